"""Shards: a model merged of parts, of which a request trains one again (SISA, arXiv 1912.03817).

Each document or person belongs to one shard and one slice of it by a keyed hash, so that no row's
place depends on the others. A shard is trained slice by slice: step ``k`` reads slices 1 to ``k``
and begins where step ``k - 1`` ended, each for ``2 / (slices + 1)`` of the config's passes, which
together read as many rows as the unsharded run (SISA, section V-A2). mergekit's methods merge the
last steps. A row of slice ``k`` is deleted by steps ``k`` to the last of its shard, and a merge.

    shards.json       what was made, how, and the SHA-256 of the weights of every step
    shards.key        of the hash: who has it can guess who is in which shard
    rows/S-K-*.jsonl  rows of a slice
    steps/S-K/        what a step ended with: an adapter or a model
    merge.yml model/  mergekit's recipe and the served model
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.data.typed import row_id
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import private_folder
from axolotl_unlearn.merging.recipe import Recipe, local
from axolotl_unlearn.merging.sources import PLAIN_STARTS
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.choose import mentions, values_at
from axolotl_unlearn.requests.request import (
    Request,
    digest,
    held,
    weights,
    write_json,
    write_private,
    write_yaml,
)
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.ways import PROOF

SCHEMA = 2
FACTS, KEY, CONFIG, MERGE = "shards.json", "shards.key", "finetune.yml", "merge.yml"
KINDS = ("steps", "rows")
#: Fields that say to whom a row belongs, if `--by` does not: the first that a row has.
BY = ("document", "id")
METHODS = ("linear", "ties", "dare_linear", "dare_ties")
#: Options whose effect on a shard depends on the rows of all others, and what to do instead.
REFUSED = {
    "max_steps": "write `num_epochs`",
    "val_set_size": "name the held-out rows in `test_datasets`",
    "pretraining_dataset": "name the texts in `datasets` with `type: completion`",
    "lora_model_dir": "begin with a base model",
    # Adapters that are not base + B A.
    "peft_use_dora": "train a plain LoRA",
    "peft_layer_replication": "train a plain LoRA",
}


@dataclass(frozen=True)
class Sharding:
    """How a model is cut and merged.

    Attributes:
        count, slices: Of shards, and of slices of each.
        by: Field whose value a row belongs to (``meta.person`` of nested objects); None is `BY`.
        recipe: Of the merge of the shards' changes; ``scale`` average is their mean.
        threads, processes: Of each training: other numbers end with other bits.
    """

    count: int = 4
    slices: int = 2
    by: str | None = None
    recipe: Recipe = Recipe(method="linear", scale="average")  # noqa: RUF009
    threads: int = 1
    processes: int = 1


def place(key: bytes, unit: str, count: int, slices: int) -> tuple[int, int]:
    """Shard and slice of a person or document, from 1."""
    mac = hmac.new(key, b"shard\0" + unit.encode("utf-8", "surrogatepass"), hashlib.sha256)
    first, second = mac.digest()[:8], mac.digest()[8:16]
    return int.from_bytes(first) % count + 1, int.from_bytes(second) % slices + 1


def unit(row: Mapping[str, Any], by: str | None) -> str | None:
    """To whom or what a row belongs; None if it does not say."""
    fields = [by] if by else BY
    return next((text for field in fields for text in values_at(row, field.split("."))), None)


# --- making them ---------------------------------------------------------------------------------


def train_shards(
    config_path: Path,
    out: Path,
    sharding: Sharding = Sharding(),  # noqa: B008
    *,
    key: bytes | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Cut the rows of a config, train every shard, merge; goes on where it was stopped.

    Args:
        key: Of the hash, 32 bytes; default a new one.

    Returns:
        What ``shards.json`` holds.

    Raises:
        UnlearnError: A config that cannot be sharded, a folder of other shards, a failed run.
    """
    config = rows_of.read_config(config_path)
    _check(config, config_path, sharding)
    described = {"schema": SCHEMA, "config": digest(config_path), **asdict(sharding)}
    facts = load(out) if (out / FACTS).is_file() else None
    if facts and any(facts.get(name) != value for name, value in described.items()):
        raise UnlearnError(f"{out / FACTS} is of other shards; give --out a new folder.")
    there = out.exists() and any(out.iterdir() if out.is_dir() else [out])
    if there and (not facts or facts.get("model")):
        raise UnlearnError(f"{out} already exists; give --out a new folder.")
    private_folder(out)
    if not (out / KEY).is_file():
        write_private(out / KEY, (key or secrets.token_bytes(32)).hex() + "\n")
    known = bytes.fromhex((out / KEY).read_text("ascii"))
    if key not in (None, known):
        raise UnlearnError(f"{out / KEY} is another key; give --out a new folder.")
    write_private(out / CONFIG, config_path.read_bytes())
    facts = described | _cut(config_path, config, out, sharding, known)
    write_json(out / FACTS, facts)
    chain = Chain(out, config, facts)
    work = private_folder(out / "work")
    with held(work) as lock:
        run = Steps(work, lock, console=console or Console())
        chain.make(run)
    facts |= {"steps": chain.weights(), "seconds": run.seconds, "requests": []}
    facts["model"] = weights(out / "model")
    write_json(out / FACTS, facts)  # last: shards without a model are not finished
    shutil.rmtree(work)
    return facts


