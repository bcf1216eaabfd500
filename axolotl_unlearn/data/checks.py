"""What is wrong with the data of a config, found before weights are loaded.

`check_entries` reads the config, `check_records` the files (no tokenizer, no model, no Axolotl),
`check_columns` what Axolotl has loaded, wherever it came from.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axolotl_unlearn.columns import KINDS, ROLES, SIDES, pair_number
from axolotl_unlearn.config import DataArgs, UnlearnArgs, nearest, unlearn_config
from axolotl_unlearn.data.coverage import RowCounts, level_faults
from axolotl_unlearn.data.overlap import COLUMNS, CURES, check_sides, matched, near_note
from axolotl_unlearn.data.records import (
    SUFFIXES,
    Record,
    Rows,
    both_sides,
    is_ambiguous,
    is_made_up,
    read_rows,
    records_from_rows,
    short,
)
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import real

if TYPE_CHECKING:
    from axolotl_unlearn.data.typed import Source

PREFIX = "axolotl_unlearn.data."
#: The dataset types, by what their rows are for.
TYPES = (*ROLES, "memorise")
KEYS = ("datasets", "test_datasets")
#: Roles of rows that are learned: one to forget is forgotten, also when it was deleted before.
LEARNED = ("retain", "memorise")

#: Keys of a ``datasets`` entry that have an effect with our types. Axolotl drops unknown ones
#: and those of other types do nothing here, both without a word.
ENTRY_KEYS = """
    path type ds_type split name data_files revision trust_remote_code shards shards_idx
    preprocess_shards
""".split()
#: Suffix of a file -> how Axolotl reads it (``ds_type``).
DS_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
DS_TYPES |= {".csv": "csv", ".txt": "text"}


@dataclass
class Checked:
    """What reading the files has shown.

    Attributes:
        faults: Sentences with file, row and cure.
        sides: Rows of ``datasets`` by role, of roles that are local files only.
        counts: How many they are by side, kind and task.
        notes: Sentences about rows that may not say what they were meant to.
    """

    faults: list[str] = field(default_factory=list)
    sides: dict[str, list[Record]] = field(default_factory=dict)
    counts: RowCounts = field(default_factory=RowCounts)
    notes: list[str] = field(default_factory=list)


def role_of(entry: Any) -> str | None:
    """One of `TYPES`; None for a foreign type."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    name = kind.removeprefix(PREFIX) if isinstance(kind, str) and kind.startswith(PREFIX) else ""
    return name if name in TYPES else None


def check_entries(cfg: dict[str, Any]) -> list[str]:
    """Faults of the entries themselves: types, keys, and sides that objectives need."""
    args = block_of(cfg)
    foreign_ok = args is not None and not args.trains  # ordinary fine-tuning beside `memorise`
    faults: list[str] = []
    for key in KEYS:
        entries = cfg.get(key) or []
        if not isinstance(entries, list):
            faults.append(f"`{key}` must be a list of entries with `path` and `type`.")
            continue
        roles = []
        for number, entry in enumerate(entries):
            where = f"{key}[{number}]"
            role = role_of(entry)
            roles += [role] if role else []
            if not isinstance(entry, dict):
                faults.append(f"`{where}` must be an entry with `path` and `type`.")
            elif role is None:
                faults += [] if foreign_ok else [_type_fault(where, entry)]
                if foreign_ok and key == "datasets" and args.data.suppression:
                    faults.append(
                        f"`{where}` is read by Axolotl alone, so `unlearn.data.suppression` has no "
                        "effect on it: filter its file with `axolotl-unlearn request suppress "
                        "--rows`, and remove the key."
                    )
            else:
                faults += _key_faults(where, entry)
                if not isinstance(entry.get("path"), str) or not entry["path"]:
                    faults.append(f"`{where}.path` is missing; name the file of the {role} rows.")
        if key == "datasets" and not roles and not foreign_ok:
            faults.append(
                f"no dataset has one of our types; add entries with `type: {PREFIX}forget` and "
                f"`type: {PREFIX}retain`."
            )
        elif args is not None and (key == "datasets" or roles):
            faults += _side_faults(key, roles, args) + _one_path(key, entries)
    return faults


def role_rows(rows: Rows, source: str, role: str, data: DataArgs) -> list[Record] | list[Source]:
    """Raw rows of a dataset type, without those on a list of deleted rows.

    Raises:
        UnlearnError: The first fault of them.
    """
    if data.rows:
        from axolotl_unlearn.data.typed import sources

        given: list[Any] = sources(rows, source, data)
    else:
        # A memorisation stream repeats its rows; a forget row may have several alternatives.
        how = {"unique": role in SIDES, "kind": data.default_kind}
        given = list(records_from_rows(rows, source, data.fields, **how))
    if data.suppression and role in LEARNED:
        from axolotl_unlearn.data.suppression import allowed

        given = allowed(given, data.suppression, source)
    return given


def records_of(entry: Mapping[str, Any], data: DataArgs) -> list[Record]:
    """`role_rows` of an entry of ``datasets`` that is a local file."""
    path = entry["path"]
    given = role_rows(read_rows(path), path, role_of(entry), data)
    return [one if isinstance(one, Record) else one.record for one in given]


