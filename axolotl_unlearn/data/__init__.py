"""Records on disk, their tokens, and how forget and retain rows meet in a batch.

`records` and `checks` need nothing but the standard library (and pyarrow for parquet); the dataset
types `forget`, `retain`, `alternative` and `memorise` are what Axolotl's ``datasets: - type:``
names: Axolotl calls `axolotl_unlearn.data.strategy.load_strategy` by them.
"""