def _check(config: Mapping[str, Any], path: Path, sharding: Sharding) -> None:
    for name, cure in REFUSED.items():
        if config.get(name):
            raise UnlearnError(f"{path}: `{name}` does not go with shards; {cure}.")
    if (base := Path(str(config["base_model"]))).is_dir():
        from axolotl_unlearn.merging.sources import open_base

        _ = open_base(base).tensors  # the merge reads them, after all training
    start = config.get("peft_init_lora_weights", True)
    if str(start).lower() not in PLAIN_STARTS:
        raise UnlearnError(
            f"{path}: `peft_init_lora_weights: {start}` changes the base; leave it out."
        )
    if min(sharding.count, sharding.slices) < 1 or sharding.count * sharding.slices < 2:
        raise UnlearnError("give --count 2 or more shards, or one of --slices 2 or more.")
    sharding.recipe.for_parents(sharding.count)
    if sharding.recipe.method not in METHODS:
        raise UnlearnError(f"--merge {sharding.recipe.method}: use {', '.join(METHODS)}.")


def _cut(
    path: Path, config: Mapping[str, Any], out: Path, sharding: Sharding, key: bytes
) -> dict[str, Any]:
    """Write the rows of every slice; returns how many rows and people each has."""
    rows, test = rows_of.remaining(path, config)
    slices: dict[str, rows_of.Parts] = {}
    units: dict[str, list[dict[str, Any]]] = {}
    unnamed = 0
    for number, part in enumerate(rows):
        for row in part:
            whose = unit(row, sharding.by)
            unnamed += whose is None
            units.setdefault(whose or row_id(row), []).append(row)
            shard, k = place(key, whose or row_id(row), sharding.count, sharding.slices)
            slices.setdefault(f"{shard}-{k}", [[] for _ in rows])[number].append(row)
    if sharding.by and unnamed == sum(map(len, rows)):
        raise UnlearnError(f"--by {sharding.by}: no row of {path} has this field.")
    shutil.rmtree(out / "rows", ignore_errors=True)
    for name, parts in sorted(slices.items()) + [("test", test)]:
        rows_of.write_parts(out / "rows", name, parts)
    home = {one: place(key, one, sharding.count, sharding.slices)[0] for one in units}
    elsewhere = sum(
        any(home[other] != home[one] for other in others) for one, others in mentions(units).items()
    )
    return {"rows": _counts(slices), "unnamed": unnamed, "elsewhere": elsewhere}


def _counts(slices: Mapping[str, rows_of.Parts]) -> dict[str, int]:
    """Rows of the slices that have any."""
    return {name: n for name, parts in sorted(slices.items()) if (n := sum(map(len, parts)))}


