"""A record for readers: a page, a section for the model card, figures for a hub."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.metrics.audit import READINGS

Statement = Mapping[str, Any]
#: What a reading means, for readers who were not there.
MEANING = {
    "still said": "an answer of it is still said",
    "still known": "told from texts that were never seen, as if known",
    "pushed away": "told from texts that were never seen, as something that was pushed away",
    "not told": "cannot be told from texts that were never seen",
    "not said": "no answer of it is said; whether it can be told was not measured",
    "not measured": "no test was possible",
}


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
        meaning=MEANING,
        evaluation=evaluation,
        css=Markup(css),
    )
    return report.harmless(shown)


def card(statement: Statement) -> str:
    """A section for the model's README."""
    record = statement["predicate"]
    counts = readings(statement)
    rows = record["request"]["counts"].get("forget", "?")
    verdict = record["verdict"].get("outcome") or record["verdict"]["status"]
    exact = record.get("way", {}).get("because")
    how = "training without them" if exact else "unlearning"
    if record["verdict"]["accepted"]:
        verdict += f", accepted: {record['verdict']['accepted']}"
    lines = [
        "## Deleted training data",
        "",
        f"Request `{record['request']['id']}` of {record['request']['created'][:10]}: {rows} rows "
        f"({sum(counts.values())} documents) were removed by {how} with axolotl-unlearn "
        f"{record['versions'].get('axolotl-unlearn', '')}. Judgement: {verdict}.",
        "",
        *(f"{text}" for text in record["verdict"].get("says", [])),
        "",
        "| documents | found to be |",
        "|---|---|",
        *(f"| {n} | {reading}: {MEANING[reading]} |" for reading, n in counts.items() if n),
        "",
        "What this does not show:",
        "",
        *(f"- {limit}" for limit in record["limits"]),
    ]
    return "\n".join(lines) + "\n"


def eval_results(statement: Statement) -> str:
    """The counts in the format of `.eval_results/*.yaml` of a model repository.

    The rows are private, so the data set's id is the request and no leaderboard will show it.
    https://huggingface.co/docs/hub/eval-results
    """
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    record = statement["predicate"]
    documents = record["documents"]
    total = max(1, len(documents))
    strengths = [line["extraction_strength"] for line in documents]
    known = [value for value in strengths if value is not None]
    values = {
        f"share-{name.replace(' ', '-')}": n / total for name, n in readings(statement).items()
    }
    if known:
        values["largest-extraction-strength"] = max(known)
    entries = [
        EvalResultEntry(
            dataset_id=f"deletion-requests/{record['request']['id']}",
            task_id=name,
            value=round(value, 4),
            date=record["request"]["recorded"],
            notes=f"{len(documents)} deleted documents; private rows, see record.json",
        )
        for name, value in values.items()
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
