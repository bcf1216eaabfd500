"""``axolotl-unlearn init``: a commented config of a user's own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from string import Template

import click

from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.cli._options import FILE, PATH
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write

#: Kind -> options that it needs.
_NEEDS = {
    "npo": ("forget", "retain"),
    "match": ("forget", "retain", "heldout", "teacher"),
    "request": ("data",),
}


@click.command("init")
@click.option(
    "--kind", type=click.Choice(list(_NEEDS)), default="npo",
    help="npo: away from the text; match: to the level of a model that never saw it; request: a "
    "fine-tuning run whose rows can be deleted later.",
)  # fmt: skip
@click.option("--base-model", required=True, help="The model that is to forget, or to be tuned.")
@click.option("--forget", type=FILE, help="npo, match: rows to forget, JSON lines.")
@click.option("--retain", type=FILE, help="npo, match: rows to keep.")
@click.option("--heldout", type=FILE, help="match: rows that the model never saw.")
@click.option("--teacher", help="match: a model that never saw the rows to forget.")
@click.option("--data", type=FILE, help="request: the rows of the fine-tuning run.")
@click.option("--output-dir", help="[out/unlearned; request: out/finetuned]")
@click.option("--out", type=PATH, help="[unlearn.yml]")
def command(kind: str, out: Path | None, **given) -> None:
    """Write a commented config that `axolotl-unlearn check` and `axolotl train` take.

    \b
    Example:
      axolotl-unlearn init --base-model out/finetuned --forget forget.jsonl --retain retain.jsonl
      axolotl-unlearn init --kind request --base-model BASE --data rows.jsonl --out finetune.yml
    """
    from axolotl_unlearn.data.records import row_type

    out = out or Path("finetune.yml" if kind == "request" else "unlearn.yml")
    if out.exists():
        raise UnlearnError(f"{out} exists; name another file with --out.")
    if missing := [f"--{name}" for name in _NEEDS[kind] if not given[name]]:
        how = "; `axolotl-unlearn teacher --help` says how a teacher is made" * (kind == "match")
        raise UnlearnError(f"--kind {kind} needs {' and '.join(missing)}{how}.")
    template = resources.files("axolotl_unlearn") / "templates" / f"{kind}.yml"
    default = "out/finetuned" if kind == "request" else "out/unlearned"
    given["output_dir"] = given["output_dir"] or default
    sides = [given[name] for name in ("forget", "retain", "data") if given[name]]
    types = {row_type(path) for path in sides}
    own = types.pop() if len(types) == 1 else None
    text = template.read_text("utf-8")
    text = Template(text).substitute(given, config=out, type=own or "completion")
    if own and kind != "request":  # else `check` names the rows that are not read
        text = text.replace("\nunlearn:\n", f"\nunlearn:\n  data: {{rows: {{type: {own}}}}}\n", 1)
    write(out, text)
    answer(config=out)
    ways = {"request": f"axolotl train {out}"}
    click.echo(f"{out} is written. Next: {ways.get(kind, f'axolotl-unlearn check {out}')}")
