"""One self-contained HTML page from results.json: no script, no font, nothing from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.report import plots
from axolotl_unlearn.report.results import (
    CELLS,
    best,
    cell_count,
    find,
    flags,
    interval,
    lab,
    load_results,
    membership_sizes,
    membership_warning,
    number,
    role_of,
    show,
    status,
)
from axolotl_unlearn.report.terminal import caption, reading, winner_word
from axolotl_unlearn.report.verdict import reading_of

TONES = {
    "collapsed": "bad",
    "below gate": "bad",
    "before": "plain",
    "target": "plain",
    "good": "good",
}
_SECRET = re.compile(r"(?im)^(\s*[\w-]*(?:token|secret|password|api_key)[\w-]*\s*:\s*)\S.*$")
# Keys of an Axolotl config that only look like secrets.
_NOT_SECRET = re.compile(r"(?i)special_tokens|tokens_per|tokenizer|_tokens\b|token_")

Log = list[dict[str, Any]]


def write_report(
    results: Mapping[str, Any] | str | Path,
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
        extras: `attacks` and `depth` (lists of curves, see `_curves`), `attack_sentences` and
            `depth_sentences` ({model: text}), `configs` ({file name: text}); whatever else is
            printed as JSON under "How this was made".

    Texts appear only where `results` carries `examples`; this function never reads the data.
    """
    results = load_results(results)
    extras = dict(extras or {})
    logs = {name: _read_log(name, log) for name, log in (training_logs or {}).items()}
    models = results["models"]
    page = _Page(results)
    page.section("Verdicts", _verdicts(page))
    page.section(
        "Scores", _warning(results) + _score_table(page) + _notes(results), note=_caption(results)
    )
    page.section(
        "Forgotten, kept, recognised",
        _grid(
            _figure(
                plots.auc_chart(models, page.palette),
                "Can training on the forget set still be noticed, on average? The band is where "
                "models fall that never saw it"
                + (
                    "." if any(map(membership_sizes, models)) else " (n unknown: band is .4 to .6)."
                ),
            ),
            _figure(
                plots.plane_chart(models, page.palette),
                "Top right is where a model should be. "
                + ("Curves join equal Task Aggregates. " if plots.has_contours(models) else "")
                + _marks(models),
            ),
            _figure(
                plots.roc_chart(models, page.palette),
                "The attack calls a text a member when its loss is low. On the diagonal it "
                "guesses. A curve that rises at the left edge finds some members for sure, "
                "whatever its AUC.",
            ),
        ),
    )
    page.section(
        "Membership",
        _membership(page),
        note="AUC of each way to recognise members, ideal 0.5; then the share of members found "
        "when 1 % of non-members are accused. Blind baselines never ask a model: where they "
        "separate the sets, the figures above them mean nothing.",
    )
    page.section(
        "The twelve cells",
        _grid(
            *(
                _figure(
                    plots.cells_chart(model, page.original, page.palette[model["name"]]),
                    title=page.tag(model),
                )
                for model in models
            )
        ),
        note="Completions: ROUGE-L recall of the continuation. Answers: exact match. Forget cells "
        "are shown as 1 - v, so a long bar is good everywhere. Whiskers are 95 % intervals; the "
        "thin upright tick is the original model.",
    )
    page.section("Distance from the retrained model", _distances(page))
    limit = plots.loss_limit(models)
    page.section(
        "Loss of members and non-members",
        _grid(
            *(
                _figure(
                    plots.loss_histogram(model, page.palette[model["name"]], limit),
                    title=page.tag(model),
                )
                for model in models
            )
        ),
        note="Members were in the forget set, non-members were never trained on. Where the two "
        "shapes lie on each other, membership cannot be told.",
    )
    if page.original is not None:
        page.section(
            "Extraction strength of the forget texts",
            _grid(
                *(
                    _figure(
                        plots.extraction_histogram(
                            model, page.original, page.palette[model["name"]]
                        ),
                        title=page.tag(model),
                    )
                    for model in models
                    if model is not page.original
                )
            ),
            note="1 minus the shortest share of a text after which the model finishes the rest "
            "word for word: 1 means no prefix is needed, 0 means nothing comes back.",
        )
    page.section(
        "Training",
        _training(logs, page),
        note="Parts of the loss, unweighted. Faint: as logged; bold: running mean over a twentieth "
        "of the run.",
    )
    page.section("Scores through training", _trajectory(trajectory, page))
    page.section(
        "Attacks",
        _sentences(extras.pop("attack_sentences", None))
        + _curves(extras.pop("attacks", None), "attack", page),
        note="What comes back when the model is quantised, trained again or prompted otherwise.",
    )
    page.section(
        "Depth",
        _sentences(extras.pop("depth_sentences", None))
        + _curves(extras.pop("depth", None), "depth", page),
        note="Activation patching layer by layer: whether the knowledge is gone or only unspoken.",
    )
    page.section("Other measurements", _others(page))
    page.section("Examples", _examples(page))
    page.section("How this was made", _provenance(results, extras))
    out = Path(out_html)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page.html(), encoding="utf-8")
    return out


