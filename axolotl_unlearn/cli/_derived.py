"""``axolotl unlearn request derived``: which models have to be withdrawn."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._json import answer

_PATH = click.Path(path_type=Path)


@click.command("derived")
@click.argument("folder", type=_PATH)
@click.argument("places", nargs=-1, required=True, type=_PATH)
def command(folder: Path, places: tuple[Path, ...]) -> None:
    """List models below PLACES that were made of one that knows the rows of the request in FOLDER.

    Adapters, merges, GGUF and quantised copies are known by digests of weights and tensors, and by
    what their own files name. Ask before `request erase`: without the old model its tensors cannot
    be compared. Nothing is removed. Exit code 0: none was found; 3: some were.

    \b
    Example:
      axolotl unlearn request derived requests/2026-001 out/ /srv/models
    """
    from rich.filesize import decimal

    from axolotl_unlearn.requests.derived import derived
    from axolotl_unlearn.requests.removal import shown

    found = derived(folder, places)
    answer(withdraw=[vars(one) for one in found])
    for one in found:
        click.echo(f"withdraw  {decimal(one.bytes):>9}  {shown(one.path)}: {one.why}")
    click.echo(f"to withdraw: {len(found)}; what names and shares nothing is not found")
    if found:
        raise SystemExit(3)
