"""The attacks that are asked for, on models, with intervals, corrected for their number.

What could not be measured is said and is never good news: no model passes with an attack missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from scipy.stats import norm

from axolotl_unlearn.attacks.inside import grid
from axolotl_unlearn.attacks.results import safe_name
from axolotl_unlearn.attacks.target import find_side
from axolotl_unlearn.data.documents import author_of, read_documents
from axolotl_unlearn.data.records import document_id, read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.sets import find_file, load_sets
from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.intervals import LEVEL, auc_gap, holm, smallest_difference
from axolotl_unlearn.metrics.membership import (
    MIN_TEXTS,
    blind_baselines,
    blind_sentence,
    told_documents,
    tpr_at_fpr,
)
from axolotl_unlearn.models import ModelSpec, load_model, load_tokenizer, parse_models
from research.attacks.base import (
    REGISTRY,
    Access,
    Attack,
    Outcome,
    Target,
    by_rank,
    measure,
)

#: (id, text) of each.
Documents = Sequence[tuple[str, str]]
#: Of each member and of each non-member.
Groups = tuple[Sequence[str], Sequence[str]]
Attacks = Mapping[str, Mapping[str, Any]]
#: Names of the groups of `by_date`.
NEAR, FAR = "near the cut-off", "far from it"


def ordered() -> list[Attack]:
    """The registry, by what an attack has to see."""
    return sorted(REGISTRY.values(), key=lambda one: get_args(Access).index(one.access))


def named(text: str | None) -> list[str]:
    """The attacks that `--attacks` names; None: those made by default; "all": every one."""
    if text is None or text.strip() == "all":
        return [one.name for one in ordered() if one.default or text]
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [name for name in names if name not in REGISTRY]:
        raise UnlearnError(
            f"--attacks: there is no attack {unknown[0]!r}; there are {', '.join(REGISTRY)}."
        )
    if not names:
        raise UnlearnError("--attacks names no attack; leave it out for the default ones.")
    return names


def attack_model(
    target: Target,
    members: Documents,
    nonmembers: Documents,
    names: Sequence[str],
    groups: Groups | None = None,
    scores: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Each attack's figures by name; ``{"missing": why}`` where it could not be made.

    ``p_corrected`` is Holm's over the attacks that were made and their groups. With a control,
    ``control`` is its AUC under the same attack, and ``difference`` the paired one of both where
    scores are ranked; there members of a group are also judged against non-members of it, because
    an average hides a minority that leaks more (arXiv 2412.08559). ``scores`` takes those of the
    attacks that rank, (members, non-members) each, minus the control's.
    """
    sides = [[text for _, text in side] for side in (members, nonmembers)]
    # What a text is not independent of: its author, else its document.
    clusters = tuple(
        [author_of(text) or document_id(name) for name, text in side]
        for side in (members, nonmembers)
    )
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        one = REGISTRY[name]
        row: dict[str, Any] = {"access": one.access, "cost": one.cost, "source": one.source}
        try:
            seen = measure(one, target, *sides, *clusters)
            row |= _figures(seen)
            if groups is not None and one.judge is None:
                row["groups"] = _by_group(seen, clusters, groups)
            pair = (seen.members, seen.nonmembers)
            if target.control is not None and not one.control:
                other = measure(one, target.control, *sides, *clusters)
                row["control"] = other.auc
                if one.judge is None:
                    row["difference"] = _difference(seen, other, clusters)
                    pair = (pair[0] - other.members, pair[1] - other.nonmembers)
            if scores is not None and one.judge is None:
                scores[name] = pair
        except UnlearnError as error:
            row = {"access": one.access, "missing": str(error)}
        found[name] = row
    tests = [one for _, _, one in _each(found) if "missing" not in one]
    for row, p in zip(tests, holm([row["p"] for row in tests]) if tests else (), strict=True):
        row["p_corrected"] = float(p)
    return found


def _each(attacks: Attacks) -> list[tuple[str, str | None, Any]]:
    """Name, group (None: all texts) and figures of each attack and of its groups."""
    return [
        (name, group, one)
        for name, row in attacks.items()
        for group, one in {None: row, **row.get("groups", {})}.items()
    ]


def _figures(seen: Outcome) -> dict[str, Any]:
    figures = {key: getattr(seen, key) for key in ("auc", "low", "high", "p")}
    counts = [len(seen.members), len(seen.nonmembers)]
    return figures | {"tpr_at_1": tpr_at_fpr(seen.members, seen.nonmembers, 0.01), "n": counts}


def _difference(seen: Outcome, other: Outcome, clusters: tuple) -> dict[str, float]:
    pairs = ((one.members, one.nonmembers) for one in (seen, other))
    gap = auc_gap(*pairs, clusters)
    low, high = gap.interval(LEVEL)
    return {"value": float(gap.value), "low": float(low), "high": float(high)}


