"""What unlearning makes of Axolotl's own options: `axolotl_options.yml` and `values.yml`."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from functools import cache
from importlib import resources
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model

from axolotl_unlearn import versions
from axolotl_unlearn.data.records import short


def _read(name: str) -> Any:
    return yaml.safe_load((resources.files(__package__) / name).read_text("utf-8"))


VALUES = _read("values.yml")
_NUMBERS = {"int": int, "float": float}
_SHAPES = {"text": str, "block": dict, "blocks": list[dict], "texts": list[str]}


def _range(group: dict[str, Any]) -> Any:
    number = Annotated[_NUMBERS.get(group["of"], int), Field(**group["range"])]
    return list[number] if group["of"] == "list" else number


def _model(kinds: Iterable[tuple[Any, list[str]]]) -> type[BaseModel]:
    return create_model("Keys", **{k: (kind | None, None) for kind, keys in kinds for k in keys})


Numbers = _model((_range(group), group["options"]) for group in VALUES["numbers"])
Shapes = _model((_SHAPES[kind], keys) for kind, keys in VALUES["shapes"].items())


@cache
def groups() -> list[dict[str, Any]]:
    """The groups of the file, in its order."""
    return _read("axolotl_options.yml")


def refused(cfg: dict[str, Any], rows: bool = False) -> list[str]:
    """A sentence for each option that is set and does not go with unlearning.

    Args:
        rows: whether rows are read by Axolotl's own types (``unlearn.data.rows``).
    """
    faults = []
    for group in groups():
        if rows and group.get("unless") == "rows":
            continue
        values = group.get("values", {})
        for option in [*group["options"], *values] if group["effect"] == "refused" else ():
            value = cfg.get(option)
            size = value.get("size", 1) if isinstance(value, dict) else value
            is_small = isinstance(size, int) and size <= group.get("above", -1)
            if value and not is_small and value in values.get(option, [value]):
                cure = group.get("cure", "remove it")
                faults.append(
                    f"`{option}: {value}` does not go with unlearning ({group['why']}); {cure}."
                )
    return faults


def _installed() -> list[dict[str, Any]]:
    """The groups of options that the installed Axolotl reads."""
    return [group for group in groups() if versions.within(group.get("since"), group.get("until"))]


def noted(cfg: dict[str, Any]) -> dict[str, str]:
    """Options that are set and have no effect -> a sentence."""
    return {
        option: f"`{option}: {cfg[option]}` has no effect: {group['why']}."
        for group in _installed()
        for option in group["options"]
        if group["effect"] == "noted" and cfg.get(option)
    }


#: Other names that Axolotl's schema takes.
_ALIASES = ("model_config", "model_kwargs", "model_revision", "model_type")


def ignored(cfg: dict[str, Any]) -> list[str]:
    """Keys that Axolotl leaves unread without a word; those of other plugins are among them."""
    known = {option for group in _installed() for option in group["options"]}
    return [str(key) for key in cfg if key not in known.union(_ALIASES, ["unlearn"])]


def misplaced(cfg: dict[str, Any], ours: Collection[str]) -> list[str]:
    """A sentence for each ignored key that was meant as an option, or for our block (``ours``)."""
    known = [option for group in _installed() for option in group["options"]]
    others = {option: group for group in groups() for option in group["options"]}
    # Other plugins' keys are like Axolotl's own (`lm_eval_batch_size`).
    cutoff = 0.8 if len(cfg.get("plugins") or []) < 2 else 0.95
    faults = []
    for key in ignored(cfg):
        # A text, slow to compare; or a place for YAML anchors, as `x-datasets`.
        if len(key) > 40 or key.startswith(("x-", "_", ".")):
            continue
        near = difflib.get_close_matches(key, [*known, "unlearn"], n=1, cutoff=cutoff)
        if key in ours:
            faults.append(
                f"`{key}` would be ignored, it belongs into the block `unlearn:`; move it."
            )
        elif key in others and cfg[key] is None:  # `axolotl merge-lora` sets some so
            continue
        elif key in others and len(cfg.get("plugins") or []) < 2:
            faults.append(
                f"`{key}` is an option of Axolotl {span(others[key])}; "
                f"{'.'.join(map(str, versions.axolotl()))} is installed and would ignore it; "
                "remove it."
            )
        elif near and key not in others:
            faults.append(f"`{key}` is no option and would be ignored; did you mean `{near[0]}`?")
    return faults


def span(group: dict[str, Any]) -> str:
    return f"from {group['since']} on" if "since" in group else f"up to {group['until']}"


def number_faults(cfg: dict[str, Any]) -> list[str]:
    """A sentence for each number outside its range."""
    return _faults(Numbers, cfg)


def shape_faults(cfg: dict[str, Any]) -> list[str]:
    """A sentence for each key that we read and that is no list, block or text as it should be."""
    return _faults(Shapes, cfg)


def _faults(kind: type[BaseModel], cfg: dict[str, Any]) -> list[str]:
    try:
        kind.model_validate({key: cfg.get(key) for key in kind.model_fields})
    except ValidationError as error:
        return [
            f"`{fault['loc'][0]}: {short(fault['input'])[1:-1]}`: {fault['msg'][0].lower()}"
            f"{fault['msg'][1:]}; correct it."
            for fault in error.errors()
        ]
    return []
