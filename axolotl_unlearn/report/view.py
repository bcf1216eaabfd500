"""What the page shows, as plain data: sections of blocks that ``page.html.j2`` lays out.

A block is a dict with a ``kind``: text, table, figures, list, audit, examples or folded. Nothing
here computes a metric or writes HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axolotl_unlearn.metrics.intervals import holm, smallest_difference
from axolotl_unlearn.metrics.results import Model, Results
from axolotl_unlearn.metrics.semeval import score_title
from axolotl_unlearn.metrics.verdict import name_of, show
from axolotl_unlearn.report import charts
from axolotl_unlearn.report.answer import answer_of
from axolotl_unlearn.report.results import (
    CELLS,
    HEADLINES,
    cell_count,
    flags,
    membership_sizes,
    membership_warning,
    number,
    value_of,
)
from axolotl_unlearn.report.terminal import caption

Block = dict[str, Any]

#: Columns of the audit list: key of a line of audit.jsonl, and what it is called.
_AUDITED = (
    ("loss", "Loss"),
    ("rank", "Rank"),
    ("min_k_plus_20", "Min-20 %++"),
    ("extraction_strength", "Extraction"),
    ("answer_said", "Answer said"),
    ("p", "p"),
)
#: Rows of a model's audit list on the page, fewer of more than ten; the file beside it has all.
MOST_AUDITED = 200
#: Models in a chart of curves, which more would fill: as many as there are colours.
MOST_DRAWN = 10
#: Documents of it whose texts are shown, where they may be.
MOST_TEXTS = 20
_SECRET = re.compile(r"(?im)^(\s*[\w-]*(?:token|secret|password|api_key)[\w-]*\s*:\s*)\S.*$")
# Keys of an Axolotl config that only look like secrets.
_NOT_SECRET = re.compile(r"(?i)special_tokens|tokens_per|tokenizer|_tokens\b|token_")


class View:
    """The results with what every section asks of them.

    Args:
        results: As `load_results` gives them.
        extras: See `write_report`.
    """

    def __init__(
        self,
        results: Results,
        extras: Mapping[str, Any],
    ) -> None:
        self.results = results
        self.extras = dict(extras)
        self.models: Sequence[Model] = results.models
        self.original, self.retrained = results.role("original"), results.role("retrained")
        self.answer = answer_of(results, _rows(self.extras.get("attack_results")))
        names = [model.name for model in self.models]
        best = [role.name for role in (self.original, self.retrained) if role]
        best += [one.name for one in self.answer.candidates if one.name not in best]
        #: Models with a curve and a name in charts of all of them.
        self.drawn = names if len(names) <= MOST_DRAWN else best[:MOST_DRAWN]
        self.palette = charts.colours(
            names if names == self.drawn else list(dict.fromkeys(best + names))
        )
        self.label = results.label
        self.warning = membership_warning(results)

    @property
    def facts(self) -> str:
        count = len(self.models)
        facts = [f"{count} model{'s' if count > 1 else ''}"]
        if self.results.data_dir:
            facts.append(f"data {self.results.data_dir}")
        if self.results.created:
            facts.append(_moment(self.results.created))
        return " · ".join(facts)

    @property
    def sections(self) -> list[dict[str, Any]]:
        """All sections that have something to show, in reading order."""
        carrying = [self.scores(), self.charts(), self.audit(), self.distances(), self.attacks()]
        details = [
            self.membership(),
            self.cells(),
            self.depth(),
            self.examples(),
            self.provenance(),
        ]
        found = [part | {"detail": False} for part in carrying if part["blocks"]]
        return found + [part | {"detail": True} for part in details if part["blocks"]]

    # ------------------------------------------------------------ what carries the answer

    def scores(self) -> dict[str, Any]:
        head = [
            _cell("Model"),
            *(
                _cell(score_title(m), "ideal 0.5" if m == "mia_auc" else "higher is better")
                for m in HEADLINES
            ),
        ]
        rows = []
        for model in self.models:
            cells = [_ranged(model, metric, tag=metric) for metric in HEADLINES]
            few = cell_count(model) != len(CELLS)
            name = self.name(model) | {
                "badges": (),
                "small": f"{cell_count(model)} of 12 cells" if few else "",
            }
            rows.append(
                {
                    "model": model.name,
                    "tone": "bad" if flags(model) else "",
                    "best": model.name == self.answer.best,
                    "cells": [name, *cells],
                }
            )
        notes = [("", note) for note in self.results.notes]
        return _section(
            "Scores",
            " ".join(caption(self.results, self.answer).splitlines()),
            _table("Scores of all models", head, rows, "scores"),
            _list(notes),
        )

    def charts(self) -> dict[str, Any]:
        band = (
            "" if any(map(membership_sizes, self.models)) else " (n unknown: the band is a guess)"
        )
        contours = charts.has_contours(self.models)
        return _section(
            "Forgotten, kept, recognised",
            "",
            _figures(
                (
                    charts.auc_chart(self.models, self.palette),
                    "",
                    "Can training on the forget set still be noticed, on average? The band is "
                    f"where models fall that never saw it{band}.",
                ),
                (
                    charts.plane_chart(self.models, self.palette, self.drawn),
                    "",
                    "Top right is where a model should be. "
                    + self._few("named, where there is room")
                    + ("Curves join equal Task Aggregates. " if contours else "")
                    + _marks(self.models),
                ),
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

    def _curved(self, curves: Mapping[str, Any]) -> dict[str, Any]:
        """Those that are drawn, where there are too many."""
        if len(curves) <= MOST_DRAWN:
            return dict(curves)
        # "retrained (never saw it)" is the model "retrained".
        known = [name for name in curves if name.partition(" (")[0] in self.drawn]
        return {name: curves[name] for name in (known or list(curves))[:MOST_DRAWN]}

    def audit(self) -> dict[str, Any]:
        """One line a document, worst first; a table for each model, the answer's open."""
        rows = _rows(self.extras.get("audit"))
        names = [one.name for one in self.answer.candidates]
        blocks: list[Block | None] = []
        most = max(20, min(MOST_AUDITED, 10 * MOST_AUDITED // max(1, len(names))))
        for name in names:
            mine = [row for row in rows if row.get("model") == name]
            block = self._audited(name, mine, len(blocks), most)
            counts = next((m.more.get("audit") for m in self.models if m.name == name), None)
            says = str(counts.get("resolution", "")) if isinstance(counts, Mapping) else ""
            if block and says:
                block["label"] += f". {says}"
            blocks.append(block if not blocks else _folded(f"The same for {name}", block))
        return _section(
            "Document by document",
            "Is this document gone? Each line is a document of the forget set. Under loss, "
            "Min-20 %++ and extraction strength stand those before unlearning and those of the "
            "retrained model; rank is the share of unseen texts with a lower loss (near 0: "
            "known, near 1: pushed away). q is p corrected for the number of documents "
            "(Benjamini-Hochberg). Long ids are cut to 8 characters; audit.jsonl has them whole.",
            *blocks,
        )

    def _audited(
        self, name: str, rows: list[Mapping[str, Any]], number_: int, most: int
    ) -> Block | None:
        if not rows:
            return None
        short = _short_ids([str(row.get("document", "")) for row in rows])
        head = [_cell("Document"), _cell("Reading"), *(_cell(title) for _, title in _AUDITED)]
        keys = ["worst first", *(title.lower() for _, title in _AUDITED)]
        places = [{id(row): place for place, row in enumerate(rows)}]
        for key, _ in _AUDITED:
            # Where a low value is bad, low ones come first.
            sign = -1 if key in ("extraction_strength", "answer_said") else 1
            order = sorted(
                rows, key=lambda r: (number(r.get(key)) is None, sign * _plain(r.get(key)))
            )
            places.append({id(row): place for place, row in enumerate(order)})
        lines = []
        for row in rows[:most]:
            count = len(_rows(row.get("rows")))
            texts = [
                [str(one.get(key, "")) for key in ("prompt", "expected", "generated")]
                for one in _rows(row.get("rows"))
                if len(lines) < MOST_TEXTS and one.get("generated")
            ]
            name_ = short[str(row.get("document", ""))]
            cells = [_cell(name_, f"{count} rows" if count else "", texts=texts)]
            told = bool(row.get("told")) or row.get("reading") in ("recited", "still said")
            reading = str(row.get("reading", ""))
            cells.append(_cell("", badges=[("bad" if told else "plain", reading)]))
            for key, _ in _AUDITED:
                others = [
                    f"{_audited_value(of_side.get(key))} {side}"
                    for side in ("before", "retrained")
                    if isinstance(of_side := row.get(side), Mapping)
                    and of_side.get(key) is not None
                ]
                if key == "p" and number(row.get("q")) is not None:
                    others = [f"q {_p(row['q'])}"]
                shown = _audited_value(row.get(key), key == "p")
                cells.append(_cell(shown, "\n".join(others)))
            lines.append(
                {
                    "tone": "bad" if told else "",
                    "cells": cells,
                    "ranks": [place[id(row)] for place in places],
                }
            )
        told = sum(bool(row.get("told")) for row in rows)
        said = sum(row.get("reading") == "still said" for row in rows)
        title = f"{name}: {told} of {len(rows)} documents can be told"
        title += f", an answer of {said} is still said" if said else ""
        if len(rows) > len(lines):
            title += f"; the {len(lines)} worst are listed, audit.jsonl has all"
        return {
            "kind": "audit",
            "id": number_,
            "label": title,
            "keys": keys,
            "head": head,
            "rows": lines,
        }

    def distances(self) -> dict[str, Any]:
        """Which scores differ from the retrained model's, and by how much."""
        title = "Distance from the retrained model"
        if self.retrained is None:
            return _section(
                title,
                "",
                _text(
                    "No retrained model is in these results. Only a model trained on everything "
                    "except the forget set shows what perfect forgetting looks like; evaluate one "
                    "as retrained=PATH to see how far every score is from it."
                ),
            )
        others = [m for m in self.models if m.part == "candidate" and m.distance]
        found: dict[str, dict[str, Any]] = {}
        least: dict[str, float] = {}
        tested = 0
        for model in others:
            gaps = {m: model.distance[m] for m in (*HEADLINES, *CELLS) if m in model.distance}
            pairs = {m: (one.value, one.p) for m, one in gaps.items()}
            pairs = {m: pair for m, pair in pairs.items() if None not in pair}
            tested = max(tested, len(pairs))
            for metric in pairs:
                if ends := gaps[metric].interval:
                    seen = smallest_difference(*ends, len(pairs))
                    least[metric] = max(least.get(metric, 0.0), seen)
            corrected = holm([p for _, p in pairs.values()]) if pairs else ()
            for (metric, (value, _)), p in zip(pairs.items(), corrected, strict=True):
                if p < 0.05:
                    found.setdefault(metric, {})[model.name] = (value, p)
        if not others:
            return _section(title, "")
        rows = []
        for metric in (m for m in (*HEADLINES, *CELLS) if m in found):
            cells = [_cell(score_title(metric)), _cell(show(value_of(self.retrained, metric)))]
            cells.append(_cell(show(least.get(metric))))
            for model in others:
                value, p = found[metric].get(model.name, (None, 1.0))
                differs = value is not None
                cells.append(_cell(f"{value:+.2f}", f"p {_p(p)}") if differs else _cell("\u2013"))
            rows.append({"cells": cells})
        note = (
            f"Only scores that differ from the retrained model's are listed, of {tested} tested: "
            "paired by document, p corrected for their number (Holm). Smallest: the difference "
            "that these rows would show in four of five data sets."
        )
        if not rows:
            shown = [f"{score_title(m)} {least[m]:.2f}" for m in HEADLINES if m in least]
            says = f"None of {tested} scores differs in any model. Differences that these rows "
            says += f"would show in four of five data sets: {', '.join(shown)}."
            return _section(title, "", _text(says))
        head = [_cell("Score"), _cell("retrained"), _cell("Smallest"), *map(self.name, others)]
        return _section(title, note, _table("Distances", head, rows, "dense"))

    def attacks(self) -> dict[str, Any]:
        return _section(
            "Attacks",
            "What comes back when the model is quantised, trained again or prompted otherwise, and "
            "what its weights tell. " + self._few("drawn"),
            _list(_named(self.extras.get("attack_sentences"))),
            self._curves(self.extras.get("attacks"), "attack"),
        )

    # ------------------------------------------------------------ details

    def membership(self) -> dict[str, Any]:
        """Attacks against models, then the blind baselines, which are the same for all models."""
        models = [m for m in self.models if m.membership is not None and m.membership.attacks]
        if not models:
            return _section("Membership", "")
        labs = [model.membership for model in models]
        rows = []
        for attack in _keys(lab.attacks for lab in labs):
            figures = [lab.attacks.get(attack) for lab in labs]
            cells = [_with_interval(f.auc, f.interval) if f else _cell("n/a") for f in figures]
            rows.append({"cells": [_cell(attack_title(attack)), *cells]})
        widest = [one.interval for lab in labs for one in lab.attacks.values() if one.interval]
        least = max((smallest_difference(*ends, len(rows)) for ends in widest), default=None)
        learned = [m.learned for m in models]
        if any(one is not None and one.p is not None for one in learned):
            cells = [
                _cell("n/a")
                if one is None
                else _cell(show(one.auc), "" if one.p is None else f"p {_p(one.p)}")
                for one in learned
            ]
            rows.append({"cells": [_cell("Learned attack"), *cells]})
        shares = [lab.tpr.get("0.01") for lab in labs]
        if any(shares):
            cells = [_with_interval(f.value, f.interval) if f else _cell("n/a") for f in shares]
            rows.append({"cells": [_cell("Loss, found at 1 % false alarms"), *cells]})
        for name, one in labs[0].blind.items():
            marks = [("bad", "separates")] if one.separates else []
            pair = None if None in (one.low, one.high) else (one.low, one.high)
            rows.append(
                {
                    "cells": [
                        _cell(f"Blind: {attack_title(name)}", badges=marks),
                        _with_interval(one.auc, pair) | {"span": len(models)},
                    ]
                }
            )
        return _section(
            "Membership",
            "AUC of each way to recognise members, ideal 0.5; then the share of members found when "
            "1 % of non-members are accused. Blind baselines never ask a model: where they "
            "separate the sets, the figures above them mean nothing."
            + (f" The smallest AUC difference that they all show: {show(least)}." if least else ""),
            _table("Membership attacks", [_cell("Attack"), *map(self.name, models)], rows, "dense"),
        )

    def cells(self) -> dict[str, Any]:
        names = [name for name in CELLS if any(name in m.cells for m in self.models)]
        rows = [
            {"cells": [_cell(score_title(name)), *(_ranged(m, name) for m in self.models)]}
            for name in names
        ]
        return _section(
            "The twelve cells",
            "Completions: ROUGE-L recall of the continuation. Answers: exact match. Forget cells "
            "are shown as 1 - v, so high is good everywhere. Below: 95 % intervals.",
            _table("Cells", [_cell("Cell"), *map(self.name, self.models)], rows, "dense"),
        )

    def depth(self) -> dict[str, Any]:
        return _section(
            "Depth",
            "Activation patching layer by layer: whether the knowledge is gone or only unspoken.",
            _list(_named(self.extras.get("depth_sentences"))),
            self._curves(self.extras.get("depth"), "depth"),
        )

    def examples(self) -> dict[str, Any]:
        """Prompt, expected and generated text; one example of each side and kind is open."""
        rows: dict[str, dict[str, Any]] = {}
        for model in self.models:
            for example in _rows(model.more.get("examples")):
                key = f"{example.get('side', '')}|{example.get('id', '')}"
                row = rows.setdefault(key, {"first": example, "said": []})
                row["said"].append((self.name(model), str(example.get("generated", ""))))
        shown: list[Block] = []
        more: list[Block] = []
        seen = set()
        for row in rows.values():
            first = row["first"]
            what = f"{first.get('side', '')} · {first.get('kind', '')}".strip(" ·")
            texts = {key: str(first.get(key, "")) for key in ("prompt", "expected")}
            (more if what in seen else shown).append({"what": what, "said": row["said"], **texts})
            seen.add(what)
        blocks = [{"kind": "examples", "shown": shown, "more": more}] if rows else []
        return _section("Examples", "", *blocks)

    def provenance(self) -> dict[str, Any]:
        """Models, versions, data hashes, configs: what a second person needs."""
        rows = [
            {
                "cells": [
                    _cell(model.name),
                    _cell(model.model, str(model.more.get("weights", ""))[:16], left=True),
                    _cell(f"{show(number(model.more.get('seconds')), 0)} s"),
                ]
            }
            for model in self.models
        ]
        head = [_cell("Model"), _cell("Weights", left=True), _cell("Evaluated in")]
        left_out = ("trajectory", "examples")
        facts = {
            "schema": self.results.schema_,
            "data_dir": self.results.data_dir,
            "created": self.results.created,
        } | {key: value for key, value in self.results.more.items() if key not in left_out}
        facts = {key: value for key, value in facts.items() if value not in (None, {}, [], "")}
        blocks = [_folded("Models", _table("Models", head, rows, ""))]
        blocks.append(_folded("Data, versions, settings", facts) if facts else None)
        configs = self.extras.get("configs")
        named = configs.items() if isinstance(configs, Mapping) else ()
        blocks += [_folded(str(name), text) for name, text in named]
        shown = (
            *("configs", "audit", "attacks", "attack_results", "attack_sentences"),
            *("depth", "depth_sentences"),
        )
        blocks += [_folded(key, more) for key, more in self.extras.items() if key not in shown]
        return _section("How this was made", "", *blocks)

    # ------------------------------------------------------------ parts of several sections

    def name(self, model: Model) -> dict[str, Any]:
        """A model as a heading: its colour, its name, its flags."""
        marks = [("bad", mark) for mark in flags(model)]
        return _cell(model.name, badges=marks, color=self.palette[model.name])

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """The small table under the answer."""
        return [
            {
                "name": self.name(model) | {"badges": [(one.tone, one.kind)]},
                "auc": show(one.auc),
                "aggregate": show(one.aggregate),
                "why": one.damning,
                "tone": one.tone,
            }
            for model, one in zip(self.models, self.answer.models, strict=True)
        ]

    def _curves(self, curves: Any, kind: str) -> Block | None:
        """Panels from curves ``{"title"|"attack", "model", "metric", "x_label", "points"}``.

        A point is ``{"x", "y", "low"?, "high"?}`` or a list of these. Curves of one title and
        metric share a panel, one line a model.
        """
        panels: dict[tuple[str, str, str], dict[str, list[list[float]]]] = {}
        for curve in _rows(curves):
            title = str(curve.get("title") or curve.get("attack") or kind)
            key = (title, str(curve.get("metric", "")), str(curve.get("x_label", "step")))
            points = []
            for point in _listed(curve.get("points")):
                if isinstance(point, Mapping):
                    point = [point.get(end) for end in ("x", "y", "low", "high")]
                values = [number(value) for value in _listed(point)]
                if len(values) > 1 and None not in values[:2]:
                    points.append(values if len(values) == 4 and None not in values else values[:2])
            panels.setdefault(key, {})[str(curve.get("model", title))] = points
        drawn = {name for lines in panels.values() for name in lines}
        # "retrained (never saw it)" is drawn in the colour of "retrained".
        palette = self.palette | {
            name: self.palette.get(name.partition(" (")[0], "var(--ink)") for name in drawn
        }
        figures = []
        for (title, metric, x_label), lines in panels.items():
            lines = self._curved(lines)
            chart = charts.curves_chart(
                kind,
                lines,
                palette,
                title=title,
                x_label=x_label,
                y_label=metric,
            )
            figures.append((chart, "", ""))
        return _figures(*figures)


# ---------------------------------------------------------------- blocks


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
    return (
        {"kind": "table", "label": label, "head": head, "rows": rows, "cls": cls} if rows else None
    )


def _figures(*figures: tuple[str, Any, str]) -> Block | None:
    """(svg, heading cell, caption) each; those without a chart are left out."""
    shown = [figure for figure in figures if figure[0]]
    return {"kind": "figures", "figures": shown} if shown else None


def _folded(title: str, content: Any) -> Block | None:
    """A block, or anything else as text, behind a line that opens it."""
    if not content:
        return None
    if not (isinstance(content, dict) and "kind" in content):
        if not isinstance(content, str):
            content = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        content = {"kind": "pre", "text": redact(content)}
    return {"kind": "folded", "title": title, "block": content}


def _cell(text: str, small: str = "", **more: Any) -> dict[str, Any]:
    """A table cell: also ``badges`` [(tone, text)], ``color``, ``span``, ``left``, ``tag``."""
    return {"text": text, "small": small, **more}


def _ranged(model: Model, metric: str, **more: Any) -> dict[str, Any]:
    return _with_interval(value_of(model, metric), model.intervals.get(metric)) | more


def _with_interval(
    value: float | None, around: tuple[float, float] | None = None
) -> dict[str, Any]:
    return _cell(show(value), f"{around[0]:.2f} to {around[1]:.2f}" if around else "")


def _plain(value: Any) -> float:
    return float(value) if isinstance(value, bool) else number(value) or 0.0


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def attack_title(name: str) -> str:
    words = name_of(name)
    return words[:1].upper() + words[1:]


def _audited_value(value: Any, is_p: bool = False) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _p(value) if is_p and number(value) is not None else show(number(value))


def _short_ids(names: Sequence[str]) -> dict[str, str]:
    """Ids without quotation marks, and cut to 8 characters where these still tell them apart."""
    bare = {name: name.strip("\"'") for name in names}
    cut = {name[:8] for name in bare.values()}
    long = max(map(len, bare.values()), default=0) > 24
    return {k: v[:8] for k, v in bare.items()} if long and len(cut) == len(bare) else bare


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list, none where it is no list."""
    return [row for row in _listed(value) if isinstance(row, Mapping)]


def _keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every key once, in the order of their first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _named(sentences: Any) -> list[tuple[str, str]]:
    """{name: "name: text"} as (name, text)."""
    found = sentences.items() if isinstance(sentences, Mapping) else ()
    return [(str(name), str(text).removeprefix(f"{name}: ")) for name, text in found]


def _moment(text: str) -> str:
    """An ISO time to the minute; anything else as it is."""
    match = re.match(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)[\d:.]*(Z|\+00:00)?", text)
    return f"{match[1]} {match[2]}{' UTC' if match[3] else ''}" if match else text


def _marks(models: Sequence[Model]) -> str:
    """Explains the shapes that occur."""
    found = {
        "ring = original": any(model.part == "original" for model in models),
        "diamond = retrained": any(model.part == "retrained" for model in models),
        "red cross = collapsed or below the gate": any(map(flags, models)),
    }
    text = ", ".join(words for words, occurs in found.items() if occurs)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def redact(text: str) -> str:
    """Config text without the values of keys that hold secrets (hub_token, api_key, ...)."""

    def hide(match: re.Match[str]) -> str:
        return match[0] if _NOT_SECRET.search(match[1]) else f"{match[1]}(hidden)"

    return _SECRET.sub(hide, text)
