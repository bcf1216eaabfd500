"""Just enough SVG: a canvas, axes, and labels that keep out of each other's way.

Hand-written SVG instead of an image library, because inline SVG takes its colours from the page's
CSS variables (light, dark, print), keeps its text as text, and a whole chart costs a few kB.
Every chart is drawn about as wide as a phone, so text is never scaled below reading size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup, escape

# Generous mean advance of a semibold sans-serif at font size 1: keeps labels apart whatever font
# the reader has, and is not used to typeset.
GLYPH_WIDTH = 0.64


def f(value: float) -> str:
    """A coordinate with at most one decimal, without a trailing ".0"."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


class Svg:
    """A canvas in px, y downwards; `alt` is what a screen reader says."""

    def __init__(self, name: str, width: float, height: float, alt: str) -> None:
        self.name, self.width, self.height, self.alt = name, width, height, alt
        self.parts: list[str] = []

    def add(self, markup: str) -> None:
        self.parts.append(markup)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        cls: str = "",
        anchor: str = "start",
        color: str = "",
        extra: str = "",
    ) -> None:
        style = f' style="fill:{color}"' if color else ""
        kind = f' class="{cls}"' if cls else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.add(f'<text x="{f(x)}" y="{f(y)}"{kind}{where}{style}{extra}>{escape(text)}</text>')

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, cls: str = "", color: str = ""
    ) -> None:
        style = f' style="stroke:{color}"' if color else ""
        self.add(
            f'<line x1="{f(x1)}" y1="{f(y1)}" x2="{f(x2)}" y2="{f(y2)}" class="{cls}"{style}/>'
        )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        cls: str = "",
        color: str = "",
        title: str = "",
    ) -> None:
        style = f' style="fill:{color}"' if color else ""
        kind = f' class="{cls}"' if cls else ""
        tip = f"><title>{escape(title)}</title></rect>" if title else "/>"
        self.add(
            f'<rect x="{f(x)}" y="{f(y)}" width="{f(max(width, 0))}" height="{f(max(height, 0))}"'
            f"{kind}{style}{tip}"
        )

    def path(
        self, points: Iterable[tuple[float, float]], *, cls: str = "line", color: str = ""
    ) -> None:
        steps = " ".join(f"{f(x)},{f(y)}" for x, y in points)
        style = f' style="stroke:{color}"' if color else ""
        self.add(f'<polyline points="{steps}" class="{cls}"{style}/>')

    def area(self, points: Iterable[tuple[float, float]], *, cls: str, color: str) -> None:
        steps = " ".join(f"{f(x)},{f(y)}" for x, y in points)
        self.add(f'<polygon points="{steps}" class="{cls}" style="fill:{color}"/>')

    def dot(
        self, x: float, y: float, *, color: str, shape: str = "full", title: str = "", r: float = 5
    ) -> None:
        """A model's mark: disc, "ring" (original), "diamond" (retrained), "cross" (flagged)."""
        tip = f"<title>{escape(title)}</title>" if title else ""
        if shape == "diamond":
            d = r * 1.25
            self.add(
                f'<path d="M{f(x)},{f(y - d)} L{f(x + d)},{f(y)} L{f(x)},{f(y + d)} '
                f'L{f(x - d)},{f(y)} Z" class="ring" style="stroke:{color}">{tip}</path>'
            )
        elif shape == "cross":
            d = r * 0.9
            self.add(
                f'<path d="M{f(x - d)},{f(y - d)} L{f(x + d)},{f(y + d)} M{f(x - d)},{f(y + d)} '
                f'L{f(x + d)},{f(y - d)}" class="cross">{tip}</path>'
            )
        else:
            style = f"stroke:{color}" if shape == "ring" else f"fill:{color}"
            kind = "ring" if shape == "ring" else "dot"
            self.add(
                f'<circle cx="{f(x)}" cy="{f(y)}" r="{f(r)}" class="{kind}" style="{style}">'
                f"{tip}</circle>"
            )

    def render(self) -> Markup:
        """The chart as markup, which a template does not escape again."""
        return Markup(
            f'<svg data-plot="{escape(self.name)}" role="img" aria-label="{escape(self.alt)}" '
            f'viewBox="0 0 {f(self.width)} {f(self.height)}" width="{f(self.width)}" '
            f'height="{f(self.height)}">{"".join(self.parts)}</svg>'
        )


