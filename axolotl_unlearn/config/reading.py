"""Configs as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.errors import UnlearnError


class _Once(yaml.SafeLoader):
    """YAML of which no block has a key twice: the last one would count."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # Before blocks are merged by `<<`, which puts the keys of several into one.
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if names.count(key.value) > 1 and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark
                )
        return node


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a config file.

    Raises:
        UnlearnError: It cannot be read.
    """
    if path.is_dir():
        raise UnlearnError(f"{path} is a folder; name the config in it.", code="config.is-a-folder")
    if not path.is_file():
        raise UnlearnError(
            f"{path} does not exist; give the path of an Axolotl config.", code="config.missing"
        )
    try:
        cfg = _Once(path.read_text("utf-8")).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", "it cannot be read")
        cure = "correct it, or give the path of an Axolotl config"
        raise UnlearnError(f"{path}{line}: not valid YAML ({reason}); {cure}.") from None
    if not isinstance(cfg, dict):
        raise UnlearnError(f"{path} holds no keys; start from a copy of examples/npo_over.yml.")
    if cfg.get("chat_template_jinja") and not cfg.get("chat_template"):
        cfg["chat_template"] = "jinja"  # as Axolotl reads it
    return cfg
