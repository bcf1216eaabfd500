"""The scores as one table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from axolotl_unlearn.metrics.intervals import ideal_membership
from axolotl_unlearn.metrics.results import CELLS, Model, Results
from axolotl_unlearn.metrics.semeval import SIDES
from axolotl_unlearn.metrics.verdict import Verdict, show
from axolotl_unlearn.report.answer import Answer, answer_of

HEADLINES = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")


def table(found: Answer | Results | Mapping[str, Any] | str | Path) -> Table:
    """The answer in a sentence, then one row a model: its scores and its verdict. Collapsed rows
    and rows below the utility gate are red; the model to use is bold."""
    answer = found if isinstance(found, Answer) else answer_of(found)
    color = {"good": "green", "bad": "yellow"}.get(answer.tone, "")
    says, left = " ".join(answer.sentence.split()), {"title_justify": "left"}
    left |= {"caption": caption(answer), "caption_justify": "left"}
    title = Text(says, style=f"bold {color}")
    out = Table(title=title, box=box.SIMPLE_HEAD, padding=0, **left)
    # Fits 80 columns with nothing cut: numbers never wrap, names and words do.
    out.add_column("Model", overflow="fold", min_width=8)
    for heading in ("Aggregate", "Task\nAgg.", "AUC\n(ideal\n0.5)", "MIA\nscore", "Utility"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("Reading", min_width=13)
    for model in answer.results.models:
        marks = model.flags
        style = "red" if marks else "bold" if model.name == answer.best else ""
        out.add_row(
            Text(model.name, style=style),
            *(_cell(model, metric, style) for metric in HEADLINES),
            _reading(marks, model.name == answer.best, answer.verdicts[model.name]),
        )
    return out


def grid(title: str, figures: Sequence[str], *names: str) -> Table:
    """An empty table with a column for each name and each figure."""
    made = Table(title=title, box=box.SIMPLE_HEAD)
    for name in names:
        made.add_column(name, overflow="fold", no_wrap=name == "measure")
    for name in figures:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _cell(model: Model, metric: str, style: str) -> Text:
    text = Text(show(model.value(metric), 2), style=style)
    around = model.intervals.get(metric)
    if around:
        text.append("\n" + "-".join(f"{end:.2f}" for end in around), style="dim")
    return text


def _reading(marks: list[str], is_best: bool, verdict: Verdict) -> Text:
    """What the row is, in a few words: its flags, its verdict, or its part in the comparison."""
    if marks:
        return Text(", ".join(mark.upper() for mark in marks), style="bold red")
    style = {"good": "green", "plain": "dim"}.get(verdict.tone, "yellow")
    text = Text(verdict.label, style=style)
    return text.append(", best", style="bold") if is_best else text


def membership_warning(results: Results) -> str | None:
    """Why the membership figures mean nothing on these data, if a blind baseline separates."""
    for model in results.models:
        if model.membership is not None and model.membership.meaningful is False:
            return model.membership.sentence or "Membership means nothing on these data."
    return None


def _sizes(results: Results) -> str:
    """What n stands behind the numbers, in words."""
    model = max(results.models, key=lambda one: one.cell_count)
    parts = []
    for side in SIDES:
        if rows := sum(model.n.get(name) or 0 for name in CELLS if name.startswith(side)):
            parts.append(f"{rows} {side} rows")
    if pair := model.sizes:
        parts.append(f"{pair[0]} members against {pair[1]} non-members")
    if questions := model.n.get("utility"):
        parts.append(f"{questions} utility questions")
    return ", ".join(parts) if parts else "n not recorded"


def caption(answer: Answer) -> str:
    """Conventions and n, so that a number can be compared with another one."""
    results = answer.results
    lines = [
        "Aggregate = mean of Task Aggregate, MIA score and utility (SemEval-2025 Task 4). "
        "Higher is better except AUC: 0.5 is ideal, above = under-forgetting, "
        "below = over-forgetting.",
        f"n: {_sizes(results)}.",
    ]
    if any(model.intervals for model in results.models):
        lines[-1] += " Ranges are 95 % intervals."
    pair = results.models[0].independent
    if pair:
        expected = ideal_membership(*pair).expected
        says = "With this n even a perfect model is expected to get a MIA score of only"
        lines.append(f"{says} {expected:.2f}.")
    known = [one.power["smallest_difference"] for one in answer.verdicts.values() if one.power]
    if least := list(filter(None, known)):
        says = f"These texts show an AUC that differs by {max(least):.2f} and more"
        lines.append(f"{says} (in four of five data sets).")
    if warning := membership_warning(results):
        lines.append(warning)
    counts = {model.name: model.cell_count for model in results.models}
    if partial := [f"{name} {count}" for name, count in counts.items() if 0 < count < 12]:
        lines.append(f"Task Aggregate over fewer than 12 cells: {', '.join(partial)}.")
    if any(model.flags for model in results.models):
        lines.append("Red rows collapsed or lost general ability: their Aggregate does not count.")
    return "\n".join(lines)