class _Page:
    """The results with what every section asks of them, and the sections so far."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        self.models: list[dict[str, Any]] = results["models"]
        self.original, self.retrained = find(results, "original"), find(results, "retrained")
        self.palette = plots.colours([model["name"] for model in self.models])
        self.parts: list[str] = []

    def color(self, name: str) -> str:
        """Colour of a model or of a run named like one ("over", "out/over", "over/adapter")."""
        return self.palette.get(name, "var(--ink)")

    def tag(self, model: Mapping[str, Any]) -> str:
        """A model's name as a heading: colour, name, and its flags in red."""
        marks = "".join(f' <span class="badge bad">{escape(mark)}</span>' for mark in flags(model))
        return f"{_swatch(self.palette[model['name']])}{escape(str(model['name']))}{marks}"

    def section(self, heading: str, body: str, *, note: str = "") -> None:
        """Adds a section; an empty body adds nothing, so that no empty heading is shown."""
        if not body:
            return
        anchor = re.sub(r"[^a-z]+", "-", heading.lower()).strip("-")
        text = f'<p class="note">{_words(note)}</p>' if note else ""
        self.parts.append(
            f'<section id="{anchor}"><h2>{escape(heading)}</h2>{text}{body}</section>'
        )

    def html(self) -> str:
        css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
        count = len(self.models)
        facts = [f"{count} model{'s' if count > 1 else ''}"]
        if self.results.get("data_dir"):
            facts.append(f"data {self.results['data_dir']}")
        if self.results.get("created"):
            facts.append(_moment(str(self.results["created"])))
        head = (
            f'<header><p class="product">axolotl-unlearn</p><h1>Unlearning report</h1>'
            f'<p class="facts">{escape(" · ".join(facts))}</p></header>'
        )
        label = self.results.get("label")
        warning = f'<p class="banner">{escape(str(label))}</p>' if label else ""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; img-src data:\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            '<link rel="icon" href="data:,">'
            f"<title>Unlearning report</title><style>{css}</style></head><body>"
            f"<main>{head}{warning}{''.join(self.parts)}</main></body></html>\n"
        )


def _moment(text: str) -> str:
    """An ISO time to the minute; anything else as it is."""
    match = re.match(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)[\d:.]*(Z|\+00:00)?", text)
    return f"{match[1]} {match[2]}{' UTC' if match[3] else ''}" if match else text


def _words(text: str) -> str:
    """Escaped prose that does not break a line before a per cent sign."""
    return escape(text).replace(" %", "\u00a0%")


def _swatch(color: str) -> str:
    return f'<span class="swatch" style="background:{color}"></span>'


def _figure(svg: str, text: str = "", *, title: str = "") -> str:
    if not svg:
        return ""
    heading = f"<h3>{title}</h3>" if title else ""
    words = f"<figcaption>{_words(text)}</figcaption>" if text else ""
    return f"<figure>{heading}{svg}{words}</figure>"


def _grid(*figures: str) -> str:
    shown = "".join(figures)
    return f'<div class="grid">{shown}</div>' if shown else ""


def _marks(models: Sequence[Mapping[str, Any]]) -> str:
    """Explains the shapes that occur."""
    parts = []
    if any(role_of(model) == "original" for model in models):
        parts.append("ring = original")
    if any(role_of(model) == "retrained" for model in models):
        parts.append("diamond = retrained")
    if any(flags(model) for model in models):
        parts.append("red cross = collapsed or below the gate")
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _caption(results: Mapping[str, Any]) -> str:
    return " ".join(caption(results).splitlines())


def _verdicts(page: _Page) -> str:
    rows = []
    for model in page.models:
        kind = status(model, page.original, page.retrained)
        tone = TONES.get(kind, "warn")
        sentence = reading_of(model, page.original, page.retrained)
        name = str(model["name"])
        rows.append(
            f'<li class="{tone}"><div class="who">{_swatch(page.palette[name])}'
            f'<b>{escape(name)}</b> <span class="badge {tone}">{escape(kind)}</span></div>'
            f"<p>{_words(sentence)}</p></li>"
        )
    return f'<ul class="verdicts">{"".join(rows)}</ul>'


