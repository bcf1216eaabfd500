"""Train one shard again without the rows: of a model whose people have adapters by shards.

Each person belongs to a shard by a keyed hash, so that nobody's place depends on the others. A
shard's adapter has read the rows of its people, after those that are nobody's, and a router finds
the shard of a prompt (SISA, arXiv 1912.03817, without its merge). Who is deleted was in one shard:
that adapter and the router are made again, and are those of a training without the rows to the bit.

    shards.json    what was made, and the key: who has it can guess who is in a shard
    model/         the routed folder (`axolotl_unlearn.shards.model`)
    work/          of a training that was stopped
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import private_folder
from axolotl_unlearn.models import ADAPTER_CONFIG
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.request import (
    Request,
    cores,
    held,
    read_json,
    weights,
    write_json,
    write_yaml,
)
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.trainings import JOB, STAMP, owner
from axolotl_unlearn.requests.ways import PROOF, WAY, retrain
from axolotl_unlearn.shards.router import place
from axolotl_unlearn.store import content_key

EXACT = True
SHOWS = "exact: the shards of the rows were trained without them"
SCHEMA, FACTS = 4, "shards.json"
#: Options that do not go with shards; of DoRA PEFT mixes no rows of several adapters.
REFUSED = (
    "max_steps", "val_set_size", "lora_model_dir", "peft_use_dora", "load_best_model_at_end",
    "early_stopping_patience",
)  # fmt: skip
#: Shards are trained without a look at held-out rows.
_LOOKS = ("eval_", "evals_per_epoch", "test_datasets", "do_bench_eval", "do_causal_lm_eval")


# --- making them ---------------------------------------------------------------------------------


def train_shards(
    config_path: Path,
    out: Path,
    by: str,
    count: int = 8,
    *,
    threads: int | None = None,
    key: bytes | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train every shard; goes on where it was stopped. Called again, when rows were added, it
    trains the shards of these rows; rows that a request has deleted stay out.

    Args:
        by: The field that says whose a row is (``meta.person`` of nested objects).
        key: Of the hash, 32 bytes; default a new one.

    Returns:
        What ``shards.json`` holds, with ``rows`` of each shard and ``seconds`` of the processor of
        each that was trained.

    Raises:
        UnlearnError: A config that cannot be sharded, a folder of others, a failed training.
    """
    config = rows_of.read_config(config_path)
    wrong = [f"leave out `{name}`" for name in REFUSED if config.get(name)]
    if wrong or config.get("adapter") != "lora":
        cure = (*wrong, "write `adapter: lora`")[0]
        raise UnlearnError(f"{config_path} does not go with shards; {cure}.", code="shards.option")
    told = {"schema": SCHEMA, "count": count, "by": by}
    new = {"threads": threads or cores(), "key": (key or secrets.token_bytes(32)).hex(),
           "current": "model", "keys": {}, "deleted": [], "model": {}}  # fmt: skip
    there = (out / FACTS).is_file()
    facts = load(out) if there else told | new
    if facts | told != facts or (not there and out.exists() and any(out.iterdir())):
        raise UnlearnError(
            f"{out} holds something else; give --out a new folder.", code="shards.other-folder"
        )
    work, model = private_folder(private_folder(out) / "work"), out / "model"
    with held(out) as lock:
        write_json(out / FACTS, facts)
        cache = {"HF_DATASETS_CACHE": str((work / "cache").absolute())}
        run = Steps(work, lock, cache, console=console or Console())
        if (batch := math.prod(_batch(config, 1).values())) < count:
            few = (
                f"{config_path}: a batch of {batch} rows is smaller than {count} shards, which "
                "then make fewer steps and learn less; raise micro_batch_size, or num_epochs."
            )
            run.console.print(few, highlight=False, soft_wrap=True, markup=False)
        rows = cut(rows_of.remaining(config_path, config), facts)
        # Never kept as a whole: each shard is that has its rows and settings.
        with run.step("shards", "train the shards", settings=secrets.token_hex()):
            told = config_path, config, facts, rows
            keys, seconds = make_routed(*told, run, work, out / facts["current"], model)
        facts |= {"keys": keys, "current": "model", "model": weights(model)}
        write_json(out / FACTS, facts)  # last: shards without a model are not finished
        shutil.rmtree(work)
    return {"rows": {one: sum(map(len, rows[one])) for one in rows}, "seconds": seconds, **facts}


def load(folder: Path) -> dict[str, Any]:
    """``shards.json``.

    Raises:
        UnlearnError: There is none, or of another version.
    """
    facts = read_json(folder / FACTS) or {}
    if facts.get("schema") != SCHEMA:
        raise UnlearnError(
            f"{folder / FACTS} is missing or of another version; make shards with `axolotl-unlearn "
            "shards train`.",
            code="shards.none",
        )
    return facts


def _keyed(facts: Mapping[str, Any], row: str) -> str:
    """How a deleted row is known again, without its id."""
    key = bytes.fromhex(facts["key"])
    return hmac.new(key, b"row\0" + row.encode(), hashlib.sha256).hexdigest()