def check_records(cfg: dict[str, Any]) -> Checked:
    """Read the local files: faulty rows, rows on both sides, rows and entries that do not meet."""
    args, checked = block_of(cfg), Checked()
    if args is None and cfg.get("unlearn"):
        return checked  # how to read them is not known; the faults of the block come first
    data = args.data if args else DataArgs()
    if data.suppression:
        from axolotl_unlearn.data.suppression import Suppression

        try:
            Suppression.read(data.suppression)
        except UnlearnError as error:
            checked.faults.append(str(error))
            return checked  # every file that it filters would say the same
    for key in KEYS:
        entries = cfg.get(key) or []
        sets: dict[str, list[tuple[str, list[Record]]]] = defaultdict(list)
        unread = set()
        for entry in entries if isinstance(entries, list) else []:
            role, path = role_of(entry), entry.get("path") if isinstance(entry, dict) else None
            if role is None or not isinstance(path, str) or not path:
                continue
            # A local file, or a path that was meant to be one.
            if not (os.path.isfile(path) or (Path(path).suffix in SUFFIXES and "://" not in path)):
                unread.add(role)
                continue
            try:
                sets[role].append((path, records_of(entry, data)))
            except UnlearnError as error:
                checked.faults.append(str(error))
                unread.add(role)
            else:
                if args and not data.rows:
                    checked.notes += _notes_on(path, role, sets[role][-1][1], data)
        checked.faults += _overlaps(sets)
        if sets["forget"] and sets["alternative"] and not unread & {"forget", "alternative"}:
            checked.faults += _unmatched(sets)
        if key == "datasets" and args is not None and args.trains:
            checked.sides = {
                role: [record for _, records in files for record in records]
                for role, files in sets.items()
                if role not in unread
            }
            checked.counts = RowCounts.of_records(checked.sides)
            checked.faults += checked.counts.faults(args)
            checked.faults += _heldout_faults(args, checked.sides) if args.level else []
    return checked


def _heldout_faults(args: UnlearnArgs, sides: Mapping[str, list[Record]]) -> list[str]:
    """Held-out rows that cannot be read, that the model sees, or that lack a kind of forget row."""
    path = args.level.heldout
    if not os.path.isfile(path):
        return []  # told of the config
    try:
        unseen = records_of({"path": path, "type": f"{PREFIX}forget"}, args.data)
    except UnlearnError as error:
        return [str(error)]
    groups = [
        {(KINDS[one.kind], one.task_number) for one in rows}
        for rows in (sides.get("forget", ()), unseen)
    ]
    faults = level_faults(*groups)
    for side in SIDES:
        rows = {one.said for one in sides.get(side, ())}
        if seen := [number for number, one in enumerate(unseen, 1) if one.said in rows]:
            faults.append(
                f"`unlearn.level.heldout: {path}` has {len(seen)} rows that are {side} rows (the "
                f"first is row {seen[0]}): give rows that the model never sees."
            )
    return faults


def _notes_on(path: str, role: str, records: list[Record], data: DataArgs) -> list[str]:
    """Rows without a prompt, and questions that are learned or forgotten with their answers."""
    if not any(record.input.strip() for record in records):
        return [f"no {role} row of {path} has a prompt: what is labelled stands alone."]
    notes = []
    untold = [r.id for r in records if r.kind == data.default_kind and is_ambiguous(r.id)]
    if untold:
        notes.append(
            f"the ending of the id {short(untold[0])} in {path} ({len(untold)} such) is taken for "
            "a part of its name and tells no kind: give a field `kind`, or an id as 'doc7-qa0'."
        )
    whole = data.labels.completion == "document" and not data.chat_template
    asked = [
        r for r in records if r.kind == "completion" and r.input.rstrip().endswith(("?", "？"))
    ]
    if role == "memorise" or not whole or not asked:
        return notes
    return notes + [
        f"{len(asked)} of {len(records)} {role} rows of {path} end their prompt with a question "
        "mark and are labelled whole, question included: give such rows `kind: question` (or an "
        "id that ends in qa0), or a template, if the model learned the answers only."
    ]


def check_loaded(cfg: Mapping[str, Any], *sets: Any) -> None:
    """Rows of each set that Axolotl has loaded against each other: the door that all rows pass.

    Raises:
        UnlearnError: Rows are on both sides.
    """
    paths = [str(entry.get("path")) for key in KEYS for entry in cfg.get(key) or []]
    for rows in sets:
        if rows is not None:
            check_sides(rows, paths)


def check_columns(args: UnlearnArgs, rows: Any) -> list[str]:
    """Rows that Axolotl has loaded against the entries; returns notes.

    Raises:
        UnlearnError: An entry without rows, or forget rows without an entry.
    """
    counts = RowCounts.of_columns(rows)
    if faults := counts.faults(args):
        raise UnlearnError(" ".join(faults), code="data.entries-and-rows")
    return [*counts.notes(args), *near_note(rows)]


def block_of(cfg: dict[str, Any]) -> UnlearnArgs | None:
    try:
        return unlearn_config(cfg)
    except UnlearnError:
        return None  # the block has faults of its own, reported elsewhere


