"""Write pages of the reference from the models and from click: `make docs-tables`."""

from __future__ import annotations

import json
import re
import sys
import typing
from pathlib import Path

import click
from axolotl.utils.schemas.enums import CustomSupportedOptimizers
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from transformers.training_args import OptimizerNames

from axolotl_unlearn import config
from axolotl_unlearn.checks import axolotl_options
from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.metrics import results

DOCS = Path(__file__).resolve().parent
#: Where each model stands in a config.
PLACES = {
    "UnlearnArgs": "unlearn",
    "ObjectiveArgs": "unlearn.forget, unlearn.retain (an entry)",
    "PhaseArgs": "unlearn.phases (an entry)",
    "ReferenceArgs": "reference",
    "LevelArgs": "unlearn.level",
    "DataArgs": "unlearn.data",
    "FieldArgs": "unlearn.data.fields",
    "LabelArgs": "unlearn.data.labels",
    "PairingArgs": "unlearn.pairing",
    "AnnealArgs": "anneal",
    "ExtensionArgs": "unlearn.extensions (an entry)",
}

_OPTIONS = """# Axolotl's options in a run with `unlearn:`

Written by `docs/generate.py` from `axolotl_unlearn/checks/axolotl_options.yml`.
`axolotl-unlearn check` and `axolotl train` stop at an option that is **refused** before weights are
loaded: it would change loss, batches, data or weights behind the objectives. An option that is
**noted** has no effect and is left out, and one that is **idle** acts beside others only, which
`check` and the log say. All others go to Axolotl as they are; a package that one of them needs and
that is not installed is named. `tests/test_options.py` trains with and without the most used.

| options | effect | |
|---|---|---|
"""


_OPTIMIZERS = """
## Optimizers

Every name that Axolotl offers. One whose package is not installed is refused with its name.

| `optimizer` | |
|---|---|"""
_NAMES = (OptimizerNames, CustomSupportedOptimizers)


def _kind(annotation: typing.Any) -> str:
    """A type as a user writes it."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    parts = [part for part in typing.get_args(annotation) if part not in (type(None), ...)]
    if parts and typing.get_origin(annotation) in (list, tuple, dict):
        kind = "dict" if typing.get_origin(annotation) is dict else "list"
        return f"{kind} of {_kind(parts[-1])}"
    if parts:
        return " or ".join(dict.fromkeys(map(_kind, parts)))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        place = PLACES.get(annotation.__name__)
        name = annotation.__name__
        return f"[block](#{_anchor(place)})" if place else f"[{name}](#{name.lower()})"
    return getattr(annotation, "__name__", str(annotation))


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower() if c.isalnum() or c in "- ").replace(" ", "-")


def config_page() -> str:
    """Every key of the `unlearn:` block."""
    lines = ["# Keys of the config", "", "Written by `docs/generate.py` from the code.", ""]
    for name, place in PLACES.items():
        model: type[BaseModel] = getattr(config, name)
        about = (model.__doc__ or "").strip().splitlines()[0].replace("``", "`")
        lines += [f"## {place}", "", about, "", "| key | value | default | |", "|---|---|---|---|"]
        for key, field in model.model_fields.items():
            default = field.get_default(call_default_factory=True, validated_data={})
            shown = "" if default in (None, PydanticUndefined) else f"`{default}`"
            if isinstance(default, BaseModel):
                shown = ""
            told = (field.description or "").replace("|", "\\|")
            lines.append(f"| `{key}` | {_kind(field.annotation)} | {shown} | {told} |")
        lines.append("")
    return "\n".join(lines)


def commands_page() -> str:
    """Every command with its options."""
    lines = ["# Commands", "", "Written by `docs/generate.py` from the code.", ""]

    def told(command: click.Command, name: str) -> None:
        nonlocal lines
        context = click.Context(command, info_name=name, show_default=True)
        lines += [f"## {name}", "", command.get_short_help_str(400), ""]
        if isinstance(command, click.Group):
            for sub in command.list_commands(context):
                inner = command.get_command(context, sub)
                if not inner.hidden:
                    told(inner, f"{name} {sub}")
            return
        rows = [p.get_help_record(context) for p in command.params]
        rows = [[text.replace("|", "\\|") for text in row] for row in rows if row]
        rows = [f"| `{row[0]}` | {row[1]} |" for row in rows]
        if rows:
            lines += ["| option | |", "|---|---|", *rows, ""]

    for name in unlearn.list_commands(None):
        told(unlearn.get_command(None, name), f"axolotl-unlearn {name}")
    return "\n".join(lines)


def results_page() -> str:
    """Every key of results.json."""
    lines = ["# Keys of results.json", "", "Written by `docs/generate.py` from the code.", ""]
    lines += [f"Schema {results.SCHEMA}. A number that is missing, null or not finite was not"]
    lines += ["measured. Keys that are not listed are kept as they are.", ""]
    found, left = [], [results.Results]
    while left:
        model = left.pop(0)
        found.append(model)
        about = (model.__dict__.get("__doc__") or "").strip().splitlines()[:1]
        lines += [f"## {model.__name__}", "", *about, ""]
        lines += ["| key | value |", "|---|---|"]
        for key, field in model.model_fields.items():
            lines.append(f"| `{field.alias or key}` | {_kind(field.annotation)} |")
            left += [one for one in _models(field.annotation) if one not in [*found, *left]]
        lines.append("")
    return "\n".join(lines).replace("``", "`")


def _models(annotation: typing.Any) -> list[type[BaseModel]]:
    """The models that a type holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [one for part in typing.get_args(annotation) for one in _models(part)]


