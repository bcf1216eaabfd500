"""``axolotl unlearn request erase | clean``: a plan, the removal, and a search for what is left."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._json import answer

PATH = click.Path(path_type=Path)


@click.command("erase")
@click.argument("folder", type=PATH)
@click.option("--yes", is_flag=True, help="Remove what is listed; without it nothing changes.")
@click.option("--with-data", is_flag=True, help="Also the rows kept for later audits.")
@click.option("--search", "places", multiple=True, type=PATH, help="Where else to look.")
def erase(folder: Path, yes: bool, with_data: bool, places: tuple[Path, ...]) -> None:
    """Remove the model before a request, its checkpoints, caches and logs; look for what is left.

    Lists first; `--yes` removes, and searches again. Nothing outside the folders that the config
    writes to is removed, and nothing that the new model needs. Searched are these, the working
    folder and the caches of Hugging Face. Found texts are never printed.

    \b
    Example:
      axolotl unlearn request erase requests/2026-001
      axolotl unlearn request erase requests/2026-001 --yes
    """
    from axolotl_unlearn.requests import erase as erasing

    _there(places)
    planned = erasing.plan(folder, places=places, with_data=with_data)
    _say(*planned.lines(), *planned.found_lines(planned.found))
    answer(
        items=[vars(item) for item in planned.items], removed=yes, **planned.facts(planned.found)
    )
    if not yes:
        _say("nothing was changed; `--yes` removes what is listed so")
        return
    listed = erasing.erase(planned)
    _say(
        f"removed {len(planned.removable)} places; {len(listed['left']) or 'no'} other places "
        "still hold deleted texts; written into the record"
    )


@click.command("clean")
@click.argument("out", type=PATH)
@click.option("--dry-run", is_flag=True, help="Only list.")
@click.option("--keep-log-probs", is_flag=True, help="Leave scores and losses a document.")
@click.option(
    "--forget", multiple=True, type=PATH, help="The forget rows.  [where the run read them]"
)
@click.option("--search", "places", multiple=True, type=PATH, help="Where else to look.")
def clean(
    out: Path, dry_run: bool, keep_log_probs: bool, forget: tuple[Path, ...], places: tuple[Path]
) -> None:
    """Remove forget texts, tokens and log-probs that runs left in OUT, and prove it by a search.

    The model and its checkpoints stay. Searched are OUT, prepared data and the caches of Hugging
    Face, for windows of eight words; exit code 3 if one is left. Texts are not printed.

    \b
    Example:
      axolotl unlearn request clean out/over --dry-run
      axolotl unlearn request clean out/over
    """
    from axolotl_unlearn.requests import clean as cleaning

    _there((*forget, *places))
    planned = cleaning.plan(out, forget=forget, places=places, keep_log_probs=keep_log_probs)
    _say(*planned.lines())
    answer(items=[vars(item) for item in planned.items], yours=planned.sources, removed=not dry_run)
    if dry_run:
        _say("nothing was changed")
        return
    found = cleaning.clean(planned)
    answer(**planned.facts(found))
    _say(
        *planned.found_lines(found),
        f"removed {len(planned.removable)} places; {len(found.left) or 'none'} left",
    )
    stays = len(planned.items) - len(planned.removable)
    if found.left or stays or not planned.texts.windows:
        raise SystemExit(3)


def _say(*lines: str) -> None:
    for line in lines:
        click.echo(line)


def _there(paths: tuple[Path, ...]) -> None:
    from axolotl_unlearn.errors import UnlearnError

    for path in paths:
        if not path.exists():
            raise UnlearnError(f"{path} does not exist; name a file or folder.")


#: For the group `request`.
COMMANDS = (erase, clean)