def by_document(
    members: Documents, scores: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> dict[str, dict[str, Any]]:
    """p and side of each member document by all attacks that rank (`told_documents`); of several
    texts of a document the smallest p times their number."""
    if not scores:
        return {}
    one = told_documents(*({name: pair[i] for name, pair in scores.items()} for i in (0, 1)))
    names = [document_id(name) for name, _ in members]
    found: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names):
        p = min(1.0, float(one.p[i]) * names.count(name))
        if name not in found or p < found[name]["p"]:
            found[name] = {"p": p, "side": one.side[i]}
    return found


def _places(groups: Groups | None) -> dict[str, list[list[int]]]:
    """Of each group the numbers of its members and of its non-members."""
    return {
        group: [[i for i, one in enumerate(side) if one == group] for side in groups]
        for group in (sorted({*groups[0], *groups[1]}) if groups else ())
    }


def _by_group(seen: Outcome, clusters: tuple, groups: Groups) -> dict[str, dict[str, Any]]:
    """Figures of each group, without one of fewer than 10 texts a side."""
    found: dict[str, dict[str, Any]] = {}
    for group, places in _places(groups).items():
        if min(map(len, places)) < MIN_TEXTS:
            found[group] = {"missing": f"fewer than {MIN_TEXTS} members or non-members"}
            continue
        names = tuple([side[i] for i in some] for side, some in zip(clusters, places, strict=True))
        told = by_rank(seen.members[places[0]], seen.nonmembers[places[1]], names)
        found[group] = _figures(told)
    return found