def cut(rows: rows_of.Sides, facts: Mapping[str, Any]) -> rows_of.Sides:
    """The rows of each shard that has some, in their order; none that a request has deleted.

    Raises:
        UnlearnError: No row is somebody's.
    """
    key, gone = bytes.fromhex(facts["key"]), set(facts["deleted"])
    parts: dict[str, rows_of.Parts] = {}
    for entry, part in enumerate(rows["train"]):
        for row in part:
            if not gone or _keyed(facts, rows_of.row_id(row)) not in gone:
                whose = owner(row, facts["by"])
                shard = "0" if whose is None else str(place(key, whose, facts["count"]))
                parts.setdefault(shard, [[] for _ in rows["train"]])[entry].append(row)
    if not parts.keys() - {"0"}:
        raise UnlearnError(
            f"no row has the field `{facts['by']}`, which says whose a row is; name the one that "
            "does, or choose fewer people.",
            code="shards.no-field",
        )
    return dict(sorted(parts.items(), key=lambda one: int(one[0])))  # what is nobody's first


def _keys(
    rows: rows_of.Sides, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, str]:
    """What the adapter of each shard is the result of: equal keys, equal bits."""
    name, settings = str(config["base_model"]), rows_of.settings(config)
    base, types = bound.base(name) | bound.elsewhere(config), rows_of.entries(config)
    if Path(name).is_dir():  # wherever it stands, its digests are what counts
        del settings["base_model"], base["name"]
    told = [settings, rows_of.row_types(types), facts["count"], facts["threads"], base]
    found: dict[str, str] = {}
    for shard, parts in rows.items():
        digests = bound.of_rows({"train": parts, "test": []})
        found[shard] = content_key(told, shard == "0", digests, found.get("0"))
    return found


def make_routed(
    config_path: Path, config: Mapping[str, Any], facts: Mapping[str, Any], rows: rows_of.Sides,
    run: Steps, work: Path, keep: Path, out: Path,
) -> tuple[dict[str, str], dict[str, float]]:  # fmt: skip
    """Train shards and make a routed folder.

    Args:
        rows: Of `cut`.
        work: What was trained there is not trained again.
        keep: A routed folder, of which the shards are copied whose keys ``facts`` knows.
        out: The new one, in the place of what is there.

    Returns:
        The key of each shard, and the seconds of those that were trained.
    """
    keys, routed = _keys(rows, config, facts), work / "router"
    kept = {s for s in keys if facts["keys"].get(s) == keys[s] and (keep / f"shard-{s}").is_dir()}
    adapters = {s: keep / f"shard-{s}" if s in kept else work / s / "model" for s in keys}
    due = [shard for shard in keys if shard not in kept]
    for old in (*work.glob("*/rows"), routed):  # of an earlier start
        shutil.rmtree(old, ignore_errors=True)
    for shard, parts in rows.items():
        rows_of.write_sides(work / shard / "rows", {"train": parts})
    for shard in due:
        made = rows_of.training(config, work / shard)
        made |= _batch(config, 1 if shard == "0" else facts["count"])
        made = {key: value for key, value in made.items() if not key.startswith(_LOOKS)}
        if shard != "0" and "0" in keys:
            made["lora_model_dir"] = str(adapters["0"])
        write_yaml(work / shard / "train.yml", "Written by axolotl-unlearn: a shard.", made)
    job = {"config": str(config_path), "by": facts["by"], "keys": keys, "due": due}
    write_json(work / JOB, job)
    run.threads = facts["threads"]  # of other numbers a product has other bits
    words = [sys.executable, "-m", "axolotl_unlearn.requests.trainings", str(work)]
    run.command("shards", words, float(config.get("num_epochs") or 1), lines="shard ")
    for shard, source in adapters.items():
        target = routed / f"shard-{shard}"
        target.mkdir()
        shutil.copy2(source / "adapter_model.safetensors", target)
        said = read_json(source / ADAPTER_CONFIG)
        # PEFT writes sets, in another order in each process; a base may have been moved.
        said = {key: sorted(v) if isinstance(v, list) else v for key, v in said.items()}
        said["base_model_name_or_path"] = str(config["base_model"])
        for folder in (target, routed):
            write_json(folder / ADAPTER_CONFIG, said)
    shutil.rmtree(out, ignore_errors=True)
    routed.replace(out)
    return keys, {shard: read_json(work / shard / STAMP)["seconds"] for shard in due}


