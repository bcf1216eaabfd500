"""Tables of a study over seeds: who wins, what tells models apart, the paper's tables.

A table is ``{"columns": [...], "rows": [[...]]}`` of text, so that `research/tables.py` writes the same
tables from committed results that a job writes into its own page.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write, write_json
from axolotl_unlearn.metrics.intervals import holm
from research.analysis.paper import COLUMNS, table_one
from research.analysis.reproduce import paper_parts
from research.analysis.seeds import (
    Table,
    count_of_seeds,
    interval_over_seeds,
    markdown,
    with_half_width,
)

#: Name in the tables -> models of which the one with the best Aggregate on validation counts.
CHOSEN = {
    "single": ("single_a", "single_b"),
    "tuned_single": ("tuned_a", "tuned_b"),
    "best_of_four": ("over", "under", "single_a", "single_b"),
}
#: The models of both studies, in the order of the tables.
ORDER = (
    *("original", "over", "under", "merged", "fixed", "tuned", "tuned_four"),
    *("single", "tuned_single", "best_of_four", "retrained_twin", "retrained"),
)
SHARED = ("original", "retrained")
#: What is kept of a model beside its scores.
KEPT = ("cells", "intervals", "distance", "utility_groups")

Seeds = Mapping[int, Mapping[str, Mapping[str, Any]]]


def read_models(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> what a study keeps of a model, from a finished evaluation.

    Raises:
        UnlearnError: It has not finished.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise UnlearnError(f"{path} does not exist: run this seed to its end first.")
    models = json.loads(path.read_text("utf-8"))["models"]
    return {
        m["name"]: {c: m[c] for c in COLUMNS} | {key: m[key] for key in KEPT if m.get(key)}
        for m in models
    }


def read_seed(folder: Path) -> dict[str, dict[str, Any]]:
    """Test scores of one finished seed; what is chosen among runs is chosen on validation."""
    validation, test = (read_models(folder / half) for half in ("validation", "test"))
    for name, among in CHOSEN.items():
        if all(run in validation for run in among):
            test[name] = test[max(among, key=lambda run: validation[run]["aggregate"])]
    return {name: test[name] for name in ORDER if name in test}


def told_apart(model: Mapping, level: float = 0.05) -> list[str]:
    """Cells, AUC and utility in which a model can be told from the retrained one.

    Holm's step-down procedure over them (family-wise error ``level``), on the p of the paired
    bootstrap over documents.
    """
    tested = sorted((gap["p"], name) for name, gap in _tested(model).items())
    adjusted = holm([p for p, _ in tested])
    return [name for (_, name), p in zip(tested, adjusted, strict=True) if p <= level]


def _tested(model: Mapping) -> dict[str, Mapping]:
    composites = ("task_aggregate", "mia_score", "aggregate")
    return {n: gap for n, gap in model.get("distance", {}).items() if n not in composites}


def detectable(seeds: Seeds, level: float = 0.05, power: float = 0.8) -> Table:
    """The smallest difference from the retrained model that `told_apart` would find.

    Of each figure and model the median over seeds of (z[1 - level / 2m] + z[power]) standard errors
    (Holm's first step over m figures), with the error of the paired 95 % bootstrap interval. A
    figure that no resample changes has none.
    """
    z = statistics.NormalDist().inv_cdf
    names = [n for n in _names(seeds) if n not in ("original", "retrained")]
    found: dict[str, dict[str, list[float]]] = {}
    for models in seeds.values():
        for name in names:
            gaps = _tested(models.get(name, {}))
            for figure, gap in gaps.items():
                low, high = gap["interval"]
                if low == high:
                    continue
                error = (high - low) / (2 * z(0.975))
                smallest = (z(1 - level / (2 * len(gaps))) + z(power)) * error
                found.setdefault(figure, {}).setdefault(name, []).append(smallest)
    names = [name for name in names if any(name in one for one in found.values())]
    rows = [
        [figure, *(f"{statistics.median(one[n]):.2f}" if one.get(n) else "" for n in names)]
        for figure, one in found.items()
    ]
    return {"columns": ["figure", *names], "rows": rows}


def _names(seeds: Seeds) -> list[str]:
    return [name for name in ORDER if any(name in models for models in seeds.values())]


def comparison(seeds: Seeds, *, shared: Sequence[str] = ()) -> Table:
    """Means and 95 % intervals over seeds; ``shared`` models are one and the same in every seed."""
    groups = sorted({g for models in seeds.values() for m in models.values()
                     for g in m.get("utility_groups", {})})  # fmt: skip
    rows = []
    for name in _names(seeds):
        those = [models[name] for models in seeds.values() if name in models]
        few = "" if len(those) == len(seeds) else f" ({count_of_seeds(len(those))})"
        those = those[:1] if name in shared else those
        values = [[one[c] for one in those] for c in COLUMNS]
        values += [[one["utility_groups"][g]["value"] for one in those] for g in groups]
        rows.append([name + few, *(with_half_width(interval_over_seeds(v)) for v in values)])
    return {"columns": ["model", *COLUMNS, *(f"utility ({g})" for g in groups)], "rows": rows}


def differences(seeds: Seeds, winner: str = "tuned") -> Table:
    """Aggregate of the searched merge minus the others', paired by seed."""
    rows = []
    for other in _names(seeds):
        pairs = [(m[winner], m[other]) for m in seeds.values() if winner in m and other in m]
        if other in ("original", winner) or not pairs:
            continue
        gaps = [one["aggregate"] - two["aggregate"] for one, two in pairs]
        level = sum(gap == 0 for gap in gaps)
        rows.append(
            [
                other,
                with_half_width(interval_over_seeds(gaps), sign=True),
                f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}"
                + (f" (level in {level})" if level else ""),
            ]
        )
    columns = ["tuned merge against", "difference in Aggregate", "above in"]
    return {"columns": columns, "rows": rows}