def _type_fault(where: str, entry: dict[str, Any]) -> str:
    kind = entry.get("type")
    if kind is None:
        return f"`{where}.type` is missing; use {PREFIX}forget, {PREFIX}retain or {PREFIX}memorise."
    names = [PREFIX + role for role in TYPES]
    near = nearest(str(kind), names)
    return f"`{where}.type` is {kind!r}, which has no role here{near}; use {', '.join(names)}."


def part_of_a_file(entry: Mapping[str, Any]) -> list[str]:
    """An entry that takes some rows of a local file, which is read whole."""
    keys = ("split", "shards", "preprocess_shards", "data_files", "name")
    named = [key for key in keys if entry.get(key) and (key, entry[key]) != ("split", "train")]
    if not (named and os.path.isfile(str(entry.get("path")))):
        return []
    return [
        f"`{named[0]}` takes a part of {entry['path']}, which is read whole; write the rows to a "
        "file of their own."
    ]


def _key_faults(where: str, entry: dict[str, Any]) -> list[str]:
    faults = []
    told, suffix = entry.get("ds_type"), Path(path := str(entry.get("path"))).suffix
    if path in DS_TYPES.values() and not os.path.exists(path):
        faults.append(
            f"`{where}.path: {path}` is a format, which Axolotl would look for on the hub; name "
            f"the file or folder itself, with `ds_type: {path}`."
        )
    if told and DS_TYPES.get(suffix, told) != told:
        faults.append(
            f"`{where}.ds_type: {told}` would read {short(path)} as what it is not; use "
            f"{DS_TYPES[suffix]}, or remove the key."
        )
    faults += part_of_a_file(entry)
    for key in entry:
        if key == "weight":
            faults.append(f"`{where}.weight` draws a part of the rows; write them to a file.")
        elif key not in ENTRY_KEYS:
            cure = nearest(key, ENTRY_KEYS) or "; remove it (format options go into `unlearn.data`)"
            faults.append(f"`{where}.{key}` has no effect with this dataset type{cure}.")
    return faults


def _side_faults(key: str, roles: list[str], args: UnlearnArgs) -> list[str]:
    """Sides of the data against sides of the block."""
    if not args.trains:
        if set(roles) & set(ROLES):
            return ["`unlearn:` names no objective; add `forget:` and `retain:`, or a `preset:`."]
        return []
    faults = []
    if "memorise" in roles:
        faults.append(
            f"`{key}` mixes {PREFIX}memorise with unlearning; memorise in a run of its own."
        )
    for side in ROLES:
        if (needed := side in args.roles()) == (side in roles):
            continue
        block = side if side in SIDES else "forget"
        kind = "" if side in SIDES else " that look at other answers"
        faults.append(
            f"`unlearn.{block}` has {'' if needed else 'no '}objectives{kind} but `{key}` has "
            f"{'no' if needed else 'an'} entry with `type: {PREFIX}{side}`, "
            + (f"{_ROWS[side]}; add one." if needed else "which would not be used; remove one.")
        )
    return faults


def _one_path(key: str, entries: list[Any]) -> list[str]:
    """A file or folder that one entry forgets and another keeps."""
    sides: dict[str, dict[tuple, str]] = defaultdict(dict)
    for entry in entries:
        if (role := role_of(entry)) and isinstance(path := entry.get("path"), str):
            part = [str(entry.get(name)) for name in ("name", "split", "data_files")]
            sides[role][real(path), *part] = path
    return [
        f"`{key}` has {short(path)} on both sides, to forget and to keep; give each side rows of "
        "its own."
        for one, path in sides["forget"].items()
        if one in sides["retain"]
    ]


_ROWS = {
    "forget": "the rows to forget",
    "retain": "the rows to keep",
    "alternative": "one row for each forget row (`axolotl-unlearn augment` writes them)",
}


def _unmatched(sets: dict[str, list[tuple[str, list[Record]]]]) -> list[str]:
    """Alternatives without a forget row, and forget rows without an alternative."""
    rows = [
        (ROLES[role], pair_number(one.id), KINDS[one.kind], one.task_number, number)
        for role in ("forget", "alternative")
        for _, records in sets[role]
        for number, one in enumerate(records)
    ]
    try:
        matched(dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)))
    except UnlearnError as error:
        return [str(error)]
    return []


def _overlaps(sets: dict[str, list[tuple[str, list[Record]]]]) -> list[str]:
    """Ids that occur twice on a side, and rows that are to be forgotten and kept or answered."""
    faults = []
    for role in SIDES:
        seen: dict[str, str] = {}
        for path, records in sets[role]:
            twin = next((r.id for r in records if r.id in seen), None)
            if twin is not None:
                faults.append(
                    f"the id {twin!r} of {path} is also in {seen[twin]}, both {role} rows; remove "
                    "it from one of them."
                )
            seen |= {r.id: path for r in records if not is_made_up(r.id)}
    for (path, forget), side in product(sets["forget"], CURES):
        for other, records in sets[side]:
            faults.append(both_sides(path, forget, other, records, CURES[side]))
    return list(filter(None, faults))