def _batch(config: Mapping[str, Any], count: int) -> dict[str, int]:
    """A shard reads its part of the rows in as many steps as the unsharded run: it learns as much
    (a whole batch would take a part of the steps)."""
    micro = int(config.get("micro_batch_size") or 1)
    batch = max(1, micro * int(config.get("gradient_accumulation_steps") or 1) // count)
    micro = next(size for size in range(min(micro, batch), 0, -1) if batch % size == 0)
    return {"micro_batch_size": micro, "gradient_accumulation_steps": batch // micro}


# --- a request -----------------------------------------------------------------------------------


def find(request: Request) -> Path:
    """The folder of the shards that the request begins with.

    Raises:
        UnlearnError: It begins with another model.
    """
    before = Path(request.facts["before"]["adapter"] or request.facts["before"]["model"])
    earlier = read_json(before.parent / WAY) or {}  # of the request that made the model
    folder = before.parent / earlier.get("shards", "")
    if (folder / FACTS).is_file() and load(folder)["model"] == weights(before):
        return Path(os.path.normpath(folder))
    raise UnlearnError(
        f"{before} was not made of shards, or its shards were trained again since; train them with "
        "`axolotl-unlearn shards train` and name the model with `request new --model`.",
        code="shards.none",
    )


def _plan(request: Request) -> tuple[dict[str, Any], rows_of.Sides, dict[str, Any]]:
    """``way.json`` but for the rows; and `retrain.remaining`."""
    folder, (left, now) = find(request), retrain.remaining(request)
    facts, config = load(folder), rows_of.read_config(request.path("finetune.yml"))
    before, rows = facts["keys"], cut(left, facts)
    keys = _keys(rows, config, facts)
    again = sorted((s for s in before | keys if keys.get(s) != before.get(s)), key=int)
    reads = sum(len(part) for shard in again for part in rows.get(shard, ()))
    way = {"way": "shards", "base": str(config["base_model"]), "of": facts["count"],
           "shards": os.path.relpath(folder, request.folder), "before": before, "keys": keys,
           "again": again, "reads": reads}  # fmt: skip
    return way, left, now


def reads(request: Request) -> tuple[float, str]:
    """Rows of the shards that are trained again, each pass counted; and which, and why if all."""
    passes = rows_of.read_config(request.path("finetune.yml")).get("num_epochs") or 1
    way, _, _ = _plan(request)
    said = f"{SHOWS} ({len(way['again'])} of {len(way['before'])})"
    if "0" in way["again"]:
        said += "; a row is nobody's, which every shard has read: all are trained again"
    return float(passes) * way["reads"], said


def prepare(request: Request) -> dict[str, Any]:
    """Write the remaining rows.

    Raises:
        UnlearnError: The request does not begin with shards, or these were changed.
    """
    known = request.way
    if known["way"] == "shards" and load(request.path(known["shards"]))["keys"] == known["keys"]:
        return dict(known)  # killed after it was handed over
    way, left, now = _plan(request)
    return way | retrain.rest(request, left, now)


def require(request: Request) -> dict[str, Any]:
    """``shards.json``, if it is that of `prepare` or of `hand_over`.

    Raises:
        UnlearnError: Another request was carried out on the shards since, or they were trained
            again; or what `retrain.require` says.
    """
    way, facts = request.way, load(request.path(request.way["shards"]))
    if facts["keys"] not in (way["before"], way["keys"]):
        raise UnlearnError(
            f"{request.folder}: another request, or a training, changed these shards; run again.",
            code="requests.overtaken",
        )
    retrain.require(request)
    return facts


def make(request: Request, run: Steps) -> None:
    """Train the shards again, make the router, write down what was shown."""
    if run.processes > 1:
        raise UnlearnError(
            "--processes is of --way retrain; leave it out.", code="requests.shards-processes"
        )
    way, path, work = request.way, request.path("finetune.yml"), request.path("work")
    with run.step("shards", "train the shards of the rows", settings=way["keys"]) as due:
        if due:
            with held(request.path(way["shards"])):  # whose adapters are copied
                find(request)
                facts, keep = require(request), Path(request.facts["before"]["adapter"])
                rows = cut(rows_of.read_sides(work / "rows"), facts)
                told = path, rows_of.read_config(path), facts, rows
                make_routed(*told, run, work / "shards", keep, work / "model")
    with run.step("exact", "what was shown", output=request.path(PROOF)) as due:
        if due:
            require(request)
            because = (
                f"of {way['of']} shards {', '.join(way['again'])} were trained again from the "
                "base, the others never had a deleted row, and the router is that of these rows"
            )
            retrain.prove(request, run, because, path)


def hand_over(request: Request) -> None:
    """The shards are those of this model, and know the deleted rows by keyed digests, so that they
    stay out when rows are added. Called again after a kill."""
    folder, model = request.path(request.way["shards"]), request.path("model")
    with held(folder):
        facts = require(request)
        gone = {_keyed(facts, row) for row in rows_of.forgotten(request)}
        facts |= {"keys": request.way["keys"], "deleted": sorted(gone.union(facts["deleted"])),
                  "model": weights(model), "current": os.path.relpath(model, folder)}  # fmt: skip
        write_json(folder / FACTS, facts)


def outputs(request: Request) -> list[Path]:
    """Folders that hold the old adapters, for `erase`."""
    return [Path(os.path.normpath(request.path(request.way["shards"])))]
