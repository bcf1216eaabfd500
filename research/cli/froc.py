"""``python -m research froc``."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import data_option


@click.command("froc")
@click.argument("models", nargs=-1, required=True)
@data_option("Folder with forget.jsonl and retain.jsonl.")
@click.option("--risk", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.05,
              show_default=True, help="Most that may be extracted of a forgotten document.")  # fmt: skip
@click.option(
    "--delta", default=0.05, show_default=True, help="Chance that one is called valid wrongly."
)
@click.option("--retrained", help="What this model says of a document is no risk.")
@click.option("--limit", type=int, help="So many rows of each side only.")
@click.option("--out", type=click.Path(path_type=Path), help="Also as JSON.")
def command(models, data_dir, risk, delta, retrained, limit, out) -> None:
    """Which of MODELS keep a stated risk (after FROC, arXiv 2512.13337), best retained first.

    \b
    python -m research froc out/demo/merged out/demo/over/merged out/demo/under/merged \\
        --retrained out/demo/retrained --data out/demo/data
    """
    import torch

    from axolotl_unlearn.attacks.target import limited, read_side
    from axolotl_unlearn.files import write_json
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from research.analysis.froc import chosen, measured

    sides = [limited(read_side(data_dir, side)[1], limit) for side in ("forget", "retain")]
    points = {}
    for spec in parse_models([*models, *([retrained] if retrained else [])]):
        model = load_model(spec, dtype=torch.float32, device="cpu")
        points[spec.name] = measured(model, load_tokenizer(spec), *sides)
        last = spec.name
    control = points.pop(last) if retrained else None
    found = chosen(points, risk, control, delta)
    for name, row in found.items():
        click.echo(
            f"{name:14} {'valid' if row['valid'] else 'not shown'}: risk {row['risk']:.3f} of "
            f"{row['documents']} documents, p {row['p']:.2g}; retained {row['kept']:.3f}; "
            f"FROC {row['froc']:.3f}"
        )
    if not any(row["valid"] for row in found.values()):
        click.echo(f"None is shown to keep a risk of {risk:g}.")
    if out:
        write_json(out, found)