def _score_table(page: _Page) -> str:
    winner = best(page.results)
    head = "".join(
        f'<th scope="col">{title}<small>{hint}</small></th>'
        for title, hint in (
            ("Model", ""),
            ("Aggregate", "higher is better"),
            ("Task Aggregate", "higher is better"),
            ("AUC", "ideal 0.5"),
            ("MIA score", "higher is better"),
            ("Utility", "higher is better"),
            ("Reading", ""),
        )
    )
    rows = []
    for model in page.models:
        marks = flags(model)
        cls = "bad" if marks else "best" if model["name"] == winner else ""
        cells = []
        for metric in ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility"):
            around = interval(model, metric)
            small = f"<small>{around[0]:.2f} to {around[1]:.2f}</small>" if around else ""
            cells.append(f'<td data-metric="{metric}">{show(model.get(metric))}{small}</td>')
        if marks:
            words = "".join(f'<span class="badge bad">{mark}</span> ' for mark in marks)
        else:
            words = escape(reading(model, page.original, page.retrained))
            if model["name"] == winner:
                good = status(model, page.original, page.retrained) == "good"
                words += f' <span class="badge plain">{winner_word(good)}</span>'
        if cell_count(model) != len(CELLS):
            words += f"<small>{cell_count(model)} of 12 cells</small>"
        name = escape(str(model["name"]))
        rows.append(
            f'<tr class="{cls}" data-model="{name}"><th scope="row">'
            f"{_swatch(page.palette[model['name']])}{name}</th>{''.join(cells)}<td>{words}</td></tr>"
        )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Scores of all models">'
        f'<table class="scores"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _warning(results: Mapping[str, Any]) -> str:
    text = membership_warning(results)
    return f'<p class="banner bad">{escape(text)}</p>' if text else ""


def _notes(results: Mapping[str, Any]) -> str:
    """What the evaluation has to say about these data."""
    notes = "".join(f"<li>{_words(str(note))}</li>" for note in results.get("notes") or ())
    return f'<ul class="notes">{notes}</ul>' if notes else ""


def _membership(page: _Page) -> str:
    """Attacks against models, then the blind baselines, which are the same for all models."""
    labs = {model["name"]: lab(model) for model in page.models if lab(model)}
    if not labs:
        return ""
    models = [model for model in page.models if model["name"] in labs]
    head = "".join(f'<th scope="col">{page.tag(model)}</th>' for model in models)
    rows = []
    attacks = list(dict.fromkeys(name for found in labs.values() for name in found["attacks"]))
    for attack in attacks:
        cells = [labs[model["name"]]["attacks"].get(attack, {}) for model in models]
        shown = "".join(_ranged(cell.get("auc"), cell.get("interval")) for cell in cells)
        rows.append(f'<tr><th scope="row">{escape(attack)}</th>{shown}</tr>')
    cells = [((labs[model["name"]].get("tpr") or {}).get("0.01") or {}) for model in models]
    if any(cells):
        shown = "".join(_ranged(cell.get("value"), cell.get("interval")) for cell in cells)
        rows.append(f'<tr><th scope="row">loss, found at 1\u00a0% false alarms</th>{shown}</tr>')
    blind = next((found["blind"] for found in labs.values() if found.get("blind")), {})
    for name, figures in blind.items():
        mark = ' <span class="badge bad">separates</span>' if figures.get("separates") else ""
        pair = (figures.get("low"), figures.get("high"))
        rows.append(
            f'<tr><th scope="row">blind: {escape(name)}{mark}</th>'
            f"{_ranged(figures.get('auc'), pair, span=len(models))}</tr>"
        )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Membership attacks">'
        f'<table class="dense"><thead><tr><th scope="col">Attack</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _ranged(value: Any, around: Any = None, *, span: int = 1) -> str:
    """A table cell with a number and, where finite, its interval."""
    small = ""
    if around is not None and None not in map(number, around):
        small = f"<small>{around[0]:.2f} to {around[1]:.2f}</small>"
    across = f' colspan="{span}"' if span > 1 else ""
    return f"<td{across}>{show(value)}{small}</td>"