def per_seed(seeds: Seeds, shown: Callable[[Mapping], str]) -> Table:
    """One row a seed, one column a model."""
    names = _names(seeds)
    rows = [
        [seed, *(shown(models[n]) if n in models else "" for n in names)]
        for seed, models in seeds.items()
    ]
    return {"columns": ["seed", *names], "rows": rows}


def aggregate_with_interval(model: Mapping) -> str:
    bounds = model.get("intervals", {}).get("aggregate")
    shown = f"{model['aggregate']:.3f}"
    return f"{shown} ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else shown


def told(model: Mapping) -> str:
    """How many figures tell a model from the retrained one, and few of them by how much."""
    if not model.get("distance"):
        return ""
    found = told_apart(model)
    few = [f"{name} {model['distance'][name]['value']:+.2f}" for name in found]
    return f"{len(found)}: {', '.join(few)}" if 0 < len(few) <= 4 else str(len(few) or "none")


def study_tables(seeds: Seeds, *, shared: Sequence[str] = ()) -> dict[str, Table]:
    """All tables of a study that follow from the scores of its models."""
    found = {
        "comparison": comparison(seeds, shared=shared),
        "differences": differences(seeds),
        "seeds": per_seed(seeds, aggregate_with_interval),
        "told": per_seed(seeds, told),
        "detectable": detectable(seeds),
    }
    return {key: table for key, table in found.items() if table["rows"]}


CAPTIONS = {
    "comparison": "",
    "differences": "",
    "seeds": "Ranges: 95 % bootstrap intervals of one seed (documents resampled).",
    "told": "Of the 12 cells, AUC and utility, those that differ from the retrained model's, and "
    "by how much (paired bootstrap over documents, Holm at .05).",
    "detectable": "The smallest difference that this comparison finds in four of five cases "
    "(median over seeds).",
}


def page(
    title: str,
    seeds: Seeds,
    reproduced: Mapping[int, Mapping],
    paired: Mapping[int, Mapping] | None = None,
    hyperparameters: Sequence[str] = (),
    shared: Sequence[str] = (),
) -> str:
    """The comparison, the paper's tables, and the pairs over seeds, as markdown."""
    parts = [f"## {title} ({count_of_seeds(len(seeds))})\n"]
    for key, table in study_tables(seeds, shared=shared).items():
        caption = f"\n{CAPTIONS[key]}\n" if CAPTIONS[key] else ""
        parts.append(f"{markdown(table)}{caption}")
    merged = "fixed" if "fixed" in _names(seeds) else "merged"
    parts.append("\n".join(table_one(seeds, merged=merged)) + "\n")
    parts.append("\n".join(hyperparameters) + "\n")
    parts += paper_parts(list(reproduced.values())) if reproduced else []
    parts += pair_parts(paired) if paired else []
    return "\n".join(parts)


def pair_parts(paired: Mapping[int, Mapping]) -> list[str]:
    """Aggregate (AUC) of each run and of each pair by each recipe, means over seeds."""
    results = list(paired.values())

    def shown(scores: Sequence[Mapping]) -> str:
        aggregate, auc = (
            statistics.fmean(one[c] for one in scores) for c in ("aggregate", "mia_auc")
        )
        return f"{aggregate:.3f} ({auc:.2f})"

    runs = [[name, shown([r["runs"][name] for r in results])] for name in results[0]["runs"]]
    recipes = list(results[0]["pairs"][0]["merges"])
    facts = {
        "cosine": "cosine of the changes",
        "initialisation": "of the LoRA draws",
        "sign_conflict": "opposite signs",
    }
    pairs = [
        [
            " x ".join(rows[0]["pair"]),
            *(f"{statistics.fmean(row[key] for row in rows):.2f}" for key in facts),
            *(shown([row["merges"][name] for row in rows]) for name in recipes),
        ]
        for rows in zip(*(result["pairs"] for result in results), strict=True)
    ]
    return [
        f"## Which pairs merge well ({count_of_seeds(len(results))}, test half, teacher-forced)\n",
        "Aggregate, AUC in brackets.\n",
        markdown({"columns": ["run", "by itself"], "rows": runs}),
        markdown({"columns": ["pair", *facts.values(), *recipes], "rows": pairs}),
    ]


def facts(command: str) -> dict[str, Any]:
    """What makes results comparable: command, versions, machine."""
    import os
    import platform
    import sys

    from axolotl_unlearn.store import versions

    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        cpu = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    machine = {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system()}
    python = sys.version.split()[0]
    return {"command": command, "versions": {"python": python, **versions()}, "machine": machine}


def write_study(out: Path, command: str, seeds: Seeds, text: str) -> Path:
    """``results.json`` (seed -> model -> scores, with facts) and ``reproduction.md``; the latter.

    `research/tables.py collect` commits the first.
    """
    content = {"schema": "study", **facts(command), "seeds": seeds}
    write_json(out / "results.json", content)
    return write(out / "reproduction.md", text)
