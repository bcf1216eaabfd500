"""Tables of `make tofu` and of published TOFU results, never in one; closeness by one function.

A job's results (schema "tofu"): ``seeds``, seed -> model -> metric of ``eval_tasks/tofu`` -> value;
``attacked``, seed -> what `analysis.attacked` finds; ``held``, seed -> model -> what
`analysis.never_seen.attacks_of` finds.
Published ones (schema "tofu-published"): ``rows``, each with ``source``, ``base``, ``method`` and
what it gives of ``forget_quality``, ``utility`` and ``attack_shares``; ``retrained``,
"source, base" -> utility of the retrained model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axolotl_unlearn.metrics.semeval import harmonic_mean
from research.analysis.attacked import TITLES
from research.analysis.never_seen import ATTACKS as RECALLED
from research.analysis.never_seen import DEPTH
from research.analysis.seeds import Table, interval_over_seeds, with_half_width

ATTACKS = ("auc_loss", "auc_zlib_ratio", "auc_min_k_0.4", "auc_min_k_plus_0.4")
CLOSENESS = ("forget_quality", "privacy", "utility")
#: Column -> metric; the strongest attack is made of all.
OURS = {
    "forget quality (p)": "forget_quality",
    "utility": "model_utility",
    "extraction": "forget_extraction_strength",
    "paraphrased": "forget_extraction_strength_paraphrased_question",
    "broken outputs": "forget_broken_outputs",
}
Models = Mapping[str, Mapping[str, float | None]]


def attack_share(auc: float, original: float, retrained: float) -> float:
    """Where an attack's AUC lies: 0 at (or beyond) the original model's, 1 at the retrained's.

    ``1 - |AUC - AUC_retrained| / |AUC_original - AUC_retrained|``, at least 0: two-sided, so that
    over-forgetting counts as far away too. The shares that arXiv 2605.24614 publishes have the
    same anchors. NaN where these are equal.
    """
    span = abs(original - retrained)
    return max(0.0, 1 - abs(auc - retrained) / span) if span else math.nan


def closeness(
    forget_quality: float | None,
    attacks: Sequence[float] | None,
    utility: float | None,
    retrained_utility: float | None,
) -> dict[str, float | None]:
    """How near a model is to one trained without the forget set; 1 where nothing differs.

    The same for our models and for published ones, whatever the base: nothing in it depends on how
    much that base knows.

    Args:
        forget_quality: p of TOFU's test; attacks: `attack_share` of each attack.
        utility, retrained_utility: Model utility of both.

    Returns:
        ``forget_quality`` (that p), ``privacy`` (harmonic mean over the attacks), ``utility`` (the
        smaller over the larger); None for what is not known.
    """
    known = [share for share in attacks or () if not math.isnan(share)]
    both = [value for value in (utility, retrained_utility) if value is not None]
    return {
        "forget_quality": forget_quality,
        "privacy": harmonic_mean(known) if known else None,
        "utility": min(both) / max(both) if len(both) == 2 and max(both) else None,
    }


def strongest_attack(model: Mapping[str, float | None]) -> float | None:
    """The AUC farthest from .5."""
    known = [model[name] for name in ATTACKS if model.get(name) is not None]
    return max(known, key=lambda auc: abs(auc - 0.5)) if known else None


def closeness_of(name: str, models: Models) -> dict[str, float | None]:
    """`closeness` of one of our models; "original" and "retrained" are its anchors."""
    model, original, retrained = (models[n] for n in (name, "original", "retrained"))
    shares = [
        attack_share(model[a], original[a], retrained[a])
        for a in ATTACKS
        if None not in (model.get(a), original.get(a), retrained.get(a))
    ]
    # A model is not tested against itself.
    quality = 1.0 if name == "retrained" else model.get("forget_quality")
    return closeness(quality, shares, model.get("model_utility"), retrained["model_utility"])


def shown(values: Iterable[float | None]) -> str:
    """Mean and half width over seeds; small p as powers of ten."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if len(known) == 1 and 0 < known[0] < 0.001:
        return f"{known[0]:.0e}"
    return with_half_width(interval_over_seeds(known))


