"""Train one shard again without the rows: of a model whose people have adapters by shards.

Each person belongs to a shard by a keyed hash, so that nobody's place depends on the others. A
shard's adapter has read the rows of its people, after those that are nobody's, and a router finds
the shard of a prompt (SISA, arXiv 1912.03817, without its merge). Who is deleted was in one shard:
that adapter and the router are made again, and are those of a training without the rows to the bit.

    shards.json  shards.key    what was made; of the hash: who has it can guess who is in a shard
    finetune.yml N/rows/       the config; rows of shard N, 0 has those that are nobody's
    model/                     the routed folder (`axolotl_unlearn.shards.model`)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import private_folder
from axolotl_unlearn.models import ADAPTER_CONFIG
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.ledger import Ledger
from axolotl_unlearn.requests.request import (
    Request,
    cores,
    counted,
    digest,
    held,
    read_json,
    weights,
    write_json,
    write_private,
    write_yaml,
)
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.trainings import STAMP, owner
from axolotl_unlearn.requests.ways import PROOF
from axolotl_unlearn.shards.router import place
from axolotl_unlearn.store import content_key, file_digest

EXACT = True
SHOWS = "exact: the shards of the rows were trained without them"
SCHEMA = 3
FACTS, KEY, CONFIG = "shards.json", "shards.key", "finetune.yml"
#: Options that do not go with shards, and what to do instead.
REFUSED = {
    "max_steps": "write `num_epochs`",
    "val_set_size": "name the held-out rows in `test_datasets`",
    "lora_model_dir": "begin with a base model",
    "peft_use_dora": "train a plain LoRA",  # PEFT mixes no others in a batch
    "load_best_model_at_end": "leave it out",
    "early_stopping_patience": "leave it out",
}
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
        What ``shards.json`` holds, with ``seconds`` of the processor by shard that was trained.

    Raises:
        UnlearnError: A config that cannot be sharded, a folder of others, a failed training.
    """
    config = rows_of.read_config(config_path)
    _check(config, config_path)
    told = {"schema": SCHEMA, "count": count, "by": by}
    there = load(out) if (out / FACTS).is_file() else {}
    other = out.exists() and any(out.iterdir())
    if {name: there.get(name) for name in told} != told if there else other:
        raise UnlearnError(f"{out} holds something else; give --out a new folder.",
                           code="shards.other-folder")  # fmt: skip
    private_folder(out)
    with held(out) as lock:
        if not (out / KEY).is_file():
            write_private(out / KEY, (key or secrets.token_bytes(32)).hex() + "\n")
        facts = there or told | {"threads": threads or cores(), "current": "model", "keys": {},
                                 "requests": [], "deleted": [], "model": {}}  # fmt: skip
        write_json(out / FACTS, facts)
        write_private(out / CONFIG, config_path.read_bytes())
        parts = rows_of.remaining(config_path, config)["train"]
        _write(out, _cut(parts, facts, _key(out)))
        run = Steps(out, lock, {"HF_DATASETS_CACHE": str((out / "cache").absolute())},
                    console=console or Console())  # fmt: skip
        if (batch := math.prod(_batch(config, 1).values())) < count:
            few = (
                f"{config_path}: a batch of {batch} rows is smaller than {count} shards, which "
                "then make fewer steps and learn less; raise micro_batch_size, or num_epochs."
            )
            run.console.print(few, highlight=False, soft_wrap=True, markup=False)
        # Never kept as a whole: each shard is that has its rows and settings.
        with run.step("shards", "train the shards", settings=secrets.token_hex()):
            keys, seconds = make_routed(out, config, facts, run, out / facts["current"])
        shutil.rmtree(out / "model", ignore_errors=True)
        (out / "routed").replace(out / "model")
        facts |= {"keys": keys, "current": "model", "model": weights(out / "model"),
                  "config": digest(out / CONFIG)}  # fmt: skip
        facts["rows"] = _counts(_sides(out, keys))
        write_json(out / FACTS, facts)  # last: shards without a model are not finished
        for path in [out / "cache", *(out / shard / "model" for shard in keys)]:
            shutil.rmtree(path, ignore_errors=True)
    return facts | {"seconds": seconds}


def _check(config: Mapping[str, Any], path: Path) -> None:
    for name, cure in REFUSED.items():
        if config.get(name):
            raise UnlearnError(
                f"{path}: `{name}` does not go with shards; {cure}.", code="shards.option"
            )
    if config.get("adapter") != "lora":
        raise UnlearnError(
            f"{path}: shards are adapters of one base; write `adapter: lora`.",
            code="shards.no-lora",
        )


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


def _key(folder: Path) -> bytes:
    return bytes.fromhex((folder / KEY).read_text("ascii"))


