"""Synthetic and public data that studies run on, and the tiny model."""
