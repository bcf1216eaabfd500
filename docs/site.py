"""Hooks of mkdocs: the README is the first page, and files outside `docs/` are named, not linked.

Started by ``mkdocs.yml``; `make site` builds it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    readme = LINK.sub(_from_docs, (ROOT / "README.md").read_text("utf-8"))
    files.append(File.generated(config, "index.md", content=readme))
    return files


def _from_docs(link: re.Match[str]) -> str:
    """A link of the README as one of a page in `docs/`."""
    image, text, target, anchor = link.groups(default="")
    if target.startswith(("http:", "https:")):
        return link[0]
    target = target[5:] if target.startswith("docs/") else f"../{target}"
    return f"{image}[{text}]({target}{anchor})"


def on_page_markdown(markdown: str, **_: Any) -> str:
    # GitHub wants a bar in a table's code escaped; Python-Markdown shows the backslash.
    whole = CODE.sub(lambda code: code[0].replace("\\|", "|"), markdown)
    return LINK.sub(_inside, whole)


def _inside(link: re.Match[str]) -> str:
    """A link to a file of the repository outside `docs/` becomes its path."""
    _, text, target, _ = link.groups(default="")
    if not target.startswith("../"):
        return link[0]
    path = (ROOT / "docs" / target).resolve()
    if not path.exists():  # mkdocs warns of it, and a warning fails
        return link[0]
    name = str(path.relative_to(ROOT))
    return f"`{name}`" if name in text else f"{text} (`{name}`)"
