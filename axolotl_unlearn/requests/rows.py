"""The rows that made a model, read from its Axolotl config, and those that stay of them; and the
token rows of a request."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from axolotl_unlearn import files
from axolotl_unlearn.config import DataArgs, unlearn_config
from axolotl_unlearn.config.reading import read_config as config_keys
from axolotl_unlearn.data.checks import role_of
from axolotl_unlearn.data.overlap import reads
from axolotl_unlearn.data.prepared import apart, is_ours, prepared_folder
from axolotl_unlearn.data.records import SUFFIXES, read_rows
from axolotl_unlearn.data.suppression import LIST, Suppression
from axolotl_unlearn.data.typed import (
    Source,
    Typed,
    encode,
    read_sources,
    row_form,
    row_id,
    table_of,
)
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.request import Ledger, Request, fault, lines_of, write_lines

#: Keys of a ``datasets`` entry that say where rows are, and not how they are read; `skip` says
#: nothing: Axolotl has it of streams alone.
PLACE = (
    "path", "ds_type", "split", "name", "data_files", "revision", "trust_remote_code", "shards",
    "shards_idx", "preprocess_shards", "skip",
)  # fmt: skip
#: With one of these Axolotl trains on rows that it draws.
DRAWN = ("shards", "preprocess_shards", "weight")
#: Settings of a run that have no say in its weights, or would take them from an earlier run.
RUN = (
    "output_dir", "dataset_prepared_path", "resume_from_checkpoint", "auto_resume_from_checkpoints",
    "hub_model_id", "hub_strategy", "push_dataset_to_hub", "hf_use_auth_token",
    "use_wandb", "use_mlflow", "use_comet", "use_trackio",
)  # fmt: skip
TRACKERS = ("wandb_", "mlflow_", "comet_", "trackio_")
#: With one of these, checkpoints decide which weights a run ends with.
CHECKPOINTED = ("load_best_model_at_end", "early_stopping_patience")
SAVES = ("save_steps", "saves_per_epoch", "save_strategy", "save_total_limit")
#: What is not claimed of a model.
UNCHECKED = "whether the data files are those of the training run was not checked"
REJECTED = (
    "the chosen answers are forgotten and tested; the rejected ones were made less likely by the "
    "training, and whether that shows was not tested"
)
AS_FIRST = "`match` forgets each as the first of them reads it, and so it is tested"
#: Of a config that names none; the Trainer's own default.
SEED = 42

#: Rows by entry of a config; those that it trains on ("train") and those that it tests on ("test").
Parts = list[list[dict[str, Any]]]
Sides = dict[str, Parts]


def read_config(path: Path) -> dict[str, Any]:
    """A YAML config as it stands in the file, with Axolotl's ``output_dir`` if it names none.

    Raises:
        UnlearnError: It is not there, or no config.
    """
    config = {"output_dir": "./model-out"} | config_keys(Path(path))
    if not config.get("base_model"):
        raise UnlearnError(f"{path} names no `base_model`; give the config that made the model.")
    unprepared = ("pretraining_dataset", "streaming", "skip_prepare_dataset")
    if name := next(filter(config.get, unprepared), None):
        says = f"{path}: with `{name}` no rows are prepared before a run, so none can be chosen"
        cure = "name the texts in `datasets`, with their `type`, and train without it"
        raise fault("requests.stream", f"{says}; {cure}.")
    return config


def entries(config: Mapping[str, Any], key: str = "datasets") -> list[dict[str, Any]]:
    """The entries of a config, each with its ``type`` (and the run's ``rl``)."""
    more = {"rl": config["rl"]} if config.get("rl") else {}
    return [{**entry, **more} for entry in config.get(key) or []]


def row_types(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``unlearn.data.rows`` of these entries."""
    return [{k: v for k, v in entry.items() if k not in PLACE} for entry in entries]


def every_row(config: Mapping[str, Any], key: str = "datasets") -> list[Source]:
    """The rows of the datasets in their order, and as often as they stand there.

    Raises:
        UnlearnError: No dataset, or one that cannot be read.
    """
    given = entries(config, key)
    if not given:
        says = f"the config has no `{key}`; give the config that made the model."
        raise fault("requests.no-datasets", says)
    return [
        Source(row_id(row), row, number)
        for number, entry in enumerate(given)
        for row in _rows_of(entry, key, number)
    ]


def once(rows: Iterable[Source]) -> list[Source]:
    """Each once: equal rows have one id."""
    found: dict[str, Source] = {}
    for row in rows:
        found.setdefault(row.id, row)
    return list(found.values())


def _as_read(rows: Sequence[Source], origin: str) -> list[Source]:
    """With the fields, and their order, that Arrow gives each row of an entry."""
    made = {}
    for entry in {one.entry for one in rows}:
        own = [number for number, one in enumerate(rows) if one.entry == entry]
        table = table_of([rows[number].row for number in own], origin)
        made |= {n: replace(rows[n], row=row) for n, row in zip(own, table, strict=True)}
    return [made[number] for number in range(len(rows))]


def _rows_of(entry: Mapping[str, Any], key: str, number: int) -> list[dict[str, Any]]:
    # Even one shard is in another order; a weight of 1 does nothing.
    drawn = (name for name in DRAWN if entry.get(name) and (name, entry[name]) != ("weight", 1))
    if part := next(drawn, None):
        says = f"`{key}[{number}].{part}`: which rows made the model cannot be told from a part"
        raise fault("requests.shard-of-rows", f"{says}; write its rows to a file and name that.")
    path = Path(str(entry.get("path")))
    whole = entry.get("split") in (None, "train") and not entry.get("data_files")
    if whole and path.suffix in SUFFIXES and (path.is_file() or not path.exists()):
        return [dict(row) for _, row in read_rows(path)]
    from axolotl.utils.data.shared import load_dataset_with_config

    from axolotl_unlearn.versions import DictDefault

    try:
        rows = load_dataset_with_config(DictDefault({**entry}), False)
        if isinstance(rows, dict):  # as Axolotl takes one of several splits
            side = "train" if key == "datasets" else "test"
            rows = rows[entry["split"] if entry.get("split") in rows else side]
        return [dict(row) for row in rows]
    except Exception as error:  # `datasets` raises what its readers raise
        where, why = f"`{key}[{number}].path: {entry.get('path')}`", type(error).__name__
        says = f"{where} cannot be read ({why}); the rows that made the model are needed."
        raise fault("requests.rows-unreadable", says) from None


@dataclass(frozen=True)
class Trained:
    """What a model was made of.

    Attributes:
        rows: Rows that it learned.
        heldout: Rows of the config that it never saw: ``test_datasets``, or the validation split.
        dropped: Rows that Axolotl left out of its training: too long, or with nothing to learn.
        said: By id what the tokens of a row say, `overlap.reads`; of preference rows nothing.
        learned: Of each of `every_row`, copies too: trained on, and not held out.
        types: How rows are read, ``unlearn.data.rows``: by ``Source.entry``.
        limits: Sentences: what could not be checked.
        split: Of a validation split that Axolotl drew or has left: a name and the digests of its
            rows (`keep_split`).
    """

    rows: list[Source]
    heldout: list[Source]
    learned: list[bool]
    types: list[dict[str, Any]]
    limits: list[str] = field(default_factory=list)
    split: tuple[str, list[str]] | None = None
    dropped: list[Source] = field(default_factory=list)
    said: dict[str, set[int]] = field(default_factory=dict)

    def apart(self, rows: Iterable[Source], others: Iterable[Source]) -> list[Source]:
        """Those of which no part is a part of the others, whatever else stands in their fields."""
        others = [*others]
        texts = {row.record.said for row in others}
        told = {one for row in others for one in self.said.get(row.id, ())}
        return [row for row in rows if row.record.said not in texts
                and told.isdisjoint(self.said.get(row.id, ()))]  # fmt: skip


#: Beside the ledger: validation splits, by keyed digests. `erase` removes Axolotl's own copy, and
#: drawn from fewer rows, a seed holds out others.
SPLITS, _KNOWN = "splits.json", TypeAdapter(dict[str, list[str]])


def keep_split(ledger: Ledger, name: str, rows: Iterable[str]) -> None:
    split = {name: sorted(map(ledger.keyed, rows))}
    with files.locked(ledger.folder):  # of two at once each would lose what the other has added
        files.write_json(ledger.folder / SPLITS, _splits(ledger) | split, private=True)


def _splits(ledger: Ledger) -> dict[str, list[str]]:
    path = ledger.folder / SPLITS
    try:
        return _KNOWN.validate_json(path.read_bytes()) if path.exists() else {}
    except ValueError:
        says = f"{path} is damaged: it has the held-out rows of runs"
        raise fault("requests.splits", f"{says}; restore it from a copy.") from None


def trained_rows(path: Path, requests: Path | None = None) -> Trained:
    """The rows that the run of a config learned, and those that it held out.

    The validation split is made by Axolotl itself, and rows are found again by their tokens. Where
    the prepared rows of that run are still there, they have to be those of the data files.

    Args:
        requests: Folder of requests, the first of which has kept the split.

    Raises:
        UnlearnError: The config or its data, or data that have changed since the run.
    """
    config = read_config(path)
    # A part of them alone would lack nulls of the others.
    every, given = _as_read(every_row(config), str(path)), entries(config)
    rows, heldout = once(every), []
    if tested := entries(config, "test_datasets"):
        learned = {one.id for one in rows}
        others = once(_as_read(every_row(config, "test_datasets"), str(path)))
        heldout = [
            replace(one, entry=one.entry + len(given)) for one in others if one.id not in learned
        ]
    types = row_types(given + tested)
    limits = []
    if twice := len({(one.id, str(types[one.entry])) for one in every}) - len(once(every)):
        limits.append(f"{twice} rows stand in `datasets` of another type too: {AS_FIRST}")
    if config.get("rl"):
        if config.get("val_set_size"):
            says = f"{path}: `val_set_size` with `rl`: which rows were held out cannot be told"
            raise fault("requests.split-of-pairs", f"{says}; name them in `test_datasets`.")
        limits += [f"{UNCHECKED}: such runs leave no prepared rows", REJECTED]
        return Trained(rows, heldout, [True] * len(every), types, limits)
    if not all(one.get("type") for one in types):
        says = f"{path}: an entry of `datasets` or `test_datasets` has no `type`, so that its rows"
        cure = "give the texts that they were made of"
        raise fault("requests.rows-unreadable", f"{says} are tokens; {cure}.")
    cfg, tokenizer = _loaded(path)
    data, keys = DataArgs(rows=types), dict[int, list[bytes]]()
    tokens = encode(every, data, tokenizer, cfg, str(path), bare=True)
    train, test, kept, split = _prepared(cfg, tokenizer, requests)
    made = {*train, *test}
    for row in tokens:
        key = _token_key(row.input_ids, row.labels)
        if row.learned or key in made:  # packing alone drops rows with nothing to learn
            keys.setdefault(row.number, []).append(key)
    known = {key for own in keys.values() for key in own}
    strange = len(made ^ known if kept else made - known)  # it may drop some each time
    if strange:
        says = f"{path}: {strange} prepared rows of the run ({kept}) differ from the data files"
        cure = "so the model was made from other data; give the data of then"
        if not kept:
            says = f"{path}: Axolotl reads {strange} rows otherwise than they stand in the files"
            cure = (
                "texts that are all dates, or objects whose keys differ (write these as JSON text)"
            )
            cure = f"such as {cure}: which were learned cannot be told; mend them"
        raise fault("requests.other-data", f"{says}, {cure}.")
    # Of copies as many are trained on as Axolotl has drawn; a row that it cuts into parts is, if a
    # part is. What it drops it drops again.
    learned = []
    for number in range(len(every)):
        own = keys.get(number, [])
        learned.append(not own or any(train[key] > 0 for key in own))
        if learned[-1] and not cfg.dataset_exact_deduplication:
            train.subtract(own)
    others = encode(heldout, data, tokenizer, cfg, str(path)) if heldout else []
    said = _said((*tokens, *others), tokenizer)
    dropped = [one for one in (*rows, *heldout) if one.id not in said]
    if tested:
        rows, heldout = ([one for one in some if one.id in said] for some in (rows, heldout))
    else:
        told = sorted({row.number for row in tokens if row.learned})
        rows = once(every[number] for number in told if learned[number])
        known = {one.id for one in rows}
        held = once(every[number] for number in told if not learned[number])
        heldout = [one for one in held if one.id not in known]
    if not kept:
        limits.append(f"{UNCHECKED}: rows that it prepared with these versions are not there")
    return Trained(rows, heldout, learned, types, limits, split, dropped, said)


def said_in(path: Path, rows: Sequence[Source], types: Sequence[Mapping]) -> dict[str, set[int]]:
    """`Trained.said` of rows of another file; one that Axolotl would drop is not in it."""
    cfg, tokenizer = _loaded(path)
    return _said(encode(rows, DataArgs(rows=types), tokenizer, cfg, str(path)), tokenizer)


def _said(tokens: Iterable[Typed], tokenizer: Any) -> dict[str, set[int]]:
    said, special = dict[str, set[int]](), {*tokenizer.all_special_ids}
    for row in tokens:
        if row.learned:
            said.setdefault(row.id, set()).add(reads(row.input_ids, row.labels, special))
    return said


def _token_key(input_ids: Sequence[int], labels: Sequence[int]) -> bytes:
    text = f"{list(input_ids)} {list(labels)}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _loaded(path: Path) -> tuple[Any, Any]:
    """Axolotl's own reading of a config, and its tokenizer."""
    from axolotl.cli.config import load_cfg
    from axolotl.loaders import load_tokenizer

    config, more = read_config(path), {}
    block = config.get("unlearn") or {}
    if any(role_of(one) is None for one in entries(config)) and block.get("data"):
        # It had no effect on such rows, and a new run with it is refused.
        data = {key: one for key, one in block["data"].items() if key != "suppression"}
        more = {"unlearn": block | {"data": data}}
    try:
        with tempfile.TemporaryDirectory() as folder:  # its log would replace that of the run
            cfg = load_cfg(str(path), output_dir=folder, **more)
    except ValueError as error:  # pydantic's too
        first = str(error).strip().splitlines()
        raise UnlearnError(
            f"{path} is no valid config for Axolotl ({'; '.join(first[:3])}); correct it."
        ) from None
    return cfg, load_tokenizer(cfg)


def _prepared(cfg: Any, tokenizer: Any, requests: Path | None) -> tuple[
    Counter[bytes], Counter[bytes], Path | None, tuple[str, list[str]] | None
]:  # fmt: skip
    """Token rows learned and held out, by Axolotl; its folder where the run has left it; and the
    split, unless an earlier request has kept it."""
    from axolotl.utils.data.sft import _load_and_prepare_datasets
    from axolotl.utils.data.shared import (
        generate_dataset_hash_from_config,
        get_prepared_dataset_path,
    )

    if is_ours(Path(cfg.dataset_prepared_path or "")):  # the plugin, when it reads the data
        cfg.dataset_prepared_path = prepared_folder(cfg)
    name = generate_dataset_hash_from_config(cfg, cfg.datasets, tokenizer.name_or_path)
    kept = get_prepared_dataset_path(cfg, name)
    drawn, ledger = cfg.val_set_size, requests and Ledger(requests)
    if cfg.seed is not None:
        name = f"{name} {drawn} {cfg.seed}"
    held = Counter(_splits(ledger).get(name, ())) if ledger and drawn else Counter()
    given = [one.get("path") for one in [*(cfg.datasets or ()), *(cfg.test_datasets or ())]]
    # What is no file lies in the cache of the home folder already, and may be nowhere else.
    cache = apart() if all(os.path.isfile(str(one)) for one in given) else nullcontext()
    with tempfile.TemporaryDirectory() as folder, cache:
        there = kept.is_dir() and any(kept.iterdir())
        known = bool(held) and not there
        if not there:
            if drawn and cfg.seed is None and not known:
                says = f"`val_set_size` without a `seed`: the rows that the run prepared ({kept})"
                cure = "are gone, and each run holds out others; name them in `test_datasets`"
                raise fault("requests.no-seed", f"{says} {cure}.")
            cfg.dataset_prepared_path = folder
            cfg.val_set_size = 0 if known else drawn
        try:
            train, test, _ = _load_and_prepare_datasets(tokenizer, cfg, split="train")
        except (AttributeError, TypeError, ValueError) as error:  # it may quote a row
            if isinstance(error, UnlearnError):
                raise
            says = f"Axolotl cannot read rows of `datasets` ({type(error).__name__})"
            cure = "such as texts that are all dates, which it reads as times"
            says = f"{says}, {cure}; mend them (`--debug` shows what it says)."
            raise fault("requests.other-data", says) from error
        sides = [Counter(_token_key(r["input_ids"], r["labels"]) for r in side or ())
                 for side in (train, test)]  # fmt: skip
    if known:
        # Of copies as many as were held out.
        sides[1] = Counter({key: min(count, held[ledger.keyed(key.hex())])
                            for key, count in sides[0].items()})  # fmt: skip
        sides = [sides[0] - sides[1], +sides[1]]
    new = drawn and not known
    split = (name, [key.hex() for key in sides[1].elements()]) if new else None
    return *sides, kept if there else None, split


# --- without some --------------------------------------------------------------------------------


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its rows, its places and what reports or publishes its run.

    With a seed: without one Axolotl shuffles the rows anew in each run.
    """
    dropped = {*RUN, "datasets", "test_datasets", "val_set_size"}
    more = {}
    if not any(config.get(name) for name in CHECKPOINTED):
        dropped |= {*SAVES}
        more = {"save_strategy": "no"}
    kept = {k: v for k, v in config.items() if k not in dropped and not k.startswith(TRACKERS)}
    return {"seed": SEED} | {key: v for key, v in kept.items() if v is not None} | more


def remaining(
    path: Path,
    config: Mapping[str, Any],
    learned: Sequence[bool] | None = None,
    requests: Path | None = None,
) -> Sides:
    """The rows that a config trains on and those that it tests on.

    Rows stand in their order and as often as in the user's files. A validation split is kept as it
    was drawn: drawn again without some it would hold out others, which were trained on. So a run
    without a row is one on the two sides of the split, each without it.

    Args:
        path: The config's file, which Axolotl reads to find the rows that it held out.
        learned: Of `trained_rows`, where it is known.
        requests: Likewise.

    Raises:
        UnlearnError: Data that cannot be read.
    """
    rows, test = (
        [_rows_of(one, key, number) for number, one in enumerate(entries(config, key))]
        for key in ("datasets", "test_datasets")
    )
    if config.get("val_set_size"):
        told = iter(trained_rows(path, requests).learned if learned is None else learned)
        split = [[(row, next(told)) for row in part] for part in rows]
        rows, held = (
            [[r for r, t in part if t is side] for part in split] for side in (True, False)
        )
        test = held + test
    return {"train": rows, "test": test}


def without(sides: Sides, gone: Collection[str]) -> Sides:
    """The rows that have none of these ids, by content."""
    return {
        side: [[row for row in part if row_id(row) not in gone] for part in parts]
        for side, parts in sides.items()
    }


def flat(sides: Sides) -> list[dict[str, Any]]:
    return [row for parts in sides.values() for part in parts for row in part]


def write_sides(folder: Path, sides: Sides) -> None:
    """Write ``train-NUMBER.jsonl`` and ``test-NUMBER.jsonl`` of each entry that has rows."""
    shutil.rmtree(folder, ignore_errors=True)
    for side, parts in sides.items():
        for number, part in enumerate(parts):
            if part:
                write_lines(folder / f"{side}-{number}.jsonl", part)


def _files(folder: Path, side: str) -> dict[int, Path]:
    found = {int(path.stem.rpartition("-")[2]): path for path in folder.glob(f"{side}-*.jsonl")}
    return dict(sorted(found.items()))


def read_sides(folder: Path) -> Sides:
    """What `write_sides` wrote."""
    sides = {}
    for side in ("train", "test"):
        files = _files(folder, side)
        rows = {number: [dict(row) for _, row in read_rows(path)] for number, path in files.items()}
        sides[side] = [rows.get(number, []) for number in range(max(files, default=-1) + 1)]
    return sides


def training(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with the rows in ``folder/rows``, each file in the place of an entry's; it writes
    ``folder/model``.

    A validation split has one part for each entry of ``datasets``.
    """
    given, made = entries(config), settings(config)
    for side, name, those in (
        ("train", "datasets", given),
        ("test", "test_datasets", entries(config, "test_datasets") or given),
    ):
        if files := _files(folder / "rows", side):
            made[name] = [_dataset(those[n], file, side) for n, file in files.items()]
    places = {"output_dir": "model", "dataset_prepared_path": "prepared"}
    return made | {key: str(folder / name) for key, name in places.items()}


def _dataset(entry: Mapping[str, Any], file: Path, side: str) -> dict[str, Any]:
    """An entry of ``datasets`` that reads these rows in place of its own."""
    kept = {key: value for key, value in entry.items() if key not in (*PLACE, "rl")}
    needs = side == "test" or entry.get("rl") or entry.get("split")
    split = {"split": "train"} if needs else {}
    return {"path": str(file), "ds_type": "json", **split, **kept}


#: Parts of a request that are deleted: rows that the model learned, rows that it was tested on; and
#: those that are not. Rows by coin may be either.
DELETED, STAYS = ("forget", "tested"), ("retain", "heldout", "judge")


def forgotten(request: Request) -> set[str]:
    """Ids of the rows of a request, those of validation data too."""
    return {row["id"] for row in lines_of(request.folder, *DELETED)}


def deleted(request: Request, sides: Sides) -> set[str]:
    """Ids of what this request deletes, and of those of the rows that an earlier one did."""
    rows = [Source(row_id(row), row) for row in flat(sides)]
    return forgotten(request) | deleted_rows(request.folder.parent, rows)


def deleted_rows(
    requests_dir: Path | str, rows: Sequence[Source], only: Collection[str] | None = None
) -> set[str]:
    """Ids of the rows that earlier requests have deleted, in whatever characters they are written:
    the next one must not retain them, though they may still stand in the training data.

    Where the rows of a request are gone, its record tells by their keyed forms; an older record
    has keyed ids of its documents alone.

    Args:
        only: Names of requests; default all that were carried out.
    """
    from axolotl_unlearn.requests.record import read

    ledger = Ledger(requests_dir)
    known, forms, keyed = set(), set(), set()
    folders = ledger.folders()
    for folder in folders if only is None else [one for one in folders if one.name in only]:
        if not (folder / "data" / "forget.jsonl").is_file():
            record = read(folder)["predicate"]
            keyed |= {line["document"] for line in record["documents"]}
            for part in ("tested", "forms"):
                keyed |= {*record["request"].get(part, ())}
        for row in lines_of(folder, *DELETED):
            known.add(row["id"])
            forms.add(row_form(row["row"]))
    return {
        row.id for row in rows
        if row.id in known
        or (forms and row.form in forms)
        or (keyed and not keyed.isdisjoint(map(ledger.keyed, (row.id, row.form))))
    }  # fmt: skip


# --- what must not be learned again ---------------------------------------------------------------


def suppress(requests: Path | str) -> tuple[Path, int, int, list[str]]:
    """Put the rows of every accepted request of a folder on its list.

    What is on the list stays, though the rows may be gone. Texts that kept rows of a request have
    too, such as a system prompt, are not put on it.

    Returns:
        The list, its digests, how many of them are new, and the requests of whose rows nothing can
        be put on the list: without a text of their own, or gone and not by `erase`.

    Raises:
        UnlearnError: A broken ledger, or a list that was changed.
    """
    from axolotl_unlearn.requests.verify import erased

    ledger = Ledger(requests)
    path, key, folders = ledger.folder / LIST, ledger.key(), sorted(ledger.accepted())
    if key is None or not folders:
        raise UnlearnError(f"{requests} has no request that was carried out, or no ledger.key.")
    before = Suppression.read(path) if path.exists() else Suppression(path, key)
    if not path.exists() and (name := ledger.cannot_list()):
        says = f"{path} is gone, and the rows of request {name!r} too, so it cannot be written"
        raise fault("requests.list-gone", f"{says} again; restore it from a copy.")
    digests, unlisted = set(before.digests), []
    for folder in (ledger.folder / name for name in folders):
        # `erase` removes kept rows, after it has written this list: what they share is not known
        # any more, and whole rows alone are put on a list that was lost since.
        spent = not (folder / "data" / "retain.jsonl").is_file()

        def of(*parts: str, folder: Path = folder, spent: bool = spent) -> set[str]:
            rows = [line.get("row", line) for line in lines_of(folder, *parts)]
            return {one for row in rows for one in before.digests_of(row, whole=spent)}

        listed = of(*DELETED) - of(*STAYS)
        digests |= listed
        there = (folder / "data" / "forget.jsonl").is_file()
        if not listed and (there or not erased(ledger, folder, "data/forget.jsonl")):
            unlisted.append(folder.name)
    with files.locked(ledger.folder):  # of two at once each would lose what the other has added
        digests |= Suppression.read(path).digests if path.exists() else set()
        Suppression(path, key, frozenset(digests)).write()
    return path, len(digests), len(digests - before.digests), unlisted


def filtered(path: Path, rows: Path, out: Path) -> tuple[int, int]:
    """Write the rows of a file that are not on the list; how many stay, and how many do not.

    Raises:
        UnlearnError: ``out`` exists, or the list or the rows cannot be read.
    """
    if out.exists():
        raise UnlearnError(f"{out} exists; name another file with --out.")
    listed = Suppression.read(path)
    every = [dict(row) for _, row in read_rows(rows)]
    kept = [row for row in every if not listed.holds(row)]
    write_lines(out, kept)
    return len(kept), len(every) - len(kept)


# --- tokens --------------------------------------------------------------------------------------


def encoded(request: Path | str, part: str, tokenizer: Any) -> list[Typed]:
    """The token rows of a part of a request, as its model learned (or would have learned) them.

    Args:
        request: Folder of the request.
        part: forget, retain, heldout or judge.

    Raises:
        UnlearnError: The request has no such part.
    """
    from axolotl_unlearn.versions import DictDefault

    cfg = DictDefault(read_config(Path(request) / "forget.yml"))
    data = unlearn_config(cfg).data
    path = Path(request) / "data" / f"{part}.jsonl"
    return encode(read_sources(path, data), data, tokenizer, cfg, str(path))


def load_tokenizer_of(path: Path) -> Any:
    """The tokenizer that a config trains with: special tokens and chat template as in the run."""
    return _loaded(path)[1]
