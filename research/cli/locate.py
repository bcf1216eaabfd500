"""``python -m research locate out/memorised --data D``"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("locate")
@click.argument("model")
@click.option(
    "--data", "data_dir", type=click.Path(path_type=Path), default=Path("out/demo/data"),
    show_default=True, help="Folder with forget.jsonl.",
)  # fmt: skip
@click.option("--limit", default=30, show_default=True, help="So many rows only.")
@click.option(
    "--window", type=click.IntRange(1), default=1, show_default=True, help="Layers at once."
)
@click.option("--noise", default=3.0, show_default=True, help="In deviations of the embeddings.")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=0.5, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--device", help="Where it runs.  [default: cuda if there is one]")
def command(
    model: str,
    data_dir: Path,
    limit: int,
    window: int,
    noise: float,
    share: float,
    seed: int,
    device: str | None,
) -> None:
    """Propose which layers to train: those that carry the answers to forget rows.

    Causal tracing: noise on the prompt, then the clean outputs of one kind of module back in one
    layer (or a window). What the answer regains is that layer's effect, in nats. It tells where the
    answers pass through, not whether training there forgets best: compare on validation rows.

    \b
    python -m research locate out/memorised --data out/demo/data
    """
    import torch
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from axolotl_unlearn.attacks.target import limited, read_side
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from research.probes.depth import encode_records
    from research.probes.locate import indirect_effects, linear_names, proposed

    (spec,) = parse_models([model])
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    records = [record for record in read_side(data_dir, "forget")[1] if record.input]
    encoded = encode_records(load_tokenizer(spec), limited(records, limit))
    loaded = load_model(spec, dtype=torch.float32, device=device)
    effects = indirect_effects(loaded, encoded, noise=noise, window=window, seed=seed)
    grid = Table("layer", *effects, box=box.SIMPLE_HEAD, title=f"{spec.name}, {len(encoded)} rows")
    for number, row in enumerate(zip(*effects.values(), strict=True)):
        grid.add_row(str(number), *(f"{value:+.3f}" for value in row))
    Console().print(grid)
    for kind, values in effects.items():
        found = proposed(values, share)
        if found is None:
            click.echo(f"{kind}: no layer brings the answers back.")
            continue
        numbers = list(range(found.first, found.last + 1))
        click.echo(
            f"{kind}: layers {found.first} to {found.last} hold {found.share:.0%} of its effect:\n"
            f"  peft_layers_to_transform: {numbers}\n"
            f"  lora_target_modules: [{', '.join(linear_names(loaded, kind))}]"
        )
