"""Every registered attack on models of two worlds, in one file and one picture.

    python -m research membership original=L/original merged=L/merged match=L/match \\
        --attacks all --control L/retrained --data L/data --out out/a
    python -m research membership retrained=L/retrained --control L/other --attacks all \\
        --data L/data --out out/b
    python -m research.studies.membership "life=out/a/membership-merged.json,out/b/membership-retrained.json"

*retrained* never saw a member, so it is each attack's null; attacks that compare with a control take
another retrained model of another seed. *life* is L, the models of ``python -m research never-seen
--out L --seed 0`` with `other`, its `retrained` with seed 1000: the demo's documents, read by a
model with a life before. *demo* is the demo itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from axolotl_unlearn import __version__
from axolotl_unlearn.files import write_json
from research.analysis.seeds import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "research" / "results" / "membership.json"
PICTURE = ROOT / "docs" / "images" / "membership.png"
COLOURS = {"original": "#c8553d", "merged": "#1b6ca8", "match": "#588157", "retrained": "#222222"}


def gathered(worlds: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Figures of files of `attack membership` and `inside`, several of one world, without paths and texts."""
    found: dict[str, Any] = {}
    for world, paths in worlds.items():
        models: dict[str, Any] = {}
        for content in (json.loads(path.read_text("utf-8")) for path in paths):
            blind = content["blind"]["baselines"]
            models.setdefault(content["model"], {}).update(
                {
                    attack: [row["auc"], row["low"], row["high"], row["p_corrected"]]
                    for attack, row in content["tests"].items()
                }
            )
        blind = {name: [one["auc"], one["low"], one["high"]] for name, one in blind.items()}
        found[world] = {"blind": blind, "models": models}
    return {"schema": "membership", "version": __version__, "worlds": found}


def tables(content: Mapping[str, Any]) -> dict[str, Table]:
    """A table a world, named by its first word: AUC and interval of each attack on each model."""

    def cell(row: list[float] | None) -> str:
        if row is None:
            return "n/a"
        text = f"{row[0]:.2f} [{row[1]:.2f}, {row[2]:.2f}]"
        return f"**{text}**" if len(row) > 3 and row[3] < 0.05 else text

    made = {}
    for world, found in content["worlds"].items():
        models = found["models"]
        attacks = dict.fromkeys(name for one in models.values() for name in one)
        rows = [[name, *(cell(one.get(name)) for one in models.values())] for name in attacks]
        rows += [
            [f"{name} (no model)", *[cell(row)] * len(models)]
            for name, row in found["blind"].items()
        ]
        made[world.split()[0]] = {"columns": ["attack", *models], "rows": rows}
    return made


def picture(content: Mapping[str, Any]) -> Figure:
    """A panel a world: attacks from top to bottom, a point and its interval for each model."""
    worlds = content["worlds"]
    every = [one for found in worlds.values() for one in found["models"].values()]
    attacks = list(dict.fromkeys(name for one in every for name in one))
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    panels = figure.subplots(1, len(worlds), sharey=True, squeeze=False)[0]
    for axes, (world, found) in zip(panels, worlds.items(), strict=True):
        models = found["models"]
        for number, (name, rows) in enumerate(models.items()):
            shift = (number - (len(models) - 1) / 2) * 0.19
            at = [(n + shift, rows[attack]) for n, attack in enumerate(attacks) if attack in rows]
            values = [row[0] for _, row in at]
            spans = [[r[0] - r[1] for _, r in at], [r[2] - r[0] for _, r in at]]
            axes.errorbar(
                values, [y for y, _ in at], xerr=spans, fmt="o", ms=3.5, lw=1.2,
                color=COLOURS.get(name, "#8a5a9e"), label=name,
            )  # fmt: skip
        axes.axvline(0.5, color="#888888", lw=0.8, ls=":")
        axes.set(title=world, xlabel="AUC", xlim=(-0.02, 1.02), ylim=(len(attacks) - 0.5, -0.5))
        axes.set_yticks(range(len(attacks)), attacks)
        axes.grid(axis="x", alpha=0.25)
    panels[0].legend(fontsize=8, loc="lower left")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worlds", nargs="+", help="NAME=FILE, several with commas between")
    given = parser.parse_args()
    worlds = {
        name: [Path(path) for path in paths.split(",")]
        for name, _, paths in (one.partition("=") for one in given.worlds)
    }
    content = gathered(worlds)
    write_json(RESULTS, content)
    picture(content).savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
