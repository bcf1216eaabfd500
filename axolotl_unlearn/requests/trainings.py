"""``python -m axolotl_unlearn.requests.trainings JOB``: trainings of shards, and their router.

The imports of a training take longer than a small training. Here they are made once, and each
training is a fork: nothing that one leaves in memory reaches the next, so that it ends with the
bits of a training alone. One that was done is not done again.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import sys
import traceback
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from axolotl_unlearn.files import write_json
from axolotl_unlearn.requests.choose import values_at
from axolotl_unlearn.requests.request import read_json
from axolotl_unlearn.requests.steps import end_with_parent

#: What a training imports.
IMPORTED = ("axolotl.cli.train", "axolotl.core.builders", "transformers.trainer")
#: What a training is the result of, and its seconds of processor.
STAMP = "trained.json"
LOG_LINES, ALONE = 15, 4096


def owner(row: Mapping[str, Any], by: str) -> str | None:
    """Whose row it is; None if nobody's."""
    return next(iter(values_at(row, by.split("."))), None)


def main(job: Mapping[str, Any]) -> None:
    """
    Args:
        job: ``trainings``, each with ``shard``, ``folder``, ``config`` and ``key``; ``router``, see
            `make_router`.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a fork may use no device that is open
    # Of 10 s of imports: collections of what all stays, and the list of packages read twice.
    gc.disable()
    metadata.packages_distributions = cache(metadata.packages_distributions)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    trainings = job["trainings"]
    for number, one in enumerate(trainings, 1):
        folder, where = Path(one["folder"]), f"shard {one['shard']} ({number} of {len(trainings)})"
        stamp, made = folder / STAMP, folder / "model"
        if (read_json(stamp) or {}).get("key") == one["key"] and made.is_dir():
            print(f"{where}: kept from an earlier start", flush=True)
            continue
        stamp.unlink(missing_ok=True)
        shutil.rmtree(made, ignore_errors=True)
        print(f"{where}: started", flush=True)
        pid = os.fork()
        if not pid:
            train(one["config"], folder / "train.log")
        _, status, used = os.wait4(pid, 0)
        if status or not any(made.glob("adapter_model.safetensors")):
            lines = (folder / "train.log").read_text("utf-8", "replace").splitlines()
            sys.exit("\n".join([f"{where}: failed", *lines[-LOG_LINES:]]))
        shutil.rmtree(folder / "prepared", ignore_errors=True)
        seconds = round(used.ru_utime + used.ru_stime, 1)
        write_json(stamp, {"key": one["key"], "seconds": seconds})
        print(f"{where}: done, {seconds:.0f} s of processor", flush=True)
    make_router(**job["router"])


def train(config: str, log: Path) -> NoReturn:
    """`axolotl train` in this process, which ends with it."""
    code = 1
    try:
        end_with_parent()
        with log.open("w") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
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


def make_router(config: str, rows: Mapping[str, str], by: str, out: str) -> None:
    """The router of the people of these folders of rows, with the tokenizer, in a folder. Each row
    that is nobody's counts as a person of shard 0, up to `ALONE`; then several in a row are one.

    Args:
        rows: Folder by shard.
        by: The field that says whose a row is.
    """
    from axolotl.utils.dict import DictDefault

    from axolotl_unlearn.config import DataArgs
    from axolotl_unlearn.data.typed import Source, encode
    from axolotl_unlearn.requests import rows as rows_of
    from axolotl_unlearn.shards.router import Router

    settings = rows_of.read_config(Path(config))
    tokenizer = rows_of.load_tokenizer_of(Path(config))
    given, whose = [], []
    for shard, folder in rows.items():
        for entry, part in enumerate(rows_of.read_sides(Path(folder))["train"]):
            for row in part:
                given.append(Source(str(len(given)), row, entry))
                whose.append((int(shard), owner(row, by)))
    data = DataArgs(rows=rows_of.row_types(rows_of.entries(settings)))
    typed = encode(given, data, tokenizer, DictDefault(settings), config)
    texts = tokenizer.batch_decode([one.input_ids for one in typed], skip_special_tokens=True)
    people, few = defaultdict(list), 1 + sum(not shard for shard, _ in whose) // ALONE
    for one, text in zip(typed, texts, strict=True):
        shard, name = whose[one.number]
        people[shard, name if shard else one.number // few].append(text)
    tokenizer.save_pretrained(out)
    Router.of((shard, texts) for (shard, _), texts in people.items()).save(Path(out))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text("utf-8")))
