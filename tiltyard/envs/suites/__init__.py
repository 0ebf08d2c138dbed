"""Envs from other packages: families `atari:NAME`, `doom:NAME`, `envpool:NAME`, and ids that packages register."""
