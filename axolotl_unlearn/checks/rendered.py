"""Rows of a config as the model will read them, for `check --full`, `check --show` and `init`."""

from __future__ import annotations

import logging
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.config import unlearn_config
from axolotl_unlearn.data.checks import KEYS, TYPES, role_of
from axolotl_unlearn.data.prepared import apart
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import cached_on_hub, is_tokenizer

#: Characters of a row that are shown.
_SHOWN = 1200


def tokenizer_of(cfg: dict[str, Any]) -> Any | None:
    """The tokenizer as Axolotl loads it; None where it is not on this machine.

    Raises:
        UnlearnError: It is here and cannot be loaded.
    """
    name = str(cfg.get("tokenizer_config") or cfg.get("base_model"))
    here = Path(name)
    files = [file.name for file in here.iterdir()] if here.is_dir() else ()
    if not any(map(is_tokenizer, files)) and not cached_on_hub(name):
        return None
    from axolotl.loaders import load_tokenizer

    from axolotl_unlearn.versions import DictDefault

    try:
        return load_tokenizer(DictDefault(cfg | {"tokenizer_config": name}))
    except UnlearnError:
        raise
    except Exception as error:  # every tokenizer class has errors of its own
        why = next(iter(str(error).splitlines()), type(error).__name__)
        says = f"the tokenizer of {name} cannot be loaded ({why})"
        cure = "correct its files or set `tokenizer_config`"
        raise UnlearnError(f"{says}; {cure}.", code="checks.tokenizer") from None


def token_rows(cfg: dict[str, Any], tokenizer: Any) -> tuple[dict[str, Any], list[str]]:
    """One dataset of each role, of the entries of ``datasets`` that are on this machine; faults.

    The columns are those of `axolotl_unlearn.data.table`; rows to memorise have tokens alone.
    """
    from datasets import concatenate_datasets

    from axolotl_unlearn.data.strategy import load_strategy

    parts: dict[str, list[Any]] = {role: [] for role in TYPES}
    faults, before = [], logging.root.manager.disable
    logging.disable(max(before, logging.INFO))  # Axolotl tells each template
    for entry in cfg.get(KEYS[0]) or []:
        role = role_of(entry)
        if role not in parts or not _is_here(entry):
            continue
        try:
            strategy = load_strategy(role, tokenizer, cfg, entry)
            with _loaded(entry) as dataset:
                parts[role].append(strategy.wrap_dataset(dataset))
        except UnlearnError as error:
            faults.append(str(error))
    logging.disable(before)
    return {role: concatenate_datasets(few) for role, few in parts.items() if few}, faults


def first_rows(cfg: dict[str, Any], number: int = 1) -> list[str]:
    """Lines that show rows of each side; a sentence where the tokenizer is not on this machine."""
    tokenizer = tokenizer_of(cfg)
    if tokenizer is None:
        return ["  The tokenizer is not on this machine; `check --show 1` shows rows once it is."]
    tables, faults = token_rows(cfg, tokenizer)
    return [*(f"  note: {fault}" for fault in faults), *lines_of(tables, tokenizer, number)]


def lines_of(tables: dict[str, Any], tokenizer: Any, number: int) -> Iterator[str]:
    """So many token rows of each side, `shown`."""
    for side, rows in tables.items():
        for place in range(min(number, len(rows))):
            yield f"  {side} row {place + 1}, > with labels, | without:"
            yield from shown(rows[place], tokenizer)


def teacher_faults(cfg: dict[str, Any], tokenizer: Any) -> list[str]:
    """Teachers of another vocabulary, which training refuses."""
    from axolotl_unlearn.reference.teacher import require_same_tokenizer

    args, faults = unlearn_config(cfg), []
    for path in {one.model for one in args.references() if one.model} if args else ():
        if os.path.isdir(path):
            try:
                require_same_tokenizer(path, tokenizer)
            except UnlearnError as error:
                faults.append(str(error))
    return faults


def _is_here(entry: dict[str, Any]) -> bool:
    return os.path.exists(entry["path"]) or bool(entry.get("data_files"))


@contextmanager
def _loaded(entry: dict[str, Any]) -> Iterator[Any]:
    """What Axolotl reads of an entry that is not one file, without a copy in the home folder."""
    if os.path.isfile(entry["path"]):
        yield None
        return
    import datasets
    from axolotl.utils.data.shared import load_dataset_with_config

    from axolotl_unlearn.versions import DictDefault

    with apart():
        try:
            loaded = load_dataset_with_config(DictDefault(entry), False)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            says = f"{entry['path']} cannot be read as data ({type(error).__name__})"
            cure = "check `path`, `ds_type` and `data_files`"
            raise UnlearnError(f"{says}; {cure}.", code="checks.unreadable-data") from None
        if isinstance(loaded, dict):
            loaded = loaded.get(entry.get("split") or "train") or next(iter(loaded.values()))
        yield loaded


def runs(labels: Sequence[int]) -> Iterator[tuple[bool, int, int]]:
    """Stretches of a row's tokens as (has labels, from, to)."""
    start = 0
    for labelled, group in groupby(label != IGNORE for label in labels):
        end = start + len([*group])
        yield labelled, start, end
        start = end


def layout(labels: Sequence[int]) -> str:
    """ "12 without label, 7 with": stretches of a row's tokens."""
    return ", ".join(f"{b - a} {'with' if has else 'without label'}" for has, a, b in runs(labels))


def shown(row: dict[str, Any], tokenizer: Any) -> Iterator[str]:
    """A token row as lines of text; `>` stands before what has labels, `|` before the rest."""
    left = _SHOWN
    for has, start, end in runs(row["labels"]):
        text = tokenizer.decode(row["input_ids"][start:end], skip_special_tokens=False)
        cut = text if len(text) <= left else f"{text[:left]}..."
        left -= len(cut)
        for line in cut.removesuffix("\n").split("\n"):
            for part in textwrap.wrap(line, 72, drop_whitespace=False) or [""]:
                yield f"    {'>' if has else '|'} {part}"
        if left <= 0:
            return
