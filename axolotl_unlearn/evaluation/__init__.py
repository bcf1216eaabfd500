"""Evaluation: the official scores, one forward for every likelihood metric, several models at once.

sets      what a data folder holds, checked before any model is loaded
generate  batched greedy generation
scorer    one forward of a text gives the facts of every likelihood metric
tasks     the lm-eval tasks of eval_tasks/, and how to register them
lm        `hf-unlearn`, an lm-eval model that carries per-token facts
models    which models, how they are loaded, the digest of their weights
run       `evaluate`: several models, cached, one results.json
"""