def _distances(page: _Page) -> str:
    """Every headline and cell minus the retrained model's; says what is missing without one."""
    if page.retrained is None:
        return (
            '<p class="missing">No retrained model is in these results. Only a model trained on '
            "everything except the forget set shows what perfect forgetting looks like; evaluate "
            "one as <code>retrained=PATH</code> to see every score as a distance from it.</p>"
        )
    others = [model for model in page.models if model is not page.retrained]
    if not others:
        return ""
    head = "".join(f'<th scope="col">{page.tag(model)}</th>' for model in others)
    rows = []
    for metric in ("task_aggregate", "mia_auc", "mia_score", "utility", "aggregate", *CELLS):
        target = _value(page.retrained, metric)
        if target is None:
            continue
        cells = []
        for model in others:
            value = _value(model, metric)
            entry = (model.get("distance") or {}).get(metric)
            around = entry.get("interval") if isinstance(entry, Mapping) else None
            small = f"<small>{around[0]:+.2f} to {around[1]:+.2f}</small>" if around else ""
            text = "n/a" if value is None else f"{value - target:+.3f}"
            cells.append(f"<td>{text}{small}</td>")
        rows.append(f'<tr><th scope="row">{metric}</th><td>{target:.3f}</td>{"".join(cells)}</tr>')
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Distances">'
        '<table class="dense">'
        f'<thead><tr><th scope="col">Metric</th><th scope="col">retrained</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _value(model: Mapping[str, Any], metric: str) -> float | None:
    source = (model.get("cells") or {}) if metric in CELLS else model
    return number(source.get(metric))


# Shown elsewhere on the page, or not a measurement.
_SHOWN = {
    *("name", "model", "role", "cells", "n", "intervals", "examples", "likelihood", "forgetting"),
    *("gate", "seconds", "distance", "config", "settings", "aggregate", "task_aggregate"),
    *("mia_auc", "mia_score", "utility", "mmlu", "general", "membership", "ideal"),
}


def _others(page: _Page) -> str:
    """Every further number that the evaluation gave a model, such as fluency figures."""
    rows: dict[str, dict[str, float]] = {}
    for model in page.models:
        for key, value in _flat(model):
            rows.setdefault(key, {})[model["name"]] = value
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{page.tag(model)}</th>' for model in page.models)
    body = []
    for key, values in rows.items():
        cells = []
        for model in page.models:
            around = interval(model, key)
            small = f"<small>{around[0]:.2f} to {around[1]:.2f}</small>" if around else ""
            cells.append(f"<td>{show(values.get(model['name']))}{small}</td>")
        body.append(f'<tr><th scope="row">{escape(key)}</th>{"".join(cells)}</tr>')
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Other measurements">'
        f'<table class="dense"><thead><tr><th scope="col">Metric</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Numbers of nested dicts as ("a.b", value), without what `_SHOWN` names on the top level."""
    out: list[tuple[str, float]] = []
    for key, value in values.items():
        # The fluency of the original's outputs is its own row's; counts are no measurements.
        if key in (_SHOWN if not prefix else ("reference", "by_group", "n")):
            continue
        if isinstance(value, Mapping):
            out += _flat(value, f"{prefix}{key}.")
        elif number(value) is not None:
            out.append((f"{prefix}{key}", float(value)))
    return out


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


# What a panel is called and where its curve should go; parts come first, in this order.
_LOG_TITLES = {
    "loss": ("Total loss", ""),
    "forget_nll": ("Forget NLL", "nats per token, higher = more forgotten"),
    "retain_nll": ("Retain NLL", "nats per token, lower = better kept"),
    "kl": ("KL to the reference", "nats per token, lower = closer"),
    "log_ratio": ("Log-ratio on the forget rows", "policy to reference, lower = more forgotten"),
    "npo_weight": ("NPO gradient weight", "1 = at the start, 0 = stopped by itself"),
    "saturated": ("Saturated forget rows", "share that no longer pulls"),
}


