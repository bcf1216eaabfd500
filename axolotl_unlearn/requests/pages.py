"""What readers get of a record: a page of it, and a record and a page for each subject."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.metrics.audit import READINGS
from axolotl_unlearn.requests.ledger import Ledger, canonical
from axolotl_unlearn.requests.request import read_json

#: Of a request: which rows are whose.
SUBJECTS = "subjects.json"
Statement = Mapping[str, Any]


# --- for readers ---------------------------------------------------------------------------------


def readings(statement: Statement) -> dict[str, int]:
    """Documents by reading, worst first."""
    counts = Counter(line["reading"] for line in statement["predicate"]["documents"])
    return {reading: counts.get(reading, 0) for reading in READINGS}


def page(statement: Statement, *, evaluation: bool = False) -> str:
    """REPORT.html: one page, no script, nothing from elsewhere, no text of a row.

    Args:
        evaluation: link to the evaluation's own page, eval/report.html.
    """
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape

    from axolotl_unlearn.report import page as report

    css = (Path(report.__file__).parent / "page.css").read_text(encoding="utf-8")
    templates = Environment(loader=PackageLoader(__package__, "."), autoescape=True)
    templates.filters["says"] = lambda text: Markup(
        re.sub("`([^`]*)`", r"<code>\1</code>", escape(text[:1].upper() + text[1:]))
    )
    shown = templates.get_template("report.html.j2").render(
        record=statement["predicate"],
        subjects=statement["subject"],
        readings=readings(statement),
        evaluation=evaluation,
        css=Markup(css),
    )
    return report.harmless(shown)


def subjects(folder: Path, statement: Statement) -> dict[str, bytes]:
    """The records of a request's subjects and their pages, by name below its folder: each is the
    record of the request without the rows of others."""
    every = read_json(folder / SUBJECTS) or {}
    ledger, whole, pages = Ledger(folder.parent), statement["predicate"], {}
    for name, rows in every.items():
        mine = {ledger.keyed(row) for row in rows}
        documents = [line for line in whole["documents"] if line["document"] in mine]
        counts = {"forget": len(rows), "documents": len(documents)}
        own = {
            "request": whole["request"] | {"subject": name, "counts": counts, "chosen": {}},
            "documents": documents,
            "limits": [
                *whole["limits"],
                f"The model was made for {len(every)} subjects together: verdict, attacks and "
                "times are those of all their rows.",
            ],
        }
        rest = {key: value for key, value in whole.items() if key != "files"}
        record = {**statement, "predicate": rest | own}
        pages[f"subjects/{name}/record.json"] = canonical(record) + b"\n"
        pages[f"subjects/{name}/REPORT.html"] = page(record).encode()
    return pages
