"""Evaluation of policies: whole episodes, their statistics, videos and tournaments."""
