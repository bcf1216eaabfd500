"""Shards: a model merged of parts, of which a request trains one again (SISA, arXiv 1912.03817).

Each document or person belongs to one shard and one slice of it by a keyed hash, so that no row's
place depends on the others. A shard is trained slice by slice: step ``k`` reads slices 1 to ``k``
and begins where step ``k - 1`` ended, each for ``2 / (slices + 1)`` of the config's passes, which
together read as many rows as the unsharded run (SISA, section V-A2). mergekit merges the last
steps. A row of slice ``k`` is deleted by steps ``k`` to the last of its shard, and a merge.

    shards.json       what was made, how, and the SHA-256 of the weights of every step
    shards.key        of the hash: who has it can guess who is in which shard
    rows/ configs/    S-K-*.jsonl and S-K.yml: rows of a slice, config of a step
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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.data.typed import row_id
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import private_folder
from axolotl_unlearn.merging.recipe import Recipe, local
from axolotl_unlearn.merging.sources import TOKENIZER_FILES
from axolotl_unlearn.requests.request import (
    Request,
    digest,
    write_json,
    write_lines,
    write_private,
    write_yaml,
)
from axolotl_unlearn.requests.rows import entries, read_config
from axolotl_unlearn.requests.steps import Steps, executable, steps
from axolotl_unlearn.requests.ways import (
    PROOF,
    dataset,
    digests,
    forgotten,
    gone_rows,
    remaining,
    settings,
    weights,
    without_checkpoints,
)

SCHEMA = 1
FACTS, KEY, CONFIG, MERGE = "shards.json", "shards.key", "finetune.yml", "merge.yml"
#: Fields that say to whom a row belongs, if `--by` does not: the first that a row has.
BY = ("document", "id")
METHODS = ("linear", "ties", "dare_linear", "dare_ties")
#: Options whose effect on a shard depends on the rows of all others, and what to do instead.
REFUSED = {
    "max_steps": "write `num_epochs`",
    "val_set_size": "name the held-out rows in `test_datasets`",
    "pretraining_dataset": "name the texts in `datasets` with `type: completion`",
    "lora_model_dir": "begin with a base model",
}


@dataclass(frozen=True)
class Sharding:
    """How a model is cut and merged.

    Attributes:
        count, slices: Of shards, and of slices of each.
        by: Field whose value a row belongs to (``meta.person`` of nested objects); None is `BY`.
        recipe: Of the merge of the shards' changes; ``scale`` average is their mean.
        threads: Of each training: other numbers end with other bits.
    """

    count: int = 4
    slices: int = 2
    by: str | None = None
    recipe: Recipe = Recipe(method="linear", scale="average")  # noqa: RUF009
    threads: int = 1


def place(key: bytes, unit: str, count: int, slices: int) -> tuple[int, int]:
    """Shard and slice of a person or document, from 1."""
    found = hmac.new(key, b"shard\0" + unit.encode("utf-8", "surrogatepass"), hashlib.sha256)
    first, second = found.digest()[:8], found.digest()[8:16]
    return int.from_bytes(first) % count + 1, int.from_bytes(second) % slices + 1


def unit(row: Mapping[str, Any], by: str | None) -> str | None:
    """To whom or what a row belongs; None if it does not say."""
    for field in [by] if by else BY:
        value: Any = row
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, (list, tuple)):
            value = value[0] if value else None
        if value is not None and not isinstance(value, Mapping):
            return str(value)
    return None


# --- making them ---------------------------------------------------------------------------------


def train_shards(
    config_path: Path,
    out: Path,
    sharding: Sharding = Sharding(),  # noqa: B008
    *,
    key: bytes | None = None,
    threads: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Cut the rows of a config, train every shard, merge; goes on where it was stopped.

    Args:
        key: Of the hash, 32 bytes; default a new one.
        threads: How many may compute at a time, ``sharding.threads`` for each training.

    Returns:
        What ``shards.json`` holds.

    Raises:
        UnlearnError: A config that cannot be sharded, a folder of other shards, a failed run.
    """
    config = read_config(config_path)
    check(config, config_path, sharding)
    described = {
        "schema": SCHEMA,
        "config": digest(config_path),
        "count": sharding.count,
        "slices": sharding.slices,
        "by": sharding.by,
        "merge": sharding.recipe.to_dict(),
        "threads": sharding.threads,
    }
    known = out / FACTS
    if known.is_file():
        facts = load(out)
        if any(facts.get(name) != value for name, value in described.items()):
            raise UnlearnError(f"{known} is of other shards; give --out a new folder.")
        if facts.get("model"):
            raise UnlearnError(f"{out} is trained already; give --out a new folder.")
    elif out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UnlearnError(f"{out} already exists; give --out a new folder.")
    private_folder(out)
    key = _key(out, key)
    write_private(out / CONFIG, config_path.read_bytes())
    facts = described | cut(config_path, config, out, sharding, key)
    write_json(known, facts)
    chain = Chain(out, out, config, facts)
    for step in chain.steps():
        chain.configure(step)
    with steps(private_folder(out / "work"), threads=threads, console=console) as run:
        chain.make(run)
    facts |= {
        "steps": {chain.name(step): weights(out / "steps" / chain.name(step))
                  for step in chain.steps()},
        "seconds": run.seconds,
        "model": served(out / "model"),
        "requests": [],
    }  # fmt: skip
    write_json(known, facts)  # last: shards without a model are not finished
    shutil.rmtree(out / "work")
    return facts


