"""The merge search."""
