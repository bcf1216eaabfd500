"""``python -m research choose``."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("choose")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--risk", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.05,
              show_default=True, help="Most that may be extracted of a forgotten document.")  # fmt: skip
@click.option("--delta", default=0.05, show_default=True, help="Chance to call one valid wrongly.")
def command(folder: Path, risk: float, delta: float) -> None:
    """Which models of an evaluation (FOLDER) keep a stated risk, best kept first.

    The risk of a document is by how much more of it can be extracted than from the retrained model.
    After FROC (arXiv 2512.13337), whose calibration was not found: this is Learn then Test
    (2110.01052).
    """
    from research.analysis.choose import CONTROLS, chosen, risks

    models = json.loads((folder / "results.json").read_text("utf-8"))["models"]
    kept = {one["name"]: one.get("utility") for one in models}
    rows = chosen(risks(folder), kept, risk, delta)
    for name, row in rows.items():
        utility = "not measured" if row["kept"] is None else f"{row['kept']:.2f}"
        click.echo(
            f"{name}: {'valid' if row['valid'] else 'not shown'} (risk {row['risk']:.3f} of "
            f"{row['documents']} documents, p {row['p']:.2g} after Holm; utility {utility})"
        )
    if not any(row["valid"] for row in rows.values()):
        click.echo(f"None is shown to keep a risk of {risk:g}.")
    click.echo(CONTROLS.format(risk=risk, delta=delta))
