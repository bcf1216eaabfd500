"""Imports run one way: a room knows the rooms below it, never those above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "axolotl_unlearn"
#: From the lowest floor to the highest; rooms of one floor know each other.
FLOORS = (
    {"errors", "columns", "normal_form", "versions", "device"},
    {"files"},
    {"store", "objectives", "metrics"},
    {"config", "models", "data", "engine", "shards"},
    {"report", "merging"},
    {"reference", "evaluation"},
    {"training", "attacks"},
    {"requests", "checks"},
    {"plugin", "cli"},
)
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}
#: Arrows up that are still there. This list only gets shorter.
KNOWN: set[tuple[str, str]] = set()


def arrows_up() -> set[tuple[str, str]]:
    """(file, module of ours that it imports from a higher floor), also inside functions and for
    annotations."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
                if node.module == PACKAGE.name:
                    modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                first, _, rest = module.partition(".")
                other = rest.partition(".")[0]
                if first == PACKAGE.name and other in FLOOR and FLOOR[other] > FLOOR[room]:
                    found.add((name, rest))
    return found


def test_imports_run_one_way():
    assert arrows_up() == KNOWN


def test_every_room_has_a_floor():
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix != ".md"}
    assert rooms - {"__init__", "__pycache__", "presets", "templates"} == set(FLOOR)


@pytest.mark.parametrize("room", ["objectives", "metrics"])
def test_pure_rooms_import_nothing_of_ours_but_errors(room):
    for path in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith(PACKAGE.name + "."):
                assert module.split(".")[1] in {room, "errors", "columns", "objectives"}, path
