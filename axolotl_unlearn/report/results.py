"""Reading ``results.json`` and the few judgements that the table and the page share.

Nothing here computes a metric: numbers come from the evaluation, this module reads, orders and
flags them. The judgement of a model is made once, in `metrics.verdict`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.membership import forgetting as name_interval
from axolotl_unlearn.metrics.semeval import CELLS, SIDES
from axolotl_unlearn.metrics.statistics import ideal_membership
from axolotl_unlearn.metrics.verdict import (  # noqa: F401
    THRESHOLDS,
    bars,
    broken,
    interval,
    number,
    role_of,
    show,
    side_mean,
    status,
    unstopped_answers,
)

SCHEMA = 1
HEADLINES = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")


def load_results(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Results as a checked dict; `source` is that dict, a results.json, or the folder holding it.

    Raises UnlearnError for a missing file, broken JSON, another schema, or a list without models.
    """
    if isinstance(source, Mapping):
        results, where = dict(source), "the results"
    else:
        path = Path(source)
        path = path / "results.json" if path.is_dir() else path
        if not path.is_file():
            folder = path.parent if path.name == "results.json" else path
            raise UnlearnError(
                f"{path} does not exist; make it with "
                f"`axolotl unlearn eval MODEL ... --data DIR --out {folder}` "
                "(or `python -m research demo`)."
            )
        where = str(path)
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as fault:
            raise UnlearnError(
                f"{path} is not valid JSON ({fault}); run the evaluation again to rewrite it."
            ) from fault
    if not isinstance(results, dict) or not isinstance(results.get("models"), list):
        raise UnlearnError(
            f"{where} has no list `models`; expected the results.json of `axolotl unlearn eval`."
        )
    if results.get("schema", SCHEMA) != SCHEMA:
        raise UnlearnError(
            f"{where} has schema {results['schema']!r}, this version reads schema {SCHEMA}; "
            "evaluate again with this version of axolotl-unlearn."
        )
    if not results["models"]:
        raise UnlearnError(f"{where} lists no models; evaluate at least one.")
    for row, model in enumerate(results["models"]):
        name = model.get("name") if isinstance(model, dict) else None
        if not name or not isinstance(name, str):
            raise UnlearnError(f"{where}, models[{row}] has no `name`; evaluate again.")
        cells = model.get("cells")
        unknown = sorted(set(cells) - set(CELLS)) if isinstance(cells, Mapping) else []
        if unknown:
            raise UnlearnError(
                f"{where}, model {model['name']!r} has the unknown cell {unknown[0]!r}; expected "
                "names such as forget_task1_regurgitation."
            )
    results["models"] = [_sound(model) for model in results["models"]]
    names = [model["name"] for model in results["models"]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UnlearnError(
            f"{where} has two models named {twice[0]!r}; evaluate them as "
            "`name=path` with different names."
        )
    return results


def _sound(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model without parts that are no mapping, such as null."""
    parts = (
        *("cells", "n", "intervals", "collapse", "gate", "answers", "likelihood", "membership"),
        *("distance", "general", "ideal"),
    )
    return {k: v for k, v in model.items() if k not in parts or isinstance(v, Mapping)}


def at(data: Any, *keys: str) -> Any:
    """What lies under these keys, or None where the way there ends."""
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def numbers(values: Any) -> list[float]:
    """The finite numbers of a list; none where it is no list."""
    if not isinstance(values, (list, tuple)):
        return []
    return [value for value in map(number, values) if value is not None]


def finite_pair(pair: Any) -> tuple[float, float] | None:
    """(low, high) where both are finite numbers."""
    found = numbers(pair)
    return (found[0], found[1]) if len(found) == 2 else None


def find(results: Mapping[str, Any], role: str) -> dict[str, Any] | None:
    """The model that plays `role` ("original" or "retrained"), by its `role` or else its name."""
    for model in results["models"]:
        if role_of(model) == role:
            return model
    return None


def cell_count(model: Mapping[str, Any]) -> int:
    """How many of the 12 cells have a value."""
    cells = model.get("cells") or {}
    return sum(number(cells.get(name)) is not None for name in CELLS)


def flags(model: Mapping[str, Any]) -> list[str]:
    """Why this row must not be called good: "collapsed", "below gate", or nothing."""
    found = []
    if (model.get("collapse") or {}).get("collapsed"):
        found.append("collapsed")
    if (model.get("gate") or {}).get("below_gate"):
        found.append("below gate")
    return found


def best(results: Mapping[str, Any]) -> str | None:
    """Name of the row with the highest Aggregate among unflagged candidates, if there is one.

    The original and the retrained model are what candidates are read against, never candidates.
    """
    rows = [
        (number(model.get("aggregate")), model["name"])
        for model in results["models"]
        if role_of(model) == "candidate" and not flags(model)
    ]
    rows = [row for row in rows if row[0] is not None]
    return max(rows)[1] if rows else None


def membership_sizes(model: Mapping[str, Any]) -> tuple[int, int] | None:
    """Numbers of members and non-members behind the AUC, where known."""
    pair = [number(at(model, "n", side)) for side in ("member", "nonmember")]
    if None in pair:
        pair = [len(numbers(at(model, "likelihood", f"{s}_loss"))) for s in ("member", "nonmember")]
    return (int(pair[0]), int(pair[1])) if min(pair) >= 1 else None


def lab(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The membership lab's answer for this model (`evaluation.membership_lab`), or {}."""
    found = model.get("membership")
    return found if isinstance(at(found, "attacks"), Mapping) else {}


def membership_warning(results: Mapping[str, Any]) -> str | None:
    """Why the membership figures mean nothing on these data, if a blind baseline separates."""
    for model in results["models"]:
        if lab(model).get("meaningful") is False:
            return str(lab(model).get("sentence", "Membership means nothing on these data."))
    return None


def forgetting(model: Mapping[str, Any]) -> str | None:
    """ "over" (AUC below .5), "under" (above) or "balanced"; None without an AUC."""
    if model.get("forgetting") in ("over", "under", "balanced"):
        return model["forgetting"]
    auc = number(model.get("mia_auc"))
    if auc is None:
        return None
    width = THRESHOLDS["auc_margin"].value
    return name_interval(interval(model, "mia_auc") or (auc - width, auc + width))


def auc_standard_error(members: int, nonmembers: int) -> float:
    """Standard error of the AUC when nothing separates the sets."""
    return ideal_membership(members, nonmembers).standard_error


def ideal_mia_score(members: int, nonmembers: int) -> float:
    """Expected MIA score of a perfect model with this n."""
    return ideal_membership(members, nonmembers).expected


def sizes_sentence(results: Mapping[str, Any]) -> str:
    """What n stands behind the numbers, in words."""
    model = max(results["models"], key=cell_count)
    parts = []
    for side in SIDES:
        rows = numbers([at(model, "n", name) for name in CELLS if name.startswith(side)])
        if sum(rows):
            parts.append(f"{sum(rows):.0f} {side} rows")
    pair = membership_sizes(model)
    if pair:
        parts.append(f"{pair[0]} members against {pair[1]} non-members")
    if questions := number(at(model, "n", "utility")):
        parts.append(f"{questions:.0f} utility questions")
    return ", ".join(parts) if parts else "n not recorded"
