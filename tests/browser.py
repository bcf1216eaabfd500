"""A headless Chromium, and texts that would run in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

#: The path in CHROMIUM, or one of the usual names.
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium found (install it or set CHROMIUM to its path)"
)

#: Texts of a stranger: scripts in every place where one can stand, and marks that turn the order.
#: A script that runs adds its number to the title.
HOSTILE = [
    "<script>document.title+=' ran 0'</script>",
    "]]><script>document.title+=' ran 1'</script>",
    "</style></title></textarea><svg onload=\"document.title+=' ran 2'\">",
    "'><img src=x onerror=\"document.title+=' ran 3'\">",
    "--><details open ontoggle=\"document.title+=' ran 4'\">",
    '" autofocus tabindex=0 onfocus="document.title+=\' ran 5\'" x="',
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe \u2066inner",
    "half \ud800 \x00 NUL",
]


def hostile(value: Any, keep: tuple[str, ...] = ()) -> Any:
    """The same data with every text but those under the keys ``keep`` from `HOSTILE`, each name
    in one way everywhere."""
    texts, known = cycle(HOSTILE), {}

    def changed(part: Any) -> Any:
        if isinstance(part, dict):
            return {k: v if k in keep else changed(v) for k, v in part.items()}
        if isinstance(part, list):
            return [changed(one) for one in part]
        if isinstance(part, str):
            return known.setdefault(part, f"{next(texts)} {len(known)}")
        return part

    return changed(value)


def chromium(tmp_path, *arguments):
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --hide-scrollbars"
    ).split()
    return subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", *arguments],
        capture_output=True,
        text=True,
        timeout=600,  # seconds; a browser on a busy two-core machine takes long to start
    )


def title_in_browser(tmp_path: Path, page: str) -> str:
    """The title of a page after it was loaded, without its policy against scripts."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    path = tmp_path / "hostile.html"
    path.write_text(page, "utf-8", "replace")
    done = chromium(tmp_path, "--virtual-time-budget=2000", "--dump-dom", path.as_uri())
    return re.search("<title>(.*?)</title>", done.stdout, re.S)[1]
