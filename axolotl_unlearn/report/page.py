"""One self-contained HTML page from results.json: no script, no font, nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write
from axolotl_unlearn.metrics.results import Results, load_results
from axolotl_unlearn.report.view import Log, View


def write_report(
    results: Results | Mapping[str, Any] | str | Path,
    out_html: str | Path,
    *,
    training_logs: Mapping[str, str | Path | Log] | None = None,
    trajectory: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the page and returns its path.

    Args:
        results: the dict of results.json, its path, or its folder.
        out_html: file to write; missing folders are made.
        training_logs: run name -> trainer_state.json (path) or its log_history.
        trajectory: `[{"step": s, "scores": {metric: value}, "run": name?}, ...]`, or such a list
            under each run's name.
        extras: `attacks` and `depth` (lists of curves, see `View`), `attack_sentences` and
            `depth_sentences` ({model: text}), `configs` ({file name: text}); whatever else is
            printed as JSON under "How this was made".

    Texts appear only where `results` carries `examples`; this function never reads the data.
    """
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    logs = {name: _read_log(name, log) for name, log in (training_logs or {}).items()}
    view = View(load_results(results), logs, trajectory, extras or {})
    templates = Environment(loader=PackageLoader(__package__, "."), autoescape=True)
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    page = templates.get_template("page.html.j2").render(view=view, css=Markup(css))
    return write(out_html, harmless(page) + "\n")


#: Marks that turn the order of what is read after them, in a name also of what is not its own.
_TURNS = {code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def harmless(page: str) -> str:
    """A page whose texts were escaped: marks of writing direction shown, half surrogates gone."""
    return page.translate(_TURNS).encode("utf-8", "replace").decode()


def _read_log(name: str, log: str | Path | Log) -> Log:
    """log_history of a trainer_state.json, or the list itself."""
    if not isinstance(log, (str, Path)):
        return list(log)
    path = Path(log)
    path = path / "trainer_state.json" if path.is_dir() else path
    if not path.is_file():
        raise UnlearnError(f"{path}, the training log of {name!r}, does not exist.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))["log_history"]
    except (json.JSONDecodeError, KeyError, TypeError) as fault:
        raise UnlearnError(f"{path} is no trainer_state.json: no list `log_history`.") from fault
