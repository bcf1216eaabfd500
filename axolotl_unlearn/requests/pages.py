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


def page(statement: Statement, *, evaluation: bool = False) -> str:
    """REPORT.html: one page, no script, nothing from elsewhere, no text of a row.

    Args:
        evaluation: link to the evaluation's own page, eval/report.html.
    """
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape

    from axolotl_unlearn.report import page as report

    counts = Counter(line["reading"] for line in statement["predicate"]["documents"])
    css = (Path(report.__file__).parent / "page.css").read_text(encoding="utf-8")
    templates = Environment(loader=PackageLoader(__package__, "."), autoescape=True)
    templates.filters["says"] = lambda text: Markup(
        re.sub("`([^`]*)`", r"<code>\1</code>", escape(text[:1].upper() + text[1:]))
    )
    shown = templates.get_template("report.html.j2").render(
        record=statement["predicate"],
        subjects=statement["subject"],
        readings={reading: counts[reading] for reading in READINGS},
        listed=lambda part: part if isinstance(part, list) else [],
        many=lambda part: len(part) if isinstance(part, list) else part,
        evaluation=evaluation,
        css=Markup(css),
    )
    return report.harmless(shown)


#: Parts of a record that say nothing of a single subject.
OF_ALL = ("config", "model", "versions", "way", "bound", "verdict", "attacks", "tries", "seconds")
OF_ALL += ("told", "limits")
_KEYED = re.compile(r"\b[0-9a-f]{32}\b")


def subjects(folder: Path, statement: Statement) -> dict[str, bytes]:
    """The records of a request's subjects and their pages, by name below its folder: each is a
    record of its own, with nothing of the rows, names and files of others."""
    every = read_json(folder / SUBJECTS) or {}
    ledger, whole, made = Ledger(folder.parent), statement["predicate"], {}
    for name, rows in every.items():
        mine = {ledger.keyed(row) for row in rows}
        documents = [line for line in whole["documents"] if line["document"] in mine]
        kept = ("id", "created", "recorded")
        own = _without({key: whole[key] for key in OF_ALL if key in whole}, mine) | {
            "request": {key: whole["request"][key] for key in kept}
            | {"subject": name, "chosen": {}}
            | {"counts": {"forget": len(rows), "documents": len(documents)}},
            "documents": documents,
            "earlier": None,
            "erased": _counts(whole["erased"]),
        }
        own["limits"] += [
            f"The model was made for {len(every)} subjects together: verdict, attacks and times "
            "are those of all their rows."
        ]
        record = {**statement, "predicate": own}
        made[f"subjects/{name}/record.json"] = canonical(record) + b"\n"
        made[f"subjects/{name}/REPORT.html"] = page(record).encode()
    return made


def _without(value: Any, mine: set[str]) -> Any:
    """Ids of documents only where they are this subject's."""
    if isinstance(value, str):
        return _KEYED.sub(lambda m: m[0] if m[0] in mine else "(of another)", value)
    if isinstance(value, Mapping):
        return {key: _without(part, mine) for key, part in value.items()}
    return [_without(part, mine) for part in value] if isinstance(value, list) else value


def places(erased: Mapping[str, Any]) -> int:
    """How many places still hold rows; before v0.4 those that were listed."""
    listed = [erased.get(part) or [] for part in ("left", "named")]
    return erased.get("places", sum(map(len, listed)))


def _counts(erased: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What was erased without a place: its name may be another's."""
    parts = ("removed", "kept", "left", "named")
    return erased and {
        **{part: len(erased[part]) for part in parts if part in erased},
        **{key: erased[key] for key in ("time", "bytes", "windows") if key in erased},
        "places": places(erased),
    }
