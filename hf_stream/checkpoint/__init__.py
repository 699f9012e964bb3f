"""Whole checkpoints: open, save, convert, verify."""
