"""Canaries, depth of knowledge and where it lies."""
