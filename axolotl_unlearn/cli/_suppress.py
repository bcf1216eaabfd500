"""``axolotl unlearn request suppress``: deleted rows are not learned again."""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.errors import UnlearnError

_PATH = click.Path(path_type=Path)


@click.command("suppress")
@click.argument("requests_dir", metavar="REQUESTS", type=_PATH)
@click.option("--rows", type=_PATH, help="A training file (.jsonl, .json, .parquet) to filter.")
@click.option("--out", type=_PATH, help="Where to write the rows that may be learned, JSON lines.")
def command(requests_dir: Path, rows: Path | None, out: Path | None) -> None:
    """Write the suppression list of REQUESTS, and filter a training file with it.

    The list has keyed digests of the deleted rows and their texts, and no text. `request erase`
    writes it too. Our own dataset types read it: `unlearn: {data: {suppression: FILE}}`; for a
    plain `axolotl train` filter the file.

    \b
    Example:
      axolotl unlearn request suppress requests/
      axolotl unlearn request suppress requests/ --rows next.jsonl --out next-allowed.jsonl
    """
    from axolotl_unlearn.requests.suppress import filtered, suppress

    if (rows is None) != (out is None):
        raise UnlearnError("--rows and --out belong together; give both or none.")
    path, count, new = suppress(requests_dir)
    answer(list=path, digests=count, new=new)
    click.echo(f"{path}: {count} digests, {new} of them new")
    if rows is not None:
        kept, gone = filtered(path, rows, out)
        answer(rows=out, kept=kept, left_out=gone)
        click.echo(f"{out}: {kept} rows of {rows}; {gone} were deleted before and are left out")
