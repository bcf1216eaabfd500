"""Where reference numbers come from, and where they are kept."""
