"""``python -m research guard-it``."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import data_option


@click.command("guard-it")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@data_option("Folder with forget.jsonl and retain.jsonl.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--layer", type=int, required=True, help="Whose output is turned, from 0.")
@click.option("--amount", default=-0.3, show_default=True, help="Of the vector that is subtracted.")
@click.option("--seed", default=0, show_default=True)
def command(model, data_dir, out, layer, amount, seed) -> None:
    """GUARD-IT (arXiv 2605.12765): turn hidden states of forget prompts at inference.

    Writes the model with its interventions, for `from_pretrained(..., trust_remote_code=True)`.
    The weights are unchanged: whoever has them has all that was to be forgotten.

    \b
    python -m research guard-it out/demo/memorised --data out/demo/data --layer 0 --out out/guard-it
    """
    import torch

    from axolotl_unlearn.attacks.target import read_side
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from research.inference.folder import write
    from research.inference.guard_it import guard_it

    (spec,) = parse_models([str(model)])
    loaded = load_model(spec, dtype=torch.float32, device="cpu")
    prompts = [[r.input for r in read_side(data_dir, side)[1]] for side in ("forget", "retain")]
    tensors = guard_it(
        loaded, load_tokenizer(spec), *prompts, layer=layer, amount=amount, seed=seed
    )
    click.echo(f"Written: {write(model, tensors, out)}")
