"""Markdown of the studies over seeds: who wins, the paper's tables, what tells models apart."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.analysis.paper import COLUMNS, TABLE_2, table_one
from axolotl_unlearn.analysis.seeds import count_of_seeds, interval_over_seeds, with_half_width
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.recipe import Recipe

#: Single runs of which the one that is better on validation counts.
SINGLES = ("single_a", "single_b")
#: The models of the comparison, in the order of the tables.
ORDER = ("original", "over", "under", "fixed", "tuned", "tuned_four", "single", "retrained")
REAL_ORDER = ("original", "over", "under", "merged", "retrained")


def read_seed(folder: Path) -> dict[str, dict[str, float]]:
    """Test scores of one finished seed, the single run that was better on validation as `single`.

    Raises:
        UnlearnError: The seed has not finished.
    """
    models = {}
    for half in ("validation", "test"):
        path = folder / half / "results.json"
        if not path.is_file():
            raise UnlearnError(f"{path} does not exist: run this seed to its end first.")
        models[half] = {m["name"]: m for m in json.loads(path.read_text("utf-8"))["models"]}
    chosen = max(SINGLES, key=lambda name: models["validation"][name]["aggregate"])
    named = {name: m for name, m in models["test"].items() if name not in SINGLES}
    named["single"] = models["test"][chosen]
    return {
        name: {column: named[name][column] for column in COLUMNS}
        | {key: named[name].get(key, {}) for key in ("cells", "intervals", "distance")}
        for name in ORDER
        if name in named
    }


def told_apart(model: Mapping, level: float = 0.05) -> list[str]:
    """Cells, AUC and utility in which a model can be told from the retrained one.

    Holm's step-down procedure over them (family-wise error ``level``), on the p of the paired
    bootstrap over documents.
    """
    tested = [
        (gap["p"], name)
        for name, gap in model.get("distance", {}).items()
        if name not in ("task_aggregate", "mia_score", "aggregate")
    ]
    found = []
    for number, (p, name) in enumerate(sorted(tested)):
        if p > level / (len(tested) - number):
            break
        found.append(name)
    return found


def summarise(seeds: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Means over seeds, and the differences that the claims are about, paired by seed.

    Args:
        seeds: seed -> model -> score -> value, see `read_seed`.
    """
    result: dict[str, Any] = {"seeds": sorted(seeds), "models": {}, "differences": {}}
    for name in ORDER:
        those = [seed[name] for seed in seeds.values() if name in seed]
        if those:
            result["models"][name] = {
                column: interval_over_seeds([one[column] for one in those]) for column in COLUMNS
            } | {"seeds": len(those)}
    for other in ("fixed", "over", "under", "tuned_four", "single", "retrained"):
        those = [seed for seed in seeds.values() if other in seed]
        if not those:
            continue
        differences = [s["tuned"]["aggregate"] - s[other]["aggregate"] for s in those]
        result["differences"][other] = {
            "mean": interval_over_seeds(differences),
            "above": sum(d > 0 for d in differences),
            "level": sum(d == 0 for d in differences),
            "of": len(differences),
        }
    return result


