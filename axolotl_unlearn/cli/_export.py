"""``axolotl unlearn request export``: one file for a regulator or for whoever asked."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.cli._options import one_value

_PATH = click.Path(path_type=Path)
_DAY = click.DateTime(["%Y-%m-%d"])


@click.command("export")
@click.argument("folder", type=_PATH)
@click.option("--out", required=True, type=_PATH, help="The zip archive to write.")
@click.option("--subject", help="Of a request of many: this one's record and no other's.")
@click.option("--by", default="", callback=one_value, help="Who answers.")
@click.option("--to", default="", callback=one_value, help="Who asked.")
@click.option("--reference", default="", callback=one_value, help="Theirs or yours.")
@click.option("--received", type=_DAY, help="YYYY-MM-DD  [when the request was made]")
@click.option("--due", type=_DAY, help="[a month later]")
def command(
    folder: Path, out: Path, subject: str | None, received: datetime | None,
    due: datetime | None, **given: str,
) -> None:  # fmt: skip
    """Write record, report, ledger entries, dates, how to verify and a reply into one file.

    The record names nobody; the reply says what you give here and nothing else. `@FILE` reads a
    value from a file. `request verify FILE` accepts what was written and finds a byte changed.

    \b
    Example:
      axolotl unlearn request export requests/2026-001 --received 2026-11-02 --to @name.txt \\
        --out 2026-001.zip
      axolotl unlearn request verify 2026-001.zip
    """
    from axolotl_unlearn.requests.export import Handling, export

    days = {
        key: day.date() for key, day in (("received", received), ("due", due)) if day is not None
    }
    handling = export(folder, out, Handling(**given, **days), subject)
    answer(file=out, **handling)
    late = ", late" if handling["late"] else ""
    click.echo(
        f"{out}: received {handling['received']}, due {handling['due']}, done "
        f"{handling['done']}{late}. Read REPLY.txt in it before you send it."
    )