def _keyed(key: bytes, row: str) -> str:
    """How a deleted row is known again, without its id."""
    return hmac.new(key, b"row\0" + row.encode(), hashlib.sha256).hexdigest()


def _cut(parts: rows_of.Parts, facts: Mapping[str, Any], key: bytes) -> dict[str, rows_of.Parts]:
    """The rows of each shard, in their order, without those that requests have deleted."""
    gone = set(facts["deleted"])
    cut = {str(shard): [[] for _ in parts] for shard in range(facts["count"] + 1)}
    for entry, part in enumerate(parts):
        for row in part:
            if gone and _keyed(key, rows_of.row_id(row)) in gone:
                continue
            whose = owner(row, facts["by"])
            shard = 0 if whose is None else place(key, whose, facts["count"])
            cut[str(shard)][entry].append(row)
    if not any(part for shard, rows in cut.items() if shard != "0" for part in rows):
        raise UnlearnError(
            f"--by {facts['by']}: no row has this field; name the one that says whose a row is.",
            code="shards.no-field",
        )
    return cut


def _sides(place: Path, shards: Iterable[str]) -> rows_of.Sides:
    """The rows of each shard."""
    return {shard: rows_of.read_sides(place / shard / "rows")["train"] for shard in shards}


def _counts(rows: rows_of.Sides) -> dict[str, int]:
    return {shard: sum(map(len, parts)) for shard, parts in rows.items()}


def _write(place: Path, rows: rows_of.Sides) -> None:
    for shard, parts in rows.items():
        rows_of.write_sides(place / shard / "rows", {"train": parts})


def make_routed(
    place: Path, config: Mapping[str, Any], facts: Mapping[str, Any], run: Steps, keep: Path
) -> tuple[dict[str, str], dict[str, float]]:
    """Train the shards of ``place/N/rows`` and make ``place/routed``.

    Args:
        config: That of ``place/finetune.yml``.
        keep: A routed folder, of which those of ``facts["keys"]`` are copied.

    Returns:
        The key of each shard (equal keys, equal bits), and the seconds of those that were trained.
    """
    keys = _keys(place, config, facts)
    kept = {s for s in keys if facts["keys"].get(s) == keys[s] and (keep / f"shard-{s}").is_dir()}
    adapters = {s: keep / f"shard-{s}" if s in kept else place / s / "model" for s in keys}
    trainings = []
    for shard in keys.keys() - kept:
        made = rows_of.training(config, place / shard) | _batch(config, facts["count"])
        made = {key: value for key, value in made.items() if not key.startswith(_LOOKS)}
        if shard == "0":
            made |= {key: config.get(key) or 1 for key in _batch(config, 1)}
        elif "0" in keys:
            made["lora_model_dir"] = str(adapters["0"])
        path = place / shard / "train.yml"
        write_yaml(path, "Written by axolotl-unlearn: a shard.", made)
        trainings.append({"shard": shard, "folder": str(place / shard), "config": str(path),
                          "key": keys[shard]})  # fmt: skip
    trainings.sort(key=lambda one: int(one["shard"]))  # what is nobody's first
    rows = {shard: str(place / shard / "rows") for shard in keys}
    router = {"config": str(place / CONFIG), "rows": rows, "by": facts["by"],
              "out": str(place / "router")}  # fmt: skip
    write_json(place / "trainings.json", {"trainings": trainings, "router": router})
    run.threads = facts["threads"]  # of other numbers a product has other bits
    module = "axolotl_unlearn.requests.trainings"
    words = [sys.executable, "-m", module, str(place / "trainings.json")]
    run.command("shards", words, lines="shard ")
    routed = place / "routed"
    shutil.rmtree(routed, ignore_errors=True)
    (place / "router").replace(routed)  # of the old one no copy stays
    for shard, source in adapters.items():
        target = routed / f"shard-{shard}"
        target.mkdir()
        shutil.copy2(source / "adapter_model.safetensors", target)
        said = json.loads((source / ADAPTER_CONFIG).read_text("utf-8"))
        # PEFT writes sets, in another order in each process; a base may have been moved.
        said = {key: sorted(v) if isinstance(v, list) else v for key, v in said.items()}
        said["base_model_name_or_path"] = str(config["base_model"])
        for folder in (target, routed):
            write_json(folder / ADAPTER_CONFIG, said)
    seconds = {
        one["shard"]: read_json(place / one["shard"] / STAMP)["seconds"] for one in trainings
    }
    return keys, seconds


