"""``python -m research mrp``."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import data_option


@click.command("mrp")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@data_option("Folder with forget.jsonl and retain.jsonl.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--layers", required=True, help="Numbers with commas between, from 0.")
@click.option("--merge", is_flag=True, help="Project what the layers write, and merge it.")
@click.option("--directions", default=2, show_default=True, help="A layer (or linear module).")
@click.option("--steps", default=200, show_default=True)
@click.option("--lr", default=0.05, show_default=True)
@click.option("--seed", default=0, show_default=True)
def command(model, data_dir, out, layers, merge, directions, steps, lr, seed) -> None:
    """MRP (arXiv 2508.15449): learn a few directions of hidden states and project them out.

    Without --merge the model needs `trust_remote_code=True` and its weights are unchanged.

    \b
    python -m research mrp out/demo/memorised --data out/demo/data --layers 0,1 --merge --out out/mrp
    """
    import torch

    from axolotl_unlearn.attacks.target import read_side
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from research.inference import folder, mrp
    from research.probes.rows import labelled

    (spec,) = parse_models([str(model)])
    loaded = load_model(spec, dtype=torch.float32, device="cpu")
    tokenizer = load_tokenizer(spec)
    rows = [labelled(tokenizer, read_side(data_dir, side)[1]) for side in ("forget", "retain")]
    numbers = [int(number) for number in layers.split(",")]
    paths = mrp.places(loaded, numbers, "written" if merge else "block")
    tensors = mrp.mrp(loaded, *rows, paths, k=directions, steps=steps, rate=lr, seed=seed)
    if merge:
        folder.merge(loaded, tensors)
        loaded.save_pretrained(out)
        tokenizer.save_pretrained(out)
    else:
        folder.write(model, tensors, out)
    click.echo(f"Written: {out}")
