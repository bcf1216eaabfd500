"""Evaluation: the official scores, one forward for every likelihood metric, several models at once.

`sets` reads and checks the data, `run` measures (`measure`, `generate`, `served`, `in_vllm`) and
summarises (`summary`), `tasks` and `lm` are for lm-eval.
"""