def _training(logs: Mapping[str, Log], page: _Page) -> str:
    unlearning = {
        name: log
        for name, log in logs.items()
        if any(key.startswith(("forget/", "retain/")) for row in log for key in row)
    }
    logs = unlearning or logs  # the loss of a plain run is another quantity: not in one panel
    keys: list[str] = []
    for log in logs.values():
        for row in log:
            keys += [key for key in row if key not in keys]
    parts = [key for key in keys if key.startswith(("forget/", "retain/"))]
    wanted = sorted(parts) + [key for key in _LOG_TITLES if key in keys]
    figures, drawn = [], []
    for key in wanted:
        curves = {
            name: [
                (row["step"], row[key])
                for row in log
                if number(row.get("step")) is not None and number(row.get(key)) is not None
            ]
            for name, log in logs.items()
        }
        if curves in drawn:  # e.g. retain_nll beside retain/nll: the same curve under two names
            continue
        drawn.append(curves)
        title, unit = _LOG_TITLES.get(key, (_part_title(key), ""))
        domain = (0.0, 1.0) if key == "saturated" else None
        figures.append(
            _figure(
                plots.curves_chart(
                    "training",
                    curves,
                    page.palette,
                    title=title,
                    x_label="step",
                    y_label=unit,
                    domain=domain,
                    smooth=True,
                )
            )
        )
    return _grid(*figures)


def _part_title(key: str) -> str:
    side, _, objective = key.partition("/")
    return f"{side.capitalize()} part: {objective}"


_SCORE_TITLES = {
    "aggregate": "Aggregate",
    "task_aggregate": "Task Aggregate",
    "mia_auc": "AUC",
    "mia_score": "MIA score",
    "utility": "Utility",
    "mmlu": "Utility (MMLU)",
}


def _trajectory(trajectory: Any, page: _Page) -> str:
    if not trajectory:
        return ""
    if isinstance(trajectory, Mapping):
        points = [{**row, "run": run} for run, rows in trajectory.items() for row in rows]
    else:
        points = list(trajectory)
    runs = list(dict.fromkeys(str(p.get("run", p.get("name", "run"))) for p in points))
    metrics = list(dict.fromkeys(key for p in points for key in (p.get("scores") or {})))
    metrics.sort(
        key=lambda key: (
            key not in _SCORE_TITLES,
            list(_SCORE_TITLES).index(key) if key in _SCORE_TITLES else 0,
        )
    )
    figures = []
    for metric in metrics:
        curves = {
            run: [
                (p["step"], p["scores"][metric])
                for p in points
                if str(p.get("run", p.get("name", "run"))) == run
                and number((p.get("scores") or {}).get(metric)) is not None
            ]
            for run in runs
        }
        unit = (
            "0.5 is ideal, lower = over-forgetting"
            if metric == "mia_auc"
            else ("higher is better" if metric in _SCORE_TITLES or metric in CELLS else "")
        )
        unbounded = any(not 0 <= b <= 1 for points_ in curves.values() for _, b in points_)
        figures.append(
            _figure(
                plots.curves_chart(
                    "trajectory",
                    curves,
                    page.palette,
                    title=_SCORE_TITLES.get(metric, metric),
                    x_label="step",
                    y_label=unit,
                    domain=None if unbounded else (0.0, 1.0),
                    ideal=0.5 if metric == "mia_auc" else None,
                    markers=True,
                )
            )
        )
    return _grid(*figures)


def _sentences(found: Mapping[str, str] | None) -> str:
    """What each attack showed, under the model's name."""
    rows = "".join(
        f"<li><b>{escape(name)}</b>: {_words(text.removeprefix(f'{name}: '))}</li>"
        for name, text in (found or {}).items()
    )
    return f'<ul class="notes">{rows}</ul>' if rows else ""


def _curves(curves: Any, name: str, page: _Page) -> str:
    """Panels from curves `{"title"|"attack", "model", "metric", "x_label", "points"}`.

    A point is `[x, y]`, `[x, y, low, high]` or `{"x", "y", "low"?, "high"?}`. Curves of one title
    and metric share a panel, one line a model.
    """
    if not curves:
        return ""
    panels: dict[tuple[str, str, str], dict[str, list[Sequence[float]]]] = {}
    for curve in curves:
        title = str(curve.get("title") or curve.get("attack") or name)
        key = (title, str(curve.get("metric", "")), str(curve.get("x_label", "step")))
        points = []
        for point in curve.get("points") or ():
            if isinstance(point, Mapping):
                low, high = point.get("low", point.get("lo")), point.get("high", point.get("hi"))
                point = [point["x"], point["y"], *([] if low is None else [low, high])]
            points.append(point)
        panels.setdefault(key, {})[str(curve.get("model", title))] = points
    figures = []
    drawn = {key for lines in panels.values() for key in lines}
    # "retrained (never saw it)" is drawn in the colour of "retrained".
    palette = page.palette | {key: page.color(key.partition(" (")[0]) for key in drawn}
    for (title, metric, x_label), lines in panels.items():
        low_high = [edge for points in lines.values() for p in points for edge in p[1:]]
        inside = bool(low_high) and all(0 <= edge <= 1 for edge in low_high)
        figures.append(
            _figure(
                plots.curves_chart(
                    name,
                    {key: [(p[0], p[1]) for p in points] for key, points in lines.items()},
                    palette,
                    title=title,
                    x_label=x_label,
                    y_label=metric,
                    domain=(0.0, 1.0) if inside else None,
                    bands={
                        key: [(p[0], p[2], p[3]) for p in points if len(p) >= 4]
                        for key, points in lines.items()
                    },
                    markers=True,
                )
            )
        )
    return _grid(*figures)


