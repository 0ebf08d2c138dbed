"""Envs: make one, check it, and step many of them together."""