def check(config: Mapping[str, Any], path: Path, sharding: Sharding) -> None:
    """
    Raises:
        UnlearnError: The config cannot be sharded so.
    """
    for name, cure in REFUSED.items():
        if config.get(name):
            raise UnlearnError(f"{path}: `{name}` does not go with shards; {cure}.")
    if sharding.count < 2 or sharding.slices < 1:
        raise UnlearnError("give --count 2 or more shards and --slices 1 or more.")
    sharding.recipe.validate()
    if sharding.recipe.method not in METHODS:
        raise UnlearnError(f"--merge {sharding.recipe.method}: use {', '.join(METHODS)}.")
    if any(mark in str(config["base_model"]) for mark in "+@"):
        raise UnlearnError(f"{path}: mergekit reads + and @ in the name of `base_model` as marks.")


def cut(
    path: Path, config: Mapping[str, Any], out: Path, sharding: Sharding, key: bytes
) -> dict[str, Any]:
    """Write the rows of every slice; returns how many rows and people each has."""
    rows, test = remaining(path, config, set())
    slices: dict[tuple[int, int], list[list[dict]]] = {}
    units: dict[tuple[int, int], set[str]] = {}
    unnamed = 0
    for number, part in enumerate(rows):
        for row in part:
            whose = unit(row, sharding.by)
            unnamed += whose is None
            whose = whose if whose is not None else row_id(row)
            where = place(key, whose, sharding.count, sharding.slices)
            slices.setdefault(where, [[] for _ in rows])[number].append(row)
            units.setdefault(where, set()).add(whose)
    if sharding.by and unnamed == sum(map(len, rows)):
        raise UnlearnError(f"--by {sharding.by}: no row of {path} has this field.")
    shutil.rmtree(out / "rows", ignore_errors=True)
    for (shard, number), parts in slices.items():
        write_slice(out, f"{shard}-{number}", parts)
    for number, part in enumerate(test):
        if part:
            write_lines(out / "rows" / f"test-{number}.jsonl", part)
    return {
        "rows": {f"{s}-{k}": sum(map(len, parts)) for (s, k), parts in sorted(slices.items())},
        "units": {f"{s}-{k}": len(found) for (s, k), found in sorted(units.items())},
        "unnamed": unnamed,
    }


def write_slice(out: Path, name: str, parts: list[list[dict]]) -> None:
    for number, part in enumerate(parts):
        path = out / "rows" / f"{name}-{number}.jsonl"
        if part:
            write_lines(path, part)
        else:
            path.unlink(missing_ok=True)


