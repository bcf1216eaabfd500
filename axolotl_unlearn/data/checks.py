"""What is wrong with the data of a config, found before anything is loaded.

Only the files are read: no tokenizer, no model, no Axolotl.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import (
    SUFFIXES,
    Fields,
    Record,
    check_disjoint,
    is_made_up,
    read_records,
)
from axolotl_unlearn.errors import UnlearnError

PREFIX = "axolotl_unlearn.data."
ROLES = ("forget", "retain", "memorise")

#: Keys of a ``datasets`` entry that have an effect with our types. Axolotl drops unknown ones
#: and those of other types do nothing here, both without a word.
ENTRY_KEYS = (
    "path",
    "type",
    "ds_type",
    "split",
    "name",
    "data_files",
    "revision",
    "trust_remote_code",
    "shards",
    "shards_idx",
    "preprocess_shards",
)


def check_files(cfg: dict[str, Any]) -> list[str]:
    """Every fault of the ``datasets`` and ``test_datasets`` of a raw config.

    Each is one sentence with key or file, row and cure; an empty list means the data can be used.
    Data that are not local files (a hub name, a folder) are checked only when they are loaded.
    """
    faults: list[str] = []
    fields = _fields(cfg)
    for key in ("datasets", "test_datasets"):
        entries = cfg.get(key) or []
        if not isinstance(entries, list):
            faults.append(f"`{key}` must be a list of entries with `path` and `type`.")
            continue
        sets: dict[str, list[tuple[str, list[Record]]]] = {role: [] for role in ROLES}
        roles = []
        for number, entry in enumerate(entries):
            where = f"{key}[{number}]"
            if not isinstance(entry, dict):
                faults.append(f"`{where}` must be an entry with `path` and `type`.")
                continue
            role = _role(entry)
            if role is None:
                faults.append(_type_fault(where, entry))
                continue
            roles.append(role)
            faults += _key_faults(where, entry)
            path = entry.get("path")
            if not isinstance(path, str) or not path:
                faults.append(f"`{where}.path` is missing; name the file of the {role} rows.")
                continue
            if not _is_file_name(path):
                continue
            try:
                records = read_records(path, fields, unique=role != "memorise")
            except UnlearnError as error:
                faults.append(str(error))
            else:
                sets[role].append((path, records))
        if key == "datasets":
            faults += _role_faults(cfg, roles)
        faults += _overlaps(sets)
    return faults


def _fields(cfg: dict[str, Any]) -> Any:
    from axolotl_unlearn.args import unlearn_config

    try:
        args = unlearn_config(cfg)
    except UnlearnError:
        return Fields()  # the block has faults of its own, reported elsewhere
    return Fields() if args is None else args.data.fields


def _role(entry: dict[str, Any]) -> str | None:
    kind = entry.get("type")
    name = kind.removeprefix(PREFIX) if isinstance(kind, str) and kind.startswith(PREFIX) else ""
    return name if name in ROLES else None


def _type_fault(where: str, entry: dict[str, Any]) -> str:
    kind = entry.get("type")
    if kind is None:
        return f"`{where}.type` is missing; use {PREFIX}forget, {PREFIX}retain or {PREFIX}memorise."
    names = [PREFIX + role for role in ROLES]
    match = difflib.get_close_matches(str(kind), names, n=1, cutoff=0.5)
    hint = f" (did you mean {match[0]}?)" if match else ""
    return f"`{where}.type` is {kind!r}, which has no role here{hint}; use {', '.join(names)}."


def _key_faults(where: str, entry: dict[str, Any]) -> list[str]:
    faults = []
    for key in entry:
        if key in ENTRY_KEYS:
            continue
        match = difflib.get_close_matches(str(key), ENTRY_KEYS, n=1, cutoff=0.6)
        cure = (
            f"did you mean {match[0]!r}?"
            if match
            else "remove it (format options go into `unlearn.data`)."
        )
        faults.append(f"`{where}.{key}` has no effect with this dataset type; {cure}")
    return faults


def _role_faults(cfg: dict[str, Any], roles: list[str]) -> list[str]:
    from axolotl_unlearn.args import unlearn_config

    if not roles:
        return [
            f"no dataset has one of our types; add entries with `type: {PREFIX}forget` and "
            f"`type: {PREFIX}retain`."
        ]
    try:
        args = unlearn_config(cfg)
    except UnlearnError:
        return []
    if args is None:
        wanted = {"forget", "retain"} if {"forget", "retain"} & set(roles) else set()
    else:
        wanted = {side for side in ("forget", "retain") if getattr(args, side)}
    return [
        f"no dataset has `type: {PREFIX}{side}`; add one with the rows to "
        f"{'forget' if side == 'forget' else 'keep'}."
        for side in ("forget", "retain")
        if side in wanted and side not in roles
    ]


def _is_file_name(path: str) -> bool:
    """A local file, or a path that was meant to be one."""
    return Path(path).is_file() or (Path(path).suffix in SUFFIXES and "://" not in path)


def _overlaps(sets: dict[str, list[tuple[str, list[Record]]]]) -> list[str]:
    faults = []
    for role in ("forget", "retain"):
        seen: dict[str, str] = {}
        for path, records in sets[role]:
            twin = next((r.id for r in records if r.id in seen), None)
            if twin is not None:
                faults.append(
                    f"the id {twin!r} of {path} is also in {seen[twin]}, both {role} rows; remove "
                    "it from one of them."
                )
            seen |= {r.id: path for r in records if not is_made_up(r.id)}
    for forget_path, forget in sets["forget"]:
        for retain_path, retain in sets["retain"]:
            try:
                check_disjoint(forget, retain, forget_path, retain_path)
            except UnlearnError as error:
                faults.append(str(error))
    return faults
