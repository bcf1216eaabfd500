"""Train one shard again without the rows: of a model whose people have adapters by shards.

Each person belongs to a shard by a keyed hash, so that nobody's place depends on the others. A
shard's adapter has read the rows of its people, after those that are nobody's, and a router finds
the shard of a prompt (SISA, arXiv 1912.03817, without its merge). Who is deleted was in one shard:
that adapter and the router are made again, and are those of a training without the rows to the bit.

    shards.json    what was made, and the key: who has it can guess who is in a shard
    model/         the routed folder (`axolotl_unlearn.shards.model`)
    work/          of a training that was stopped

``python -m axolotl_unlearn.requests.ways.shards WORK`` trains (`main`).
"""

from __future__ import annotations

import gc
import importlib
import math
import multiprocessing
import os
import secrets
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.device import accelerator, hardware
from axolotl_unlearn.errors import UnlearnError, counted
from axolotl_unlearn.files import private_folder
from axolotl_unlearn.models import ADAPTER_CONFIG
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests import request as of_request
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.choose import values_at
from axolotl_unlearn.requests.request import Request, fault, held, read_json, weights, write_json
from axolotl_unlearn.requests.steps import Steps, end_with_parent
from axolotl_unlearn.requests.ways import PROOF, WAY, retrain
from axolotl_unlearn.shards import is_routed
from axolotl_unlearn.shards.router import place
from axolotl_unlearn.store import content_key

EXACT = True
SHOWS = "exact: the shards of the rows were trained without them"
SCHEMA, FACTS = 5, "shards.json"
FIELDS = {"by", "count", "threads", "current", "keys", "deleted", "key", "model"}
JOB, WEIGHTS = "job.json", "adapter_model.safetensors"
#: Options that do not go with shards; of DoRA PEFT mixes no rows of several adapters.
REFUSED = """
    max_steps val_set_size lora_model_dir peft_use_dora load_best_model_at_end
    early_stopping_patience
""".split()
#: Of packages, those whose version decides the bits of an adapter.
BITS = ("axolotl", "torch", "transformers", "peft")
#: Shards are trained without a look at held-out rows.
_LOOKS = ("eval_", "evals_per_epoch", "test_datasets", "do_bench_eval", "do_causal_lm_eval")
#: Vectors of rows that are nobody's: each row has its own until there are more.
ALONE = 4096


