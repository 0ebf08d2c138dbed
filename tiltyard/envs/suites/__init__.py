"""Families of envs from other packages: `atari:NAME`, `doom:NAME`, `envpool:NAME`."""