def tables(content: Mapping[str, Any]) -> dict[str, Table]:
    """``ours``, ``closeness``, ``requests``, ``attacked`` and ``held`` of a job's results; no table
    without its rows."""
    seeds: Sequence[Models] = list(content["seeds"].values())
    attacked = list(content.get("attacked", {}).values())
    names = list(dict.fromkeys(name for models in seeds for name in models))
    names.sort(key=lambda name: name not in ("retrained", "original"))  # the anchors first

    def over_seeds(name: str) -> list[str]:
        there = [models[name] for models in seeds if name in models]
        columns = [[model.get(metric) for model in there] for metric in OURS.values()]
        columns.insert(4, [strongest_attack(model) for model in there])
        return [name, *map(shown, columns)]

    columns = ["model", *OURS]
    columns.insert(5, "strongest attack (AUC)")
    plain = [name for name in names if "-after-" not in name]
    near = []
    for name in plain:
        found = [closeness_of(name, models) for models in seeds if name in models]
        near.append([name, *(shown([one[key] for one in found]) for key in CLOSENESS)])
    made = {
        "ours": {"columns": columns, "rows": [over_seeds(name) for name in plain]},
        "closeness": {"columns": ["model", *CLOSENESS], "rows": near},
        "requests": {
            "columns": columns,
            "rows": [over_seeds(name) for name in names if "-after-" in name],
        },
        "attacked": {
            "columns": ["model", *(f"AUC {title}" for title in TITLES.values())],
            "rows": [[name, *_attacked(attacked, name)] for name in plain if attacked],
        },
        "held": _held(content.get("held", {})),
    }
    return {key: table for key, table in made.items() if table["rows"]}


def _attacked(seeds: Iterable[Mapping[str, Any]], name: str) -> Iterable[str]:
    """Mean AUC of each attack; bold where every seed's interval by rows is within the margin."""
    found = [seed[name]["attacks"] for seed in seeds]
    for attack in TITLES:
        auc = interval_over_seeds([one[attack]["auc"] for one in found])
        tests = [one[attack].get("from_retrained", {}).get("equivalent") for one in found]
        yield f"**{with_half_width(auc)}**" if all(tests) else with_half_width(auc)


def _held(seeds: Mapping[str, Mapping[str, Any]]) -> Table:
    """What attacks on `match` bring back above the retrained model, and what they see inside."""
    rows: dict[str, list[str]] = {}
    for models in seeds.values():
        found = models["match"]
        for kind, title in RECALLED.items():
            gap = found[kind]
            text = f"{gap['value']:+.3f} ({gap['low']:+.3f} to {gap['high']:+.3f})"
            rows.setdefault(f"{title}, 95 % interval", []).append(text)
        for view, seen in found.get("inside", {}).items():
            gap = seen["difference"]
            text = f"{seen['auc']:.2f}, *retrained* {seen['control']:.2f}: "
            text += f"{gap['value']:+.2f} ({gap['low']:+.2f} to {gap['high']:+.2f})"
            rows.setdefault(f"AUC of {view}, 90 % interval", []).append(text)
        depth = found["depth"]
        text = f"{depth['score']:.2f} ({depth['low']:.2f} to {depth['high']:.2f})"
        rows.setdefault(f"{DEPTH}, 95 % interval", []).append(text)
    columns = ["attack on *match*", *(f"seed {seed}" for seed in seeds)]
    return {"columns": columns, "rows": [[name, *texts] for name, texts in rows.items()]}


def published_tables(content: Mapping[str, Any]) -> dict[str, Table]:
    """``anchors``, as printed by their sources, and ``closeness`` of each to its own retrained."""
    anchors, near = [], []
    for row in content["rows"]:
        retrained = content["retrained"].get(f"{row['source']}, {row['base']}")
        who = [row["base"], row["method"], row["source"]]
        shares = row.get("attack_shares")
        anchors.append([*who, *(_printed(row.get(k)) for k in ("forget_quality", "utility"))])
        found = closeness(row.get("forget_quality"), shares, row.get("utility"), retrained)
        near.append([*who, *(_printed(found[key]) for key in CLOSENESS)])
    head = ["model", "method", "source"]
    return {
        "anchors": {"columns": [*head, "forget quality (p)", "utility"], "rows": anchors},
        "closeness": {"columns": [*head, *CLOSENESS], "rows": near},
    }


def _printed(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
