"""``python -m research membership``."""

from __future__ import annotations

from typing import Any

import click

from axolotl_unlearn.cli._options import ATTACKED, data_option, out_option, show
from axolotl_unlearn.errors import UnlearnError
from research.cli._options import attack_options


@click.command("membership")
@click.argument("models", nargs=-1)
@data_option("Folder with member.jsonl and nonmember.jsonl (and retain.jsonl).")
@out_option("out/attacks", ATTACKED)
@attack_options
@click.option("--attacks", help="Names with commas between, or all.  [default: see --list]")
@click.option("--limit", type=int, help="So many texts of each kind only.")
@click.option("--seed", default=0, show_default=True)
@click.option("--list", "listed", is_flag=True, help="Print the attacks and end.")
def command(models: tuple[str, ...], listed: bool, attacks: str | None, **options: Any) -> None:
    """Tell members from texts never seen, by every registered attack, corrected for their number.

    Writes membership.json, and membership-MODEL.json for verdict and report of results in the same
    folder. An attack that cannot be made is named as not measured; then no model passes.

    \b
    python -m research membership out/merged --attacks loss,g_drift,icp --out out/eval
    """
    from research.attacks import run

    if listed:
        show(*map(run.described, run.ordered()))
        return
    if not models:
        raise UnlearnError("name at least one model to attack: a folder, or NAME=FOLDER.")
    result, path = run.attack_models(models, run.named(attacks), **options)
    show(*run.said(result), f"Written: {path}")
