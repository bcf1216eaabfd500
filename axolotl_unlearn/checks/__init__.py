"""What is looked at before a run: the config, its options, its cost."""