def _examples(page: _Page) -> str:
    """Prompt, expected and generated text, one table an example row, one line a model.

    One example of each side and kind is open, the others are folded away.
    """
    rows: dict[str, dict[str, Any]] = {}
    for model in page.models:
        for example in model.get("examples") or ():
            key = f"{example.get('side', '')}|{example.get('id', '')}"
            row = rows.setdefault(key, {"first": example, "said": []})
            row["said"].append((model, str(example.get("generated", ""))))
    blocks: dict[bool, list[str]] = {True: [], False: []}
    seen = set()
    for row in rows.values():
        first = row["first"]
        sort = (first.get("side"), first.get("kind"))
        shown = sort not in seen
        seen.add(sort)
        what = f"{first.get('side', '')} · {first.get('kind', '')}".strip(" ·")
        said = "".join(
            f"<tr><th scope='row'>{page.tag(model)}</th><td>{escape(text)}</td></tr>"
            for model, text in row["said"]
        )
        blocks[shown].append(
            f'<div class="example"><p class="what">{escape(what)}</p>'
            f'<p class="prompt">{escape(str(first.get("prompt", "")))}</p>'
            f"<table><tr class='expected'><th scope='row'>expected</th>"
            f"<td>{escape(str(first.get('expected', '')))}</td></tr>{said}</table></div>"
        )
    if not rows:
        return ""
    out = f'<div class="examples">{"".join(blocks[True])}</div>'
    if blocks[False]:
        out += (
            f"<details><summary>{len(blocks[False])} more</summary>"
            f'<div class="examples">{"".join(blocks[False])}</div></details>'
        )
    return out


def _provenance(results: Mapping[str, Any], extras: Mapping[str, Any]) -> str:
    """Models, versions, data hashes, configs: what a second person needs for the same numbers."""
    blocks = []
    models = "".join(
        f'<tr><th scope="row">{escape(str(model["name"]))}</th>'
        f"<td class='left'><code>{escape(str(model.get('model', '')))}</code></td>"
        f"<td>{show(model.get('seconds'), 0)} s</td></tr>"
        for model in results["models"]
    )
    blocks.append(
        '<div class="scroll"><table><thead><tr><th scope="col">Model</th>'
        '<th scope="col" class="left">Weights</th>'
        f'<th scope="col">Evaluated in</th></tr></thead><tbody>{models}</tbody></table></div>'
    )
    facts = {
        key: value
        for key, value in results.items()
        if key not in ("models", "label", "trajectory", "examples", "notes")
        and value not in (None, {}, [])
    }
    if facts:
        blocks.append(_details("Data, versions, settings", facts, is_open=True))
    configs = {**_texts(extras, "config"), **_texts(extras, "configs")}
    for name, text in configs.items():
        blocks.append(_details(name, text))
    for key, value in extras.items():
        if key not in ("config", "configs"):
            blocks.append(_details(key, value))
    for model in results["models"]:
        for key in ("config", "settings"):
            if model.get(key):
                blocks.append(_details(f"{model['name']}: {key}", model[key]))
    return "".join(blocks)


def _texts(extras: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = extras.get(key)
    if not value:
        return {}
    if key == "configs" and isinstance(value, Mapping):
        return {str(name): text for name, text in value.items()}
    return {key: value}


def _details(name: str, value: Any, *, is_open: bool = False) -> str:
    text = (
        value
        if isinstance(value, str)
        else json.dumps(value, indent=2, ensure_ascii=False, default=str)
    )
    opened = " open" if is_open else ""
    return (
        f"<details{opened}><summary>{escape(name)}</summary>"
        f"<pre>{escape(redact(text))}</pre></details>"
    )


def redact(text: str) -> str:
    """Config text without the values of keys that hold secrets (hub_token, api_key, ...)."""

    def hide(match: re.Match[str]) -> str:
        return match[0] if _NOT_SECRET.search(match[1]) else f"{match[1]}(hidden)"

    return _SECRET.sub(hide, text)
