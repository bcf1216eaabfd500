"""Published settings: `presets/NAME.yml` as the beginning of a block."""

from __future__ import annotations

import json
from importlib import resources
from string import Template
from typing import Any

import yaml

from axolotl_unlearn.config import nearest

#: Blocks of which a config may give some keys beside a preset; all else replaces the preset's.
_MERGED = ("data", "labels", "fields", "pairing", "level")


#: Keys of ``data`` -> those of a preset's that they replace.
_REPLACED = {
    "rows": ("join", "template", "chat_template", "eos", "labels", "max_length"),
    "template": ("join", "chat_template"),
    "chat_template": ("join", "template"),
}


def merged(preset: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """``given`` over ``preset``, blocks key by key and objectives as whole lists."""
    gone = [old for key, others in _REPLACED.items() if given.get(key) for old in others]
    preset = {key: value for key, value in preset.items() if key not in gone}
    both = {
        key: merged(preset[key], value)
        for key, value in given.items()
        if key in _MERGED and isinstance(value, dict) and isinstance(preset.get(key), dict)
    }
    return {**preset, **given, **both}


def preset_names() -> list[str]:
    """Names that ``preset:`` takes."""
    folder = resources.files("axolotl_unlearn") / "presets"
    return sorted(p.name[:-4] for p in folder.iterdir() if p.name.endswith(".yml"))


def load_preset(name: str, given: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[str]]:
    """A preset with what a block gives for its places, and the keys that it takes.

    Raises:
        ValueError: There is none of this name; says the nearest.
    """
    if name not in preset_names():
        raise ValueError(
            f"there is no preset {name!r}{nearest(name, preset_names())}; "
            f"presets: {', '.join(preset_names())}"
        )
    text, values = Template(preset_text(name)), {}
    for key in text.get_identifiers():
        value = (given or {}).get(key)
        as_model = isinstance(value, str) and key != "heldout"
        value = {"model": value} if as_model else value
        values[key] = json.dumps(value, ensure_ascii=False, default=str)  # which is YAML
    return yaml.safe_load(text.substitute(values))["unlearn"], text.get_identifiers()


def preset_text(name: str) -> str:
    """The file of a preset: its source as a comment, and the block."""
    return (resources.files("axolotl_unlearn") / "presets" / f"{name}.yml").read_text("utf-8")