def options_page() -> str:
    """The options of Axolotl that do not pass through."""
    rows = []
    for effect in ("refused", "noted"):
        for group in axolotl_options.TABLE[effect]:
            options = list(group["options"])
            for option, values in group.get("values", {}).items():
                options += [f"{option}: {json.dumps(value)}".replace('"', "") for value in values]
            cell = group["why"]
            if group.get("above"):
                cell += f" (values above {group['above']})"
            if group.get("unless"):
                cell += "; taken beside `unlearn.data.rows`"
            if group.get("cure"):
                cell += f"; {group['cure']}"
            names = ", ".join(f"`{option}`" for option in options)
            rows.append(f"| {names} | {effect} | {cell} |")
    for option, beside in axolotl_options.TABLE["idle"].items():
        cell = f"read {axolotl_options.conditions(beside)}; noted elsewhere"
        rows.append(f"| `{option}` | idle | {cell} |")
    return _OPTIONS + "\n".join([*rows, "", _OPTIMIZERS, *optimizers()])


def optimizers() -> list[str]:
    """A row for each name that Axolotl offers."""
    table, refused = axolotl_options.TABLE, {}
    for group in table["refused"]:
        for name in group.get("values", {}).get("optimizer", ()):
            refused[name] = f"refused: {group['why']}; {group['cure']}"
    rows = []
    for name in dict.fromkeys(one.value for kind in _NAMES for one in kind):
        packages = table["needs"]["optimizer"].items()
        needs = [f"needs the package `{m}`" for p, m in packages if re.fullmatch(p, name)]
        read = [f"`{k}`" for k, with_ in table["idle"].items() if with_.get("optimizer") == name]
        reads = [f"reads {', '.join(read)}"] if read else []
        rows.append(f"| `{name}` | {refused.get(name) or '; '.join(['trained', *needs, *reads])} |")
    return rows


PAGES = {
    "axolotl-options.md": options_page,
    "config.md": config_page,
    "commands.md": commands_page,
    "results-schema.md": results_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page().rstrip() + "\n", "utf-8")
        print(f"docs/{name}: written", file=sys.stderr)


if __name__ == "__main__":
    main()
