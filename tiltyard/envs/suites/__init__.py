"""Envs from other packages: families `atari:NAME`, `car-racing:NAME`, ..., and ids that packages register."""