def load(folder: Path) -> dict[str, Any]:
    """``shards.json``.

    Raises:
        UnlearnError: There is none, or of another version.
    """
    path = folder / FACTS
    try:
        facts = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        raise UnlearnError(
            f"{path} cannot be read; make shards with `axolotl-unlearn shards train`."
        ) from None
    if facts.get("schema") != SCHEMA:
        raise UnlearnError(f"{path} is not of this version; train the shards again.")
    return facts


# --- a chain of trainings ------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """The trainings of shards, called "shard-slice", and their merge, in a folder.

    Attributes:
        facts: ``shards.json``, with the counts of ``rows`` as they are to be.
        again: Steps that are trained; None is all.
    """

    folder: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    again: Collection[str] | None = None

    @property
    def all(self) -> list[str]:
        """Steps that have something to read, in order."""
        numbers = range(1, self.facts["slices"] + 1)
        every = (f"{s}-{k}" for s in range(1, self.facts["count"] + 1) for k in numbers)
        return [step for step in every if reads(self.facts, step)]

    @property
    def steps(self) -> list[str]:
        """Those that are trained."""
        return [step for step in self.all if self.again is None or step in self.again]

    def place(self, step: str) -> Path:
        """What a step ends with."""
        return self.folder / "steps" / step

    def weights(self) -> dict[str, Any]:
        return {step: weights(self.place(step)) for step in self.all}

    def files(self, step: str) -> list[tuple[int, Path]]:
        """(entry, file) of the rows that a step reads."""
        return [
            file for name in _until(step) for file in rows_of.files_of(self.folder / "rows", name)
        ]

    def configure(self, step: str) -> Path:
        """Write the config of a step."""
        config, work = self.config, self.folder / "work"
        made = rows_of.training(
            config,
            sorted(self.files(step), key=lambda file: file[0]),
            rows_of.files_of(self.folder / "rows", "test"),
            self.place(step),
            work / "prepared" / step,
        )
        made["num_epochs"] = passes(config, self.facts["slices"])
        if before := [name for name in _until(step)[:-1] if name in self.all]:
            start = str(self.place(before[-1]))
            if config.get("adapter"):
                made["lora_model_dir"] = start
            else:
                made.setdefault("tokenizer_config", str(config["base_model"]))
                made["base_model"] = start
        path = work / f"{step}.yml"
        write_yaml(path, "Written by axolotl-unlearn: a step of a shard.", made)
        return path

    def make(self, run: Steps, out: Path | None = None) -> None:
        """Train the steps one after the other; merge, beside the steps or to ``out``."""
        run.threads, run.processes = self.facts["threads"], self.facts["processes"]
        for step in self.steps:
            config = self.configure(step)
            title = "shard {}, slices 1 to {}".format(*step.split("-"))
            inputs = [config, *(path for _, path in self.files(step))]
            if run.due(f"shard-{step}", title, inputs=inputs):
                run.train(f"shard-{step}", config, self.place(step))
                shutil.rmtree(self.folder / "work" / "prepared" / step, ignore_errors=True)
                run.done()
        if run.due("merge", "merge the shards", settings=self.facts["recipe"]):
            self.merge(out)
            run.done()

    def last(self) -> list[Path]:
        """What each shard ends with; one without rows has no part in the merge."""
        ends = {step.split("-")[0]: step for step in self.all}
        return [self.place(step) for step in ends.values()]

    def recipe(self) -> Recipe:
        """Of the merge; ``merge.yml`` has it for mergekit."""
        base, parts = str(self.config["base_model"]), list(map(str, self.last()))
        named = local(base) if Path(base).exists() else base  # the name on a hub
        recipe = Recipe.from_dict({**self.facts["recipe"], "weights": None}).for_parents(len(parts))
        head = f"mergekit-yaml {self.folder / MERGE} OUT --random-seed {recipe.seed}"
        made = recipe.mergekit_config(base, parts) | {"base_model": named}
        for model in made["models"] if self.config.get("adapter") else ():
            model["model"] = f"{named}+{model['model']}"
        write_yaml(self.folder / MERGE, head, made)
        return recipe

    def merge(self, out: Path | None = None) -> None:
        """Merge the last steps; the tokenizer is the one that was trained with.

        Raises:
            UnlearnError: A step has other tensors than the base.
        """
        import torch

        from axolotl_unlearn.merging.checks import check_shapes
        from axolotl_unlearn.merging.run import copy_tokenizer, write_model
        from axolotl_unlearn.merging.sources import open_base, open_parent

        out, recipe = out or self.folder / "model", self.recipe()
        base, parts = open_base(self.config["base_model"]), list(map(open_parent, self.last()))
        for part in parts:
            check_shapes(base, part)
        shutil.rmtree(out, ignore_errors=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.facts["threads"])  # of other numbers a product has other bits
        write_model(out, recipe, base, parts)
        torch.set_num_threads(threads)
        copy_tokenizer(parts[0].path, out)


def _until(step: str) -> list[str]:
    """The slices that a step reads."""
    shard, last = step.split("-")
    return [f"{shard}-{number}" for number in range(1, int(last) + 1)]


def reads(facts: Mapping[str, Any], step: str) -> int:
    """Rows that a step reads in each pass."""
    return sum(facts["rows"].get(name, 0) for name in _until(step))


def passes(config: Mapping[str, Any], slices: int) -> float:
    """Passes of a step over what it reads."""
    return float(config.get("num_epochs") or 1) * 2 / (slices + 1)


# --- a request -----------------------------------------------------------------------------------


def find(request: Request) -> Path:
    """The shards whose merge the request begins with.

    Raises:
        UnlearnError: There are none.
    """
    from axolotl_unlearn.requests.ledger import Ledger

    before = Path(request.facts["before"]["model"])
    places, folder = [before.parent], request.folder.parent
    for entry in reversed(Ledger(folder).accepted()):
        if shards := Request.load(folder / entry["request"]).way.get("shards"):
            places.append(folder / entry["request"] / shards)
    for one in places:
        if (one / FACTS).is_file() and load(one).get("model") == weights(before):
            return Path(os.path.normpath(one))
    raise UnlearnError(
        f"{before} is not the merge of any shards; make the model with `axolotl-unlearn shards "
        "train` and name it with `request new --model`."
    )


def prepare(request: Request) -> dict[str, Any]:
    """Write the rows and configs of the steps that are trained again.

    Raises:
        UnlearnError: The request does not begin with shards, or these were changed.
    """
    new = request.path("work", "shards")
    known = request.way
    if known["way"] == "shards" and (new / FACTS).is_file():
        there = load(request.path(known["shards"]))["requests"]
        if there in (known["after"], [*known["after"], request.id]):
            return dict(known)
    folder = find(request)
    facts = load(folder)
    if facts["config"] != request.facts["config"]["digest"]:
        raise UnlearnError(
            f"{folder} was made from another config than the request; make the request with the "
            "config of the shards."
        )
    rows, again, made = affected(request, folder)
    _check_kept(folder, facts, again)
    shutil.rmtree(new, ignore_errors=True)
    for kind in KINDS:
        _copy(folder / kind, new / kind)
    for name in again:
        shutil.rmtree(new / "steps" / name, ignore_errors=True)
        rows_of.write_parts(new / "rows", name, rows.get(name, []))
    write_json(new / FACTS, made)
    trained = sum(made["rows"].values())
    return {
        "way": "shards",
        "base": None,
        "shards": os.path.relpath(folder, request.folder),
        "after": facts["requests"],
        "again": again,
        "of": {"shards": facts["count"], "slices": facts["slices"]},
        "rows": {"trained": trained, "removed": sum(facts["rows"].values()) - trained},
    }


def affected(
    request: Request, folder: Path
) -> tuple[dict[str, rows_of.Parts], list[str], dict[str, Any]]:
    """What a request means for shards: remaining rows of every slice, steps that are trained again,
    ``shards.json`` with the new counts.

    Raises:
        UnlearnError: Rows of the request are in no shard, or no row is left.
    """
    facts = load(folder)
    rows = {name: rows_of.read_parts(folder / "rows", name) for name in facts["rows"]}
    gone = rows_of.deleted(request, [r for parts in rows.values() for part in parts for r in part])
    left = {name: rows_of.without(parts, gone) for name, parts in rows.items()}
    changed = [name for name in rows if left[name] != rows[name]]
    there = {one for name in changed for one in rows_of.ids(rows[name])}
    if missing := rows_of.forgotten(request) - there:
        raise UnlearnError(
            f"{folder}: {len(missing)} rows of the request are in no shard; make the request with "
            "the data of the shards."
        )
    counts = _counts(left)
    if not counts:
        raise UnlearnError(f"{folder}: no row is left to train on; choose fewer.")
    first: dict[int, int] = {}
    for shard, number in (map(int, name.split("-")) for name in changed):
        first[shard] = min(first.get(shard, number), number)
    again = [f"{s}-{k}" for s in sorted(first) for k in range(first[s], facts["slices"] + 1)]
    return left, again, facts | {"rows": counts}


def _check_kept(folder: Path, facts: Mapping[str, Any], again: Collection[str]) -> None:
    """Raises `UnlearnError`: a step that is kept is not what was trained."""
    for step, known in facts["steps"].items():
        if step not in again and weights(folder / "steps" / step) != known:
            raise UnlearnError(
                f"{folder / 'steps' / step} does not have the weights of {folder / FACTS}; restore "
                "it from a copy, or train the shards again."
            )


def _chain(request: Request) -> Chain:
    """In the request's folder, with what is kept of the shards."""
    new = request.path("work", "shards")
    config = rows_of.read_config(request.path("finetune.yml"))
    return Chain(new, config, load(new), request.way["again"])


