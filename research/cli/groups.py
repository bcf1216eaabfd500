"""``python -m research groups``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._options import ATTACKED, data_option, out_option, show
from research.cli._options import attack_options


@click.command("groups")
@click.argument("model")
@data_option("Folder with member.jsonl and nonmember.jsonl; each row has a `group`, or a `date`.")
@out_option("out/attacks", ATTACKED)
@attack_options
@click.option("--attacks", "names", default="loss,min_k_plus_20", show_default=True)
def command(model: str, out: Path, names: str, **settings: Any) -> None:
    """Tell members in each group of texts, or next to the date of a cut-off. Writes groups.json.

    \b
    python -m research groups out/merged --data DIR
    """
    from axolotl_unlearn.attacks.members import chosen
    from axolotl_unlearn.files import write_json
    from research.attacks import REGISTRY
    from research.attacks.groups import attack_groups, lines

    attacks = chosen(REGISTRY, names)
    found = attack_groups(model, attacks=attacks, limit=None, seed=0, **settings)
    show(*lines(found), f"Written: {write_json(out / 'groups.json', found)}")
