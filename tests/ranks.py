"""Processes that begin where the libraries are imported: seconds in place of a minute each."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from research.harness import IMPORTED, become

CONTEXT = multiprocessing.get_context("fork")
for name in IMPORTED:
    importlib.import_module(name)


def start(script: Path, arguments: Sequence[str], log: Path, **environment: object):
    """A `multiprocessing.Process` that runs a script, with its output in ``log``."""
    given = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    given |= {name: str(value) for name, value in environment.items()}
    words = [str(script), *arguments]
    process = CONTEXT.Process(target=_run, args=(words, str(log), given))
    process.start()
    return process


def _run(words: Sequence[str], log: str, environment: Mapping[str, str]) -> None:
    end = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for target in (1, 2):
        os.dup2(end, target)
    os.environ.update(environment)
    gc.freeze()  # Axolotl collects five times a run, half of its time
    become(words)