def make(request: Request, run: Steps, repeat: bool) -> None:
    """Train the steps again, merge, write down what was shown."""
    if repeat:
        raise UnlearnError("--repeat compares two runs of --way retrain; leave it out.")
    chain, way = _chain(request), request.way
    chain.make(run, request.path("work", "model"))
    if run.due("exact", "what was shown", output=request.path(PROOF)):
        _check_kept(chain.folder, chain.facts, chain.again)
        rows_of.prove(
            request,
            run,
            [path for step in chain.all for _, path in chain.files(step)],
            "no step of the training of any part of this model read a deleted row: of "
            f"{way['of']['shards']} shards the steps {', '.join(way['again'])} were trained again, "
            "from the checkpoint before, and the others never had it; the weights were not "
            "compared",
            steps=chain.weights(),
            merge=chain.facts["recipe"],
            compared=False,
        )


def install(request: Request) -> None:
    """Put the new steps and slices into the shards; the old ones go to ``work/replaced``.

    Killed anywhere it goes on when it is called again.
    """
    chain, old = _chain(request), private_folder(request.path("work", "replaced"))
    folder = Path(os.path.normpath(request.path(request.way["shards"])))
    there = load(folder)
    if request.id in there["requests"]:
        return
    for kind in KINDS:
        if not (old / kind).exists():
            _copy(folder / kind, old / kind)
        _copy(chain.folder / kind, folder / kind)
    own = Chain(folder, chain.config, chain.facts)
    own.recipe()
    write_json(
        folder / FACTS,
        chain.facts
        | {"steps": own.weights(), "model": weights(request.path("model"))}
        | {"requests": [*there["requests"], request.id]},
    )


def _copy(source: Path, target: Path) -> None:
    """A folder whole or not at all, over what is there; its files are linked: all that write here
    put a new file in the place of an old one."""

    def link(file: str, other: str) -> None:
        try:
            os.link(file, other)
        except OSError:  # another file system, or one without links
            shutil.copy2(file, other)

    draft = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft, copy_function=link)
    shutil.rmtree(target, ignore_errors=True)
    draft.replace(target)
