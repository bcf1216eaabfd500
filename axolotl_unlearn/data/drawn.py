"""A retain side that does not fit: rows drawn while its files are read once, line by line."""

from __future__ import annotations

import codecs
import copy
import hashlib
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.checks import role_of
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write

LOG = logging.getLogger(__name__)


def draw_retain(cfg: dict[str, Any], folder: Path, count: int) -> list[tuple[str, str]]:
    """Put ``count`` rows, drawn uniformly from all retain files together, in the files' place.

    A run reads (forget rows) x ``retain_per_forget`` x epochs retain rows; what is beyond is
    tokenised in vain. One pass with a reservoir (Vitter 1985, algorithm R) holds ``count`` lines
    in memory, and the config's seed fixes the draw.

    Args:
        cfg: The ``path`` of its retain entries is changed in place, and an entry of which no row
            is drawn is removed.
        folder: Where the drawn rows are written, as ``retain-<hash>.jsonl``.

    Returns:
        The files, each as (drawn, from).

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
        if entry.get("split") not in (None, "train") or entry.get("shards"):
            raise UnlearnError(
                f"`unlearn.data.retain_rows` draws from all of {path}; remove `split` and `shards` "
                "of its entry, or the option."
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
    data = (cfg.get("unlearn") or {}).get("data") if isinstance(cfg.get("unlearn"), dict) else None
    count = data.get("retain_rows") if isinstance(data, dict) else None
    if not isinstance(count, int) or count < 1:
        yield cfg, str
        return
    with tempfile.TemporaryDirectory() as folder:
        cfg = copy.deepcopy(cfg)
        files = draw_retain(cfg, Path(folder), count)

        def named(sentence: str) -> str:
            for drawn, source in files:
                sentence = sentence.replace(drawn, f"the rows drawn from {source}")
            return sentence

        yield cfg, named
