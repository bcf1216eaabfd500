"""Records on disk, their tokens, and how forget and retain rows meet in a batch.

`records` and `checks` need nothing but the standard library (and pyarrow for parquet); the dataset
types `forget`, `retain` and `memorise` are what Axolotl's ``datasets: - type:`` names.
"""
