"""Tensors that are not loaded yet."""
