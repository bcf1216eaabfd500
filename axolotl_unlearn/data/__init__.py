"""Records on disk, their tokens, and how forget and retain rows meet in a batch.

`records` and `checks` import neither torch nor Axolotl. The dataset types `forget`, `retain`,
`alternative` and `memorise` are what Axolotl's ``datasets: - type:`` names: Axolotl calls
`axolotl_unlearn.data.strategy.load_strategy` by them.
"""
