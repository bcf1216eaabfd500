"""A retain side that does not fit: rows drawn while its files are read once, line by line."""

from __future__ import annotations

import codecs
import copy
import hashlib
import logging
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axolotl_unlearn.config import UnlearnArgs, unlearn_config
from axolotl_unlearn.data.checks import PREFIX, role_of
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write

LOG = logging.getLogger(__name__)


def streams_as_retain_side(cfg: dict[str, Any]) -> None:
    """Axolotl's ``streaming`` and ``pretraining_dataset``, in place: a retain side to draw from.

    A shuffled buffer would see the beginning of a corpus first; a uniform draw sees all of it.
    """
    streams = cfg.get("pretraining_dataset") or []
    block = cfg.get("unlearn")
    if not (streams or cfg.get("streaming")) or not isinstance(block, dict):
        return
    data = block.get("data") or {}
    if not isinstance(data, dict) or not isinstance(cfg.get("datasets") or [], list):
        return  # a fault of its own
    block["data"] = {"retain_rows": "auto", **data}
    texts = [
        {key: one[key] for key in one if key in ("split", "skip")}
        | {"path": one.get("data_files") or one.get("path"), "type": f"{PREFIX}retain"}
        | {"field": one.get("text_column") or "text"}
        for one in streams
    ]
    cfg["datasets"] = [*(cfg.get("datasets") or []), *texts]
    for key in ("streaming", "pretraining_dataset"):
        cfg.pop(key, None)


def rows_to_draw(cfg: dict[str, Any], args: UnlearnArgs) -> int:
    """`retain_rows`; for `auto` the retain rows that training reads.

    Raises:
        UnlearnError: They cannot be counted before training.
    """
    if args.data.retain_rows != "auto":
        return args.data.retain_rows
    forget = [entry for entry in cfg.get("datasets") or [] if role_of(entry) == "forget"]
    if not all(Path(str(entry.get("path"))).is_file() for entry in forget):
        raise UnlearnError(
            "`unlearn.data.retain_rows: auto` counts the forget rows, which are no local files: "
            "give a number."
        )
    rows = sum(len(list(read_rows(entry["path"]))) for entry in forget)
    accumulated = (cfg.get("micro_batch_size") or 1) * (cfg.get("gradient_accumulation_steps") or 1)
    batch = cfg.get("batch_size") or accumulated * int(os.environ.get("WORLD_SIZE", 1))
    if args.phases:
        pairs = sum(p.steps * batch if p.steps else p.epochs * rows for p in args.phases)
    else:
        pairs = rows * float(cfg.get("num_epochs") or 1)
        pairs = min(pairs, (cfg.get("max_steps") or pairs) * batch)
    return max(1, math.ceil(pairs * args.pairing.retain_per_forget))


def draw_retain(cfg: dict[str, Any], folder: Path, count: int) -> list[tuple[str, str]]:
    """Put ``count`` rows, drawn uniformly from all retain files together, in the files' place.

    One pass with a reservoir (Vitter 1985, algorithm R) holds ``count`` lines in memory, and the
    config's seed fixes the draw. An entry of which no row is drawn is removed.

    Returns:
        The files, each as (drawn, from); they are written to ``folder/retain-<hash>.jsonl``.

    Raises:
        UnlearnError: A retain side that is no JSON lines file, or a part of one.
    """
    entries = [entry for entry in cfg.get("datasets") or [] if role_of(entry) == "retain"]
    drawn: list[tuple[int, bytes]] = []
    generator, seen = random.Random(42 if cfg.get("seed") is None else cfg["seed"]), 0
    for number, entry in enumerate(entries):
        path = Path(str(entry.get("path")))
        if path.suffix not in (".jsonl", ".ndjson") or not path.is_file():
            raise UnlearnError(
                f"`unlearn.data.retain_rows` draws from files of JSON lines, and {path} is none; "
                "write the rows to one, or remove the option."
            )
        with path.open("rb") as lines:
            for number_of_line, line in enumerate(lines):
                line = line if number_of_line else line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                place = seen if seen < count else generator.randrange(seen + 1)
                if place < count:
                    drawn[place : place + 1] = [(number, line.rstrip(b"\r\n") + b"\n")]
                seen += 1
    LOG.info("%d of %d retain rows are drawn.", min(count, seen), seen)
    files = []
    for number, entry in enumerate(entries):
        rows = b"".join(line for owner, line in drawn if owner == number)
        if not rows:
            cfg["datasets"].remove(entry)
            continue
        own = folder / f"retain-{hashlib.blake2b(rows, digest_size=8).hexdigest()}.jsonl"
        files.append((str(own), entry["path"]))
        entry["path"] = str(own if own.is_file() else write(own, rows, private=True))
    return files


@contextmanager
def passing_draw(
    cfg: dict[str, Any],
) -> Iterator[tuple[dict[str, Any], Callable[[str], str]]]:
    """The config with drawn rows in files that go again, and how a sentence names their source."""
    try:
        args = unlearn_config(cfg)
    except UnlearnError:
        args = None  # a fault of its own
    if args is None or not args.data.retain_rows:
        yield cfg, str
        return
    with tempfile.TemporaryDirectory() as folder:
        cfg = copy.deepcopy(cfg)
        files = draw_retain(cfg, Path(folder), rows_to_draw(cfg, args))

        def named(sentence: str) -> str:
            for drawn, source in files:
                sentence = sentence.replace(drawn, f"the rows drawn from {source}")
            return sentence

        yield cfg, named
