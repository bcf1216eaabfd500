"""``axolotl-unlearn init``: a commented config of a user's own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from string import Template

import click

from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("init")
@click.option(
    "--kind", type=click.Choice(["npo", "match"]), default="npo", show_default=True,
    help="npo: away from the text; match: to the level of a model that never saw it.",
)  # fmt: skip
@click.option("--base-model", required=True, help="The fine-tuned model that is to forget.")
@click.option("--forget", required=True, type=_FILE, help="Rows to forget, JSON lines.")
@click.option("--retain", required=True, type=_FILE, help="Rows to keep.")
@click.option("--heldout", type=_FILE, help="match: rows that the model never saw.")
@click.option("--teacher", help="match: a model that never saw the rows to forget.")
@click.option("--output-dir", default="out/unlearned", show_default=True)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("unlearn.yml"),
    show_default=True,
)  # fmt: skip
def command(kind: str, out: Path, **given) -> None:
    """Write a commented config that `axolotl-unlearn check` and `axolotl train` take.

    \b
    Example:
      axolotl-unlearn init --base-model out/finetuned --forget forget.jsonl --retain retain.jsonl
    """
    if out.exists():
        raise UnlearnError(f"{out} exists; name another file with --out.")
    if kind == "match" and not (given["heldout"] and given["teacher"]):
        raise UnlearnError(
            "--kind match needs --heldout FILE and --teacher MODEL; `axolotl-unlearn teacher "
            "--help` says how a teacher is made."
        )
    template = resources.files("axolotl_unlearn") / "templates" / f"{kind}.yml"
    text = Template(template.read_text("utf-8")).substitute(given, config=out)
    from axolotl_unlearn.data.records import row_type

    types = {row_type(given[side]) for side in ("forget", "retain")}
    if types != {None} and len(types) == 1:  # else `check` names the rows that are not read
        text = text.replace(
            "\nunlearn:\n", f"\nunlearn:\n  data: {{rows: {{type: {types.pop()}}}}}\n", 1
        )
    write(out, text)
    answer(config=out)
    click.echo(f"{out} is written. Next: axolotl-unlearn check {out}")
