"""What the page shows, as plain data: sections of blocks that ``page.html.j2`` lays out.

A block is a dict with a ``kind``: text, table, figures, list, audit or folded. Nothing here
computes a metric or writes HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axolotl_unlearn.metrics.intervals import smallest_difference
from axolotl_unlearn.metrics.results import CELLS, Model, Results
from axolotl_unlearn.metrics.semeval import score_title
from axolotl_unlearn.metrics.verdict import show
from axolotl_unlearn.metrics.verdict.words import name_of
from axolotl_unlearn.report import charts
from axolotl_unlearn.report import results as readings
from axolotl_unlearn.report.answer import answer_of
from axolotl_unlearn.report.results import HEADLINES, cell_count, flags, number, value_of
from axolotl_unlearn.report.terminal import caption

Block = dict[str, Any]

#: Columns of the audit list: key of a line of audit.jsonl, and what it is called.
_AUDITED = {
    "loss": "Loss", "rank": "Rank", "min_k_plus_20": "Min-20 %++",
    "extraction_strength": "Extraction", "answer_said": "Answer said", "p": "p",
}  # fmt: skip
#: Rows of a model's audit list on the page, fewer of more than ten; the file beside it has all.
MOST_AUDITED = 200
#: Models in a chart of curves, which more would fill: as many as there are colours.
MOST_DRAWN = 10
#: Documents of it whose texts are shown, where they may be.
MOST_TEXTS = 20


class View:
    """The results with what every section asks of them; arguments as of `write_report`."""

    def __init__(self, results: Results, extras: Mapping[str, Any]) -> None:
        self.results, self.extras = results, dict(extras)
        self.models: Sequence[Model] = results.models
        self.retrained = results.role("retrained")
        self.answer = answer_of(results, _rows(self.extras.get("attack_results")))
        names = [model.name for model in self.models]
        best = [role.name for role in (results.role("original"), self.retrained) if role]
        best += [one.name for one in self.answer.candidates if one.name not in best]
        few = len(names) <= MOST_DRAWN
        #: Models with a curve and a name in charts of all of them.
        self.drawn = names if few else best[:MOST_DRAWN]
        self.palette = charts.colours(names if few else list(dict.fromkeys(best + names)))
        self.label = results.label
        self.warning = readings.membership_warning(results)

    @property
    def facts(self) -> str:
        count = len(self.models)
        facts = [f"{count} model{'s' if count > 1 else ''}"]
        facts += [f"data {self.results.data_dir}"] if self.results.data_dir else []
        return " · ".join(facts + ([self.results.created] if self.results.created else []))

    @property
    def sections(self) -> list[dict[str, Any]]:
        """All sections that have something to show, in reading order."""
        carrying = [self.scores(), self.charts(), self.audit(), self.distances(), self.attacks()]
        details = [self.membership(), self.cells(), self.provenance()]
        found = [part | {"detail": False} for part in carrying if part["blocks"]]
        return found + [part | {"detail": True} for part in details if part["blocks"]]

    def scores(self) -> dict[str, Any]:
        head = [_cell("Model")] + [
            _cell(score_title(m), "ideal 0.5" if m == "mia_auc" else "higher is better")
            for m in HEADLINES
        ]
        rows = []
        for model in self.models:
            count = cell_count(model)
            small = f"{count} of 12 cells" if count != len(CELLS) else ""
            cells = [self.name(model) | {"badges": (), "small": small}]
            cells += [_ranged(model, metric, tag=metric) for metric in HEADLINES]
            tone = "bad" if flags(model) else ""
            best = model.name == self.answer.best
            rows.append({"model": model.name, "tone": tone, "best": best, "cells": cells})
        return _section(
            "Scores",
            " ".join(caption(self.results, self.answer).splitlines()),
            _table("Scores of all models", head, rows, "scores"),
            _list(("", note) for note in self.results.notes),
        )

    def charts(self) -> dict[str, Any]:
        sized = any(map(readings.membership_sizes, self.models))
        band = "" if sized else " (n unknown: the band is a guess)"
        recognised = "Can training on the forget set still be noticed, on average? The band is "
        recognised += f"where models fall that never saw it{band}."
        kept = f"Top right is where a model should be. {self._few('named')}"
        kept += "Curves join equal Task Aggregates. " * charts.has_contours(self.models)
        kept += "Ring: original; diamond: retrained; red cross: collapsed or below the gate."
        return _section(
            "Forgotten, kept, recognised",
            "",
            _figures(
                (charts.auc_chart(self.models, self.palette), recognised),
                (charts.plane_chart(self.models, self.palette, self.drawn), kept),
            ),
        )

    def _few(self, how: str) -> str:
        """Says that not every model has a curve or a name."""
        if len(self.drawn) == len(self.models):
            return ""
        return (
            f"Of {len(self.models)} models {len(self.drawn)} are {how}: original, retrained and "
            "the best by the answer. "
        )

    def audit(self) -> dict[str, Any]:
        """One line a document, worst first; a table for each model, the answer's open."""
        rows = _rows(self.extras.get("audit"))
        candidates = self.answer.candidates
        most = max(20, min(MOST_AUDITED, 10 * MOST_AUDITED // max(1, len(candidates))))
        blocks: list[Block | None] = []
        for name in (one.name for one in candidates):
            mine = [row for row in rows if row.get("model") == name]
            block = _audited(name, mine, most) if mine else None
            counts = next((m.more.get("audit") for m in self.models if m.name == name), None)
            if block and isinstance(counts, Mapping) and counts.get("resolution"):
                block["label"] += f". {counts['resolution']}"
            blocks.append(block if not blocks else _folded(f"The same for {name}", block))
        return _section(
            "Document by document",
            "Is this document gone? Each line is a document of the forget set, worst first. Under "
            "loss, Min-20 %++ and extraction strength stand those before unlearning and those of "
            "the retrained model; rank is the share of unseen texts with a lower loss (near 0: "
            "known, near 1: pushed away). q is p corrected for the number of documents "
            "(Benjamini-Hochberg). Long ids are cut to 8 characters; audit.jsonl has them whole.",
            *blocks,
        )

    def distances(self) -> dict[str, Any]:
        """Which scores differ from the retrained model's, and by how much."""
        title = "Distance from the retrained model"
        if self.retrained is None:
            says = "No retrained model is in these results. Only a model trained on everything "
            says += "except the forget set shows what perfect forgetting looks like; evaluate one "
            says += "as retrained=PATH to see how far every score is from it."
            return _section(title, "", _text(says))
        others = [m for m in self.models if m.part == "candidate" and m.distance]
        if not others:
            return _section(title, "")
        found: dict[str, dict[str, Any]] = {}
        least: dict[str, float] = {}
        tested = 0
        for model in others:
            gaps = {metric: model.distance.get(metric) for metric in (*HEADLINES, *CELLS)}
            gaps = {m: gap for m, gap in gaps.items() if gap and None not in (gap.value, gap.p)}
            tested = max(tested, len(gaps))
            for metric, gap in gaps.items():
                if gap.interval:
                    seen = smallest_difference(*gap.interval, len(gaps))
                    least[metric] = max(least.get(metric, 0.0), seen)
                if gap.p < 0.05:  # corrected already
                    cell = _cell(f"{gap.value:+.2f}", _p(gap.p))
                    found.setdefault(metric, {})[model.name] = cell
        if not found:
            shown = [f"{score_title(m)} {least[m]:.2f}" for m in HEADLINES if m in least]
            says = f"None of {tested} scores differs in any model. Differences that these rows "
            says += f"would show in four of five data sets: {', '.join(shown)}."
            return _section(title, "", _text(says))
        rows = []
        for metric in [metric for metric in (*HEADLINES, *CELLS) if metric in found]:
            figures = (score_title(metric), show(value_of(self.retrained, metric)))
            cells = [*map(_cell, figures), _cell(show(least.get(metric)))]
            cells += [found[metric].get(model.name, _cell("\u2013")) for model in others]
            rows.append({"cells": cells})
        head = [_cell("Score"), _cell("retrained"), _cell("Smallest"), *map(self.name, others)]
        note = (
            f"Only scores that differ from the retrained model's are listed, of {tested} tested: "
            "paired by document, p corrected for their number (Holm). Smallest: the difference "
            "that these rows would show in four of five data sets."
        )
        return _section(title, note, _table("Distances", head, rows, "dense"))

    def attacks(self) -> dict[str, Any]:
        sentences = self.extras.get("attack_sentences")
        named = sentences.items() if isinstance(sentences, Mapping) else ()
        return _section(
            "Attacks",
            "What comes back when the model is quantised, trained again or prompted otherwise, and "
            "what its weights tell. " + self._few("drawn"),
            _list((str(name), str(text).removeprefix(f"{name}: ")) for name, text in named),
            self._curves(self.extras.get("attacks")),
        )

    def membership(self) -> dict[str, Any]:
        """Attacks against models, then the blind baselines, which are the same for all models."""
        models = [m for m in self.models if m.membership is not None and m.membership.attacks]
        if not models:
            return _section("Membership", "")
        labs = [model.membership for model in models]
        names = list(dict.fromkeys(name for lab in labs for name in lab.attacks))
        figures = {name: [lab.attacks.get(name) for lab in labs] for name in names}
        lines = {
            attack_title(name): [_with_interval(f and f.auc, f and f.interval) for f in ones]
            for name, ones in figures.items()
        }
        widest = [one.interval for lab in labs for one in lab.attacks.values() if one.interval]
        least = max((smallest_difference(*ends, len(names)) for ends in widest), default=None)
        learned = [m.learned for m in models]
        if any(one is not None and one.p is not None for one in learned):
            lines["Learned attack"] = [
                _cell(show(one and one.auc), _p(one.p) if one and one.p is not None else "")
                for one in learned
            ]
        shares = [lab.tpr.get("0.01") for lab in labs]
        if any(shares):
            cells = [_with_interval(f and f.value, f and f.interval) for f in shares]
            lines["Loss, found at 1 % false alarms"] = cells
        rows = [{"cells": [_cell(title), *cells]} for title, cells in lines.items()]
        for name, one in labs[0].blind.items():
            marks = [("bad", "separates")] if one.separates else []
            pair = None if None in (one.low, one.high) else (one.low, one.high)
            title = _cell(f"Blind: {attack_title(name)}", badges=marks)
            cells = [title, _with_interval(one.auc, pair) | {"span": len(models)}]
            rows.append({"cells": cells})
        return _section(
            "Membership",
            "AUC of each way to recognise members, ideal 0.5; then the share of members found when "
            "1 % of non-members are accused. Blind baselines never ask a model: where they "
            "separate the sets, the figures above them mean nothing."
            + (f" The smallest AUC difference that they all show: {show(least)}." if least else ""),
            _table("Membership attacks", [_cell("Attack"), *map(self.name, models)], rows, "dense"),
        )

    def cells(self) -> dict[str, Any]:
        rows = [
            {"cells": [_cell(score_title(name)), *(_ranged(m, name) for m in self.models)]}
            for name in CELLS
            if any(name in m.cells for m in self.models)
        ]
        return _section(
            "The twelve cells",
            "Completions: ROUGE-L recall of the continuation. Answers: exact match. Forget cells "
            "are shown as 1 - v, so high is good everywhere. Below: 95 % intervals.",
            _table("Cells", [_cell("Cell"), *map(self.name, self.models)], rows, "dense"),
        )

    def provenance(self) -> dict[str, Any]:
        """Models, versions, data hashes, settings: what a second person needs."""
        facts = {key: value for key, value in self.results.more.items() if key != "trajectory"}
        facts["models"] = {
            m.name: [m.model, *(m.more[k] for k in ("weights", "seconds") if k in m.more)]
            for m in self.models
        }
        return _section("How this was made", "", _folded("Models, data, versions, settings", facts))

    def name(self, model: Model) -> dict[str, Any]:
        """A model as a heading: its colour, its name, its flags."""
        marks = [("bad", mark) for mark in flags(model)]
        return _cell(model.name, badges=marks, color=self.palette[model.name])

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """The small table under the answer."""
        found = []
        for model, one in zip(self.models, self.answer.models, strict=True):
            name = self.name(model) | {"badges": [(one.tone, one.kind)]}
            figures = {"auc": show(one.auc), "aggregate": show(one.aggregate)}
            found.append({"name": name, **figures, "why": one.damning, "tone": one.tone})
        return found

    def _curves(self, curves: Any) -> Block | None:
        """Panels from curves ``{"title"|"attack", "model", "metric", "x_label", "points"}``, a
        point ``{"x", "y", "low"?, "high"?}``. Curves of one title and metric share a panel."""
        panels: dict[tuple[str, str, str], dict[str, list[list[float]]]] = {}
        for curve in _rows(curves):
            title = str(curve.get("title") or curve.get("attack") or "attack")
            key = (title, str(curve.get("metric", "")), str(curve.get("x_label", "step")))
            points = []
            for point in _rows(curve.get("points")):
                values = [number(point.get(end)) for end in ("x", "y", "low", "high")]
                if None not in values[:2]:
                    points.append(values if None not in values else values[:2])
            panels.setdefault(key, {})[str(curve.get("model", title))] = points
        figures = []
        for (title, metric, x_label), lines in panels.items():
            if len(lines) > MOST_DRAWN:
                known = [name for name in lines if name in self.drawn] or list(lines)
                lines = {name: lines[name] for name in known[:MOST_DRAWN]}
            names = {"title": title, "x_label": x_label, "y_label": metric}
            figures.append((charts.curves_chart("attack", lines, self.palette, **names), ""))
        return _figures(*figures)


def _audited(name: str, rows: list[Mapping[str, Any]], most: int) -> Block:
    short = _short_ids([str(row.get("document", "")) for row in rows])
    lines = []
    for row in rows[:most]:
        inner = _rows(row.get("rows"))
        texts = [
            [str(one.get(key, "")) for key in ("prompt", "expected", "generated")]
            for one in inner
            if len(lines) < MOST_TEXTS and one.get("generated")
        ]
        told = bool(row.get("told")) or row.get("reading") in ("recited", "still said")
        document = short[str(row.get("document", ""))]
        count = f"{len(inner)} rows" if inner else ""
        reading = ("bad" if told else "plain", str(row.get("reading", "")))
        cells = [_cell(document, count, texts=texts), _cell("", badges=[reading])]
        for key in _AUDITED:
            others = [
                f"{_audited_value(of_side.get(key))} {side}"
                for side in ("before", "retrained")
                if isinstance(of_side := row.get(side), Mapping) and of_side.get(key) is not None
            ]
            if key == "p" and number(row.get("q")) is not None:
                others = [f"q {_p(row['q'], '')}"]
            cells.append(_cell(_audited_value(row.get(key), key == "p"), "\n".join(others)))
        lines.append({"tone": "bad" if told else "", "cells": cells})
    told = sum(bool(row.get("told")) for row in rows)
    said = sum(row.get("reading") == "still said" for row in rows)
    title = f"{name}: {told} of {len(rows)} documents can be told"
    title += f", an answer of {said} is still said" if said else ""
    if len(rows) > len(lines):
        title += f"; the {len(lines)} worst are listed, audit.jsonl has all"
    head = [_cell("Document"), _cell("Reading"), *map(_cell, _AUDITED.values())]
    return {"kind": "audit", "label": title, "head": head, "rows": lines, "cls": "dense"}


def _section(title: str, note: str, *blocks: Block | None) -> dict[str, Any]:
    anchor = re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
    return {"id": anchor, "title": title, "note": note, "blocks": [b for b in blocks if b]}


def _text(text: str) -> Block:
    return {"kind": "text", "text": text}


def _list(items: Iterable[tuple[str, str]]) -> Block | None:
    """(heading, text) pairs."""
    items = list(items)
    return {"kind": "list", "items": items} if items else None


def _table(label: str, head: list, rows: list[dict[str, Any]], cls: str) -> Block | None:
    block = {"kind": "table", "label": label, "head": head, "rows": rows, "cls": cls}
    return block if rows else None


def _figures(*figures: tuple[str, str]) -> Block | None:
    """(svg, caption) each; those without a chart are left out."""
    shown = [figure for figure in figures if figure[0]]
    return {"kind": "figures", "figures": shown} if shown else None


def _folded(title: str, content: Any) -> Block | None:
    """A block, or anything else as JSON, behind a line that opens it."""
    if not content:
        return None
    if "kind" not in content:
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        content = {"kind": "pre", "text": text}
    return {"kind": "folded", "title": title, "block": content}


def _cell(text: str, small: str = "", **more: Any) -> dict[str, Any]:
    """A table cell: also ``badges`` [(tone, text)], ``color``, ``span``, ``tag``, ``texts``."""
    return {"text": text, "small": small, **more}


def _ranged(model: Model, metric: str, **more: Any) -> dict[str, Any]:
    return _with_interval(value_of(model, metric), model.intervals.get(metric)) | more


def _with_interval(
    value: float | None, around: tuple[float, float] | None = None
) -> dict[str, Any]:
    return _cell(show(value), f"{around[0]:.2f} to {around[1]:.2f}" if around else "")


def _p(value: float, name: str = "p ") -> str:
    return f"{name}< 0.001" if value < 0.001 else f"{name}{value:.3f}"


def attack_title(name: str) -> str:
    words = name_of(name)
    return words[:1].upper() + words[1:]


def _audited_value(value: Any, is_p: bool = False) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _p(value, "") if is_p and number(value) is not None else show(number(value))


def _short_ids(names: Sequence[str]) -> dict[str, str]:
    """Ids without quotation marks, and cut to 8 characters where these still tell them apart."""
    bare = {name: name.strip("\"'") for name in names}
    cut = {name[:8] for name in bare.values()}
    long = max(map(len, bare.values()), default=0) > 24
    return {k: v[:8] for k, v in bare.items()} if long and len(cut) == len(bare) else bare


def _rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list, none where it is no list."""
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []
