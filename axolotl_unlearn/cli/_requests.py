"""``axolotl unlearn request list | show``: what was asked for, and what became of it."""

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


#: For the group `request`.
COMMANDS = (list_, show)
