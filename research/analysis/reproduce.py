"""Table 2 and figures 2 to 5 of arXiv 2503.21088 from two finished runs of our own.

    python -m research.analysis.reproduce --base out/demo/memorised --over out/demo/over \\
        --under out/demo/under --data out/demo/data --out out/reproduce

Writes results.json, reproduction.md and one PNG a figure. Nothing is chosen here, so all rows of
the data folder are scored; figures that need checkpoints are left out, by name, without them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import replacing, write, write_json
from axolotl_unlearn.merging.recipe import Recipe
from axolotl_unlearn.store import Store
from research.analysis import figures
from research.analysis.geometry import task_vectors, update_angles
from research.analysis.paper import COLUMNS, TABLE_2
from research.analysis.seeds import (
    count_of_seeds,
    interval_over_seeds,
    markdown,
    with_half_width,
)
from research.analysis.sweep import densities, path, sweep, table_two_recipes
from research.analysis.trajectory import checkpoints, losses, trajectory
from research.merging.calibrate import equal_retention
from research.merging.lab import Lab
from research.merging.remembered import remembered

PEFT_SCALE = {"linear": "sum", "dare_linear": "sum", "magnitude_prune": "sum"}
KEEP = 0.9  # methods at equal retention (UWC, arXiv 2406.09179)


def reproduce(
    base: str | Path,
    over: str | Path,
    under: str | Path,
    data_dir: str | Path,
    out: str | Path,
    *,
    generate: bool = False,
    short: bool = False,
    limit: int | None = None,
    seed: int = 0,
    max_new_tokens: int = 256,
    device: str = "cpu",
    store: str | Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict:
    """Run everything that the two runs allow; returns what results.json holds.

    Args:
        generate: free generation for every score (the official definition) instead of the
            teacher-forced one, about ten times as long.
        short: the rows of table 2 and the densities of figure 5 that the paper has, and neither
            path nor equal retention.
        limit: score the first so many rows, documents and questions only.
        store: folder of scores by the content of weights and data; default ``out/store``.

    Called again after an interruption it goes on: nothing is scored twice.
    """
    from transformers import AutoTokenizer

    from axolotl_unlearn.evaluation.sets import load_sets
    from research.merging.scores import Scorer

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    lab = Lab(base, [over, under])
    tokenizer = AutoTokenizer.from_pretrained(lab.base.path)
    sets = load_sets(data_dir).limited(limit)
    scorer = Scorer(sets, tokenizer, max_new_tokens=max_new_tokens)
    score = remembered(
        scorer.full if generate else scorer.proxy,
        Store(store or out / "store"),
        *(sets.digest, generate, max_new_tokens if generate else None),
    )
    model = lab.resident_model(device)
    recipe = Recipe(seed=seed)
    result: dict = {
        "scores": "generated" if generate else "teacher-forced",
        "left_out": [],
        "parents": {
            name: score(lab.load(model, source))
            for name, source in (("original", None), ("over", 0), ("under", 1))
        },
    }
    log("table 2")
    grid = table_two_recipes(recipe, factors=lab.factors_possible)
    result["table_2"] = sweep(lab, model, score, filter(as_paper, grid) if short else grid, log=log)
    log("figure 5")
    dense = densities(recipe, (0.6, 0.8, 1.0)) if short else densities(recipe)
    result["figure_5"] = sweep(lab, model, score, dense, log=log)
    drawn = {"figure_5_density": figures.density_figure(result["figure_5"])}
    if not short:
        log("path")
        result["path"] = path(lab, model, score, [0, recipe, 1], names=["over", "TIES", "under"])
        drawn["path"] = figures.path_figure(result["path"])
        log("equal retention")
        kept = "retain" if result["parents"]["original"]["utility"] is None else "utility"
        targets = {"over": 0, "under": 1, "TIES": recipe}
        options = {"metric": kept, "keep": KEEP, "tolerance": 0.05, "slack": 0.02}
        rows = equal_retention(lab, model, score, targets, **options)
        result["equal_retention"] = {"metric": kept, "keep": KEEP, "rows": rows}
    result["geometry"] = task_vectors(base, [over, under])
    drawn["layers"] = figures.layer_figure(result["geometry"])
    for run, name in ((over, "over"), (under, "under")):
        _run_figures(base, run, name, score, model, result, drawn, log)
    curves = {name: result["figure_3"][name] for name in result.get("figure_3", {})}
    if curves:
        drawn["figure_3_losses"] = figures.loss_figure(curves)
    for name, figure in drawn.items():
        with replacing(out / f"{name}.png") as draft:
            figure.savefig(draft, dpi=130, format="png")
    result["figures"] = sorted(drawn)
    write_json(out / "results.json", result)
    write(out / "reproduction.md", page(result))
    return result


def as_paper(recipe: Recipe) -> bool:
    """Whether a merge is one of the paper's table 2: on factors, at PEFT's scale."""
    scale = PEFT_SCALE.get(recipe.method, "average")
    return recipe.space == "factors" and recipe.scale == scale


def _run_figures(base, run, name, score, model, result, drawn, log) -> None:
    """Figures 2 to 4 of one run, as far as it kept checkpoints and logs."""
    try:
        result.setdefault("figure_3", {})[name] = losses(run)
    except UnlearnError as error:
        result["left_out"].append(f"figure 3, {name}: {error}")
    try:
        steps = checkpoints(run)
        log(f"figures 2 and 4, {name}")
        rows = trajectory(base, run, score, name=name, model=model)
        result.setdefault("figure_2", []).extend(rows)
        drawn[f"figure_2_{name}"] = figures.trajectory_figure(rows)
        angles = update_angles(base, steps)
        result.setdefault("figure_4", {})[name] = angles
        drawn[f"figure_4_{name}"] = figures.angle_figure(angles)
    except UnlearnError as error:
        result["left_out"].append(f"figures 2 and 4, {name}: {error}")


def page(result: Mapping) -> str:
    """The tables beside the paper's values, as markdown."""
    return "\n".join(
        [
            "# Table 2 and figures 2 to 5 from our own runs\n",
            "Our model, data and n differ from the paper's OLMo-7B: patterns can be compared, "
            "values cannot.\n",
            *paper_parts([result]),
            *(f"![{name}]({name}.png)" for name in result["figures"]),
            *(f"\nLeft out: {line}" for line in result["left_out"]),
            "",
        ]
    )


