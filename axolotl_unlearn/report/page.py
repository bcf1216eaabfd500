"""One self-contained HTML page from results.json: no script, no font, nothing from elsewhere.

``page.html.j2`` lays out what `View` has; nothing here computes a metric.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import counted
from axolotl_unlearn.files import write
from axolotl_unlearn.metrics.intervals import smallest_difference
from axolotl_unlearn.metrics.results import CELLS, Model, Results, load_results
from axolotl_unlearn.metrics.semeval import score_title
from axolotl_unlearn.metrics.verdict import show
from axolotl_unlearn.metrics.verdict.words import name_of, p_value
from axolotl_unlearn.report import charts
from axolotl_unlearn.report.answer import answer_of
from axolotl_unlearn.report.inputs import TEXTS, find_inputs
from axolotl_unlearn.report.terminal import HEADLINES, caption, membership_warning

#: Columns of the audit list: key of a line of audit.jsonl, and what it is called.
AUDITED = {
    "loss": "Loss", "rank": "Rank", "min_k_plus_20": "Min-20 %++",
    "extraction_strength": "Extraction", "answer_said": "Answer said", "p": "p",
}  # fmt: skip
#: Rows of a model's audit list on the page, fewer of more than ten; the file beside it has all.
MOST_AUDITED = 200
#: Documents of it whose texts are shown, where they may be.
MOST_TEXTS = 20


def write_report(
    results: Results | Mapping[str, Any] | str | Path, out_html: str | Path, *,
    extras: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Writes the page and returns its path; ``extras`` as `find_inputs` gives them, which is asked
    where there are none. Texts appear only where the audit carries them."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    templates = Environment(
        loader=PackageLoader(__package__, "."), autoescape=True, undefined=StrictUndefined
    )
    if extras is None and isinstance(results, (str, Path)):
        extras = find_inputs(results, results)
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    page = templates.get_template("page.html.j2").render(
        view=View(load_results(results), extras or {}), css=Markup(css), AUDITED=AUDITED,
        HEADLINES=HEADLINES, attack_title=attack_title, score_title=score_title, show=show,
        p=lambda value: f"p {p_value(value)}",
    )  # fmt: skip
    rows = (row for line in (extras or {}).get("audit", ()) for row in line["rows"])
    return write(out_html, harmless(page) + "\n", private=any(row.get("generated") for row in rows))


#: Marks that turn the order of what is read after them, in a name also of what is not its own.
_TURNS = {code: f"[U+{code:04X}]" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def harmless(page: str) -> str:
    """A page whose texts were escaped: marks of writing direction shown, half surrogates gone."""
    return page.translate(_TURNS).encode("utf-8", "replace").decode()


class View:
    """The results with what the sections ask of them; arguments as of `write_report`."""

    marks = staticmethod(lambda model: [("bad", mark) for mark in model.flags])

    def __init__(self, results: Results, extras: Mapping[str, Any]) -> None:
        self.results, self.extras = results, dict(extras)
        self.models: Sequence[Model] = results.models
        self.answer = answer_of(results, self.extras.get("attack_results", ()))
        self.palette = charts.colours([model.name for model in self.models])
        self.warning = membership_warning(results)
        self.caption = " ".join(caption(self.answer).splitlines())
        self.sized = any(model.sizes for model in self.models)
        self.auc_chart = charts.auc_chart(self.models, self.palette)
        self.plane_chart = charts.plane_chart(self.models, self.palette)
        self.cells = [name for name in CELLS if any(name in m.cells for m in self.models)]

    @property
    def facts(self) -> str:
        facts = [counted(len(self.models), "model")]
        facts += [f"data {self.results.data_dir}"] if self.results.data_dir else []
        made = re.sub(r"T(\d\d:\d\d):\d\d\+00:00$", r" \1 UTC", self.results.created)
        return " · ".join([*facts, *[made] * bool(made)])

    @property
    def audits(self) -> Iterator[dict[str, Any]]:
        """The documents of each candidate, worst first; those of the best are not folded."""
        rows, candidates = self.extras.get("audit", ()), self.answer.candidates
        most = max(20, min(MOST_AUDITED, 10 * MOST_AUDITED // max(1, len(candidates))))
        by_name = {model.name: model for model in self.models}
        for place, name in enumerate(candidates):
            mine = [row for row in rows if row["model"] == name]
            readings = Counter(row["reading"] for row in mine)
            label = f"{name}: {counted(len(mine), 'document')}, "
            label += ", ".join(f"{n} {reading}" for reading, n in readings.items())
            if len(mine) > most:
                label += f"; the {most} worst are listed, audit.jsonl has all"
            counts = by_name[name].more.get("audit")
            if isinstance(counts, Mapping) and counts.get("resolution"):
                label += f". {counts['resolution']}"
            lines = [_line(row, n < MOST_TEXTS) for n, row in enumerate(mine[:most])]
            yield {"model": name, "label": label, "lines": lines, "folded": place > 0}

    @property
    def sentences(self) -> list[tuple[str, str]]:
        """What each attack says, by its name; and what of them the verdict does not count."""
        verdicts = self.answer.verdicts.items()
        ignored = [(n, f"not counted: {x}.") for n, one in verdicts for x in one.ignored]
        return [*self.extras.get("attack_sentences", {}).items(), *ignored]

    @cached_property
    def membership(self) -> dict[str, Any]:
        """Models with figures, names of attacks, and the difference that all attacks would
        show."""
        models = [m for m in self.models if m.membership is not None and m.membership.attacks]
        labs = [model.membership for model in models]
        names = list(dict.fromkeys(name for lab in labs for name in lab.attacks))
        widest = [one.interval for lab in labs for one in lab.attacks.values() if one.interval]
        least = max((smallest_difference(*ends, len(names)) for ends in widest), default=None)
        return {"models": models, "attacks": names, "least": least}

    @property
    def provenance(self) -> str:
        """Models, versions, data hashes, settings: what a second person needs."""
        models = {m.name: [m.model, m.weights, m.more.get("seconds")] for m in self.models}
        facts = {**self.results.more, "models": models}
        return json.dumps(facts, indent=2, ensure_ascii=False, default=str)


def _line(row: Mapping[str, Any], with_texts: bool) -> dict[str, Any]:
    """One document of the audit list as it is shown."""
    inner, figures = row["rows"], []
    for key in AUDITED:
        others = [
            f"{_audited(of_side[key])} {side}"
            for side in ("before", "retrained")
            if (of_side := row[side]) and of_side.get(key) is not None
        ]
        if key == "p" and row["q"] is not None:
            others = [f"q {p_value(row['q'])}"]
        figures.append((_audited(row[key], key == "p"), "\n".join(others)))
    texts = [[one.get(key, "") for key in TEXTS] for one in inner if one.get("generated")]
    return {
        "document": row["document"],
        "count": counted(len(inner), "row") if inner else "",
        "texts": texts if with_texts else [],
        "reading": row["reading"],
        "bad": row["told"] or row["reading"] in ("recited", "still said"),
        "figures": figures,
    }


def attack_title(name: str) -> str:
    words = name_of(name)
    return words[:1].upper() + words[1:]


def _audited(value: float | bool | None, is_p: bool = False) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return p_value(value) if is_p and value is not None else show(value)
