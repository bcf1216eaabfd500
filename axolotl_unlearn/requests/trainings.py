"""``python -m axolotl_unlearn.requests.trainings FOLDER``: trainings of shards, and their router.

The imports of a training take longer than a small training. Here they are made once, and each
training is a fork: nothing that one leaves in memory reaches the next, so that it ends with the
bits of a training alone. One that was done is not done again.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from axolotl_unlearn.files import write_json
from axolotl_unlearn.requests.choose import values_at
from axolotl_unlearn.requests.request import read_json
from axolotl_unlearn.requests.steps import end_with_parent

#: What a training imports.
IMPORTED = "axolotl.cli.train", "axolotl.core.builders", "transformers.trainer"
#: What is to be done; what a training was the result of, and its seconds of processor.
JOB, STAMP = "trainings.json", "trained.json"
ALONE = 4096


def owner(row: Mapping[str, Any], by: str) -> str | None:
    """Whose row it is; None if nobody's."""
    return next(iter(values_at(row, by.split("."))), None)


def main(place: Path) -> None:
    """
    Args:
        place: Holds ``N/rows`` of each shard, ``N/train.yml`` of those that are due, and `JOB`:
            ``config``, ``by``, ``keys`` by shard, and ``due``.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a fork may use no device that is open
    # Of 10 s of imports: collections of what all stays, and the list of packages read twice.
    gc.disable()
    metadata.packages_distributions = cache(metadata.packages_distributions)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    job = read_json(place / JOB)
    for number, shard in enumerate(job["due"], 1):
        folder, where = place / shard, f"shard {shard} ({number} of {len(job['due'])})"
        stamp, made, key = folder / STAMP, folder / "model", job["keys"][shard]
        if (read_json(stamp) or {}).get("key") == key and made.is_dir():
            print(f"{where}: kept from an earlier start", flush=True)
            continue
        stamp.unlink(missing_ok=True)
        shutil.rmtree(made, ignore_errors=True)
        print(f"{where}: started", flush=True)
        pid = os.fork()
        if not pid:
            train(str(folder / "train.yml"))
        _, status, used = os.wait4(pid, 0)
        if status or not any(made.glob("adapter_model.safetensors")):
            sys.exit(f"{where}: failed")
        shutil.rmtree(folder / "prepared", ignore_errors=True)
        seconds = round(used.ru_utime + used.ru_stime, 1)
        write_json(stamp, {"key": key, "seconds": seconds})
        print(f"{where}: done, {seconds:.0f} s of processor", flush=True)
    make_router(place, Path(job["config"]), job["by"], list(job["keys"]))


def train(config: str) -> NoReturn:
    """`axolotl train` in this process, which ends with it."""
    code = 1
    try:
        end_with_parent()
        sys.argv = ["axolotl"]
        from axolotl.cli.train import do_cli

        do_cli(config=config)
        code = 0
    except BaseException:  # `sys.exit` of a library too
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def make_router(place: Path, config: Path, by: str, shards: Iterable[str]) -> None:
    """``place/router``: that of the people of ``place/N/rows``, with the tokenizer. Each row that
    is nobody's counts as a person of shard 0, up to `ALONE`; then several in a row are one."""
    from axolotl.utils.dict import DictDefault

    from axolotl_unlearn.config import DataArgs
    from axolotl_unlearn.data.typed import Source, encode
    from axolotl_unlearn.requests import rows as rows_of
    from axolotl_unlearn.shards.router import Router

    settings, tokenizer = rows_of.read_config(config), rows_of.load_tokenizer_of(config)
    given, whose = [], []
    for shard in shards:
        for entry, part in enumerate(rows_of.read_sides(place / shard / "rows")["train"]):
            for row in part:
                given.append(Source(str(len(given)), row, entry))
                whose.append((int(shard), owner(row, by)))
    data = DataArgs(rows=rows_of.row_types(rows_of.entries(settings)))
    typed = encode(given, data, tokenizer, DictDefault(settings), str(config))
    texts = tokenizer.batch_decode([one.input_ids for one in typed], skip_special_tokens=True)
    people, few = defaultdict(list), 1 + sum(not shard for shard, _ in whose) // ALONE
    for one, text in zip(typed, texts, strict=True):
        shard, name = whose[one.number]
        people[shard, name if shard else one.number // few].append(text)
    tokenizer.save_pretrained(place / "router")
    made = Router.of((shard, texts) for (shard, _), texts in people.items())
    made.save(place / "router")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
