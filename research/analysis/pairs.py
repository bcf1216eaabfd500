"""Which pairs of runs merge well: the same recipes on every pair, and how the pair lies.

    python -m research.analysis.pairs --base out/demo/memorised --runs over=out/demo/over \\
        under=out/demo/under --pairs over+under --data out/demo/data --out out/pairs

Nothing is chosen here, so all rows of the data folder are scored, teacher-forced. Factor merges
of different LoRA draws are made too (they are refused elsewhere): that is one of the questions.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json
from axolotl_unlearn.merging.recipe import Recipe
from research.analysis.geometry import task_vectors
from research.analysis.sweep import sweep
from research.merging.lab import Lab, Score

#: Name -> recipe at equal weights.
RECIPES = {
    "TIES .8": Recipe(),
    "mean": Recipe(method="linear"),
    "sum x .75": Recipe(method="linear", scale="sum", weights=(0.75, 0.75)),
    "factors: TIES .8": Recipe(space="factors"),
    "factors: mean": Recipe(method="linear", space="factors"),
}


def compare_pairs(
    base: str | Path,
    runs: Mapping[str, str | Path],
    pairs: Sequence[tuple[str, str]],
    score: Score,
    *,
    log: Callable[[str], None] = lambda line: None,
) -> dict:
    """Scores of each run by itself and of each pair merged by each of `RECIPES`.

    Args:
        runs: name -> adapter of the same base, rank and modules.
        score: from a model to scores, for example `merging.scores.Scorer(...).proxy`.

    Returns:
        ``{"runs": {name: scores}, "pairs": [{"pair": [a, b], "cosine", "sign_conflict", "norm",
        "initialisation": mean cosine of the A factors, "merges": {recipe: scores}}]}``.

    Raises:
        UnlearnError: A pair names an unknown run, or the runs do not fit together.
    """
    for name in itertools.chain.from_iterable(pairs):
        if name not in runs:
            raise UnlearnError(f"the pair names {name!r}, which is none of {', '.join(runs)}.")
    result: dict = {"runs": {}, "pairs": []}
    model = None
    for name, where in runs.items():
        lab = Lab(base, [where])
        model = model if model is not None else lab.resident_model()
        result["runs"][name] = dict(score(lab.load(model, 0)))
        lab.load(model, None)
        log(name)
    for first, second in pairs:  # every name is a run, so there is a model
        lab = Lab(base, [runs[first], runs[second]], force=True)
        geometry = task_vectors(base, [runs[first], runs[second]])
        cosines = lab.initialisation_cosines()
        rows = sweep(lab, model, score, RECIPES.values())
        lab.load(model, None)
        result["pairs"].append(
            {
                "pair": [first, second],
                "cosine": geometry["cosine"]["0,1"],
                "sign_conflict": geometry["sign_conflict"],
                "norm": geometry["norm"],
                "initialisation": sum(cosines) / len(cosines) if cosines else None,
                "merges": {name: row["scores"] for name, row in zip(RECIPES, rows, strict=True)},
            }
        )
        log(f"{first} x {second}")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    from transformers import AutoTokenizer

    from axolotl_unlearn.evaluation.sets import load_sets
    from research.merging.scores import Scorer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("base", "data", "out"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--runs", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--pairs", nargs="+", metavar="A+B", help="[all pairs]")
    given = parser.parse_args(arguments)
    try:
        runs = dict(_named(text) for text in given.runs)
        pairs = [_pair(text) for text in given.pairs or ()]
        scorer = Scorer(load_sets(given.data), AutoTokenizer.from_pretrained(given.base))
        result = compare_pairs(
            given.base,
            runs,
            pairs or list(itertools.combinations(runs, 2)),
            scorer.proxy,
            log=lambda line: print(line, flush=True),
        )
    except UnlearnError as error:
        parser.exit(2, f"Error: {error}\n")
    print(write_json(given.out / "pairs.json", result))


def _named(text: str) -> tuple[str, str]:
    name, sign, folder = text.partition("=")
    if not (name and sign and folder):
        raise UnlearnError(f"--runs {text!r}: write NAME=FOLDER, as in over=out/demo/over.")
    return name, folder


def _pair(text: str) -> tuple[str, str]:
    parts = text.split("+")
    if len(parts) != 2:
        raise UnlearnError(f"--pairs {text!r}: write two names of --runs, as in over+under.")
    return parts[0], parts[1]


if __name__ == "__main__":
    main()
