"""The embedded demo: a generator of synthetic data, a tiny model, and the driver of the job."""