def _keys(place: Path, config: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, str]:
    """What the adapter of each shard that has rows is the result of."""
    name, settings = str(config["base_model"]), rows_of.settings(config)
    base, types = bound.base(name) | bound.elsewhere(config), rows_of.entries(config)
    if Path(name).is_dir():  # wherever it stands, its digests are what counts
        del settings["base_model"], base["name"]
    told = [settings, rows_of.row_types(types), facts["count"], facts["threads"], base]
    found: dict[str, str] = {}
    for shard in map(str, range(facts["count"] + 1)):
        files = sorted((place / shard / "rows").glob("*.jsonl"))
        if files:
            rows = [[path.name, file_digest(path)] for path in files]
            found[shard] = content_key(told, shard == "0", rows, found.get("0"))
    return found


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
    places, ledger = [before.parent], Ledger(request.folder.parent)
    for entry in reversed(ledger.accepted()):
        one = request.folder.parent / entry["request"]
        if shards := Request.load(one).way.get("shards"):
            places.append(one / shards)
    for one in places:
        if (one / FACTS).is_file() and load(one)["model"] == weights(before):
            return Path(os.path.normpath(one))
    raise UnlearnError(
        f"{before} was not made of shards, or its shards were trained again since; train them with "
        "`axolotl-unlearn shards train` and name the model with `request new --model`.",
        code="shards.none",
    )


def _affected(request: Request) -> tuple[Path, dict[str, rows_of.Parts], set[str]]:
    """The shards, rows of each that remain, and which lose some: all where a row is nobody's."""
    folder, path = find(request), request.path(CONFIG)
    facts, config = load(folder), rows_of.read_config(path)
    if facts["config"] != digest(path):
        raise UnlearnError(
            f"{folder} was made from another config than the request; make the request with "
            f"{folder / CONFIG}.",
            code="shards.other-config",
        )
    bound.require(request.facts.get("bound"), bound.facts(config), path, bound.QUICK)
    rows = _sides(folder, facts["keys"])
    left = rows_of.without(rows, rows_of.deleted(request, rows))
    changed = {shard for shard in rows if left[shard] != rows[shard]}
    there = {rows_of.row_id(row) for row in rows_of.flat({shard: rows[shard] for shard in changed})}
    forget = {row["id"] for row in read_json_lines(request.rows("forget"))}
    if missing := forget - there:
        raise UnlearnError(
            f"{folder}: {len(missing)} rows of the request are in no shard; make the request with "
            "the data of the shards.",
            code="shards.rows-missing",
        )
    if not rows_of.flat({shard: parts for shard, parts in left.items() if shard != "0"}):
        raise UnlearnError(f"{folder}: nobody is left; choose fewer.", code="shards.nobody")
    return folder, left, set(rows) if "0" in changed else changed


def says(request: Request) -> str:
    """For `plan`: which shards are trained again, and why if it is all of them."""
    folder, _, again = _affected(request)
    facts = load(folder)
    said = f"{SHOWS} ({len(again)} of {len(facts['keys'])})"
    if "0" in again:
        said += "; a row is nobody's, which every shard has read: all are trained again"
    if others := _elsewhere(request, folder, again):
        said += f"; {counted(others, 'row')} of other shards may name them (`request new` lists)"
    return said


def _elsewhere(request: Request, folder: Path, again: Collection[str]) -> int:
    """Rows that `request new` offered and that shards have which are not trained again."""
    offered = {one["id"] for one in read_json(request.path("offered.json"))["rows"]}
    kept = _sides(folder, load(folder)["keys"].keys() - again)
    return sum(rows_of.row_id(row) in offered for row in rows_of.flat(kept))


def reads(request: Request) -> list[float]:
    """Rows of the shards that are trained again, each pass counted: one start for all of them."""
    _, left, again = _affected(request)
    passes = float(rows_of.read_config(request.path(CONFIG)).get("num_epochs") or 1)
    return [passes * len(rows_of.flat({shard: left[shard] for shard in again}))]


def prepare(request: Request) -> dict[str, Any]:
    """Write the remaining rows of all shards.

    Raises:
        UnlearnError: The request does not begin with shards, or these were changed.
    """
    new, known = request.path("work", "shards"), request.way
    if known["way"] == "shards":
        there = load(request.path(known["shards"]))["requests"]
        if there == [*known["after"], request.id]:  # killed after it was handed over
            return dict(known)
    folder, left, again = _affected(request)
    facts = load(folder)
    private_folder(new)
    write_private(new / CONFIG, request.path(CONFIG).read_bytes())
    _write(new, left)
    config = rows_of.read_config(request.path(CONFIG))
    trained = len(rows_of.flat(left))
    return {
        "way": "shards",
        "base": str(config["base_model"]),
        "shards": os.path.relpath(folder, request.folder),
        "after": facts["requests"],
        "keys": facts["keys"],
        "again": sorted(again),
        "of": facts["count"],
        "rows": {"trained": trained, "removed": sum(facts["rows"].values()) - trained},
        "bound": bound.facts(config) | {"rows": _read(new, left)},
    }


