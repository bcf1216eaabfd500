"""`python -m research tune-merge`."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli.merge import PathList
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.recipe import METHODS


@click.command(
    epilog="Example: python -m research tune-merge --parents out/over out/under --base out/memorised "
    "--data out/demo/data --out out/tuned --trials 40 --seconds 600"
)
@click.option(
    "--parents",
    cls=PathList,
    help="Adapters or full models, or one alone; negate:PATH turns round.",
)
@click.option("--base", type=click.Path(path_type=Path), help="The model that all started from.")
@click.option("--data", type=click.Path(path_type=Path), default="out/demo/data", show_default=True,
              help="Folder with validation/ and test/.")  # fmt: skip
@click.option("--validation", type=click.Path(path_type=Path), help="Instead of DATA/validation.")
@click.option("--test", type=click.Path(path_type=Path), help="Instead of DATA/test.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the search and its result.")
@click.option("--trials", default=40, show_default=True, help="Candidates in all.")
@click.option(
    "--finalists",
    default=3,
    show_default=True,
    help="Generated on validation, beside the fixed recipe and each parent by itself.",
)
@click.option("--seconds", type=float, help="Time budget of the search.")
@click.option("--patience", type=int, help="Stop after so many candidates without a better one.")
@click.option("--seed", default=0, show_default=True, help="Of the search and of random drops.")
@click.option("--methods", cls=PathList, help=f"Of {', '.join(METHODS)}  [default: all]")
@click.option("--spaces", cls=PathList, help="delta, factors  [default: all that fit the parents]")
@click.option("--scales", cls=PathList, help="average, sum  [default: both; sum for one parent]")
@click.option("--objective", default="aggregate", show_default=True,
              help="Scores with weights: task_aggregate=1,mia_score=2")  # fmt: skip
@click.option("--gate", default=0.75, show_default=True, help="Least share of the base's utility.")
@click.option("--max-new-tokens", default=256, show_default=True, help="Of the finalists' answers.")
@click.option("--batch-size", default=64, show_default=True, help="Of generation.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda")
@click.option("--store", type=click.Path(path_type=Path),
              help="Folder of scores that searches share  [default: OUT/store]")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the result of another search in --out.")
@click.option("--force", is_flag=True, help="Merge despite another base or LoRA initialisation.")
def command(parents, base, data, out, objective, gate, methods, spaces, scales, **options) -> None:
    """Find the best merge on validation data, write it, and report it on test data.

    One parent is searched too, over the scale of its task vector. Run again with the same options
    to go on after an interruption.
    """
    from rich.progress import Progress

    from research.merging.tune import Objective, label, tune

    missing = [
        name
        for name, value in (("--parents", parents), ("--base", base), ("--out", out))
        if not value
    ]
    if missing:
        raise UnlearnError(
            f"tune-merge needs {' and '.join(missing)}: see `python -m research tune-merge --help`."
        )
    with Progress(transient=True) as bar:
        task = bar.add_task("searching", total=options["trials"])
        result = tune(
            parents,
            base,
            data,
            out,
            objective=Objective.parse(objective, gate),
            methods=methods or METHODS,
            spaces=spaces or None,
            scales=scales or None,
            log=lambda line: bar.console.print(line, highlight=False, soft_wrap=True),
            progress=lambda done, total, text: bar.update(
                task, completed=done, total=total, description=text
            ),
            **options,
        )
    from axolotl_unlearn.merging.recipe import Recipe

    click.echo(table(result))
    click.echo(verdict(result))
    click.echo(f"Best merge: {label(Recipe.from_dict(result['winner']['recipe']))}")
    click.echo(f"Written to {out}/best; all candidates in {out}/tune.json, plot {out}/pareto.png")


def verdict(result: dict) -> str:
    """Whether the winner is told from the fixed recipe on the test half, in words."""
    from axolotl_unlearn.evaluation.compare import sentence
    from axolotl_unlearn.metrics.intervals import Difference
    from research.merging.tune import FIXED

    fixed = FIXED.for_parents(len(result["parents"]))
    if result["winner"]["recipe"] == fixed.to_dict():
        return "The winner is the fixed recipe."
    gaps = result["test_differences"].get("fixed")
    if not gaps:
        return "Nobody can say how sure this is: members, non-members or a finite loss are missing."
    differences = {metric: Difference(**gap) for metric, gap in gaps.items()}
    return f"Test half: {sentence('the winner', 'the fixed recipe', differences)}"


def table(result: dict) -> str:
    """Test-half scores of original, parents, fixed recipe and winner as plain text."""
    names = ("task_aggregate", "mia_auc", "mia_score", "utility", "aggregate")
    lines = ["test half".ljust(12) + "".join(name.rjust(16) for name in names)]
    for model, scores in result["test"].items():
        values = [scores.get(name) for name in names]
        cells = ["n/a" if value is None else f"{value:.3f}" for value in values]
        lines.append(model.ljust(12) + "".join(cell.rjust(16) for cell in cells))
    return "\n".join(lines)
