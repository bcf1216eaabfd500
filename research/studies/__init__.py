"""Stages as data and one runner: demo, demo-real, reproduce, reproduce-real."""
