"""Matplotlib figures of the analyses. Each takes the data of its function and returns a Figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

SCORES = ("task_aggregate", "mia_score", "utility", "aggregate")
COLOURS = {
    "task_aggregate": "#1b6ca8",
    "mia_score": "#c8553d",
    "utility": "#588157",
    "aggregate": "#222222",
    "mia_auc": "#8a5a9e",
}


def _figure(title: str, x: str, y: str, width: float = 6.0):
    figure = Figure(figsize=(width, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    return figure, axes


def _lines(axes, x: Sequence[float], rows: Sequence[Mapping], names: Sequence[str]) -> None:
    for name in names:
        values = [row["scores"].get(name) for row in rows]
        if any(value is not None for value in values):
            points = [(a, b) for a, b in zip(x, values, strict=True) if b is not None]
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                ms=3.5,
                label=name.replace("_", " "),
                color=COLOURS.get(name),
            )
    axes.legend(fontsize=8)


def density_figure(rows: Sequence[Mapping], names: Sequence[str] = SCORES) -> Figure:
    """Figure 5: scores over the density of ``sweep`` rows."""
    rows = sorted(rows, key=lambda row: row["recipe"]["density"])
    figure, axes = _figure("Scores over density", "density", "score")
    _lines(axes, [row["recipe"]["density"] for row in rows], rows, names)
    axes.set_ylim(-0.02, 1.02)
    return figure


def path_figure(rows: Sequence[Mapping], names: Sequence[str] = (*SCORES, "mia_auc")) -> Figure:
    """Scores along an interpolation path, its stops named."""
    figure, axes = _figure("Along the line between models", "", "score")
    _lines(axes, [row["position"] for row in rows], rows, names)
    stops = [(row["position"], row["stop"]) for row in rows if row["stop"]]
    axes.set_xticks([position for position, _ in stops], [name for _, name in stops])
    axes.axhline(0.5, color="#8a5a9e", lw=0.8, ls=":")
    axes.set_ylim(-0.02, 1.02)
    return figure


def trajectory_figure(rows: Sequence[Mapping], names: Sequence[str] | None = None) -> Figure:
    """Figure 2: regurgitation and knowledge of both sides along training (or ``names``).

    Forget cells are drawn as they are reported (1 - v, high is good).
    """
    figure, axes = _figure("Scores along training", "step", "score")
    if names is None:
        rows = [{**row, "scores": {**row["scores"], **sides(row["scores"])}} for row in rows]
        names = (
            "forget_regurgitation",
            "forget_knowledge",
            "retain_regurgitation",
            "retain_knowledge",
        )
    _lines(axes, [row["step"] for row in rows], rows, names)
    axes.set_ylim(-0.02, 1.02)
    return figure


def sides(scores: Mapping[str, float | None]) -> dict[str, float | None]:
    """Means of the cells of each side and kind over the tasks that have rows."""
    means: dict[str, float | None] = {}
    for side in ("forget", "retain"):
        for kind in ("regurgitation", "knowledge"):
            values = [scores.get(f"{side}_task{task}_{kind}") for task in (1, 2, 3)]
            present = [value for value in values if value is not None]
            means[f"{side}_{kind}"] = sum(present) / len(present) if present else None
    return means


def loss_figure(runs: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> Figure:
    """Figure 3: the loss curves of several runs, one panel a curve name."""
    names = sorted({name for curves in runs.values() for name in curves})
    figure = Figure(
        figsize=(3.4 * min(3, len(names)), 2.6 * -(-len(names) // 3)), layout="constrained"
    )
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(-(-len(names) // 3), min(3, len(names)), number)
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.25)
        for run, curves in runs.items():
            if name in curves:
                axes.plot(*zip(*curves[name], strict=True), label=run, lw=1.2)
        axes.legend(fontsize=7)
    return figure


def angle_figure(rows: Sequence[Mapping]) -> Figure:
    """Figure 4: angles between the first part of training and the rest, by turning point."""
    figure, axes = _figure("Angles between update directions", "turning point (step)", "degrees")
    for key, label in (
        ("first_to_rest", "start to turn / turn to end"),
        ("first_to_whole", "start to turn / start to end"),
    ):
        points = [(row["step"], row[key]) for row in rows if row[key] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", ms=3.5, label=label)
    axes.axhline(90, color="#888888", lw=0.8, ls=":")
    axes.legend(fontsize=8)
    return figure


def layer_figure(result: Mapping) -> Figure:
    """Cosine and sign conflicts of two task vectors per layer."""
    layers = result["layers"]
    figure, axes = _figure("Two task vectors, layer by layer", "layer", "share or cosine")
    x = range(len(layers))
    axes.bar(
        [i - 0.2 for i in x],
        [row["sign_conflict"] or 0 for row in layers],
        0.4,
        label="opposite signs",
        color="#c8553d",
    )
    axes.bar(
        [i + 0.2 for i in x],
        [row["cosine"]["0,1"] or 0 for row in layers],
        0.4,
        label="cosine",
        color="#1b6ca8",
    )
    axes.set_xticks(list(x), [row["layer"] for row in layers])
    axes.legend(fontsize=8)
    return figure


def pareto_figure(points: Sequence[Mapping], *, x: str = "retain", y: str = "forget") -> Figure:
    """Candidates by what they keep and what they forget; colour is the membership AUC.

    ``points``: ``{"name", "kind": "candidate|parent|fixed|winner", "scores": {...}}``.
    """
    figure, axes = _figure(
        "Candidates on validation",
        f"{x} (harmonic mean of its cells)",
        f"{y} (harmonic mean of its cells)",
        width=6.6,
    )
    drawn = None
    for kind, marker, area in (
        ("candidate", "o", 26),
        ("parent", "s", 70),
        ("fixed", "D", 70),
        ("winner", "*", 190),
    ):
        chosen = [p for p in points if p["kind"] == kind and p["scores"].get(x) is not None]
        if not chosen:
            continue
        drawn = axes.scatter(
            [p["scores"][x] for p in chosen],
            [p["scores"][y] for p in chosen],
            c=[p["scores"].get("mia_auc", 0.5) for p in chosen],
            cmap="coolwarm",
            vmin=0,
            vmax=1,
            marker=marker,
            s=area,
            edgecolors="black",
            linewidths=0.5,
            label=kind,
        )
        if kind != "candidate":
            for p in chosen:
                axes.annotate(
                    p["name"],
                    (p["scores"][x], p["scores"][y]),
                    fontsize=7,
                    xytext=(4, 4),
                    textcoords="offset points",
                )
    front = pareto_front([(p["scores"].get(x), p["scores"].get(y)) for p in points])
    if len(front) > 1:
        axes.plot(*zip(*front, strict=True), color="#888888", lw=0.8, zorder=0)
    if drawn is not None:
        figure.colorbar(drawn, label="membership AUC (.5 is the aim)")
    axes.legend(fontsize=7)
    return figure


def pareto_front(points: Sequence[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, by the first."""
    present = sorted({(a, b) for a, b in points if a is not None and b is not None}, reverse=True)
    front: list[tuple[float, float]] = []
    for a, b in present:
        if not front or b > front[-1][1]:
            front.append((a, b))
    return front[::-1]