def scale(domain: tuple[float, float], span: tuple[float, float]) -> Callable[[float], float]:
    """Linear map from data to pixels, clamped to the span."""
    (d0, d1), (p0, p1) = domain, span
    width = (d1 - d0) or 1.0

    def to_pixel(value: float) -> float:
        share = min(max((value - d0) / width, 0.0), 1.0)
        return p0 + share * (p1 - p0)

    return to_pixel


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from at or below `low` to at or above `high`."""
    if not high > low:
        high = low + 1.0
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(k * step, 10) for k in range(first, last + 1)]


def tick_label(value: float) -> str:
    """A tick as short as it can be: 0.5, 20, 1.5k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def text_width(text: str, size: float = 12) -> float:
    return len(text) * size * GLYPH_WIDTH


def fit(text: str, width: float, size: float = 12) -> str:
    """`text`, cut in the middle with an ellipsis where it would be wider than `width` px."""
    most = max(int(width / (size * GLYPH_WIDTH)), 3)
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}\u2026{text[len(text) - (most - 1 - head) :]}"


def spread(targets: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near `targets`, at least `gap` apart, inside [low, high]; order is kept.

    Used for labels at the ends of lines. With too little room the gap shrinks.
    """
    if not targets:
        return []
    order = sorted(range(len(targets)), key=lambda i: targets[i])
    gap = min(gap, (high - low) / max(len(targets) - 1, 1))
    placed = [min(max(targets[i], low), high) for i in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    overflow = placed[-1] - high
    if overflow > 0:
        placed[-1] = high
        for i in range(len(placed) - 2, -1, -1):
            placed[i] = min(placed[i], placed[i + 1] - gap)
    out = [0.0] * len(targets)
    for rank, i in enumerate(order):
        out[i] = placed[rank]
    return out


# Places of a label around its point: close ones first, then, for crowds, further out below and to
# the sides (a leader line is drawn to those).
_PLACES = [
    (10, 4, "start"),
    (-10, 4, "end"),
    (0, -11, "middle"),
    (0, 20, "middle"),
    (9, -9, "start"),
    (-9, -9, "end"),
    (9, 17, "start"),
    (-9, 17, "end"),
    *((dx, dy, "middle") for dy in (36, 52, 68, 84) for dx in (0, -30, 30, -60, 60, -90)),
    *((dx, dy, "middle") for dy in (-27, -43) for dx in (0, -30, 30)),
]


def place_labels(
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    bounds: tuple[float, float, float, float],
    size: float = 12,
    *,
    all_of_them: bool = True,
) -> list[tuple[float, float, str]]:
    """For each point a label position (x, baseline y, anchor) that overlaps as little as it can.

    `bounds` = (left, top, right, bottom). Greedy over fixed places around each point. Unless
    `all_of_them` has to be placed, one that would lie on another or outside gets no anchor.
    """
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    out = []
    for index, ((x, y), label) in enumerate(zip(points, labels, strict=True)):
        width = text_width(label, size)
        best_cost, best_place, best_box = math.inf, (x, y, "start"), (x, y, x, y)
        for rank, (dx, dy, anchor) in enumerate(_PLACES):
            left = x + dx - {"start": 0, "middle": width / 2, "end": width}[anchor]
            box = (left, y + dy - size * 0.8, left + width, y + dy + size * 0.25)
            outside = (
                max(bounds[0] - box[0], 0)
                + max(box[2] - bounds[2], 0)
                + max(bounds[1] - box[1], 0)
                + max(box[3] - bounds[3], 0)
            )
            overlap = sum(
                _overlap(box, other) for other_i, other in enumerate(taken) if other_i != index
            )
            cost = 50 * outside + 3 * overlap + rank
            fits = not outside and not any(_overlap(box, other) for other in taken[len(points) :])
            if cost < best_cost and (all_of_them or fits):
                best_cost, best_place, best_box = cost, (x + dx, y + dy, anchor), box
        if best_cost == math.inf:
            best_place = (x, y, "")
        taken.append(best_box)
        out.append(best_place)
    return out


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
