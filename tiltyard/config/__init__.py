"""The description of an experiment: every setting, where its value came from, and what is wrong with it."""
