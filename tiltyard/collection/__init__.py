"""Collecting: play episodes of an env with any policy and add them to a dataset, from many processes and machines."""
