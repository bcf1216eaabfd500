"""Dataset type for ordinary fine-tuning on records: ``type: axolotl_unlearn.data.memorise``.

Rows are joined as for forgetting (`unlearn.data` if the config has it, else its defaults), with a
label on every token unless `unlearn.data.labels` is given. It needs no plugin and no ``unlearn:``
block.
"""

from functools import partial

from axolotl_unlearn.data.strategy import load_strategy

load = partial(load_strategy, "memorise")