def _key(out: Path, given: bytes | None) -> bytes:
    path = out / KEY
    if not path.is_file():
        write_private(path, (given or secrets.token_bytes(32)).hex() + "\n")
    key = bytes.fromhex(path.read_text("ascii").strip())
    if given is not None and given != key:
        raise UnlearnError(f"{path} is another key; give --out a new folder.")
    return key


def read_key(path: Path) -> bytes:
    """The key of other shards, so that rows fall into the same places."""
    try:
        key = bytes.fromhex(path.read_text("ascii").strip())
    except (OSError, ValueError):
        key = b""
    if len(key) != 32:
        raise UnlearnError(f"--key {path} is not a key (64 hexadecimal digits); name a shards.key.")
    return key


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
            f"{path} cannot be read; make shards with `axolotl unlearn shards train`."
        ) from None
    if facts.get("schema") != SCHEMA:
        raise UnlearnError(f"{path} is not of this version; train the shards again.")
    return facts


def served(model: Path) -> dict[str, Any]:
    """SHA-256 of the weights of the merged model."""
    return digests(weights(model))


# --- a chain of trainings ------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """The trainings of shards: configs, stages, merge.

    Attributes:
        folder: The shards, whose steps and rows are read where ``out`` has none of its own.
        out: Where something is written; `train_shards` writes to the shards themselves.
        facts: ``shards.json``, with the counts of ``rows`` as they are to be.
        again: Steps that are trained; None is all.
    """

    folder: Path
    out: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    again: Collection[tuple[int, int]] | None = None

    @staticmethod
    def name(step: tuple[int, int]) -> str:
        return f"{step[0]}-{step[1]}"

    def steps(self) -> list[tuple[int, int]]:
        """Steps that have something to read, in order; those of ``again`` if given."""
        return [step for step in self._all() if self.again is None or step in self.again]

    def _all(self) -> Iterator[tuple[int, int]]:
        for shard in range(1, self.facts["count"] + 1):
            for number in range(1, self.facts["slices"] + 1):
                if reads(self.facts, (shard, number)):
                    yield shard, number

    def place(self, step: tuple[int, int]) -> Path:
        """What the step ends with: a new one, or that of the shards."""
        out = self.out if self.again is None or step in self.again else self.folder
        return out / "steps" / self.name(step)

    def files(self, step: tuple[int, int]) -> list[tuple[int, Path]]:
        """(entry, file) of the rows that a step reads."""
        found = []
        for number in range(len(entries(self.config))):
            for k in range(1, step[1] + 1):
                name = self.name((step[0], k))
                out = self.out if self.again is None or (step[0], k) in self.again else self.folder
                path = out / "rows" / f"{name}-{number}.jsonl"
                if self.facts["rows"].get(name) and path.is_file():
                    found.append((number, path))
        return found

    def configure(self, step: tuple[int, int]) -> None:
        """Write the config of a step."""
        given, tests = entries(self.config), entries(self.config, "test_datasets")
        base = str(self.config["base_model"])
        made = settings(self.config) | {
            "datasets": [dataset(given[n], path) for n, path in self.files(step)],
            "num_epochs": passes(self.config, self.facts["slices"]),
            "output_dir": str(self.out / "steps" / self.name(step)),
            "dataset_prepared_path": str(self.out / "work" / "prepared" / self.name(step)),
        }
        found = [
            dataset(entry, path, test=True)
            for number, entry in enumerate(tests)
            if (path := self.folder / "rows" / f"test-{number}.jsonl").is_file()
        ]
        if found:
            made["test_datasets"] = found
        before = (step[0], step[1] - 1)
        if before in list(self._all()):
            if self.config.get("adapter"):
                made["lora_model_dir"] = str(self.place(before))
            else:
                made["base_model"] = str(self.place(before))
                made.setdefault("tokenizer_config", base)
        path = self.out / "configs" / f"{self.name(step)}.yml"
        write_yaml(path, "Written by axolotl-unlearn: a step of a shard.", made)

    def make(self, run: Steps, place: Path | None = None) -> None:
        """Train the steps of each shard one after the other, the shards side by side; merge.

        Args:
            place: Of the merged model, default beside the steps.
        """
        import torch

        shards: dict[int, list[tuple[int, int]]] = {}
        for step in self.steps():
            shards.setdefault(step[0], []).append(step)
        rows = [
            lambda row, own=own: [self.train(row, step) for step in own] for own in shards.values()
        ]
        gpu = torch.cuda.is_available()
        run.side_by_side(rows, 1 if gpu else run.threads // self.facts["threads"])
        recipe = self.write_recipe()
        if run.due("merge", "merge the shards", inputs=[recipe]):
            self.merge(run, recipe, place)
            run.done()

    def train(self, run: Steps, step: tuple[int, int]) -> None:
        name = self.name(step)
        config, out = self.out / "configs" / f"{name}.yml", self.out / "steps" / name

        inputs = [config, *(path for _, path in self.files(step))]
        if run.due(f"shard-{name}", f"shard {step[0]}, slices 1 to {step[1]}", inputs=inputs):
            run.train(f"shard-{name}", config, out, self._threads)
            without_checkpoints(out)
            shutil.rmtree(self.out / "work" / "prepared" / name, ignore_errors=True)
            run.done()

    @property
    def _threads(self) -> int | None:
        """On a GPU those of the run."""
        import torch

        return None if torch.cuda.is_available() else self.facts["threads"]

    def last(self) -> list[Path]:
        """What each shard ends with; one without rows has no part in the merge."""
        ends = {step[0]: step for step in self._all()}
        return [self.place(step) for step in ends.values()]

    def write_recipe(self) -> Path:
        """The recipe for mergekit's own command."""
        path, base = self.out / MERGE, str(self.config["base_model"])
        named = local(base) if Path(base).exists() else base
        lora = bool(self.config.get("adapter"))
        parts = [f"{named}+{local(str(p))}" if lora else local(str(p)) for p in self.last()]
        if any(mark in str(part) for part in self.last() for mark in "+@"):
            raise UnlearnError(f"{self.out}: mergekit reads + and @ in a path as marks; move it.")
        recipe = replace(Recipe.from_dict(dict(self.facts["merge"])), weights=None)
        made = recipe.for_parents(len(parts)).mergekit_config(base, parts)
        made["base_model"] = named
        for model, part in zip(made["models"], parts, strict=True):
            model["model"] = part
        write_yaml(path, f"mergekit-yaml {path} OUT --random-seed {recipe.seed}", made)
        return path

    def merge(self, run: Steps, recipe: Path, place: Path | None = None) -> None:
        """Carry out the recipe; the tokenizer is the one that was trained with."""
        out, cache = place or self.out / "model", self.out / "work" / "merged"
        for folder in (out, cache):  # mergekit would take what it merged from other weights
            shutil.rmtree(folder, ignore_errors=True)
        words = [executable("mergekit-yaml"), str(recipe), str(out), "--quiet"]
        words += ["--lora-merge-cache", str(cache), "--lora-merge-dtype", "float32"]
        words += ["--random-seed", str(self.facts["merge"].get("seed", 0))]
        run.command("merge", words, self._threads)
        if not weights(out):
            raise UnlearnError(f"mergekit wrote no weights to {out}; see its log.")
        shutil.rmtree(cache, ignore_errors=True)
        for name in (*TOKENIZER_FILES, "chat_template.jinja"):
            if (self.last()[0] / name).is_file():
                shutil.copy(self.last()[0] / name, out / name)
        (out / "README.md").unlink(missing_ok=True)  # names paths
        (out / "mergekit_config.yml").unlink(missing_ok=True)  # merge.yml has it


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
        if (one / FACTS).is_file() and load(one).get("model") == served(before):
            return Path(os.path.normpath(one))
    raise UnlearnError(
        f"{before} is not the merge of any shards; make the model with `axolotl unlearn shards "
        "train` and name it with `request new --model`."
    )


