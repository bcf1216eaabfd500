"""``python -m research depth``: is the knowledge gone, or only unspoken?"""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._options import ATTACKED, data_option, out_option


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--original", required=True, help="The model before unlearning.")
@click.option("--retrained", required=True, help="A model that never saw the forget set.")
@data_option("Folder with forget.jsonl.")
@out_option("out/depth", ATTACKED)
@click.option("--limit", type=int, help="So many rows only.")
@click.option("--batch-size", default=16, show_default=True)
@click.option("--tau", default=0.05, show_default=True, help="Gap of a layer that counts, in nats.")
@click.option("--device", help="Where models run.  [default: cuda if there is one]")
def command(
    models: tuple[str, ...],
    original: str,
    retrained: str,
    data_dir: Path,
    out: Path,
    limit: int | None,
    batch_size: int,
    tau: float,
    device: str | None,
) -> None:
    """Unlearning Depth Score (arXiv 2605.24614) by activation patching, layer by layer.

    1: erased as in the retrained model; 0: intact behind another output. Two models are in memory
    at a time.

    \b
    python -m research depth out/demo/merged --original out/demo/memorised \\
        --retrained out/demo/retrained
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from axolotl_unlearn.attacks.target import limited, read_side
    from axolotl_unlearn.files import write_json
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from research.probes.depth import depth_report, encode_records, patching_drops

    records = limited(read_side(data_dir, "forget")[1], limit)
    before, reference, *candidates = parse_models([original, retrained, *models])
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = load_model(before, dtype=torch.float32, device=device)
    encoded = encode_records(load_tokenizer(before), records)
    drops = {}
    with Progress(transient=True) as progress:
        for spec in (reference, *candidates):
            task = progress.add_task(f"{spec.name}: patching", total=len(encoded))
            source = load_model(spec, dtype=torch.float32, device=device)
            drops[spec.name] = patching_drops(
                target,
                source,
                encoded,
                batch_size=batch_size,
                on_batch=lambda n, task=task: progress.advance(task, n),
            )
    first = drops.pop(reference.name)
    report, curves = depth_report(
        records, first, drops, tau=tau, retrained_name=f"{reference.name} (never saw it)"
    )
    report |= {"data_dir": str(data_dir), "original": before.name, "retrained": reference.name}
    write_json(out / "uds.json", report)
    write_json(out / "depth.json", curves)
    console = Console()
    for figures in report["models"].values():
        console.print(figures["sentence"], markup=False, highlight=False)
    console.print(f"Written: {out / 'uds.json'}", markup=False, highlight=False)
