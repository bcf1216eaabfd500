"""`python -m research analyse`: layers and the price of forgetting, without training anything."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.errors import UnlearnError

_base = click.option("--base", type=click.Path(path_type=Path), required=True,
                     help="The model that all started from.")  # fmt: skip
_parents = click.argument("parents", nargs=-1, required=True)
_data = click.option("--data", type=click.Path(path_type=Path), required=True,
                     help="Folder with the rows to score, as for eval.")  # fmt: skip
_out = click.option("--out", type=click.Path(path_type=Path), help="Also write all of it as JSON.")
_limit = click.option("--limit", type=int, help="Score the first so many rows only.")
SCORES = ("task_aggregate", "mia_auc", "utility", "aggregate")


@click.group()
def command() -> None:
    """Look at the changes of unlearning runs: layers, price of forgetting."""


@command.command()
@_base
@click.option("--parent", required=True, help="The unlearned adapter or model.")
@_data
@_out
@_limit
def layers(base, parent, data, out, limit) -> None:
    """Which layers carry the forgetting, each alone in the original; and the best of them (CRU)."""
    from research.merging.layers import choose_layers

    lab, score = _lab(base, [parent], data, limit)
    found = choose_layers(lab, lab.resident_model(), score)
    rows = [(row["layer"], *(row["alone"].get(name) for name in SCORES)) for row in found["rows"]]
    click.echo(_table(("alone", *SCORES), rows))
    steps = [(str(p["k"]), *(p["scores"].get(name) for name in SCORES)) for p in found["path"]]
    click.echo("\n" + _table(("best k", *SCORES), steps))
    click.echo(f"\nBest aggregate with layers: {', '.join(found['layers']) or 'none'}")
    _write(out, found)


@command.command()
@_base
@_parents
@_data
@click.option("--metric", default="utility", show_default=True, help="What must be kept.")
@click.option("--keep", default=0.95, show_default=True, help="Share of the base's, (0, 1].")
@_out
@_limit
def retention(base, parents, data, metric, keep, out, limit) -> None:
    """Models at equal retention: each mixed with the base until it keeps enough (2406.09179)."""
    from research.merging.calibrate import calibrate

    lab, score = _lab(base, parents, data, limit)
    model, options = lab.resident_model(), {"metric": metric, "keep": keep}
    found = [
        {"name": str(parent), **calibrate(lab, model, score, number, **options)}
        for number, parent in enumerate(parents)
    ]
    rows = [
        (row["name"], row["amount"], *(row["scores"].get(name) for name in SCORES)) for row in found
    ]
    click.echo(_table(("model", "share", *SCORES), rows))
    _write(out, found)


def _lab(base, parents, data, limit):
    """The models, and a function from model to teacher-forced scores."""
    from transformers import AutoTokenizer

    from axolotl_unlearn.evaluation.sets import load_sets
    from research.merging.lab import Lab
    from research.merging.scores import proxy

    lab = Lab(base, parents)
    sets = load_sets(data).limited(limit)
    if not sets.rows:
        raise UnlearnError(f"{data} holds no rows to score.")
    return lab, proxy(sets, AutoTokenizer.from_pretrained(lab.path))


def _table(head, rows) -> str:
    """Names and numbers in columns."""
    numbers = [["n/a" if v is None else f"{v:.3f}" for v in row[1:]] for row in rows]
    first = max(len(head[0]), *(len(row[0]) for row in rows))
    lines = [head[0].ljust(first) + "".join(f"{name:>16}" for name in head[1:])]
    for row, cells in zip(rows, numbers, strict=True):
        lines.append(row[0].ljust(first) + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _write(out: Path | None, result) -> None:
    if out is not None:
        from axolotl_unlearn.files import write_json

        write_json(out, result)
        click.echo(f"Written to {out}")
