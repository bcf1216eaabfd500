"""``axolotl unlearn eval --compare``: is the difference of two models more than chance?"""

from __future__ import annotations

from pathlib import Path

from axolotl_unlearn.cli._json import answer


def show_difference(
    first: str, second: str, data_dir: Path | None, out_dir: Path, resamples: int | None
) -> None:
    """Difference FIRST - SECOND of every score, with paired 95 % intervals.

    Models are named as in the results, or by path; nothing is measured again, and settings are
    those of the evaluation.
    """
    from rich.console import Console
    from rich.table import Table

    from axolotl_unlearn.evaluation.compare import compare

    result = compare(first, second, data_dir=data_dir, out_dir=out_dir, resamples=resamples)
    answer(**result)
    grid = Table(title=f"{result['first']} - {result['second']} (same rows, documents resampled)")
    for heading in ("score", "difference", "95 % interval", "p", "smallest"):
        grid.add_column(heading, justify="left" if heading == "score" else "right")
    for metric, gap in result["differences"].items():
        bold = "bold" if gap["low"] > 0 or gap["high"] < 0 else ""
        bounds = rf"\[{gap['low']:+.3f}, {gap['high']:+.3f}]"
        figures = (f"{gap['value']:+.3f}", bounds, f"{gap['p']:.4f}", f"{gap['smallest']:.3f}")
        grid.add_row(metric, *figures, style=bold)
    grid.caption = (
        "p after Holm over all scores. smallest: the difference that these rows would show in four "
        "of five data sets."
    )
    console = Console()
    console.print(grid)
    console.print(result["sentence"], markup=False, highlight=False)
