"""Commands of `python -m research`, a file each."""
