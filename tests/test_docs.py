"""What the documents name exists: paths, commands, config blocks, objectives, presets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Folders whose files the repository holds (out/, data/ and the like are made or the user's).
OURS = r"(?:axolotl_unlearn|benchmarks|docs|eval_tasks|examples|mergekit_configs|tests)"


def text(page: Path) -> str:
    return page.read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text(page))
    missing = [link for link in links if not (page.parent / link).exists()]
    named = re.findall(rf"(?<![\w/.-]){OURS}/[\w./*-]*\w", text(page))
    missing += [name for name in named if not list(ROOT.glob(name))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page):
    from axolotl_unlearn.cli import unlearn

    known = set(unlearn.list_commands(None))
    named = set(re.findall(r"(?:`|^|\$ )axolotl unlearn ([a-z][a-z-]+)", text(page), re.M))
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.M))
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text(page), re.M))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_config_blocks_are_valid(page):
    from axolotl_unlearn.args import parse_unlearn

    for block in re.findall(r"```yaml\n(.*?)```", text(page), re.S):
        content = yaml.safe_load(block)
        if isinstance(content, dict) and "unlearn" in content:
            parse_unlearn(content["unlearn"])


def test_every_objective_and_preset_is_documented():
    from axolotl_unlearn.args import preset_names
    from axolotl_unlearn.objectives import OBJECTIVES

    page = text(ROOT / "docs" / "objectives.md")
    assert all(f"| `{name}` |" in page for name in OBJECTIVES)
    assert all(name.removesuffix("-model2") in page for name in preset_names())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yml")), ids=str)
def test_example_blocks_are_valid(path):
    from axolotl_unlearn.args import parse_unlearn

    cfg = yaml.safe_load(text(path))
    if cfg.get("unlearn"):
        parse_unlearn(cfg["unlearn"])


def test_no_path_of_one_machine_in_tracked_files():
    import subprocess

    done = subprocess.run(
        ["git", "grep", "-nIE", r"(^|[^A-Za-z0-9_.])/(work|farm|root|home)/", "--", "."],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode > 1:
        pytest.skip("not a git checkout")
    assert [x for x in done.stdout.splitlines() if not x.startswith("tests/test_docs.py")] == []
