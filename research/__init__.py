"""The laboratory beside the plugin: studies, benchmarks and their results. Not in the wheel."""
