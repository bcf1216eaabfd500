"""Membership attacks that are asked for, on a model, with intervals and p-values.

What could not be measured is said and is never good news. The verdict reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.text import Text
from scipy.stats import norm

from axolotl_unlearn.attacks.registry import Attack, Outcome, Target
from axolotl_unlearn.attacks.target import bound_to, with_control
from axolotl_unlearn.data.documents import read_documents
from axolotl_unlearn.data.records import document_id
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.sets import clusters_of, data_digests, find_file, load_sets
from axolotl_unlearn.metrics.intervals import LEVEL, holm, smallest_difference
from axolotl_unlearn.metrics.membership import (
    blind_baselines,
    blind_sentence,
    by_document,
    gap_of,
)
from axolotl_unlearn.metrics.verdict import sentence
from axolotl_unlearn.models import ModelSpec, load_model, load_tokenizer
from axolotl_unlearn.report.terminal import grid

#: (id, text) of each.
Documents = Sequence[tuple[str, str]]
TITLES = {"membership": "Attacks on membership", "inside": "Looking inside"}


def chosen(known: Mapping[str, Attack], text: str | None, inside: bool = False) -> list[Attack]:
    """The attacks that `--attacks` names; None: those made by default; "all": every one."""
    if text is None or text.strip() == "all":
        return [one for one in known.values() if one.inside == inside and (one.default or text)]
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [name for name in names if name not in known]:
        raise UnlearnError(
            f"--attacks: there is no attack {unknown[0]!r}; there are {', '.join(known)}.",
            code="attack.unknown",
        )
    if not names:
        raise UnlearnError(
            "--attacks names no attack; leave it out for the default ones.", code="attack.none"
        )
    if other := [name for name in names if known[name].inside != inside]:
        command = "membership" if inside else "inside"
        says = f"--attacks: {other[0]!r} is made by `axolotl-unlearn attack {command}`."
        raise UnlearnError(says, code="attack.other-command")
    return [known[name] for name in names]


def attack_model(
    target: Target, members: Documents, nonmembers: Documents, attacks: Sequence[Attack]
) -> dict[str, Any]:
    """Each attack judged, with a control against it.

    Returns:
        ``tests`` by title: auc, low, high (95 %), p (of the difference from the control where there
        is one; before any correction), p_corrected (Holm's over all tests here), n, what
        the attack sees, and with a control ``control`` (its AUC) and ``difference`` {value, low,
        high}; ``missing``: attacks that could not be made, ``reasons`` of each; ``documents``: p
        and side of each member by all attacks that rank; ``status``: "told", "not told", or "open":
        nothing told, but one is missing.
    """
    sides = [[text for _, text in side] for side in (members, nonmembers)]
    clusters = clusters_of(members, nonmembers)
    tests: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    scores: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for one in attacks:
        judge = _ranked if one.judge is None else _learned
        try:
            pairs = [_look(one, target, sides)]
            if target.control is not None and not one.control:
                pairs.append(_look(one, target.control, sides))
            found = judge(one, pairs, clusters, target.seed)
        except UnlearnError as error:
            missing[one.name] = str(error)
            continue
        tests[one.name] = {"access": one.access, "cost": one.cost, "source": one.source} | found
        if one.judge is None:
            apart = [a - b for a, b in zip(*pairs, strict=True)] if pairs[1:] else pairs[0]
            scores[one.name] = tuple(apart)
    corrected = holm([row["p"] for row in tests.values()]) if tests else ()
    for row, p in zip(tests.values(), corrected, strict=True):
        row["p_corrected"] = float(p)
    status = "not told" if tests and not missing else "open"
    if any(row["p_corrected"] < 1 - LEVEL for row in tests.values()):
        status = "told"
    found = {"tests": tests, "missing": [*missing], "reasons": missing, "status": status}
    paired = target.control is not None  # then all scores are differences from its own
    parts = ({name: pair[i] for name, pair in scores.items()} for i in (0, 1))
    names = [document_id(name) for name, _ in members]
    told = by_document(names, *parts, paired) if scores else {}
    return found | {"documents": {n: {"p": p, "side": side} for n, (p, side) in told.items()}}


def _look(one: Attack, target: Target, sides: Sequence[Sequence[str]]) -> tuple[Any, Any]:
    """Scores or features of members and of non-members."""
    values = np.asarray(one.look(target, [*sides[0], *sides[1]]), float)
    if not np.isfinite(values).all():
        raise UnlearnError(
            "some scores are NaN or infinite; load the model with --dtype float32.",
            code="attack.not-finite",
        )
    return values[: len(sides[0])], values[len(sides[0]) :]


def _ranked(_: Attack, pairs: Sequence[tuple], clusters: tuple, __: int) -> dict[str, Any]:
    """By the order of scores: two-sided rank test, interval of the AUC; both by cluster."""
    area, gap, p = gap_of(*pairs, clusters=clusters)
    row = _figures(Outcome(*pairs[0], area.value, *area.interval(), p))
    if pairs[1:]:
        ends = {key: one for key, one in gap.difference().items() if key != "p"}
        row |= {"control": area.value - gap.value, "difference": ends}
    return row


def _learned(one: Attack, pairs: Sequence[tuple], clusters: tuple, seed: int) -> dict[str, Any]:
    """With a control p is of the attack on the differences from its features: what makes a text
    unusual for every model cancels."""
    own = one.judge(*pairs[0], *clusters, seed)
    row = _figures(own)
    if pairs[1:]:
        if pairs[0][0].shape != pairs[1][0].shape:
            raise UnlearnError(
                "model and control are of different architectures; the control of this attack has "
                "to be of the same.",
                code="attack.other-shape",
            )
        apart = [a - b for a, b in zip(*pairs, strict=True)]
        other, knowing = (one.judge(*pair, *clusters, seed) for pair in (pairs[1], apart))
        row |= {"p": knowing.p, "control": other.auc, "knowing_it": knowing.auc}
        if own.null is not None:  # the same permutations under both
            value = own.auc - other.auc
            error = float((own.null - other.null).std(ddof=1)) * norm.ppf((1 + LEVEL) / 2)
            row["difference"] = {"value": value, "low": value - error, "high": value + error}
    return row


def _figures(seen: Outcome) -> dict[str, Any]:
    figures = {key: float(getattr(seen, key)) for key in ("auc", "low", "high", "p")}
    counts = [len(seen.members), len(seen.nonmembers)]
    return figures | {"n": counts}


def said(file: Mapping[str, Any]) -> list[Any]:
    """What `attack_models` found of a model, as a table and sentences."""
    heads = ("AUC", "interval", "control", "p", "smallest")
    made = grid(f"{file['title']}: {file['model']}", heads, "attack", "sees")
    for name, one in file["tests"].items():
        control, p = one.get("control"), one["p_corrected"]
        made.add_row(
            name,
            one["access"],
            f"{one['auc']:.2f}",
            f"{one['low']:.2f}, {one['high']:.2f}",
            "" if control is None else f"{control:.2f}",
            Text(f"{p:.2g}", "red" if p < 1 - LEVEL else ""),
            f"{smallest_difference(one['low'], one['high'], len(file['tests'])):.2f}",
        )
    made.caption = (
        "95 % intervals over documents; p (with a control: of the difference from it) after Holm "
        "over all; smallest: the difference from 0.5 that these texts would show in four of five "
        "data sets."
    )
    why = (f"Not measured: {name} ({one})" for name, one in file["reasons"].items())
    return [made, *why, file["sentence"], *filter(None, [file["blind"]["warning"]])]


def attack_models(
    models: Sequence[str],
    attacks: Sequence[Attack],
    *,
    kind: str,
    data_dir: Path,
    control: str | None,
    limit: int | None,
    seed: int,
    device: str,
    dtype: str,
    join: str = " ",
) -> list[dict[str, Any]]:
    """What the file of each model holds; ``kind``: "membership" or "inside"."""
    if limit is not None and limit < 1:
        raise UnlearnError(f"--limit is {limit}; it must be 1 or more.", code="attack.limit")
    specs = with_control(models, control)
    sets = load_sets(data_dir, parts=("mia",), join=join)
    if limit is not None and limit >= max(len(sets.member), len(sets.nonmember)):
        limit = None
    sides = (sets.member[:limit], sets.nonmember[:limit])
    retain = find_file(data_dir, "retain")
    retained = [text for _, text in read_documents(retain, join=join)][:200] if retain else []
    digests = data_digests(data_dir, ("member", "nonmember"))
    alone = blind_baselines(*([text for _, text in side] for side in sides), clusters_of(*sides))
    blind = {"baselines": alone, "warning": blind_sentence(alone)}

    def load(spec: ModelSpec, other: Target | None = None) -> Target:
        model = load_model(spec, dtype=getattr(torch, dtype), device=device)
        return Target(model, load_tokenizer(spec), other, retained, seed)

    against, made = load(specs[-1]) if control else None, []
    for spec in specs[: len(models)]:
        found = attack_model(load(spec, against), *sides, attacks)
        names = {"model": spec.name, "control": specs[-1].name if control else None}
        facts = {"data_dir": str(data_dir), "seed": seed, "limit": limit, "join": join}
        facts |= {"dtype": dtype, "blind": blind}
        facts |= bound_to(spec, specs[-1] if control else None) | {"data": digests}
        counts = {"members": len(sides[0]), "nonmembers": len(sides[1])}
        facts |= {"attack": kind, "title": TITLES[kind]}
        file = names | counts | facts | found
        made.append(file | {"sentence": sentence(file)})
    return made