def page(
    seeds: Mapping[int, Mapping],
    summary: Mapping,
    reproduced: Mapping[int, Mapping],
    paired: Mapping[int, Mapping] | None = None,
    hyperparameters: Sequence[str] = (),
) -> str:
    """The comparison, the paper's tables, and the pairs over seeds, as markdown."""
    names = list(summary["models"])
    lines = [
        f"## Who wins, on the test half ({count_of_seeds(len(seeds))})",
        "",
        "| model | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for name, row in summary["models"].items():
        few = "" if row["seeds"] == len(seeds) else f" ({count_of_seeds(row['seeds'])})"
        lines.append(
            f"| {name}{few} | " + " | ".join(with_half_width(row[c]) for c in COLUMNS) + " |"
        )
    lines += ["", "| tuned merge against | difference in Aggregate | above in |", "|---|---|---|"]
    for other, row in summary["differences"].items():
        level = f" (level in {row['level']})" if row["level"] else ""
        mean = with_half_width(row["mean"], sign=True)
        lines.append(f"| {other} | {mean} | {row['above']} of {row['of']}{level} |")
    lines += ["", "| seed | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for number, models in seeds.items():
        shown = [aggregate_with_interval(models[n]) if n in models else "" for n in names]
        lines.append(f"| {number} | {' | '.join(shown)} |")
    lines += ["", "Ranges: 95 % bootstrap intervals of one seed (documents resampled)."]
    lines += told_apart_table(seeds)
    lines += table_one(seeds, merged="fixed")
    lines += hyperparameters
    if reproduced:
        lines += table_two(reproduced)
    if paired:
        lines += _pairs_table(paired)
    return "\n".join(lines) + "\n"


def told_apart_table(seeds: Mapping[int, Mapping], order: Sequence[str] = ORDER) -> list[str]:
    """What tells each model from the retrained one."""
    names = [n for n in order if any(m.get(n, {}).get("distance") for m in seeds.values())]
    if not names:
        return []
    lines = ["", "## Told from the retrained model", ""]
    lines += [
        "Of the 12 cells, AUC and utility, those that differ from the retrained model's, and by "
        "how much (paired bootstrap over documents, Holm at .05).",
        "",
        "| seed | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for number, models in seeds.items():
        shown = []
        for name in names:
            found = told_apart(models[name]) if name in models else None
            count = "" if found is None else "none" if not found else str(len(found))
            few = [f"{cell} {models[name]['distance'][cell]['value']:+.2f}" for cell in found or ()]
            shown.append(f"{count}: {', '.join(few)}" if 0 < len(few) <= 4 else count)
        lines.append(f"| {number} | {' | '.join(shown)} |")
    return lines


def table_two(reproduced: Mapping[int, Mapping]) -> list[str]:
    from axolotl_unlearn.analysis.reproduce import as_paper, equal_retention_table

    count = len(reproduced)
    lines = ["", f"## Table 2 of the paper ({count_of_seeds(count)}, teacher-forced scores)", ""]
    lines += [
        "| merge | space | scale | Aggregate | Task Aggregate | AUC | paper's Aggregate |",
        "|---|---|---|---|---|---|---|",
    ]
    tables = [result["table_2"] for result in reproduced.values()]
    for rows in zip(*tables, strict=True):
        recipe = rows[0]["recipe"]
        method, space, scale = (recipe[k] for k in ("method", "space", "scale"))
        values = [
            with_half_width(interval_over_seeds([row["scores"][c] for row in rows]))
            for c in ("aggregate", "task_aggregate", "mia_auc")
        ]
        paper = f"{TABLE_2[method]:.3f}" if as_paper(Recipe.from_dict(recipe)) else ""
        lines.append(f"| {method} | {space} | {scale} | {' | '.join(values)} | {paper} |")
    lines += [
        "",
        f"## Figure 5: density of TIES (delta space, average; {count_of_seeds(count)})",
        "",
    ]
    lines += ["| density | Aggregate | AUC |", "|---|---|---|"]
    for rows in zip(*(result["figure_5"] for result in reproduced.values()), strict=True):
        values = [
            with_half_width(interval_over_seeds([row["scores"][c] for row in rows]))
            for c in ("aggregate", "mia_auc")
        ]
        lines.append(f"| {rows[0]['recipe']['density']:g} | {' | '.join(values)} |")
    kept = [r["equal_retention"] for r in reproduced.values() if "equal_retention" in r]
    if kept:
        lines += [
            "",
            f"## Methods at equal retention ({count_of_seeds(len(kept))}, teacher-forced)",
            "",
        ]
        lines += equal_retention_table(kept)
    cosines = [result["geometry"]["cosine"]["0,1"] for result in reproduced.values()]
    lines += ["", f"Cosine of the two changes: {', '.join(f'{c:.2f}' for c in cosines)}."]
    return lines


def _pairs_table(paired: Mapping[int, Mapping]) -> list[str]:
    """Aggregate (AUC) of each run and of each pair by each recipe, means over seeds."""
    results = list(paired.values())

    def shown(scores: Sequence[Mapping]) -> str:
        aggregate, auc = (
            statistics.fmean(one[c] for one in scores) for c in ("aggregate", "mia_auc")
        )
        return f"{aggregate:.3f} ({auc:.2f})"

    count = count_of_seeds(len(results))
    lines = ["", f"## Which pairs merge well ({count}, test half, teacher-forced)", ""]
    lines += ["Aggregate, AUC in brackets.", "", "| run | by itself |", "|---|---|"]
    for name in results[0]["runs"]:
        lines.append(f"| {name} | {shown([result['runs'][name] for result in results])} |")
    recipes = list(results[0]["pairs"][0]["merges"])
    lines += [
        "",
        "| pair | cosine of the changes | of the LoRA draws | opposite signs | "
        + " | ".join(recipes)
        + " |",
        "|---|---|---|---|" + "---|" * len(recipes),
    ]
    for rows in zip(*(result["pairs"] for result in results), strict=True):
        facts = [
            statistics.fmean(row[key] for row in rows)
            for key in ("cosine", "initialisation", "sign_conflict")
        ]
        merges = [shown([row["merges"][name] for row in rows]) for name in recipes]
        pair = " x ".join(rows[0]["pair"])
        lines.append(f"| {pair} | {' | '.join(f'{v:.2f}' for v in facts)} | {' | '.join(merges)} |")
    return lines


def aggregate_with_interval(model: Mapping) -> str:
    bounds = model.get("intervals", {}).get("aggregate")
    shown = f"{model['aggregate']:.3f}"
    return f"{shown} ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else shown


def page_real(
    seeds: Mapping[int, Mapping],
    reproduced: Mapping[int, Mapping],
    hyperparameters: Sequence[str] = (),
) -> str:
    """Tables 1 to 3 with intervals over seeds, and figure 5, as markdown."""
    lines = [
        f"## SmolLM2-135M and LUME ({len(seeds)} seeds of the forgetting runs)",
        "",
        "| model | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for name in REAL_ORDER:
        shown = []
        for column in COLUMNS:
            values = [models[name][column] for models in seeds.values()]
            # One model for all seeds: no spread to speak of.
            shared = name in ("original", "retrained")
            shown.append(
                f"{values[0]:.3f}" if shared else with_half_width(interval_over_seeds(values))
            )
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines += ["", "| seed | " + " | ".join(REAL_ORDER) + " |", "|---|" + "---|" * len(REAL_ORDER)]
    for seed, models in seeds.items():
        shown = [aggregate_with_interval(models[name]) for name in REAL_ORDER]
        lines.append(f"| {seed} | {' | '.join(shown)} |")
    lines += ["", "Ranges: 95 % bootstrap intervals of one seed (documents resampled)."]
    lines += told_apart_table(seeds, REAL_ORDER)
    lines += table_one(seeds)
    lines += hyperparameters
    lines += table_two(reproduced)
    return "\n".join(lines) + "\n"
