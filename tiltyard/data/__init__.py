"""Recorded episodes on disk."""
