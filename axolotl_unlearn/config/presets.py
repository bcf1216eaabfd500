"""Published settings: `presets/NAME.yml` as the beginning of a block."""

from __future__ import annotations

import json
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any

import yaml

from axolotl_unlearn.columns import SIDES, task_number
from axolotl_unlearn.config import UnlearnArgs, nearest
from axolotl_unlearn.objectives import OBJECTIVES

if TYPE_CHECKING:
    from axolotl_unlearn.data.coverage import RowCounts

#: Blocks of which a config may give some keys beside a preset; all else replaces the preset's.
_MERGED = ("data", "labels", "fields", "pairing", "level")

#: Rows from which objectives that compare distributions have something to compare.
MATCHED_FROM = 20


def merged(preset: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """``given`` over ``preset``, blocks key by key and objectives as whole lists."""
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


def fitted(args: UnlearnArgs, counts: RowCounts) -> UnlearnArgs:
    """``args`` with the limits of a preset that takes a teacher lifted where no row meets them.

    Such a preset names kinds and tasks that data need not have. Tasks that no row of the side
    has are left out; an entry that is then for no row is left out if another one of its
    objective has rows, and is else for all kinds. With fewer than `MATCHED_FROM`
    rows those that compare with held-out rows are left out.
    """
    changed = {}
    for side in SIDES:
        entries = getattr(args, side)
        tasks = {task for of, _, task in counts.rows if of == side}
        if not tasks:
            continue  # no such data at all: reported elsewhere, or not read yet
        met = [
            entry.model_copy(
                update={"tasks": [t for t in entry.tasks if task_number(t) in tasks] or None}
            )
            if entry.tasks
            else entry
            for entry in entries
        ]
        busy = {entry.objective for entry in met if counts.of_entry(side, entry)}
        changed[side] = []
        for entry in met:
            if not counts.of_entry(side, entry):
                if entry.objective in busy:
                    continue
                busy.add(entry.objective)
                entry = entry.model_copy(update={"kinds": None})
            if (
                OBJECTIVES[entry.objective].against_heldout
                and counts.of_entry(side, entry) < MATCHED_FROM
            ):
                continue
            changed[side].append(entry)
    return args.model_copy(update=changed)
