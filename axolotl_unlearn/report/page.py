"""One self-contained HTML page from results.json: no script, no font, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.files import write
from axolotl_unlearn.metrics.results import Results, load_results
from axolotl_unlearn.report.view import View


def write_report(
    results: Results | Mapping[str, Any] | str | Path, out_html: str | Path, *,
    extras: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Writes the page and returns its path; ``extras`` as `find_inputs` gives them. Texts appear
    only where the audit carries them."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    view = View(load_results(results), extras or {})
    templates = Environment(loader=PackageLoader(__package__, "."), autoescape=True)
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    page = templates.get_template("page.html.j2").render(view=view, css=Markup(css))
    return write(out_html, harmless(page) + "\n")


#: Marks that turn the order of what is read after them, in a name also of what is not its own.
_TURNS = {code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def harmless(page: str) -> str:
    """A page whose texts were escaped: marks of writing direction shown, half surrogates gone."""
    return page.translate(_TURNS).encode("utf-8", "replace").decode()