def paper_parts(results: Sequence[Mapping]) -> list[str]:
    """Table 2, figure 5, equal retention and geometry of one or more seeds, as markdown."""
    count = f"{count_of_seeds(len(results))}, {results[0].get('scores', 'teacher-forced')} scores"
    parents = results[0].get("parents", {})
    merges = [[name, "", "", *_means([r["parents"][name] for r in results]), ""]
              for name in parents]  # fmt: skip
    for rows in zip(*(result["table_2"] for result in results), strict=True):
        recipe = rows[0]["recipe"]
        paper = f"{TABLE_2[recipe['method']]:.3f}" if as_paper(Recipe.from_dict(recipe)) else ""
        facts = [recipe[key] for key in ("method", "space", "scale")]
        merges.append([*facts, *_means([row["scores"] for row in rows]), paper])
    densities = [
        [f"{rows[0]['recipe']['density']:g}", *_means([r["scores"] for r in rows])]
        for rows in zip(*(result["figure_5"] for result in results), strict=True)
    ]
    merge = ["merge", "space", "scale", *COLUMNS, "paper's aggregate"]
    parts = [
        f"## Table 2 of the paper ({count})\n",
        markdown({"columns": merge, "rows": merges}),
        f"## Figure 5: density of TIES (delta space, average; {count})\n",
        markdown({"columns": ["density", *COLUMNS], "rows": densities}),
    ]
    kept = [result["equal_retention"] for result in results if "equal_retention" in result]
    if kept:
        mixed = []
        for rows in zip(*(each["rows"] for each in kept), strict=True):
            amount = f"{statistics.fmean(row['amount'] for row in rows):.2f}"
            mixed.append([rows[0]["name"], amount, *_means([r["scores"] for r in rows])])
        parts += [
            f"## Methods at equal retention ({count})\n",
            f"Mixed with the original until {kept[0]['metric']} is {kept[0]['keep']:.0%} of its "
            "own (`amount`: share of the unlearned model, 1.00 where it keeps as much itself).\n",
            markdown({"columns": ["model", "amount", *COLUMNS], "rows": mixed}),
        ]
    cosines = [result["geometry"]["cosine"]["0,1"] for result in results]
    shown = ", ".join("n/a" if cosine is None else f"{cosine:.2f}" for cosine in cosines)
    return [*parts, f"Cosine of the changes of over and under: {shown}.\n"]


def _means(scores: Sequence[Mapping]) -> list[str]:
    """Means over seeds with their intervals; n/a where a seed lacks the score."""
    values = [[one.get(name) for one in scores] for name in COLUMNS]
    return [
        "n/a" if None in several else with_half_width(interval_over_seeds(several))
        for several in values
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("base", "over", "under", "data", "out"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--generate", action="store_true", help="score by free generation")
    parser.add_argument("--short", action="store_true", help="the paper's merges only")
    parser.add_argument("--limit", type=int, help="the first so many rows only")
    parser.add_argument("--seed", type=int, default=0, help="of the random drops")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--store", type=Path, help="scores by content [OUT/store]")
    given = parser.parse_args(arguments)
    try:
        reproduce(
            given.base,
            given.over,
            given.under,
            given.data,
            given.out,
            generate=given.generate,
            short=given.short,
            limit=given.limit,
            seed=given.seed,
            device=given.device,
            store=given.store,
            log=lambda line: print(line, flush=True),
        )
    except UnlearnError as error:
        parser.exit(2, f"Error: {error}\n")
    print(given.out / "reproduction.md")


if __name__ == "__main__":
    main()
