"""What every test process has in its environment, set before the libraries that read it."""

import os

for _key, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    # Each worker of `datasets` imports Axolotl again (10 s); none are needed for a few rows.
    "AXOLOTL_DATASET_NUM_PROC": "0",
    # A thread of pyarrow's allocator, which a fork would lack.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}.items():
    os.environ.setdefault(_key, _value)