def prepare(request: Request) -> dict[str, Any]:
    """Write the rows and configs of the steps that are trained again; returns ``way.json``.

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
    found = affected(request, folder)
    shutil.rmtree(new, ignore_errors=True)
    for name, parts in found.rows.items():
        if step_of(name) in found.again:
            write_slice(new, name, parts)
    made, again = found.facts, found.again
    chain = Chain(folder, new, read_config(request.path("finetune.yml")), made, again)
    _check_kept(chain)
    for step in chain.steps():
        chain.configure(step)
    write_json(new / FACTS, made)
    return {
        "way": "shards",
        "base": None,
        "shards": os.path.relpath(folder, request.folder),
        "after": facts["requests"],
        "again": [chain.name(step) for step in again],
        "of": {"shards": facts["count"], "slices": facts["slices"]},
        "rows": {
            "trained": sum(made["rows"].values()),
            "removed": sum(facts["rows"].values()) - sum(made["rows"].values()),
        },
    }


@dataclass(frozen=True)
class Affected:
    """What a request means for shards.

    Attributes:
        rows: Remaining rows of every slice by entry.
        again: Steps that are trained again.
        facts: ``shards.json`` with the new counts.
    """

    rows: dict[str, list[list[dict]]]
    again: list[tuple[int, int]]
    facts: dict[str, Any]


def affected(request: Request, folder: Path) -> Affected:
    """
    Raises:
        UnlearnError: Rows of the request are in no shard, or no row is left.
    """
    facts = load(folder)
    rows = {name: _slice(folder, name) for name in facts["rows"]}
    gone = gone_rows(request, [row for parts in rows.values() for part in parts for row in part])
    left = {
        name: [[row for row in part if row_id(row) not in gone] for part in parts]
        for name, parts in rows.items()
    }
    counts = {name: sum(map(len, parts)) for name, parts in left.items()}
    changed = [name for name in rows if counts[name] != facts["rows"][name]]
    ids = {row_id(row) for name in changed for part in rows[name] for row in part}
    if missing := forgotten(request) - ids:
        raise UnlearnError(
            f"{folder}: {len(missing)} rows of the request are in no shard; make the request with "
            "the data of the shards."
        )
    if not any(counts.values()):
        raise UnlearnError(f"{folder}: no row is left to train on; choose fewer.")
    first: dict[int, int] = {}
    for shard, number in map(step_of, changed):
        first[shard] = min(first.get(shard, number), number)
    units = {
        name: len({unit(row, facts["by"]) or row_id(row) for part in parts for row in part})
        for name, parts in left.items()
        if counts[name]
    }
    return Affected(
        left,
        [(s, k) for s, k0 in sorted(first.items()) for k in range(k0, facts["slices"] + 1)],
        facts | {"rows": {name: n for name, n in counts.items() if n}, "units": units},
    )


def step_of(name: str) -> tuple[int, int]:
    """Of "3-1"."""
    shard, number = name.split("-")
    return int(shard), int(number)


def reads(facts: Mapping[str, Any], step: tuple[int, int]) -> int:
    """Rows that a step reads in each pass."""
    return sum(facts["rows"].get(f"{step[0]}-{k}", 0) for k in range(1, step[1] + 1))


def passes(config: Mapping[str, Any], slices: int) -> float:
    """Passes of a step over what it reads."""
    return float(config.get("num_epochs") or 1) * 2 / (slices + 1)


def _slice(folder: Path, name: str) -> list[list[dict]]:
    """The rows of a slice by entry."""
    paths = {int(path.stem.split("-")[2]): path for path in (folder / "rows").glob(f"{name}-*")}
    return [
        [dict(row) for _, row in read_rows(paths[number])] if number in paths else []
        for number in range(max(paths, default=-1) + 1)
    ]


def _check_kept(chain: Chain) -> None:
    """
    Raises:
        UnlearnError: A step that is kept is not what was trained.
    """
    for name, known in chain.facts["steps"].items():
        step = step_of(name)
        if step not in chain.again and weights(chain.folder / "steps" / name) != known:
            raise UnlearnError(
                f"{chain.folder / 'steps' / name} does not have the weights of "
                f"{chain.folder / FACTS}; restore it from a copy, or train the shards again."
            )


def _chain(request: Request) -> Chain:
    way, new = request.way, request.path("work", "shards")
    again = [step_of(name) for name in way["again"]]
    folder = Path(os.path.normpath(request.path(way["shards"])))
    return Chain(folder, new, read_config(request.path("finetune.yml")), load(new), again)


def make(request: Request, run: Steps, repeat: bool) -> None:
    """Train the steps again, merge, write down what was shown."""
    if repeat:
        raise UnlearnError("--repeat compares two runs of --way retrain; leave it out.")
    _chain(request).make(run, request.path("work", "model"))
    if run.due("exact", "what was shown", output=request.path(PROOF)):
        prove(request)
        run.done()


def prove(request: Request) -> None:
    """Write ``exact.json``.

    Raises:
        UnlearnError: A deleted row is in a slice, or a kept step is another than was trained.
    """
    from axolotl_unlearn.requests.ways.retrain import device

    chain, way = _chain(request), request.way
    _check_kept(chain)
    gone = forgotten(request)
    for name in chain.facts["rows"]:
        step = step_of(name)
        place = chain.out if step in chain.again else chain.folder
        if any(row_id(row) in gone for part in _slice(place, name) for row in part):
            raise UnlearnError(f"{place} has rows of the request; remove it and run again.")
    steps = {chain.name(step): weights(chain.place(step)) for step in chain._all()}
    again = ", ".join(way["again"])
    write_json(
        request.path(PROOF),
        {
            "because": "no step of the training of any part of this model read a deleted row: of "
            f"{way['of']['shards']} shards the steps {again} were trained again, from the "
            "checkpoint before, and the others never had it; the weights were not compared",
            "weights": digests(weights(request.path("work", "model"))),
            "steps": {name: digests(found) for name, found in steps.items()},
            "merge": chain.facts["merge"],
            "compared": False,
            "threads": chain.facts["threads"],
            "device": device(),
        },
    )


def install(request: Request) -> None:
    """Put the new steps and slices into the shards; the old ones go to ``work/replaced``.

    Killed anywhere it goes on when it is called again.
    """
    chain = _chain(request)
    folder, new = chain.folder, chain.out
    there = load(folder)
    if request.id in there["requests"]:
        return
    old = private_folder(request.path("work", "replaced"))
    for kind in ("steps", "rows", "configs"):
        names = {
            path.name
            for place in (folder / kind, new / kind)
            if place.is_dir()
            for path in place.iterdir()
            if _of(path.name) in chain.again
        }
        for name in sorted(names):
            before, made, place = old / kind / name, new / kind / name, folder / kind / name
            if place.exists() and not before.exists():
                _copy(place, before)
            if made.exists():
                _copy(made, place)
            elif place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
    own = Chain(folder, folder, chain.config, chain.facts)
    for step in own.steps():
        own.configure(step)
    own.write_recipe()
    made = {own.name(step): weights(own.place(step)) for step in own.steps()}
    write_json(
        folder / FACTS,
        chain.facts
        | {"steps": made, "model": served(request.path("model"))}
        | {"requests": [*there["requests"], request.id]},
    )


def _of(name: str) -> tuple[int, int] | None:
    """The step that a file or folder belongs to: 3-1, 3-1.yml, 3-1-0.jsonl."""
    parts = name.split(".")[0].split("-")[:2]
    return (int(parts[0]), int(parts[1])) if all(p.isdigit() for p in parts) else None


def _copy(source: Path, target: Path) -> None:
    """Whole or not at all, over what is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.tmp")
    if draft.is_dir():
        shutil.rmtree(draft)
    if source.is_dir():
        shutil.copytree(source, draft)
        shutil.rmtree(target, ignore_errors=True)
    else:
        shutil.copy2(source, draft)
    draft.replace(target)
