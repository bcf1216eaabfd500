"""Methods without a promise of stability."""
