"""``axolotl unlearn request list | show | erase``: what was asked for, and what is left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._json import answer

FOLDER = click.Path(path_type=Path)


@click.command("list")
@click.argument("requests_dir", metavar="[REQUESTS]", type=FOLDER, default="requests")
def list_(requests_dir: Path) -> None:
    """All requests of a folder, in the order of its ledger; the last model is the current one.

    \b
    Example:
      axolotl unlearn request list
    """
    from axolotl_unlearn.errors import UnlearnError
    from axolotl_unlearn.requests.ledger import Ledger
    from axolotl_unlearn.requests.request import Request

    if not requests_dir.is_dir():
        raise UnlearnError(f"{requests_dir} does not exist; name the folder of the requests.")
    ledger = Ledger(requests_dir)
    states: dict[str, list[str]] = {}
    for entry in ledger.entries():
        state = entry["event"] + ("" if entry.get("good", True) else " (not good)")
        states.setdefault(entry["request"], []).append(f"{state} {entry['time'][:10]}")
    folders = {path.parent.name for path in requests_dir.glob("*/request.json")}
    listed: list[dict[str, Any]] = []
    for name in [*states, *sorted(folders - set(states))]:
        rows = "its folder is gone"
        if name in folders:
            rows = f"{Request.load(requests_dir / name).facts['counts']['forget']} rows"
        said = ", ".join(states.get(name, ["not carried out"]))
        listed.append({"request": name, "rows": rows, "events": states.get(name, [])})
        click.echo(f"{name}  {rows}  {said}")
    current = ledger.current()
    answer(requests=listed, current=current)
    click.echo(f"current model: {current['path'] if current else 'no request was carried out'}")


@click.command("show")
@click.argument("folder", type=FOLDER)
def show(folder: Path) -> None:
    """What a request asked for and what became of it.

    \b
    Example:
      axolotl unlearn request show requests/2026-001
    """
    from axolotl_unlearn.requests.ledger import Ledger
    from axolotl_unlearn.requests.pages import readings
    from axolotl_unlearn.requests.record import PAGE, read
    from axolotl_unlearn.requests.request import Request

    request = Request.load(folder)
    facts = request.facts
    known = [e for e in Ledger(folder.parent).entries() if e["request"] == request.id]
    answer(
        **{key: facts[key] for key in ("id", "created", "chosen", "counts", "config")}, events=known
    )
    click.echo(f"request {request.id} of {facts['created']}")
    click.echo(f"  chosen by   {'; '.join(map(str, facts['chosen']['how']))}")
    click.echo("  rows        " + ", ".join(f"{n} {k}" for k, n in facts["counts"].items()))
    click.echo(f"  config      {facts['config']['path']}")
    if not known:
        click.echo(f"  not carried out yet: axolotl unlearn request run {folder}")
        return
    statement = read(folder)
    verdict = statement["predicate"]["verdict"]
    answer(verdict=verdict, documents=readings(statement), report=folder / PAGE)
    click.echo(f"  judgement   {verdict['status']}")
    if verdict["accepted"]:
        click.echo(f"  accepted    {verdict['accepted']}")
    found = ", ".join(f"{n} {reading}" for reading, n in readings(statement).items() if n)
    click.echo(f"  documents   {found}")
    for entry in known:
        click.echo(f"  ledger      line {entry['entry']}: {entry['event']} {entry['time']}")
    click.echo(f"  report      {folder / PAGE}")


@click.command("erase")
@click.argument("folder", type=FOLDER)
@click.option("--yes", is_flag=True, help="Remove what is listed; without it nothing changes.")
@click.option("--with-data", is_flag=True, help="Also the rows kept for later audits.")
@click.option(
    "--search",
    "places",
    multiple=True,
    type=FOLDER,
    help="Where else to look than in the working folder and the caches of Hugging Face.",
)
def erase(folder: Path, yes: bool, with_data: bool, places: tuple[Path, ...]) -> None:
    """Remove the model before a request, its checkpoints, caches and logs; look for what is left.

    Lists first; `--yes` removes. Nothing outside the folders that the config writes to is removed,
    and nothing that the new model needs. Found texts are never printed.

    \b
    Example:
      axolotl unlearn request erase requests/2026-001
      axolotl unlearn request erase requests/2026-001 --yes
    """
    from axolotl_unlearn.errors import UnlearnError
    from axolotl_unlearn.requests import erase as erasing

    for place in places:
        if not place.exists():
            raise UnlearnError(f"--search {place} does not exist; name a folder or file.")
    planned = erasing.plan(folder, places=places, with_data=with_data)
    answer(
        items=[vars(item) for item in planned.items],
        removed=yes,
        **found_facts(planned.texts, planned.found, planned.left, planned.named),
    )
    for item in planned.items:
        said = "remove" if item.why is None else "keep  "
        why = f" ({item.why})" if item.why else ""
        click.echo(f"{said}  {_size(item.bytes):>9}  {item.kind}: {erasing.shown(item.path)}{why}")
    for path, windows in sorted(planned.left.items()):
        count = f"{windows} of {planned.texts.whole} windows"
        click.echo(f"left    {_at(path)}still holds deleted texts, {count}: {erasing.shown(path)}")
    for path, count in sorted(planned.named.items()):
        click.echo(
            f"named   {_at(path)}holds {count} short texts (names, numbers): {erasing.shown(path)}"
        )
    found = planned.found
    for path in found.unreadable:
        click.echo(f"unread  {_at(path)}look yourself: {erasing.shown(path)}")
    click.echo(said_of_search(planned.texts, found))
    total = _size(sum(item.bytes for item in planned.removable))
    if not yes:
        click.echo(f"nothing was changed; `--yes` removes {total}")
        return
    erasing.erase(planned)
    click.echo(f"removed {len(planned.removable)} places, {total}; written into the record")


def _at(path: Path) -> str:
    return f"{_size(path.stat().st_size):>9}  "


def found_facts(texts: Any, found: Any, left: Any = None, named: Any = None) -> dict[str, Any]:
    """Of a search, for ``--json``."""
    return {
        "left": found.left if left is None else left,
        "named": found.named if named is None else named,
        "searched": {"files": found.files, "bytes": found.searched_bytes, "windows": texts.whole},
        "unsearched": found.unsearched,
        "unreadable": found.unreadable,
    }


def said_of_search(texts: Any, found: Any) -> str:
    """What was looked for and where, and what that leaves open; without a text."""
    from axolotl_unlearn.requests.request import counted

    short = len(texts.windows) - texts.whole
    said = (
        f"searched {found.files} files ({_size(found.searched_bytes)}) for "
        f"{counted(texts.whole, 'window')} of eight words and {counted(short, 'short text')}"
    )
    if not texts.windows:
        said = "nothing could be searched for: the rows are gone, or kept rows say all of it too"
    if texts.too_short:
        said += f"; not searched for: {counted(texts.too_short, 'text')} of a single word"
    if found.unsearched:
        said += f"; cannot be searched: {found.not_searched()}"
    return said + (f"; {len(found.unreadable)} files were unreadable" * bool(found.unreadable))


def _size(count: int) -> str:
    from rich.filesize import decimal

    return decimal(count)


#: For the group `request`.
COMMANDS = (list_, show, erase)
