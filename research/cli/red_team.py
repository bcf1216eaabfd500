"""``python -m research red-team``."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import data_option


@click.command("red-team")
@click.argument("models", nargs=-1, required=True)
@data_option("Folder with forget.jsonl.")
@click.option("--limit", default=64, show_default=True, help="So many rows are asked.")
@click.option("--rows", default=20, show_default=True, help="Rows to relearn from.")
@click.option("--lr", default=1e-4, show_default=True, help="Of relearning.")
@click.option("--out", type=click.Path(path_type=Path), help="Also as JSON.")
def command(models, data_dir, limit, rows, lr, out) -> None:
    """How metrics of forgetting correlate over MODELS before and after attacks (UWC, 2406.09179).

    \b
    python -m research red-team out/demo/memorised out/demo/over/merged out/demo/under/merged \\
        out/demo/merged --data out/demo/data --lr 1e-3
    """
    import torch

    from axolotl_unlearn.attacks.relearn import split_forget
    from axolotl_unlearn.attacks.target import limited, read_side
    from axolotl_unlearn.files import write_json
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from research.probes.red_team import METRICS, attacked, correlations

    others, asked = split_forget(read_side(data_dir, "forget")[1], rows, 0)
    asked = limited(asked, limit)
    found = {}
    for spec in parse_models(list(models)):

        def load(spec=spec):
            return load_model(spec, dtype=torch.float32, device="cpu"), load_tokenizer(spec)

        found[spec.name] = attacked(load, asked, others, lr)
        for attack, row in found[spec.name].items():
            figures = "  ".join(f"{name} {value:.3f}" for name, value in row.items())
            click.echo(f"{spec.name:12} {attack:10} {figures}")
    told = correlations(found)
    for attack, row in told.items():
        said = (
            f"{name} {'n/a' if row[name] is None else format(row[name], '.2f')}" for name in METRICS
        )
        click.echo(f"r  {attack:10} {'  '.join(said)}")
    if out:
        write_json(out, {"models": found, "pearson": told})
