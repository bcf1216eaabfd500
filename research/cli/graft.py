"""``python -m research graft``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("graft")
@click.option("--base", required=True, help="The model that unlearning began from.")
@click.option("--unlearned", required=True, help="What it ended in (full weights).")
@click.option("--next", "later", required=True, help="The next version of the base.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--scale", default=1.0, show_default=True)
@click.option("--pack", is_flag=True, help="Compress the update first (SkillPack).")
@click.option("--energy", default=0.95, show_default=True, help="Of MLP updates that stays.")
@click.option("--rank", default=16, show_default=True, help="Of attention updates.")
@click.option("--share", default=0.5, show_default=True, help="Of embedding updates that stays.")
def command(base, unlearned, later, out, scale, pack, energy, rank, share) -> None:
    """Carry an unlearning update over to the next version of its base (arXiv 2503.20110, 2505.18502).

    Nothing promises that the next version forgets: evaluate and attack it.

    \b
    python -m research graft --base out/demo/memorised --unlearned out/demo/merged --next out/v2 \\
        --out out/v2-unlearned
    """
    import torch

    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from research.merging.graft import carried, packed, updates

    specs = parse_models([f"base={base}", f"unlearned={unlearned}", f"next={later}"])
    models = [load_model(spec, dtype=torch.float32, device="cpu") for spec in specs]
    first, last, new = (model.state_dict() for model in models)
    changes = updates(first, last)
    if pack:
        changes, size = packed(changes, share=share, rank=rank, energy=energy)
        click.echo(f"The pack has {size:.1%} of the update's bytes.")
    models[2].load_state_dict(carried(new, changes, scale))
    models[2].save_pretrained(out)
    load_tokenizer(specs[2]).save_pretrained(out)
    click.echo(f"Written: {out}")
