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
from axolotl_unlearn.checks import axolotl_options, estimate
from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.metrics import results
from axolotl_unlearn.objectives import OBJECTIVES

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
    "ExtensionArgs": "unlearn.extensions (an entry)",
}

_OPTIONS = """# Axolotl's options in a run with `unlearn:`

Written by `docs/generate.py` from `axolotl_unlearn/checks/axolotl_options.yml`.
`axolotl-unlearn check` and `axolotl train` stop at an option that is **refused** before weights are
loaded: it would change loss, batches, data or weights behind the objectives. An option that is
**noted** has no effect and is left out, which `check` and the log say. All others go to Axolotl as
they are; a package that one of them needs and that is not installed is named.
`tests/test_options.py` trains with and without the most used.

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
    lines += [
        "An editor completes and checks them with [unlearn.schema.json](unlearn.schema.json):", "",
        "```yaml", "# yaml-language-server: $schema=unlearn.schema.json", "```", "",
    ]  # fmt: skip
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
            for key in group.get("unless", ()):
                cell += f"; taken beside `{key}`"
            if group.get("cure"):
                cell += f"; {group['cure']}"
            names = ", ".join(f"`{option}`" for option in options)
            rows.append(f"| {names} | {effect} | {cell} |")
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
        rows.append(f"| `{name}` | {refused.get(name) or '; '.join(['trained', *needs])} |")
    return rows


def schema_page() -> str:
    """JSON schema of a config file, for editors: the block `unlearn:`, all else is Axolotl's."""
    block = config.UnlearnArgs.model_json_schema()
    defs = {name: _loose(one) for name, one in block.pop("$defs").items()}
    entry = defs["ObjectiveArgs"]["properties"]
    # An extension may have others.
    entry["objective"] |= {"anyOf": [{"enum": sorted(OBJECTIVES)}, {"type": "string"}]}
    for name, objective in sorted(OBJECTIVES.items()):
        for key in objective.parameters:
            about = entry.setdefault(key, {"description": "parameter of"})
            about["description"] += f" {name}"
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Axolotl config with a block `unlearn:`",
        "type": "object",
        "properties": {"unlearn": _loose(block)},
        "$defs": defs,
    }
    return json.dumps(schema, indent=1)


def _loose(schema: typing.Any) -> typing.Any:
    """With the short forms that are taken: one value for a list of it, a text for a block."""
    if isinstance(schema, list):
        return [_loose(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _loose(one) for key, one in schema.items()}
    if inner.get("type") == "array":
        one = inner.get("items", {})
        about = {key: inner.pop(key) for key in ("description", "title", "default") if key in inner}
        return {"anyOf": [inner, *one.get("anyOf", [one])]} | about
    if inner.get("$ref", "").endswith(("/ReferenceArgs", "/AnnealArgs", "/ExtensionArgs")):
        about = {key: inner[key] for key in inner if key != "$ref"}
        return {"anyOf": [{"$ref": inner["$ref"]}, {"type": "string"}]} | about
    return inner


#: Hidden size, layers, inner size, width of keys and values, vocabulary, and whether its matrix is
#: the head's: as the config.json of each says.
MODELS = {
    "Llama 3.2 1B": (2048, 16, 8192, 512, 128256, True),
    "SmolLM2 1.7B": (2048, 24, 8192, 2048, 49152, True),
    "Llama 3.2 3B": (3072, 28, 8192, 1024, 128256, True),
    "OLMo 7B": (4096, 32, 11008, 4096, 50304, False),
    "Llama 3.1 8B": (4096, 32, 14336, 1024, 128256, False),
    "Qwen 2.5 14B": (5120, 48, 13824, 1024, 152064, False),
    "Qwen 2.5 32B": (5120, 64, 27648, 1024, 152064, False),
    "Llama 3.1 70B": (8192, 80, 28672, 1024, 128256, False),
}
_LORA = {"adapter": "lora", "lora_r": 32, "lora_target_linear": True}
WAYS = {"LoRA": _LORA, "QLoRA": _LORA | {"load_in_4bit": True}, "full": {}}
_SIZES = """# Which model fits which GPU

The largest `micro_batch_size`, a power of two up to 16, for one GPU of 24, 40 and 80 GB; a dash:
none. **Computed** by the estimate of `axolotl-unlearn check --full`, not measured: NPO with one
retain row beside each forget row, rows of 512 tokens, bf16, `gradient_checkpointing: true`, AdamW,
LoRA of rank 32 on all linear layers, a tenth of the memory left free. Full fine-tuning holds a copy
of the start as reference. Written by `docs/generate.py`. How far the estimate is from the peak:
[memory](performance.md#memory).

Start at half of what the table says. Where memory runs out: [faults and cures](faults.md).

| model | way | weights, gradients, optimizer | 24 GB | 40 GB | 80 GB |
|---|---|---|---|---|---|
"""


def shapes(hidden: int, layers: int, inner: int, keys: int, vocabulary: int, tied: bool) -> dict:
    """Shape of each matrix of a decoder of the Llama family by its name."""
    each = {"q_proj": (hidden, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
            "o_proj": (hidden, hidden), "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
            "down_proj": (hidden, inner)}  # fmt: skip
    found = {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in each.items()}
    ends = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    return {f"model.{name}": shape for name, shape in found.items()} | {
        end: (vocabulary, hidden) for end in ends
    }


def sizes_page() -> str:
    """Models, ways of training and GPUs."""
    block = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}}
    args, rows = config.parse_unlearn(block), []
    for name, numbers in MODELS.items():
        for way, settings in WAYS.items():
            given = settings | {"bf16": True, "gradient_checkpointing": True}
            best = estimate.largest_batches(given, args, 512, shapes(*numbers))
            cells = [str(batch or "–") for batch in best.values()]
            found = estimate.memory(given, args, 512, shapes(*numbers))
            fixed = found["weights"] + found["gradients_and_optimizer"] + found["reference"]
            rows.append(f"| {name} | {way} | {fixed / 1e9:.1f} GB | {' | '.join(cells)} |")
    return _SIZES + "\n".join(rows)


PAGES = {
    "gpu-sizes.md": sizes_page,
    "unlearn.schema.json": schema_page,
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