def by_date(members: Sequence[str], nonmembers: Sequence[str]) -> Groups:
    """Regression discontinuity (arXiv 2406.17975): which texts lie next to the date of the cut-off.

    Members older than all non-members differ from them by their time, whatever the model is. Next
    to the cut-off they differ least: there stand the later half of the older side and the earlier
    half of the other one. The paper takes a window of time; the halves are ours.

    Args:
        members, nonmembers: Dates in one form that sorts as text does (ISO 8601).
    """
    ranks = np.unique([*members, *nonmembers], return_inverse=True)[1]
    older, newer = np.median(ranks[: len(members)]), np.median(ranks[len(members) :])

    def side(dates: Sequence[str], latest: bool) -> list[str]:
        order = sorted(range(len(dates)), key=dates.__getitem__, reverse=latest)
        near = set(order[: (len(dates) + 1) // 2])
        return [NEAR if i in near else FAR for i in range(len(dates))]

    return side(members, older <= newer), side(nonmembers, older > newer)


def blind(
    members: Documents, nonmembers: Documents, groups: Groups | None = None
) -> dict[str, Any]:
    """What the texts alone tell, without a model, and the warning about it; in each group too."""
    sides = [[text for _, text in side] for side in (members, nonmembers)]
    found = blind_baselines(*sides)
    told: dict[str, Any] = {
        "baselines": {name: asdict(one) for name, one in found.items()},
        "warning": blind_sentence(found),
    }
    for name, places in _places(groups).items():
        some = [[side[i] for i in one] for side, one in zip(sides, places, strict=True)]
        if min(map(len, some)) >= MIN_TEXTS:
            inner = {one: asdict(base) for one, base in blind_baselines(*some).items()}
            told.setdefault("groups", {})[name] = inner
    return told


def status(attacks: Attacks) -> str:
    """ "told", "not told", or "open": nothing told, but an attack is missing."""
    if any(one.get("p_corrected", 1) < 1 - LEVEL for _, _, one in _each(attacks)):
        return "told"
    return "not told" if attacks and not _missing(attacks) else "open"


def _missing(attacks: Attacks) -> list[str]:
    """Attacks, and then groups of them, that were not measured."""
    lost = [(name, group) for name, group, one in _each(attacks) if "missing" in one]
    groups = {f"group {group}" for _, group in lost if group is not None}
    return [*(name for name, group in lost if group is None), *sorted(groups)]


def sentence(model: str, attacks: Attacks) -> str:
    """What the attacks say of a model, in words."""
    made = {
        name if group is None else f"{name} in group {group}": one
        for name, group, one in _each(attacks)
        if "missing" not in one
    }
    said, figures = status(attacks), ""
    if made:
        name = min(made, key=lambda n: (made[n]["p_corrected"], -abs(made[n]["auc"] - 0.5)))
        row = made[name]
        figures = f" ({name}: AUC {row['auc']:.2f} [{row['low']:.2f}, {row['high']:.2f}], p "
        figures += f"{row['p_corrected']:.2g} after Holm over {len(made)} tests)"
    what = "no attack that was made tells members" if made else "no attack was made"
    if said == "told":
        what = "members are told from texts never seen"
    text = f"{model}: {what}{figures}"
    if missing := _missing(attacks):
        text += f"; not measured: {', '.join(missing)}"
        text += ", so this is no evidence of forgetting" if said == "open" else ""
    return text + "."


def described(one: Attack) -> str:
    """For `--list`."""
    often = "" if one.default else " (if named)"
    return f"{one.name}{often}: sees {one.access}; {one.cost}; {one.source}"


def said(result: Mapping[str, Any]) -> list[Any]:
    """What `attack_models` found, as tables and sentences."""
    parts: list[Any] = []
    for model, found in result["models"].items():
        heads = ("AUC", "interval", "control", "p", "smallest")
        made = grid(f"Membership attacks: {model}", heads, "attack", "sees")
        count = sum("missing" not in one for *_, one in _each(found["attacks"]))
        for name, group, one in _each(found["attacks"]):
            cells = ["n/a", "", "", "", ""]
            if "missing" not in one:
                p, control = one["p_corrected"], one.get("control")
                cells = [f"{one['auc']:.2f}", f"{one['low']:.2f}, {one['high']:.2f}"]
                cells.append("" if control is None else f"{control:.2f}")
                cells.append(f"[red]{p:.2g}[/]" if p < 1 - LEVEL else f"{p:.2g}")
                cells.append(f"{smallest_difference(one['low'], one['high'], count):.2f}")
            made.add_row(*((name, one["access"]) if group is None else (f"  {group}", "")), *cells)
        made.caption = (
            "95 % intervals over documents; p after Holm over all; smallest: the difference from "
            "0.5 that these texts would show in four of five data sets."
        )
        why = {name: row["missing"] for name, row in found["attacks"].items() if "missing" in row}
        parts += [made, *(f"Not measured: {name} ({one})" for name, one in why.items())]
        parts.append(found["sentence"])
    return [*parts, *filter(None, [result["blind"]["warning"]])]


def groups_of(data_dir: Path, limit: int | None = None) -> Groups | None:
    """By the field ``group`` of the rows, else by ``date`` (`by_date`) where all have one."""
    rows = [
        [row for _, row in read_rows(find_side(data_dir, side))][:limit]
        for side in ("member", "nonmember")
    ]
    names = tuple([str(row.get("group", "none")) for row in side] for side in rows)
    if len({*names[0], *names[1]}) > 1:
        return names
    if all("date" in row for side in rows for row in side):
        return by_date(*([str(row["date"]) for row in side] for side in rows))
    return None


def attack_models(
    models: Sequence[str],
    names: Sequence[str],
    *,
    data_dir: Path,
    out: Path,
    control: str | None,
    limit: int | None,
    seed: int,
    device: str,
    dtype: str,
) -> tuple[dict[str, Any], Path]:
    """Attack each model; returns what ``membership.json`` holds, and where it lies. What the verdict
    reads of a model stands beside it, in ``membership-<model>.json``."""
    specs = parse_models([*models, *([control] if control else [])])
    sets = load_sets(data_dir, parts=("mia",))
    if limit is not None and limit < 1:
        raise UnlearnError(f"--limit is {limit}; it must be 1 or more.")
    sides = (sets.member[:limit], sets.nonmember[:limit])
    retain = find_file(data_dir, "retain")
    retained = [text for _, text in read_documents(retain)][:200] if retain else []
    groups = groups_of(data_dir, limit)

    def load(spec: ModelSpec, other: Target | None = None) -> Target:
        model = load_model(spec, dtype=getattr(torch, dtype), device=device)
        return Target(model, load_tokenizer(spec), other, retained, seed)

    against = load(specs[-1]) if control else None
    found = {}
    for spec in specs[: len(models)]:
        scores: dict[str, Any] = {}
        attacks = attack_model(load(spec, against), *sides, names, groups, scores)
        words = sentence(spec.name, attacks)
        found[spec.name] = {"attacks": attacks, "status": status(attacks), "sentence": words}
        found[spec.name]["documents"] = by_document(sides[0], scores)
    result = {
        "schema": 1,
        "data_dir": str(data_dir),
        "members": len(sides[0]),
        "nonmembers": len(sides[1]),
        "control": specs[-1].name if control else None,
        "seed": seed,
        "blind": blind(*sides, groups),
        "models": found,
    }
    for name, one in found.items():
        file = {"attack": "membership", "title": "Attacks on membership", "model": name}
        file |= as_tests(one["attacks"]) | {key: one[key] for key in ("documents", "sentence")}
        write_json(out / f"membership-{safe_name(name)}.json", file, private=True)
    return result, write_json(out / "membership.json", result, private=True)


def as_tests(attacks: Attacks) -> dict[str, Any]:
    """For the verdict: each attack and group as one test, with a control that of the paired
    difference; attacks that learn have none and count where the control is told less."""
    tests, missing = {}, []
    for name, group, row in _each(attacks):
        title = name if group is None else f"{name} in group {group}"
        if "missing" in row:
            missing.append(title)
            continue
        p = row["p"]
        if gap := row.get("difference"):
            error = (gap["high"] - gap["low"]) / (2 * norm.ppf((1 + LEVEL) / 2))
            p = float(2 * norm.sf(abs(gap["value"]) / error)) if error > 0 else 1.0
        elif row.get("control", -1.0) >= row["auc"]:
            p = 1.0
        tests[title] = {key: row[key] for key in ("auc", "low", "high")} | {"p": p}
    return {"tests": tests, "missing": missing}
