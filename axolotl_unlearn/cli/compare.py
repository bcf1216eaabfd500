"""``axolotl unlearn compare``: is the difference of two models more than chance?"""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--data", "data_dir", type=click.Path(path_type=Path), help="[as evaluated]")
@click.option(
    "--out",
    "out_dir",
    type=click.Path(path_type=Path),
    default=Path("out/eval"),
    show_default=True,
    help="Folder of `axolotl unlearn eval`, whose measurements are read.",
)
@click.option("--resamples", type=int, help="[as in the evaluation]")
def command(first: str, second: str, **options) -> None:
    """Difference FIRST - SECOND of every score, with paired 95 % intervals.

    Models are named as in the results, or by path; nothing is measured again, and settings are
    those of the evaluation.

    \b
    axolotl unlearn compare merged single --out out/eval
    """
    from rich.console import Console
    from rich.table import Table

    from axolotl_unlearn.evaluation.compare import compare

    result = compare(first, second, **options)
    grid = Table(title=f"{result['first']} - {result['second']} (same rows, documents resampled)")
    for heading in ("score", "difference", "95 % interval", "p"):
        grid.add_column(heading, justify="left" if heading == "score" else "right")
    for metric, gap in result["differences"].items():
        bold = "bold" if gap["low"] > 0 or gap["high"] < 0 else ""
        bounds = rf"\[{gap['low']:+.3f}, {gap['high']:+.3f}]"
        grid.add_row(metric, f"{gap['value']:+.3f}", bounds, f"{gap['p']:.4f}", style=bold)
    console = Console()
    console.print(grid)
    console.print(result["sentence"], markup=False, highlight=False)
