"""The charts of the report: each takes models (or curves) and returns one inline SVG, or "".

A model has one colour in all of them. Words on the axes say which direction is which. Charts are
about 360 px wide so that a phone shows them unscaled; the page puts several side by side.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from axolotl_unlearn.metrics.results import Model
from axolotl_unlearn.metrics.semeval import CELLS, SIDES, score_title
from axolotl_unlearn.metrics.verdict import show
from axolotl_unlearn.report.results import (
    auc_standard_error,
    cell_count,
    flags,
    forgetting,
    known,
    membership_sizes,
)
from axolotl_unlearn.report.svg import (
    Svg,
    fit,
    nice_ticks,
    place_labels,
    scale,
    spread,
    text_width,
    tick_label,
)

WIDTH = 360
# Names the demo uses keep their colour from run to run; other models take the rest in order.
FIXED_COLOURS = {"original": 0, "over": 1, "under": 2, "merged": 3, "single": 4, "retrained": 5}
SIDE_WORDS = {
    "forget": "Forget set (right = more forgotten)",
    "retain": "Retain set (right = better kept)",
}

Point = tuple[float, float]


def colours(names: Sequence[str]) -> dict[str, str]:
    """A CSS colour variable for each model; two models share one only beyond ten models."""
    taken = {FIXED_COLOURS[name] for name in names if name in FIXED_COLOURS}
    free = [i for i in (3, 1, 2, 4, 6, 7, 8, 9, 5, 0) if i not in taken] or [6]
    out, used = {}, 0
    for name in names:
        if name in FIXED_COLOURS:
            out[name] = f"var(--m{FIXED_COLOURS[name]})"
        else:
            out[name] = f"var(--m{free[used % len(free)]})"
            used += 1
    return out


def _shape(model: Model) -> str:
    if flags(model):
        return "cross"
    return {"original": "ring", "retrained": "diamond"}.get(model.part, "full")


def cells_chart(model: Model, original: Model | None, color: str) -> str:
    """Bars of the 12 cells of one model, with intervals and n; a tick marks the original."""
    if not cell_count(model):
        return ""
    left, right, row, top = 128, 282, 19, 8
    height = top + 2 * (24 + 6 * row) + 28
    x = scale((0, 1), (left, right))
    told = ", ".join(f"{score_title(name)} {show(model.cells.get(name), 2)}" for name in CELLS)
    svg = Svg("cells", WIDTH, height, f"Scores of the 12 cells of {model.name}: {told}.")
    y = float(top)
    bottom = height - 26
    for tick in (0, 0.5, 1):
        svg.line(x(tick), top + 16, x(tick), bottom, cls="grid")
        svg.text(x(tick), bottom + 14, tick_label(tick), cls="tick", anchor="middle")
    for side in SIDES:
        svg.text(0, y + 12, SIDE_WORDS[side], cls="head")
        if side == "forget":
            svg.text(WIDTH, y + 12, "n", cls="tick", anchor="end")
        y += 20
        for name in (name for name in CELLS if name.startswith(side)):
            value, middle = model.cells.get(name), y + row / 2
            label = score_title(name).partition(", ")[2].capitalize()
            svg.text(0, middle + 4, label, cls="label")
            if (count := model.n.get(name)) is not None:
                svg.text(WIDTH, middle + 4, f"{count}", cls="tick", anchor="end")
            if value is None:
                svg.text(left + 4, middle + 4, "n/a", cls="tick")
            else:
                around = model.intervals.get(name)
                tip = f"{score_title(name)}: {value:.2f}"
                if around:
                    tip += f", 95 % interval {around[0]:.2f} to {around[1]:.2f}"
                svg.rect(left, y + 4, x(value) - left, row - 8, color=color, title=tip)
                if around:
                    svg.line(x(around[0]), middle, x(around[1]), middle, cls="whisker")
                    for end in around:
                        svg.line(x(end), middle - 3, x(end), middle + 3, cls="whisker")
                svg.text(right + 40, middle + 4, f"{value:.2f}", cls="value", anchor="end")
            before = original.cells.get(name) if original is not None else None
            if before is not None and original is not model:
                svg.line(x(before), y + 1, x(before), y + row - 1, cls="origin")
            y += row
        y += 4
    return svg.render()


def auc_chart(models: Sequence[Model], palette: Mapping[str, str]) -> str:
    """One row a model on the AUC axis, over- and under-forgetting named, the ideal band shaded.

    The band is where 95 % of perfect models fall with this n (AUC .5 and its standard error when
    nothing separates the sets); without n it is .4 to .6 and says so.
    """
    rows = [model for model in models if model.mia_auc is not None]
    if not rows:
        return ""
    sizes = next((size for size in map(membership_sizes, rows) if size), None)
    half = 1.96 * auc_standard_error(*sizes) if sizes else 0.1
    row, top = min(40, max(26, 250 / len(rows))), 46
    left = min(130, max(54, max(text_width(model.name) for model in rows) + 14))
    right, bottom = WIDTH - 46, top + row * len(rows)
    x = scale((0, 1), (left, right))
    told = ", ".join(f"{model.name} {show(model.mia_auc, 2)}" for model in rows)
    svg = Svg(
        "auc",
        WIDTH,
        bottom + 40,
        f"Membership AUC of each model, 0.5 is ideal, below is over-forgetting, above is "
        f"under-forgetting: {told}.",
    )
    svg.rect(x(0.5 - half), top - 6, x(0.5 + half) - x(0.5 - half), bottom - top + 8, cls="band")
    svg.text(left - 8, top - 30, "\u2190 over-forgetting", cls="axis")
    svg.text(right + 8, top - 30, "under-forgetting \u2192", cls="axis", anchor="end")
    svg.text(x(0.5), top - 12, "ideal", cls="bandtext", anchor="middle")
    for tick in (0, 0.25, 0.5, 0.75, 1):
        svg.line(x(tick), top - 6, x(tick), bottom + 2, cls="grid")
        svg.text(x(tick), bottom + 16, tick_label(tick), cls="tick", anchor="middle")
    for index, model in enumerate(rows):
        y, color = top + row * (index + 0.5), palette[model.name]
        auc, around = model.mia_auc, model.intervals.get("mia_auc")
        svg.text(0, y + 4, fit(model.name, left - 10), cls="name", color=color)
        if around:
            svg.line(x(around[0]), y, x(around[1]), y, cls="interval", color=color)
        tip = f"{model.name}: AUC {auc:.3f}, {forgetting(model)}"
        svg.dot(x(auc), y, color=color, shape=_shape(model), title=tip)
        svg.text(WIDTH, y + 4, f"{auc:.2f}", cls="value", anchor="end")
    svg.text(
        (left + right) / 2,
        bottom + 34,
        "AUC of members against non-members",
        cls="axis",
        anchor="middle",
    )
    return svg.render()


def has_contours(models: Sequence[Model]) -> bool:
    """Whether the Task Aggregate is a function of the two sides: equally many cells on both."""
    counts = [
        [sum(model.cells.get(c) is not None for c in CELLS if c.startswith(side)) for side in SIDES]
        for model in models
    ]
    return all(forget == retain for forget, retain in counts)


def plane_chart(
    models: Sequence[Model], palette: Mapping[str, str], named: Sequence[str] | None = None
) -> str:
    """Forget side against retain side, with contours of the Task Aggregate.

    ``named``: the models whose names stand beside their dots [all].

    With equally many cells on both sides the Task Aggregate is 2 / (1/F + 1/R), so the contours
    are exact; a contour of level c is R = c F / (2 F - c).
    """
    rows = [
        (model, model.side("forget"), model.side("retain"))
        for model in models
        if model.side("forget") is not None and model.side("retain") is not None
    ]
    if not rows:
        return ""
    left, right, top, bottom = 44, WIDTH - 12, 12, 308
    x, y = scale((0, 1), (left, right)), scale((0, 1), (bottom, top))
    told = ", ".join(f"{m.name} forgotten {a:.2f} kept {b:.2f}" for m, a, b in rows)
    svg = Svg("plane", WIDTH, bottom + 40, f"Forgotten against kept, best is top right: {told}.")
    for tick in (0, 0.25, 0.5, 0.75, 1):
        svg.line(x(tick), top, x(tick), bottom, cls="grid")
        svg.line(left, y(tick), right, y(tick), cls="grid")
        svg.text(x(tick), bottom + 15, tick_label(tick), cls="tick", anchor="middle")
        svg.text(left - 6, y(tick) + 4, tick_label(tick), cls="tick", anchor="end")
    for level in (0.2, 0.4, 0.6, 0.8, 0.9) if has_contours(models) else ():
        start = level / (2 - level)
        forget = np.linspace(start, 1, 40)
        kept = level * forget / (2 * forget - level)
        svg.path(zip(map(x, forget), map(y, kept), strict=True), cls="contour")
        svg.text(x(1) - 3, y(start) - 3, f"{level:g}", cls="contourtext", anchor="end")
    # Those with a name last, over the others.
    rows.sort(key=lambda row: named is None or row[0].name in named)
    spots = [(x(a), y(b)) for _, a, b in rows]
    labels = [fit(m.name, 150) if named is None or m.name in named else "" for m, _, _ in rows]
    frame = (left, top, right, bottom)
    places = place_labels(
        spots, labels, frame, all_of_them=named is None or len(named) == len(rows)
    )
    for (model, a, b), label, (px, py), (tx, ty, anchor) in zip(
        rows, labels, spots, places, strict=True
    ):
        color = palette[model.name] if label else "var(--muted)"
        tip = f"{model.name}: forgotten {a:.3f}, kept {b:.3f}"
        if label and anchor and abs(tx - px) + abs(ty - py) > 34:
            svg.line(px, py, tx, ty - 4, cls="leader")
        svg.dot(px, py, color=color, shape=_shape(model), title=tip, r=6 if label else 3)
        if label and anchor:
            svg.text(tx, ty, label, cls="name halo", color=color, anchor=anchor)
    svg.text(
        (left + right) / 2,
        bottom + 33,
        "forgotten (harmonic mean of forget cells) \u2192",
        cls="axis",
        anchor="middle",
    )
    svg.text(
        0,
        0,
        "kept (harmonic mean of retain cells) \u2192",
        cls="axis",
        anchor="middle",
        extra=f' transform="translate(11 {(top + bottom) / 2:.0f}) rotate(-90)"',
    )
    return svg.render()


def roc_points(member_loss: Sequence[float], nonmember_loss: Sequence[float]) -> list[Point]:
    """(false positive rate, true positive rate) when a text is called a member below a loss."""
    from sklearn.metrics import roc_curve

    member = [True] * len(member_loss) + [False] * len(nonmember_loss)
    fpr, tpr, _ = roc_curve(member, -np.array([*member_loss, *nonmember_loss]))
    return list(zip(fpr.tolist(), tpr.tolist(), strict=True))


def roc_chart(models: Sequence[Model], palette: Mapping[str, str]) -> str:
    """ROC of the loss attack on logarithmic axes (arXiv 2112.03570), a curve a model with losses.

    The axes start at the smallest rate that one text makes; rates of 0 lie on their edge.
    """
    rows = [(model, *pair) for model in models if (pair := _losses(model))]
    if not rows:
        return ""
    texts = max(max(len(members), len(others)) for _, members, others in rows)
    low = -max(1.0, math.log10(texts))
    left, right, top, bottom = 44, WIDTH - 12, 12, 308
    x, y = scale((low, 0), (left, right)), scale((low, 0), (bottom, top))

    def log(share: float) -> float:
        return math.log10(share) if share > 0 else low

    names = ", ".join(f"{model.name} AUC {show(model.mia_auc, 2)}" for model, _, _ in rows)
    columns = 2 if max(text_width(model.name) for model, _, _ in rows) < 90 else 1
    legend_rows = -(-len(rows) // columns)
    svg = Svg(
        "roc",
        WIDTH,
        bottom + 44 + 18 * legend_rows,
        f"ROC curves of the loss attack, logarithmic: {names}.",
    )
    for tick in range(math.ceil(low), 1):
        label = tick_label(10.0**tick)
        svg.line(x(tick), top, x(tick), bottom, cls="grid")
        svg.line(left, y(tick), right, y(tick), cls="grid")
        svg.text(x(tick), bottom + 15, label, cls="tick", anchor="middle" if tick else "end")
        svg.text(left - 6, y(tick) + 4, label, cls="tick", anchor="end")
    svg.line(x(low), y(low), x(0), y(0), cls="before")
    svg.text(x(0) - 4, y(low) - 6, "dashed: chance, the ideal", cls="tick halo", anchor="end")
    for index, (model, members, others) in enumerate(rows):
        color = palette[model.name]
        points = _thin(roc_points(members, others), 400)
        svg.path(((x(log(a)), y(log(b))) for a, b in points), color=color)
        lx, ly = left + (index % columns) * 160, bottom + 52 + 18 * (index // columns)
        svg.line(lx, ly - 4, lx + 16, ly - 4, cls="line", color=color)
        words = f"{fit(model.name, 240)} {show(model.mia_auc, 2)}"
        svg.text(lx + 22, ly, words, cls="name", color=color)
    middle = (left + right) / 2
    words = "share of non-members called members \u2192"
    svg.text(middle, bottom + 33, words, cls="axis", anchor="middle")
    turned = f' transform="translate(11 {(top + bottom) / 2:.0f}) rotate(-90)"'
    words = "share of members found \u2192"
    svg.text(0, 0, words, cls="axis", anchor="middle", extra=turned)
    return svg.render()


def _losses(model: Model) -> tuple[list[float], list[float]] | None:
    keys = ("member_loss", "nonmember_loss")
    members, others = (known(getattr(model.likelihood, key)) for key in keys)
    return (members, others) if members and others else None


def loss_limit(models: Sequence[Model]) -> float:
    """Right end of the shared loss axis: the pooled 95th percentile, rounded up.

    Flagged models do not stretch it, or the losses of a collapsed one would flatten the others.
    """
    models = [model for model in models if not flags(model)] or models
    pooled = [
        value for model in models if (pair := _losses(model)) for part in pair for value in part
    ]
    return nice_ticks(0, float(np.quantile(pooled, 0.95)), 9)[-1] if pooled else 1.0


def loss_histogram(model: Model, color: str, limit: float) -> str:
    """Losses of members (filled) and non-members (outline) on the axis all models share."""
    pair = _losses(model)
    if not pair:
        return ""
    members, others = pair
    alt = (
        f"Loss of {len(members)} members (median {np.median(members):.2f}) and {len(others)} "
        f"non-members (median {np.median(others):.2f}) under {model.name}, nats per token."
    )
    return _histogram(
        "losses",
        alt,
        others,
        members,
        color,
        (0, limit),
        28,
        "loss, nats per token",
        ("non-members", "members"),
        overflow=True,
    )


def extraction_histogram(model: Model, original: Model, color: str) -> str:
    """Extraction strength of the forget texts before (outline) and after (filled)."""
    after, before = (
        known(one.extraction.strength if one.extraction is not None else ())
        for one in (model, original)
    )
    if not after or not before:
        return ""
    alt = (
        f"Extraction strength of {len(after)} forget texts: median {np.median(before):.2f} before, "
        f"{np.median(after):.2f} under {model.name}."
    )
    return _histogram(
        "extraction",
        alt,
        before,
        after,
        color,
        (0, 1),
        20,
        "extraction strength (0 = nothing can be extracted)",
        ("before", fit(model.name, 130)),
        overflow=False,
    )


def _histogram(
    name: str,
    alt: str,
    outline: Sequence[float],
    filled: Sequence[float],
    color: str,
    domain: tuple[float, float],
    bins: int,
    axis: str,
    words: tuple[str, str],
    overflow: bool,
) -> str:
    left, right, top, bottom = 34, WIDTH - 8, 34, 156
    edges = np.linspace(*domain, bins + 1)
    shares = []
    for values in (outline, filled):
        counts, _ = np.histogram(np.clip(values, *domain), edges)
        shares.append(100 * counts / len(values))
    ticks = nice_ticks(0, max(float(share.max()) for share in shares), 3)
    x, y = scale(domain, (left, right)), scale((0, ticks[-1]), (bottom, top))
    svg = Svg(name, WIDTH, bottom + 36, alt)
    for tick in ticks:
        svg.line(left, y(tick), right, y(tick), cls="grid")
        svg.text(left - 5, y(tick) + 4, tick_label(tick), cls="tick", anchor="end")
    for low, high, share in zip(edges[:-1], edges[1:], shares[1], strict=True):
        if share:
            svg.rect(
                x(low) + 0.5,
                y(share),
                x(high) - x(low) - 1,
                bottom - y(share),
                cls="fill",
                color=color,
                title=f"{words[1]}: {share:.0f} % from {low:.2f} to {high:.2f}",
            )
    steps = [(x(edges[0]), bottom)]
    for low, high, share in zip(edges[:-1], edges[1:], shares[0], strict=True):
        steps += [(x(low), y(share)), (x(high), y(share))]
    svg.path([*steps, (x(edges[-1]), bottom)], cls="outline")
    svg.line(left, bottom, right, bottom, cls="axisline")
    for tick in nice_ticks(*domain, 5):
        if domain[0] <= tick < domain[1] - 0.08 * (domain[1] - domain[0]):
            svg.text(x(tick), bottom + 14, tick_label(tick), cls="tick", anchor="middle")
    end = ("\u2265" if overflow else "") + tick_label(domain[1])
    svg.text(right, bottom + 14, end, cls="tick", anchor="end")
    svg.text((left + right) / 2, bottom + 31, axis, cls="axis", anchor="middle")
    svg.text(0, 11, "% of texts", cls="axis")
    labels = [
        (float(np.median(outline)), words[0], ""),
        (float(np.median(filled)), words[1], color),
    ]
    _median_labels(svg, labels, x, (left, right), top)
    return svg.render()


def _median_labels(
    svg: Svg,
    labels: list[tuple[float, str, str]],
    x: Callable[[float], float],
    span: tuple[float, float],
    top: float,
) -> None:
    """Names two distributions above their medians, left one ending before the right one starts."""
    labels.sort(key=lambda label: label[0])
    texts = [f"{word} {median:.2f}" for median, word, _ in labels]
    widths = [text_width(text) for text in texts]
    floor = span[0] + 38  # keeps clear of the unit of the vertical axis
    starts = [
        min(max(x(m) - w / 2, floor), span[1] - w)
        for (m, _, _), w in zip(labels, widths, strict=True)
    ]
    if starts[0] + widths[0] + 12 > starts[1]:
        middle = (starts[0] + widths[0] + starts[1]) / 2
        starts = [middle - widths[0] - 6, middle + 6]
        if starts[0] < floor:
            starts = [floor, floor + widths[0] + 12]
        if starts[1] + widths[1] > span[1]:
            starts = [span[1] - widths[1] - 12 - widths[0], span[1] - widths[1]]
    for (median, _, color), text, start in zip(labels, texts, starts, strict=True):
        cls = "median" if color else "median plain"
        svg.text(start, top - 13, text, cls="name" if color else "name plain", color=color)
        svg.line(x(median), top - 8, x(median), top + 2, cls=cls, color=color)


def curves_chart(
    name: str,
    curves: Mapping[str, Sequence[Point]],
    palette: Mapping[str, str],
    *,
    title: str,
    x_label: str,
    y_label: str = "",
    domain: tuple[float, float] | None = None,
    ideal: float | None = None,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    markers: bool = False,
    smooth: bool = False,
) -> str:
    """Lines over steps, labelled at their right ends; `bands` = (x, low, high) per curve."""
    curves = {key: _thin(sorted(points), 250) for key, points in curves.items() if points}
    if not curves:
        return ""
    bands = bands or {}
    xs = [a for points in curves.values() for a, _ in points]
    ys = [b for points in curves.values() for _, b in points]
    ys += [edge for band in bands.values() for _, low, high in band for edge in (low, high)]
    label_width = min(110, max(text_width(key) for key in curves) + 8)
    ticks = nice_ticks(*(domain or (min(0.0, min(ys)), max(ys))), 5)
    # A generous line of small text holds 60 characters; the metric of a curve may need two.
    subtitle = textwrap.wrap(y_label, 60)
    top = 32 + 14 * len(subtitle)
    left, right, bottom = 40, WIDTH - label_width, top + 142
    last = max(xs) if max(xs) > min(xs) else min(xs) + 1
    x = scale((min(xs), last), (left, right))
    y = scale((ticks[0], ticks[-1]), (bottom, top))
    told = ", ".join(
        f"{key} from {points[0][1]:.3g} to {points[-1][1]:.3g}" for key, points in curves.items()
    )
    svg = Svg(name, WIDTH, bottom + 36, f"{title} over {x_label}: {told}.")
    svg.text(0, 12, title, cls="head")
    for row, words in enumerate(subtitle):
        svg.text(0, 27 + 13 * row, words, cls="tick")
    for tick in ticks:
        svg.line(left, y(tick), right, y(tick), cls="grid")
        svg.text(left - 5, y(tick) + 4, tick_label(tick), cls="tick", anchor="end")
    if ideal is not None:
        svg.line(left, y(ideal), right, y(ideal), cls="before")
    for tick in nice_ticks(min(xs), last, 5):
        if min(xs) <= tick <= last:
            svg.text(x(tick), bottom + 15, tick_label(tick), cls="tick", anchor="middle")
    svg.line(left, bottom, right, bottom, cls="axisline")
    svg.text((left + right) / 2, bottom + 31, x_label, cls="axis", anchor="middle")
    for key, band in bands.items():
        if key in curves and len(band) > 1:
            edge = [(x(a), y(low)) for a, low, _ in band]
            edge += [(x(a), y(high)) for a, _, high in reversed(band)]
            svg.area(edge, cls="bandarea", color=palette.get(key, "var(--ink)"))
    last_values = [
        running_mean(points, len(points) // 20)[-1][1]
        if smooth and len(points) > 60
        else points[-1][1]
        for points in curves.values()
    ]
    ends = spread([y(value) for value in last_values], 14, top + 2, bottom)
    for (key, points), end in zip(curves.items(), ends, strict=True):
        color = palette.get(key, "var(--ink)")
        if smooth and len(points) > 60:
            svg.path(((x(a), y(b)) for a, b in points), cls="raw", color=color)
            points = running_mean(points, len(points) // 20)
        svg.path(((x(a), y(b)) for a, b in points), color=color)
        if markers or len(points) == 1:
            for a, b in points:
                svg.dot(x(a), y(b), color=color, r=3, title=f"{key}: {b:.3f} at {tick_label(a)}")
        svg.text(right + 6, end + 4, fit(key, label_width - 6), cls="name", color=color)
    return svg.render()


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean over `window` points around each, fewer at both ends."""
    values = np.array([value for _, value in points], float)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    start, stop = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    means = (sums[stop] - sums[start]) / (stop - start)
    return [(x, float(mean)) for (x, _), mean in zip(points, means, strict=True)]


def _thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most about `most` points, the first and last always among them."""
    points = list(points)
    if len(points) <= most:
        return points
    step = len(points) / most
    kept = [points[int(i * step)] for i in range(most)]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]
