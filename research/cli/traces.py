"""``python -m research traces``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._options import ATTACKED, data_option, out_option, show
from research.cli._options import attack_options


@click.command("traces")
@click.argument("model")
@data_option("Folder with retain.jsonl, whose inputs are asked.")
@out_option("out/attacks", ATTACKED)
@attack_options
@click.option("--original", required=True, help="The model before unlearning.")
@click.option("--limit", default=200, show_default=True, help="So many prompts.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--batch-size", default=32, show_default=True)
def command(out: Path, **options: Any) -> None:
    """Tell by answers to unrelated prompts that a model was unlearned. Writes traces.json.

    \b
    python -m research traces out/merged --original out/memorised
    """
    from axolotl_unlearn.files import write_json
    from research.attacks.traces import sentence, traces_attack

    result = traces_attack(**options)
    path = write_json(out / "traces.json", result)
    show(sentence(result), f"Written: {path}")
