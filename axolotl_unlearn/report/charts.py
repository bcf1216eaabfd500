"""The three charts of the report, drawn by matplotlib as inline SVG; each returns "" without data.

Colours are variables of the page's style sheet, so that light, dark and print follow it: matplotlib
draws with stand-ins (`_STAND_INS`), which are replaced in the SVG.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from axolotl_unlearn.metrics.intervals import ideal_membership
from axolotl_unlearn.metrics.results import Model
from axolotl_unlearn.metrics.semeval import CELLS, SIDES
from axolotl_unlearn.metrics.verdict import show

#: A colour that matplotlib knows -> what the page draws.
INK, MUTED, GRID, BAND, CARD, BAD = (f"#10001{i}" for i in range(6))
_STAND_INS = {f"#10000{i}": f"var(--m{i})" for i in range(10)} | {
    INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", BAND: "var(--band)",
    CARD: "var(--card)", BAD: "var(--bad)",
}  # fmt: skip
_PLACE = {variable: stand_in for stand_in, variable in _STAND_INS.items()}
#: Names that the demo uses keep their colour from run to run; other models take the rest in order.
FIXED_COLOURS = {"original": 0, "over": 1, "under": 2, "merged": 3, "single": 4, "retrained": 5}
#: Inches of a chart 360 px wide, at 100 dots an inch.
WIDTH = 3.6

Points = Sequence[Sequence[float]]


def colours(names: Sequence[str]) -> dict[str, str]:
    """A CSS colour variable for each model; two models share one only beyond ten models."""
    taken = {FIXED_COLOURS[name] for name in names if name in FIXED_COLOURS}
    free = [i for i in (3, 1, 2, 4, 6, 7, 8, 9, 5, 0) if i not in taken] or [6]
    others = [name for name in names if name not in FIXED_COLOURS]
    numbers = {name: free[place % len(free)] for place, name in enumerate(others)}
    return {name: f"var(--m{(FIXED_COLOURS | numbers)[name]})" for name in names}


def _figure(height: float):
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure, name: str, alt: str) -> Markup:
    """The figure without background, document head, numbered names or anything from elsewhere."""
    import matplotlib

    with (
        matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}),
        warnings.catch_warnings(action="ignore", category=UserWarning),  # letters of other scripts
    ):
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})  # no draft
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"|<!--.*?-->', "", text, flags=re.S)
    box = re.search(r'viewBox="([^"]*)"', text)[1]
    text = re.sub(r"#1000[01]\d", lambda match: _STAND_INS[match[0]], text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    head = f'<svg data-plot="{name}" role="img" aria-label="{html.escape(alt)}" viewBox="{box}">'
    text = re.sub(r' clip-path="[^"]*"|<defs>\s*<clipPath.*?</defs>', "", text, flags=re.S)
    return Markup(head + text[text.index(">") + 1 :].strip())


def _mark(axes, x: float, y: float, model: Model, color: str, size: float = 7) -> None:
    shape = {"original": ("o", CARD), "retrained": ("D", color)}.get(model.part, ("o", color))
    if model.flags:
        shape = ("X", BAD)
    axes.plot(
        [x], [y], marker=shape[0], markersize=size, markerfacecolor=shape[1],
        markeredgecolor=CARD if shape[1] != CARD else color, clip_on=False, zorder=4,
    )  # fmt: skip


def auc_chart(models: Sequence[Model], palette: Mapping[str, str]) -> str:
    """Membership AUC, a row a model with its interval; the band holds 95 % of models that never
    saw the texts (an AUC of 0.5 with this many texts; 0.4 to 0.6 where their number is unknown)."""
    rows = [model for model in models if model.mia_auc is not None]
    if not rows:
        return ""
    sizes = next((size for size in (model.sizes for model in rows) if size), None)
    half = 1.96 * ideal_membership(*sizes).standard_error if sizes else 0.1
    figure, axes = _figure(1.1 + 0.26 * len(rows))
    axes.axvspan(0.5 - half, 0.5 + half, color=BAND, linewidth=0)
    for place, model in enumerate(rows):
        color, auc = _PLACE[palette[model.name]], model.mia_auc
        if around := model.intervals.get("mia_auc"):
            axes.plot(around, [place, place], color=color, linewidth=2.2, alpha=0.55)
        _mark(axes, auc, place, model, color)
        axes.text(1.04, place, f"{auc:.2f}", color=INK, fontsize=8, va="center")
    axes.set_yticks(range(len(rows)), [_short(model.name) for model in rows])
    for label, model in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(_PLACE[palette[model.name]])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set_xlabel("AUC of members against non-members", color=MUTED, fontsize=8)
    axes.set_title("\u2190 over-forgetting   under-forgetting \u2192", color=MUTED, fontsize=8)
    told = ", ".join(f"{m.name} {show(m.mia_auc, 2)} ({m.forgetting})" for m in rows)
    return _svg(figure, "auc", f"Membership AUC of each model, 0.5 is ideal: {told}.")


def has_contours(models: Sequence[Model]) -> bool:
    """Whether the Task Aggregate is a function of the two sides: equally many cells on both."""

    def count(model: Model, side: str) -> int:
        return sum(model.cells.get(c) is not None for c in CELLS if c.startswith(side))

    return all(count(model, SIDES[0]) == count(model, SIDES[1]) for model in models)


def plane_chart(
    models: Sequence[Model], palette: Mapping[str, str], named: Sequence[str] | None = None
) -> str:
    """Forget side against retain side; contours of the Task Aggregate 2 / (1/F + 1/R). ``named``
    models stand in the legend, by default all."""
    rows = [(model, model.side("forget"), model.side("retain")) for model in models]
    rows = [row for row in rows if None not in row]
    if not rows:
        return ""
    shown = [row for row in rows if named is None or row[0].name in named]
    figure, axes = _figure(3.3 + 0.2 * ((len(shown) + 1) // 2))
    for level in (0.2, 0.4, 0.6, 0.8, 0.9) if has_contours(models) else ():
        forget = np.linspace(level / (2 - level), 1, 40)
        axes.plot(forget, level * forget / (2 * forget - level), color=GRID, linewidth=1.2)
    for model, forget, kept in rows:
        known = any(model is one for one, _, _ in shown)
        color = _PLACE[palette[model.name]] if known else MUTED
        _mark(axes, forget, kept, model, color, 7 if known else 4)
        if known:
            axes.plot([], [], "o", color=color, label=_short(model.name))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("forgotten (harmonic mean of forget cells) \u2192", color=MUTED, fontsize=8)
    axes.set_ylabel("kept (harmonic mean of retain cells) \u2192", color=MUTED, fontsize=8)
    _legend(figure, len(shown))
    told = ", ".join(f"{m.name} forgotten {a:.2f} kept {b:.2f}" for m, a, b in rows)
    return _svg(figure, "plane", f"Forgotten against kept, best is top right: {told}.")


def curves_chart(
    name: str, curves: Mapping[str, Points], palette: Mapping[str, str], *, title: str,
    x_label: str, y_label: str = "",
) -> str:  # fmt: skip
    """A line a model through points (x, y) or (x, y, low, high), whose interval is a band."""
    curves = {key: sorted(points) for key, points in curves.items() if points}
    if not curves:
        return ""
    figure, axes = _figure(2.4 + 0.2 * ((len(curves) + 1) // 2))
    for key, points in curves.items():
        color = _PLACE.get(palette.get(key, ""), INK)
        x, y = [p[0] for p in points], [p[1] for p in points]
        axes.plot(x, y, "o-", color=color, markersize=3.5, linewidth=1.6, label=_short(key))
        if band := [p for p in points if len(p) == 4]:
            edges = [[p[i] for p in band] for i in (0, 2, 3)]
            axes.fill_between(*edges, color=color, alpha=0.16, linewidth=0)
    values = [value for points in curves.values() for p in points for value in p[1:]]
    if all(0 <= value <= 1 for value in values):
        axes.set_ylim(0, 1)
    wrapped = "\n".join(textwrap.wrap(y_label, 52))
    axes.set_title(f"{title}\n{wrapped}".strip(), color=INK, fontsize=8, loc="left")
    axes.set_xlabel(x_label, color=MUTED, fontsize=8)
    _legend(figure, len(curves))
    told = ", ".join(f"{key} from {p[0][1]:.3g} to {p[-1][1]:.3g}" for key, p in curves.items())
    return _svg(figure, name, f"{title} over {x_label}: {told}.")


def _legend(figure, count: int) -> None:
    figure.legend(
        loc="outside lower center", ncols=min(2, count), frameon=False, fontsize=8, labelcolor=INK
    )


def _short(name: str) -> str:
    """A name without what matplotlib would read as mathematics or hide, at most 22 characters."""
    name = name if len(name) <= 22 else f"{name[:21]}\u2026"
    return name.replace("$", r"\$").lstrip("_") or "?"
