"""Reading ``results.json`` and the few judgements that the table and the page share.

Nothing here computes a metric: numbers come from the evaluation, this module reads, orders and
flags them. Every judgement (flag, status, best row) is made here once, so that the terminal and
the page cannot disagree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.semeval import CELLS, SIDES

SCHEMA = 1
HEADLINES = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")

# Half width of "balanced" around AUC 0.5 where the evaluation gives neither a name nor an interval.
BALANCED_HALF_WIDTH = 0.1
# A model is only called good when it forgets at least this much (harmonic mean of forget cells) ...
FORGET_BAR = 0.8
# ... and keeps at least this share of what the original had on the retain set. With a retrained
# model in the table, both bars become "at most this far below the retrained model".
KEEP_SHARE = 0.8
RETRAINED_TOLERANCE = 0.1
# False positive rate at which single members are looked for; the largest share of broken outputs on
# the forget set, and of answers that exact match does not see, of a model that may be called good.
LOW_FPR = 0.01
BROKEN_LIMIT = 0.1
UNSTOPPED_LIMIT = 0.05


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
                "(or `axolotl unlearn demo`)."
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


def number(value: Any) -> float | None:
    """`value` as a finite float, or None (null, NaN, text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def show(value: Any, digits: int = 3) -> str:
    """A number as the report prints it; a missing one is "n/a", never 0."""
    value = number(value)
    return "n/a" if value is None else f"{value:.{digits}f}"


def interval(model: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    """The [low, high] interval of one metric, if the evaluation gave a finite one."""
    return finite_pair(at(model, "intervals", metric))


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


def role_of(model: Mapping[str, Any]) -> str:
    """ "original", "retrained" or "candidate"."""
    role = model.get("role") or model["name"]
    return role if role in ("original", "retrained") else "candidate"


def side_mean(model: Mapping[str, Any], side: str) -> float | None:
    """Harmonic mean of the cells of one side (forget cells are already 1 - v); 0 if any is 0.

    The Task Aggregate is the harmonic mean of these two when both sides have equally many cells.
    """
    cells = model.get("cells") or {}
    values = [number(cells.get(name)) for name in CELLS if name.startswith(side)]
    present = [value for value in values if value is not None]
    if not present:
        return None
    if min(present) <= 0:
        return 0.0
    return len(present) / sum(1 / value for value in present)


def cell_count(model: Mapping[str, Any]) -> int:
    """How many of the 12 cells have a value."""
    cells = model.get("cells") or {}
    return sum(number(cells.get(name)) is not None for name in CELLS)


def forgetting(model: Mapping[str, Any]) -> str | None:
    """ "over" (AUC below .5), "under" (above) or "balanced"; None without an AUC."""
    if model.get("forgetting") in ("over", "under", "balanced"):
        return model["forgetting"]
    auc = number(model.get("mia_auc"))
    if auc is None:
        return None
    around = interval(model, "mia_auc") or (auc - BALANCED_HALF_WIDTH, auc + BALANCED_HALF_WIDTH)
    if around[0] <= 0.5 <= around[1]:
        return "balanced"
    return "under" if auc > 0.5 else "over"


def flags(model: Mapping[str, Any]) -> list[str]:
    """Why this row must not be called good: "collapsed", "below gate", or nothing."""
    found = []
    if (model.get("collapse") or {}).get("collapsed"):
        found.append("collapsed")
    if (model.get("gate") or {}).get("below_gate"):
        found.append("below gate")
    return found


def status(
    model: Mapping[str, Any],
    original: Mapping[str, Any] | None = None,
    retrained: Mapping[str, Any] | None = None,
) -> str:
    """One of: collapsed, below gate, before, target, no membership, over-forgets, under-forgets,
    recognisable, still knows, lost knowledge, broken answers, utility unknown, good. The first
    that applies, in this order.
    """
    marks = flags(model)
    if marks:
        return marks[0]
    role = role_of(model)
    if role != "candidate":
        return {"original": "before", "retrained": "target"}[role]
    name = forgetting(model)
    if name is None:
        return "no membership"
    if name != "balanced":
        return f"{name}-forgets"
    if recognised(model, retrained):
        return "recognisable"
    forget, retain = side_mean(model, "forget"), side_mean(model, "retain")
    forget_bar, retain_bar = bars(original, retrained)
    if forget is None or forget < forget_bar or unstopped_answers(model, "forget"):
        return "still knows"
    if retain is None or retain < retain_bar:
        return "lost knowledge"
    if broken(model, retrained):
        return "broken answers"
    if number(model.get("utility")) is None or not model.get("gate"):
        return "utility unknown"
    return "good"


def recognised(
    model: Mapping[str, Any], retrained: Mapping[str, Any] | None = None
) -> tuple[str, float] | None:
    """("low" or "high" loss, share of members found by it at 1 % false positives), or None.

    An AUC of .5 can hide it: a third of the members far below and the others far above the
    non-members average out. Needs the loss arrays. Counts only where the 95 % interval of the
    share (Clopper-Pearson) lies above 1 % and above the retrained model's own share.
    """
    found = {}
    for side in ("low", "high"):
        share = _share_found(model, side)
        if share is None:
            return None
        target = _share_found(retrained, side) if retrained is not None else None
        floor = max(LOW_FPR, target[0] if target else 0.0)
        if share[1] > floor:
            found[side] = share[0]
    return max(found.items(), key=lambda item: item[1]) if found else None


def _share_found(model: Mapping[str, Any], side: str) -> tuple[float, float] | None:
    """Share of members beyond all but 1 % of the non-members, and its lower 95 % bound."""
    from scipy.stats import beta

    members, others = (
        [v if side == "low" else -v for v in numbers(at(model, "likelihood", key))]
        for key in ("member_loss", "nonmember_loss")
    )
    if not members or not others:
        return None
    cut = sorted(others)[int(LOW_FPR * len(others))]  # accuses at most 1 % of the non-members
    hits = sum(value < cut for value in members)
    low = float(beta.ppf(0.025, hits, len(members) - hits + 1)) if hits else 0.0
    return hits / len(members), low


def broken(model: Mapping[str, Any], retrained: Mapping[str, Any] | None = None) -> float | None:
    """Share of broken outputs on the forget set where it is over the limit and the target's."""
    share = _broken_share(model)
    floor = BROKEN_LIMIT + (_broken_share(retrained) or 0.0)
    return share if share is not None and share > floor else None


def _broken_share(model: Mapping[str, Any] | None) -> float | None:
    return number(at(model, "collapse", "forget", "broken"))


def unstopped_answers(model: Mapping[str, Any], side: str) -> float | None:
    """Share of questions whose answer is said without being an exact match, where it is large.

    A model that says the right answer and does not stop counts as forgotten for exact match.
    """
    exact, contained = (number(at(model, "answers", side, key)) for key in ("exact", "contained"))
    if exact is None or contained is None or contained - exact < UNSTOPPED_LIMIT:
        return None
    return contained - exact


def bars(
    original: Mapping[str, Any] | None, retrained: Mapping[str, Any] | None
) -> tuple[float, float]:
    """The least forget score and retain score of a model that may be called good."""
    forget_bar, retain_bar = FORGET_BAR, KEEP_SHARE
    if original is not None:
        retain_bar = KEEP_SHARE * (side_mean(original, "retain") or 1.0)
    if retrained is not None:
        target_forget, target_retain = (side_mean(retrained, side) for side in SIDES)
        if target_forget is not None:
            forget_bar = target_forget - RETRAINED_TOLERANCE
        if target_retain is not None:
            retain_bar = target_retain - RETRAINED_TOLERANCE
    return forget_bar, retain_bar


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


def auc_standard_error(members: int, nonmembers: int) -> float:
    """Standard error of the AUC when nothing separates the sets (Mann-Whitney, no ties)."""
    return math.sqrt((members + nonmembers + 1) / (12 * members * nonmembers))


def ideal_mia_score(members: int, nonmembers: int) -> float:
    """Expected MIA score 1 - 2 E|AUC - .5| of a perfect model with this n (normal AUC).

    150 against 150 texts: SE .0334, so 1 - 2 * .0334 * sqrt(2 / pi) = .947.
    """
    return 1 - 2 * auc_standard_error(members, nonmembers) * math.sqrt(2 / math.pi)


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
