"""Measuring a policy: play.py plays whole episodes, numbers.py sums them up, measure.py is what others call."""