def _read(place: Path, shards: Collection[str]) -> dict[str, str]:
    """Digest of the rows of each shard."""
    return {s: content_key([[p.name, digest(p)] for p in sorted((place / s / "rows").glob("*"))])
            for s in shards}  # fmt: skip


def _require_unchanged(request: Request, facts: Mapping[str, Any]) -> None:
    way = request.way
    if facts["requests"] != [*way["after"], request.id] and (
        (facts["requests"], facts["keys"]) != (way["after"], way["keys"])
    ):
        raise UnlearnError(
            f"{request.folder}: another request, or a training, changed these shards; run again.",
            code="requests.overtaken",
        )


def require(request: Request) -> None:
    """
    Raises:
        UnlearnError: Another request was carried out on the shards since `prepare`, or they were
            trained again; or base, rows, config or packages were changed.
    """
    way, new = request.way, request.path("work", "shards")
    _require_unchanged(request, load(request.path(way["shards"])))
    if new.is_dir() and _read(new, way["bound"]["rows"]) != way["bound"]["rows"]:
        raise UnlearnError(
            f"{new} was changed since it was written; run again.", code="requests.changed-rows"
        )
    now = bound.facts(rows_of.read_config(request.path(CONFIG)))
    bound.require(way["bound"], now, request.folder, bound.QUICK)


def make(request: Request, run: Steps) -> None:
    """Train the shards again, make the router, write down what was shown."""
    if run.processes > 1:
        raise UnlearnError(
            "--processes is of --way retrain; leave it out.", code="requests.shards-processes"
        )
    new, folder = request.path("work", "shards"), request.path(request.way["shards"])
    facts, config = load(folder), rows_of.read_config(request.path(CONFIG))
    before = Path(request.facts["before"]["adapter"])
    files = sorted(new.glob("*/rows/*.jsonl"))
    with run.step("shards", "train the shards of the rows", inputs=[new / CONFIG, *files]) as due:
        if due:
            with held(folder):  # whose adapters are copied
                require(request)
                made, _ = make_routed(new, config, facts, run, before)
            write_json(new / "keys.json", made)
            shutil.rmtree(request.path("work", "model"), ignore_errors=True)
            (new / "routed").replace(request.path("work", "model"))
    with run.step("exact", "what was shown", output=request.path(PROOF)) as due:
        if due:
            _prove(request, facts, run)


def _prove(request: Request, facts: Mapping[str, Any], run: Steps) -> None:
    """Or refuse: a deleted row was read, or an adapter that is kept is another one."""
    require(request)
    new, way, now = request.path("work", "shards"), request.way, weights(request.newest)
    rows = _sides(new, way["bound"]["rows"])
    trained = tuple(f"shard-{shard}/" for shard in way["again"])
    kept = {name for name in now if "/" in name and not name.startswith(trained)}
    if rows_of.deleted(request, rows) & set(map(rows_of.row_id, rows_of.flat(rows))) or any(
        now[n] != facts["model"][n] for n in kept
    ):
        raise UnlearnError(
            f"{request.path('work')} has rows of this request, or adapters of other shards; remove "
            "it and run again.",
            code="requests.rows-read",
        )
    because = (
        f"no step of the training of any adapter of this model read a deleted row: of {way['of']} "
        f"shards {', '.join(way['again'])} were trained again from the base without them, the "
        "others never had them, and the router was made from the remaining rows"
    )
    made = {"because": because, "weights": now, "bound": way["bound"]}
    made |= {"config": {"sha256": digest(request.path(CONFIG))}}
    write_json(request.path(PROOF), made | bound.environment(facts["threads"], 1))


def hand_over(request: Request) -> None:
    """The shards have the remaining rows, and know the deleted ones by keyed digests, so that they
    stay out when rows are added. Killed anywhere it goes on when it is called again."""
    new, folder = request.path("work", "shards"), request.path(request.way["shards"])
    with held(folder):
        facts = load(folder)
        _require_unchanged(request, facts)
        if request.id not in facts["requests"]:
            key, keys = _key(folder), read_json(new / "keys.json")
            gone = {_keyed(key, row) for row in rows_of.forgotten(request)}
            model = request.path("model")
            facts["requests"] = [*facts["requests"], request.id]
            facts["deleted"] = sorted({*facts["deleted"], *gone})
            facts["current"] = os.path.relpath(model, folder)
            facts |= {"keys": keys, "model": weights(model), "rows": _counts(_sides(new, keys))}
            write_json(folder / FACTS, facts)  # first: `prepare` knows by it that a run was killed
        shards = request.way["bound"]["rows"]
        _write(folder, _sides(new, shards))
        for shard in shards:
            for name in ("train.log", STAMP):
                (folder / shard / name).unlink(missing_ok=True)


def outputs(request: Request) -> list[Path]:
    """Folders that hold the old adapters, for `erase`."""
    return [Path(os.path.normpath(request.path(request.way["shards"])))]
