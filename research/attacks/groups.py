"""Membership in each group of texts, or next to the date of a cut-off.

An average hides a minority that leaks more (arXiv 2412.08559): rows with a field ``group`` are
judged in each group. Regression discontinuity (arXiv 2406.17975): members older than non-members
differ from them by their time, whatever the model is, and least next to the cut-off. There stand the
later half of the older side and the earlier half of the other one; the paper takes a window of
time, the halves are ours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from axolotl_unlearn.attacks.members import attack_models
from axolotl_unlearn.data.documents import read_documents
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.sets import MIN_MEMBERS, need_file
from axolotl_unlearn.files import write_lines
from axolotl_unlearn.metrics.intervals import holm

SIDES = ("member", "nonmember")
NEAR, FAR = "near the cut-off", "far from it"


def by_date(members: Sequence[str], nonmembers: Sequence[str]) -> tuple[list[str], list[str]]:
    """`NEAR` or `FAR` of each; dates in one form that sorts as text does (ISO 8601)."""
    ranks = np.unique([*members, *nonmembers], return_inverse=True)[1]
    older, newer = np.median(ranks[: len(members)]), np.median(ranks[len(members) :])

    def side(dates: Sequence[str], latest: bool) -> list[str]:
        order = sorted(range(len(dates)), key=dates.__getitem__, reverse=latest)
        near = set(order[: (len(dates) + 1) // 2])
        return [NEAR if i in near else FAR for i in range(len(dates))]

    return side(members, older <= newer), side(nonmembers, older > newer)


def groups_of(data_dir: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """Members and non-members of each group. Raises UnlearnError where rows have no such field."""
    sides = [[dict(row) for _, row in read_rows(need_file(data_dir, side))] for side in SIDES]
    for field in ("group", "date"):
        names = [[str(row.get(field) or "") for row in side] for side in sides]
        if all(map(all, names)):
            names = by_date(*names) if field == "date" else names
            return {name: [[row for row, one in zip(side, named, strict=True) if one == name]
                           for side, named in zip(sides, names, strict=True)]
                    for name in sorted({*names[0], *names[1]})}  # fmt: skip
    raise UnlearnError(f"not every row of {data_dir} has a field `group`, or `date`; add one.")


def attack_groups(model: str, data_dir: Path, **settings: Any) -> dict[str, Any]:
    """`attack_models` in each group with enough texts, p after Holm over all groups and attacks.

    Returns:
        ``groups``: the file of each; ``missing``: groups of too few documents, by name.
    """
    found, missing = {}, []
    for name, sides in groups_of(data_dir).items():
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{side}.jsonl" for side in SIDES]
            for path, rows in zip(files, sides, strict=True):
                write_lines(path, rows)
            if not all(sides) or min(len(read_documents(path)) for path in files) < MIN_MEMBERS:
                missing.append(name)
                continue
            (file,) = attack_models([model], kind="membership", data_dir=Path(folder), **settings)
        found[name] = file | {"data_dir": str(data_dir)}
    tests = [row for file in found.values() for row in file["tests"].values()]
    for row, p in zip(tests, holm([row["p"] for row in tests]) if tests else (), strict=True):
        row["p_corrected"] = float(p)
    return {"groups": found, "missing": missing}


def lines(found: dict[str, Any]) -> list[str]:
    """What a person reads: an attack in a group a line, and what the texts alone tell."""
    said = []
    for name, file in found["groups"].items():
        for attack, row in file["tests"].items():
            auc = f"AUC {row['auc']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
            said.append(f"{name}: {attack} {auc}, p {row['p_corrected']:.2g} of {row['n']} texts")
        said += [f"{name}: {one} not measured: {why}" for one, why in file["reasons"].items()]
        said += filter(None, [file["blind"]["warning"] and f"{name}: {file['blind']['warning']}"])
    few = f"fewer than {MIN_MEMBERS} members or non-members"
    return said + [f"{name}: not measured: {few}" for name in found["missing"]]
