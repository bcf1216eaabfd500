"""``axolotl unlearn request clean OUT``"""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._json import answer

PATH = click.Path(path_type=Path)


@click.command("clean")
@click.argument("out", type=PATH)
@click.option("--dry-run", is_flag=True, help="Only list.")
@click.option("--keep-log-probs", is_flag=True, help="Leave scores and losses a document.")
@click.option(
    "--forget", multiple=True, type=PATH, help="The forget rows.  [where the run read them]"
)
@click.option("--search", "places", multiple=True, type=PATH, help="Where else to look.")
def command(
    out: Path, dry_run: bool, keep_log_probs: bool, forget: tuple[Path, ...], places: tuple[Path]
) -> None:
    """Remove forget texts, tokens and log-probs that runs left in OUT, and prove it by a search.

    The model and its checkpoints stay. Searched are OUT, prepared data and the cache of Hugging
    Face data sets, for windows of eight words; exit code 3 if one is left. Texts are not printed.

    \b
    Example:
      axolotl unlearn request clean out/over --dry-run
      axolotl unlearn request clean out/over
    """
    from rich.filesize import decimal

    from axolotl_unlearn.cli._requests import found_facts, said_of_search
    from axolotl_unlearn.errors import UnlearnError
    from axolotl_unlearn.requests.clean import clean, plan
    from axolotl_unlearn.requests.erase import shown

    for path in (*forget, *places):
        if not path.exists():
            raise UnlearnError(f"{path} does not exist; name a file or folder.")
    planned = plan(out, forget=forget, places=places, keep_log_probs=keep_log_probs)
    for item in planned.items:
        said, why = ("keep  ", f" ({item.why})") if item.why else ("remove", "")
        click.echo(f"{said}  {decimal(item.bytes):>9}  {item.kind}: {shown(item.path)}{why}")
    for path in planned.sources:
        click.echo(f"yours   {decimal(path.stat().st_size):>9}  forget rows: {shown(path)}")
    answer(items=[vars(item) for item in planned.items], yours=planned.sources, removed=not dry_run)
    if dry_run:
        click.echo("nothing was changed")
        return
    found = clean(planned)
    answer(**found_facts(planned.texts, found))
    for path, count in sorted(found.left.items()):
        click.echo(f"left     {count} of {planned.texts.whole} windows: {shown(path)}")
    for path, count in sorted(found.named.items()):
        click.echo(f"named    {count} short texts (names, numbers): {shown(path)}")
    for path in found.unreadable:
        click.echo(f"unread   look yourself: {shown(path)}")
    click.echo(
        f"removed {len(planned.removable)} places; {said_of_search(planned.texts, found)}; "
        f"{len(found.left) or 'none'} left"
    )
    unknown = not planned.texts.windows
    if found.left or unknown or any(item.why for item in planned.items):
        raise SystemExit(3)
