"""``python -m research g-effect``."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import data_option


@click.command("g-effect")
@click.argument("model")
@data_option("Folder with forget.jsonl and retain.jsonl.")
@click.option("--original", required=True, help="The model before unlearning: the reference.")
@click.option("--objectives", default="ga,npo,wga,tnpo", show_default=True)
@click.option("--limit", default=64, show_default=True, help="So many rows of each side.")
@click.option("--out", type=click.Path(path_type=Path), help="Also as JSON.")
def command(model, data_dir, original, objectives, limit, out) -> None:
    """G-effect (arXiv 2502.19301): what a step on each objective does to both sides, by layers.

    retain above 0: the step helps what is kept; forget below 0: it takes away what should go.

    \b
    python -m research g-effect out/demo/memorised --original out/demo/memorised --data out/demo/data
    """
    import torch

    from axolotl_unlearn.attacks.target import limited, read_side
    from axolotl_unlearn.errors import UnlearnError
    from axolotl_unlearn.files import write_json
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from axolotl_unlearn.objectives import OBJECTIVES as known
    from research.probes.gradient_effect import effects
    from research.probes.rows import labelled

    names = [name.strip() for name in objectives.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UnlearnError(f"--objectives: there is no objective {unknown[0]!r}.")
    spec, before = parse_models([f"model={model}", f"original={original}"])
    tokenizer = load_tokenizer(spec)
    sides = [limited(read_side(data_dir, s)[1], limit) for s in ("forget", "retain")]
    own, reference = (load_model(s, dtype=torch.float32, device="cpu") for s in (spec, before))
    found = effects(
        own, reference, [known[name] for name in names], *(labelled(tokenizer, s) for s in sides)
    )
    for name, blocks in found.items():
        for block, row in blocks.items():
            click.echo(
                f"{name:10} {block:10} forget {row['forget']:+.3e} retain {row['retain']:+.3e}"
            )
    if out:
        write_json(out, found)
