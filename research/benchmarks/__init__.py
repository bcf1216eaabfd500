"""Speed and memory, side by side with other ways; `make bench` runs all of it."""
