"""Bytes and their meaning: no torch ops, no policy."""
