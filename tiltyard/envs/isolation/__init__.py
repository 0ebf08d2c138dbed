"""Envs in threads or processes of their own, as `env.isolate` asks: see pool.py for the drawing."""
