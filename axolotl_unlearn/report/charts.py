"""The two charts of the report, drawn by matplotlib as inline SVG; each returns "" without data.

Colours are variables of the page's style sheet, so that light, dark and print follow it: matplotlib
draws with stand-ins (`_STAND_INS`), which are replaced in the SVG.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from axolotl_unlearn.metrics.intervals import ideal_membership
from axolotl_unlearn.metrics.results import Model
from axolotl_unlearn.metrics.verdict import show

#: A colour that matplotlib knows -> what the page draws.
INK, MUTED, GRID, BAND, CARD, BAD = (f"#10001{i}" for i in range(6))
_STAND_INS = {f"#10000{i}": f"var(--m{i})" for i in range(10)} | {
    INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", BAND: "var(--band)",
    CARD: "var(--card)", BAD: "var(--bad)",
}  # fmt: skip
_PLACE = {variable: stand_in for stand_in, variable in _STAND_INS.items()}
#: Inches of a chart 360 px wide, at 100 dots an inch.
WIDTH = 3.6


def colours(names: Sequence[str]) -> dict[str, str]:
    """A CSS colour variable for each model; two models share one only beyond ten models."""
    return {name: f"var(--m{number % 10})" for number, name in enumerate(names)}


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


def _mark(axes, x: float, y: float, model: Model, color: str) -> None:
    shape = {"original": ("o", CARD), "retrained": ("D", color)}.get(model.part, ("o", color))
    if model.flags:
        shape = ("X", BAD)
    axes.plot(
        [x], [y], marker=shape[0], markersize=7, markerfacecolor=shape[1],
        markeredgecolor=CARD if shape[1] != CARD else color, clip_on=False, zorder=4,
    )  # fmt: skip


def auc_chart(models: Sequence[Model], palette: Mapping[str, str]) -> str:
    """Membership AUC, a row a model with its interval; the band holds 95 % of models that never
    saw the texts (an AUC of 0.5 with this many texts; 0.4 to 0.6 where their number is unknown)."""
    rows = [model for model in models if model.mia_auc is not None]
    if not rows:
        return ""
    sizes = next((size for size in (model.independent for model in rows) if size), None)
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
    told = ", ".join(f"{m.name} {show(m.mia_auc, 2)}" for m in rows)
    return _svg(figure, "auc", f"Membership AUC of each model, 0.5 is ideal: {told}.")


def plane_chart(models: Sequence[Model], palette: Mapping[str, str]) -> str:
    """Forget side against retain side."""
    rows = [(model, model.side("forget"), model.side("retain")) for model in models]
    rows = [row for row in rows if None not in row]
    if not rows:
        return ""
    figure, axes = _figure(3.3 + 0.2 * ((len(rows) + 1) // 2))
    for model, forget, kept in rows:
        color = _PLACE[palette[model.name]]
        _mark(axes, forget, kept, model, color)
        axes.plot([], [], "o", color=color, label=_short(model.name))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("forgotten (harmonic mean of forget cells) \u2192", color=MUTED, fontsize=8)
    axes.set_ylabel("kept (harmonic mean of retain cells) \u2192", color=MUTED, fontsize=8)
    columns = min(2, len(rows))
    figure.legend(
        loc="outside lower center", ncols=columns, frameon=False, fontsize=8, labelcolor=INK
    )
    told = ", ".join(f"{m.name} forgotten {a:.2f} kept {b:.2f}" for m, a, b in rows)
    return _svg(figure, "plane", f"Forgotten against kept, best is top right: {told}.")


def _short(name: str) -> str:
    """A name without what matplotlib would read as mathematics or hide, at most 22 characters."""
    name = name if len(name) <= 22 else f"{name[:21]}\u2026"
    return name.replace("$", r"\$").lstrip("_") or "?"