def train_shards(
    config_path: Path, out: Path, by: str, count: int = 8, *, threads: int | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train every shard; goes on where it was stopped. Called again, when rows were added, it
    trains the shards of these rows; rows that a request has deleted stay out.

    Args:
        by: The field that says whose a row is (``meta.person`` of nested objects).
        key: Of the hash, 32 bytes; default a new one.

    Returns:
        What ``shards.json`` holds, with ``rows`` of each shard and those that were ``trained``.

    Raises:
        UnlearnError: A config that cannot be sharded, a folder of others, a failed training.
    """
    config = rows_of.read_config(config_path)
    wrong = [f"leave out `{name}`" for name in REFUSED if config.get(name)]
    if config.get("adapter") != "lora":
        wrong.append("write `adapter: lora`")
    if math.prod(_batch(config)) < count:
        wrong.append(f"give it a batch of {count} rows at least, or take fewer shards")
    if wrong:
        cure = wrong[0]
        raise UnlearnError(f"{config_path} does not go with shards; {cure}.", code="shards.option")
    told, there = {"schema": SCHEMA, "count": count, "by": by}, (out / FACTS).is_file()
    new = {"threads": threads or of_request.cores(), "current": "model", "keys": {}, "deleted": [],
           "key": (key or secrets.token_bytes(32)).hex(), "model": {}}  # fmt: skip
    facts = load(out) if there else told | new
    if facts | told != facts or (not there and out.exists() and any(out.iterdir())):
        says = f"{out} holds something else; give --out a new folder."
        raise fault("shards.other-folder", says)
    as_trained(facts, threads)
    rows = cut(rows_of.remaining(config_path, config), facts)  # before a folder is made
    work, model = private_folder(private_folder(out) / "work"), out / "model"
    with held(out) as lock:
        if (out / FACTS).is_file() and load(out) != facts:  # its deleted rows would be trained
            says = f"another command changed {out} while its rows were read; run this one again."
            raise UnlearnError(says, code="shards.overtaken")
        write_json(out / FACTS, facts)
        cache = {"HF_DATASETS_CACHE": str((work / "cache").absolute())}
        run = Steps(work, lock, cache, facts["threads"])
        with run.step("shards", "train the shards"):
            told = facts, rows, run, work, out / facts["current"], model
            keys, trained = make_routed(config_path, *told)
        facts |= {"keys": keys, "current": "model", "model": weights(model)}
        write_json(out / FACTS, facts)  # last: shards without a model are not finished
        shutil.rmtree(work)
    return {"rows": {one: sum(map(len, rows[one])) for one in rows}, "trained": trained, **facts}


def load(folder: Path, model: Path | None = None) -> dict[str, Any]:
    """``shards.json``.

    Raises:
        UnlearnError: There is none, or of another version; or it is not of this model.
    """
    try:
        facts = read_json(folder / FACTS) or {}
        sound = facts["schema"] == SCHEMA and FIELDS <= facts.keys()
        sound = sound and (not model or facts["model"] == weights(model))
    except (ValueError, TypeError, LookupError):  # cut off, or of something else
        sound = False
    if not sound:
        says = f"{model or folder} has no shards of this version, or they were trained again since"
        cure = "train them with `axolotl-unlearn shards train`, and name the model with --model"
        raise fault("shards.none", f"{says}; {cure}.")
    return facts


def as_trained(facts: Mapping[str, Any], threads: int | None, processes: int = 1) -> None:
    """Raises `UnlearnError`: asked for other threads than those of the shards, or for more
    processes than one; a product would have other bits than those of the shards that stay."""
    if threads not in (None, facts["threads"]):
        says = f"the shards were trained with {counted(facts['threads'], 'thread')}"
        raise fault("shards.threads", f"{says}; leave --threads out, or give it that number.")
    if processes != 1:
        says = "each shard is trained by one process"
        raise fault("shards.processes", f"{says}; leave --processes out, or use --way retrain.")


def _keyed(facts: Mapping[str, Any], row: str) -> int:
    """How a deleted row is known again, without its id: 64 bits."""
    return place(bytes.fromhex(facts["key"]), row, 1 << 64)


def _owner(row: Mapping[str, Any], by: str) -> str | None:
    """Whose row it is; None if nobody's, as of an empty cell."""
    return next(filter(str.strip, values_at(row, by.split("."))), None)


def cut(rows: rows_of.Sides, facts: Mapping[str, Any]) -> rows_of.Sides:
    """The rows of each shard that has some, in their order, nobody's first; none that a request
    has deleted.

    Raises:
        UnlearnError: No row is somebody's.
    """
    key, gone = bytes.fromhex(facts["key"]), set(facts["deleted"])
    parts: dict[int, rows_of.Parts] = defaultdict(lambda: [[] for _ in rows["train"]])
    for entry, part in enumerate(rows["train"]):
        for row in part:
            if not gone or _keyed(facts, rows_of.row_id(row)) not in gone:
                whose = _owner(row, facts["by"])
                parts[0 if whose is None else place(key, whose, facts["count"])][entry].append(row)
    if not parts.keys() - {0}:
        says = f"no row has the field `{facts['by']}`, which says whose a row is"
        raise fault("shards.no-field", f"{says}; name the one that does, or choose fewer people.")
    return {str(shard): parts[shard] for shard in sorted(parts)}


def _keys(
    rows: rows_of.Sides, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, str]:
    """What the adapter of each shard is the result of: equal keys, equal bits."""
    now = bound.facts(config)
    now |= {"versions": {name: now["versions"].get(name) for name in BITS}, "device": hardware()}
    told = now, facts["count"], facts["threads"]
    found: dict[str, str] = {}
    for shard, parts in rows.items():
        digests = bound.of_rows({"train": parts, "test": []})
        found[shard] = content_key(told, shard, digests, found.get("0"))
    return found


def _batch(config: Mapping[str, Any]) -> tuple[int, int]:
    micro, times = map(config.get, ("micro_batch_size", "gradient_accumulation_steps"))
    return int(micro or 1), int(times or 1)


def make_routed(
    config_path: Path, facts: Mapping[str, Any], rows: rows_of.Sides, run: Steps, work: Path,
    keep: Path, out: Path,
) -> tuple[dict[str, str], list[str]]:  # fmt: skip
    """Train shards and make a routed folder.

    Args:
        rows: Of `cut`.
        work: Has a folder of each key; what was trained there is not trained again.
        keep: A routed folder, of which the shards are copied whose keys ``facts`` knows.
        out: The new one, in the place of what is there.

    Returns:
        The key of each shard, and the shards that were trained.
    """
    config = rows_of.read_config(config_path)
    keys, routed = _keys(rows, config, facts), work / "router"
    # Of another model a key says nothing: its adapters have other rows.
    known = facts["keys"] if weights(keep) == facts["model"] else {}
    kept = {s for s in keys if known.get(s) == keys[s]}
    adapters = {s: keep / f"shard-{s}" if s in kept else work / keys[s] / "made" for s in keys}
    due = [shard for shard in keys if shard not in kept]
    for old in (*work.glob("*/rows"), routed):  # of an earlier start
        shutil.rmtree(old, ignore_errors=True)
    for shard, parts in rows.items():
        rows_of.write_sides(work / keys[shard] / "rows", {"train": parts})
    for shard in due:
        made = rows_of.training(config, work / keys[shard])
        made = {name: value for name, value in made.items() if not name.startswith(_LOOKS)}
        if shard != "0":  # of mean size: as many steps as the unsharded run makes
            (micro, _), batch = _batch(config), math.prod(_batch(config)) // facts["count"]
            made["micro_batch_size"] = min(micro, batch)
            made["gradient_accumulation_steps"] = max(1, batch // micro)
            made |= {"lora_model_dir": str(adapters["0"])} if "0" in keys else {}
        path = work / keys[shard] / "train.yml"
        of_request.write_yaml(path, "Written by axolotl-unlearn.", made)
        if not (path.parent / "made").is_dir():
            shutil.rmtree(path.parent / "prepared", ignore_errors=True)  # half, of a killed start
            rows_of.trained_rows(path)  # Axolotl reads them as it read those of the user's files
    job = {"config": str(config_path), "by": facts["by"], "keys": keys, "due": due}
    write_json(work / JOB, job)
    words = [sys.executable, "-m", __spec__.name, str(work)]
    run.command("shards", words, float(config.get("num_epochs") or 1), lines="shard ")
    for shard, source in adapters.items():
        (routed / f"shard-{shard}").mkdir()
        for name in (ADAPTER_CONFIG, WEIGHTS):
            shutil.copy2(source / name, routed / f"shard-{shard}")
    shutil.copy2(source / ADAPTER_CONFIG, routed)
    shutil.rmtree(out, ignore_errors=True)
    routed.replace(out)
    return keys, due


def main(work: Path) -> None:
    """Train the shards that are due, and make the router. Each training is a process: nothing that
    one leaves in memory reaches the next, so that it ends with the bits of a training alone. The
    imports take longer than a small training. Without a GPU they are made once and each process is
    a fork; a fork may use no GPU that was looked at before it, as imports do.

    Args:
        work: Of `make_routed`, with `JOB`. What an earlier start has done is not done again.
    """
    context = multiprocessing.get_context("spawn" if accelerator() else "fork")
    if context.get_start_method() == "fork":
        gc.disable()  # collections of what all stays are a quarter of the start
        for name in ("axolotl.cli.train", "axolotl.core.builders", "transformers.trainer"):
            importlib.import_module(name)
        gc.freeze()
        gc.enable()
    job = read_json(work / JOB)
    for number, shard in enumerate(job["due"], 1):
        folder, where = work / job["keys"][shard], f"shard {shard} ({number} of {len(job['due'])})"
        if (folder / "made").is_dir():
            print(f"{where}: kept from an earlier start", flush=True)
            continue
        shutil.rmtree(folder / "model", ignore_errors=True)
        print(f"{where}: started", flush=True)
        before = sum(os.times()[2:4])
        child = context.Process(target=_train, args=(str(folder / "train.yml"),))
        child.start()
        child.join()
        if child.exitcode or not (folder / "model" / WEIGHTS).is_file():
            sys.exit(f"{where}: failed")
        shutil.rmtree(folder / "prepared", ignore_errors=True)
        (folder / "model").replace(folder / "made")
        seconds = sum(os.times()[2:4]) - before
        print(f"{where}: done, {seconds:.1f} s of processor", flush=True)
    _make_router(work, job)


def _train(config: str) -> None:
    from axolotl.cli.train import do_cli

    end_with_parent()
    sys.argv = ["axolotl"]
    do_cli(config=config)


def _make_router(work: Path, job: Mapping[str, Any]) -> None:
    """``work/router``: that of the people of all rows, with the tokenizer."""
    from axolotl_unlearn.config import DataArgs
    from axolotl_unlearn.data.typed import Source, encode
    from axolotl_unlearn.shards.router import Router
    from axolotl_unlearn.versions import DictDefault

    config, given, whose = Path(job["config"]), [], []
    settings, tokenizer = rows_of.read_config(config), rows_of.load_tokenizer_of(config)
    for shard, key in job["keys"].items():
        for entry, part in enumerate(rows_of.read_sides(work / key / "rows")["train"]):
            for row in part:
                alone = len(given) % ALONE
                given.append(Source(str(len(given)), row, entry))
                whose.append((int(shard), _owner(row, job["by"]) or alone))
    data = DataArgs(rows=rows_of.row_types(rows_of.entries(settings)))
    typed = encode(given, data, tokenizer, DictDefault(settings), str(config))
    texts = tokenizer.batch_decode([one.input_ids for one in typed], skip_special_tokens=True)
    people = defaultdict(list)
    for one, text in zip(typed, texts, strict=True):
        people[whose[one.number]].append(text)
    tokenizer.save_pretrained(work / "router")
    Router.of((shard, texts) for (shard, _), texts in people.items()).save(work / "router")


def _plan(request: Request) -> tuple[dict[str, Any], rows_of.Sides, dict[str, Any]]:
    """``way.json`` but for the rows; and `retrain.remaining`."""
    before = Path(request.facts["before"]["adapter"] or request.facts["before"]["model"])
    folder = _folder(before)
    facts, config = load(folder, before), rows_of.read_config(request.path("finetune.yml"))
    left, now = retrain.remaining(request)
    known, rows = facts["keys"], cut(left, facts)
    keys = _keys(rows, config, facts)
    again = sorted((s for s in known | keys if keys.get(s) != known.get(s)), key=int)
    reads = sum(len(part) for shard in again for part in rows.get(shard, ()))
    way = {"way": "shards", "base": str(config["base_model"]), "of": facts["count"],
           "shards": _from(request.folder, folder), "before": known, "keys": keys,
           "again": again, "reads": reads * float(config.get("num_epochs") or 1)}  # fmt: skip
    return way, left, now


def reads(request: Request) -> tuple[float, str]:
    """Rows of the shards that are trained again, each pass counted; and which, and why if all."""
    way, _, _ = _plan(request)
    said = f"{SHOWS} ({len(way['again'])} of {len(way['before'])})"
    if "0" in way["again"]:
        said += "; a row is nobody's, which every shard has read: all are trained again"
    return way["reads"], said


def prepare(request: Request) -> dict[str, Any]:
    """Write the remaining rows.

    Raises:
        UnlearnError: The request does not begin with shards, or these were changed.
    """
    known = request.way
    if known["way"] == "shards":
        folder = request.path(known["shards"])
        if load(folder)["current"] == _from(folder, request.path("model")):
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
        says = "another request, or a training, changed these shards; run again"
        raise fault("requests.overtaken", f"{request.folder}: {says}.")
    retrain.require(request)
    return facts


def fits(request: Request, threads: int | None, processes: int) -> None:
    """Of `as_trained`."""
    as_trained(load(request.path(request.way["shards"])), threads, processes)


def make(request: Request, run: Steps) -> None:
    """Train the shards again, make the router, write down what was shown."""
    way, path, work = request.way, request.path("finetune.yml"), request.path("work")
    title, told = "train the shards of the rows", work / retrain.TRAINED
    with run.step("shards", title, settings=way["keys"], output=told) as due:
        if due:
            with held(request.path(way["shards"])):  # whose adapters are copied
                facts, keep = require(request), Path(request.facts["before"]["adapter"])
                # Of other numbers a product has other bits.
                run.threads, run.processes = facts["threads"], 1
                write_json(told, bound.environment(run.threads, run.processes))
                rows = cut(rows_of.read_sides(work / "rows"), facts)
                make_routed(path, facts, rows, run, work / "shards", keep, work / "model")
    with run.step("exact", "what was shown", output=request.path(PROOF)) as due:
        if due:
            require(request)
            from_base = "0" in way["again"] or "0" not in way["keys"]
            start = "base" if from_base else "adapter of rows that are nobody's"
            because = (
                f"of {way['of']} shards {', '.join(way['again'])} were trained again from the "
                f"{start}, the others never had a deleted row, and the router is that of these rows"
            )
            retrain.prove(request, because, path)


def hand_over(request: Request) -> None:
    """The shards are those of this model, and know the deleted rows by keyed digests, so that they
    stay out when rows are added. Called again after a kill."""
    folder, model = request.path(request.way["shards"]), request.path("model")
    with held(folder):
        facts = require(request)
        facts |= {"keys": request.way["keys"], "deleted": _deleted(request, facts),
                  "model": weights(model), "current": _from(folder, model)}  # fmt: skip
        write_json(folder / FACTS, facts)


def deleted_otherwise(request: Request) -> None:
    """What another way has deleted of a model of shards stays out of them, too."""
    if folder := told_of(request):
        with held(folder):
            facts = load(folder)
            write_json(folder / FACTS, facts | {"deleted": _deleted(request, facts)})


def _deleted(request: Request, facts: Mapping[str, Any]) -> list[int]:
    """With the rows of a request."""
    return sorted(
        {_keyed(facts, row) for row in rows_of.forgotten(request)}.union(facts["deleted"])
    )


def told_of(request: Request) -> Path | None:
    """The folder of the shards of the model before, or of the model that earlier requests made it
    of, if it is a model of shards that are there.

    Raises:
        UnlearnError: What they were made of, or an earlier request, cannot be read.
    """
    seen: set[Path] = set()
    while (here := request.folder.resolve()) not in seen:
        seen.add(here)
        before = Path(request.facts["before"]["adapter"] or request.facts["before"]["model"])
        before = before if before.exists() else request.root / before
        # `erase` of an earlier request leaves no router, and no weights.
        routed = is_routed(before) or not any(before.glob("*.safetensors"))
        if routed and ((folder := _folder(before)) / FACTS).is_file():
            load(folder)
            return folder
        if not (before.parent / "request.json").exists():
            break
        request = Request.load(before.parent)
    return None


def _from(folder: Path, place: Path) -> str:
    """The way from a folder to a place, where both may lie behind links."""
    return os.path.relpath(place.resolve(), folder.resolve())


def _folder(model: Path) -> Path:
    """Of the shards of a routed model: beside it, or named by the request that made it."""
    return model.parent / (read_json(model.parent / WAY) or {}).get("shards", "")


def outputs(request: Request) -> list[Path]:
    """Folders that hold the old adapters, for `erase`."""
    return [request.path(request.way["shards"]).resolve()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
