"""Jobs of many stages."""
