"""Ways to carry out a deletion request: two that train without the rows, one that unlearns them.

``retrain`` trains the base on the remaining rows; ``shards`` (SISA, arXiv 1912.03817) trains one of
several parts again and merges; both are exact: no step that made the model read a deleted row.
Each has `prepare`, whose answer is ``way.json``, and `make`, which ends with ``exact.json``.
``match`` unlearns (`axolotl_unlearn.requests.new`), for models whose training cannot be repeated.
"""

EXACT = ("retrain", "shards")
WAYS = (*EXACT, "match")
#: ``way.json`` says how a request is carried out, ``exact.json`` what an exact way has shown.
WAY, PROOF = "way.json", "exact.json"
