"""``axolotl-unlearn init``: a commented config of a user's own."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from shlex import quote
from string import Template

import click
import yaml

from axolotl_unlearn.cli._options import PATH, Answer
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write

#: Kind -> options that it needs. Those of other kinds it refuses.
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
@click.option("--forget", type=PATH, help="npo, match: rows to forget, JSON lines.")
@click.option("--retain", type=PATH, help="npo, match: rows to keep.")
@click.option("--heldout", type=PATH, help="match: rows that the model never saw.")
@click.option("--teacher", help="match: a model that never saw the rows to forget.")
@click.option("--data", type=PATH, help="request: the rows of the fine-tuning run.")
@click.option("--output-dir", help="[out/unlearned; request: out/finetuned]")
@click.option("--out", type=PATH, help="[unlearn.yml]")
def command(kind: str, out: Path | None, **given):
    """Write a commented config that `axolotl-unlearn check` and `axolotl train` take.

    Says how the rows are read, by the fields that they have, and shows the first one as the model
    will read it: correct `unlearn.data` where the model learned them in another form.

    \b
    Example:
      axolotl-unlearn init --base-model MODEL --forget f.jsonl --retain r.jsonl
      axolotl-unlearn init --kind request --base-model BASE --data rows.jsonl
    """
    out = out or Path("finetune.yml" if kind == "request" else "unlearn.yml")
    if out.exists():
        raise UnlearnError(f"{out} exists; name another file with --out.", code="init.exists")
    if missing := [f"--{name}" for name in _NEEDS[kind] if not given[name]]:
        how = "; `axolotl-unlearn teacher --help` says how a teacher is made" * (kind == "match")
        raise UnlearnError(
            f"--kind {kind} needs {' and '.join(missing)}{how}.", code="init.missing"
        )
    others = {name for needed in _NEEDS.values() for name in needed} - {*_NEEDS[kind]}
    if strange := [f"--{name}" for name in sorted(others) if given[name]]:
        says = f"--kind {kind} does not use {' and '.join(strange)}"
        raise UnlearnError(f"{says}; leave it out, or name another kind.", code="init.not-used")
    files = [given[name] for name in ("forget", "retain", "heldout", "data") if given[name]]
    if gone := [str(file) for file in files if not file.is_file()]:
        says = f"{' and '.join(gone)}: no such file"
        raise UnlearnError(f"{says}; give files of rows.", code="init.no-file")
    default = "out/finetuned" if kind == "request" else "out/unlearned"
    given["output_dir"] = given["output_dir"] or default
    text, said = _config(kind, given, out)
    from axolotl_unlearn.checks.estimate import first_rows

    # As the model will read them, if its tokenizer is here.
    first = first_rows(cfg) if (cfg := yaml.safe_load(text)).get("unlearn") else []
    write(out, text)
    then = "axolotl train" if kind == "request" else "axolotl-unlearn check"
    lines = [f"{out} is written.", *said, *first, f"Next: {then} {quote(str(out))}"]
    return Answer({"config": out, "rows": said}, lines)


def _config(kind: str, given: dict, out: Path) -> tuple[str, list[str]]:
    """The config, and what was guessed of the rows."""
    from axolotl_unlearn.checks.config import PLUGIN
    from axolotl_unlearn.config import MEMORISE
    from axolotl_unlearn.data.checks import DS_TYPES
    from axolotl_unlearn.data.records import guessed
    from axolotl_unlearn.models import has_chat_template

    template = resources.files("axolotl_unlearn") / "templates" / f"{kind}.yml"
    base = str(given["base_model"])
    templated = has_chat_template(base)
    chat = kind != "request" and templated
    sides = [given[name] for name in ("forget", "retain", "data") if given[name]]
    found = {str(side): guessed(side, chat) for side in sides}
    (block, how), *others = found.values()
    text = Template(template.read_text("utf-8"))
    entry, plugin = block.get("rows", {}), ""
    asked = kind == "request" and not entry
    if asked and block.get("fields") == {"input": "question", "output": "answer"}:
        entry, how = {"type": "alpaca_chat.load_qa"}, "questions, by the prompt of alpaca_chat"
    elif asked:  # Axolotl has no type for two fields of any name
        entry, plugin = {"type": MEMORISE}, f"plugins:\n  - {PLUGIN}\n\n"
        plugin += f"unlearn: {_flow({'data': block})}\n\n" if block else ""
    types = {side: DS_TYPES.get(Path(side).suffix, "json") for side in found}
    entry = {"path": str(sides[0]), "ds_type": types[str(sides[0])], **entry}
    given = given | {"prepared": f"{given['output_dir']}-prepared"}
    named = {name: value and _scalar(str(value)) for name, value in given.items()}
    named |= {f"{name}_type": types.get(str(given[name])) for name in ("forget", "retain")}
    text = text.substitute(named, config=quote(str(out)), entry=_flow(entry))
    said = [f"  {path}: read as {words}." for path, (_, words) in found.items()]
    if any(other != block for other, _ in others):
        said.append("  note: the sides have rows of two forms; give both the same.")
    elif kind == "request":
        text = text.replace("\ndatasets:\n", f"\n{plugin}datasets:\n")
        said = [f"  {sides[0]}: read as {how}."]
        if entry["type"] == "chat_template" and os.path.isdir(base) and not templated:
            said.append(f"  note: {base} has no chat template; set `chat_template:`, as chatml.")
    elif block:
        line = _flow({"data": block})[1:-1]
        text = text.replace(
            "\nunlearn:\n", f"\nunlearn:\n  # Guessed of the rows: {how}.\n  {line}\n"
        )
    return text, said


def _flow(block: dict) -> str:
    return yaml.safe_dump(block, default_flow_style=True, sort_keys=False, width=1000).strip()


def _scalar(text: str) -> str:
    """As YAML reads it: a path may hold ": "."""
    return yaml.safe_dump([text], default_flow_style=True, width=1000).strip()[1:-1]
