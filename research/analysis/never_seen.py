"""The page of ``make never-seen``: its table, its plots and the marks, from finished seeds.

    python -m research.analysis.never_seen out/ns-201 out/ns-202
    python -m research.analysis.never_seen research/results/never-seen-real.json out/real \\
        --name never-seen-real                       # to the seeds that are there already

writes research/results/NAME.json and docs/images/NAME/*.svg; `make docs-tables` then fills
the page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from scipy.stats import t

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import replacing, write_json
from axolotl_unlearn.metrics.membership import MARGIN
from axolotl_unlearn.metrics.semeval import CELLS
from axolotl_unlearn.metrics.verdict import judged
from axolotl_unlearn.report.inputs import attack_results
from axolotl_unlearn.store import versions
from research.analysis.attacked import RANKS, TITLES
from research.studies.never_seen import FILES

STEPS = 5  # of the relearning attack
ATTACKS = {
    "relearn": f"relearned in {STEPS} steps above control (+.05)",
    "quantise": "recalled after rounding to 8 or 4 bits, above control (+.05)",
    "prompt": "recalled by the strongest other prompt, above control (+.05)",
}
DEPTH = "erased from the layers, share of *retrained* (UDS)"
WITHIN = "AUC {} within .10 of *retrained*"
GENERAL = "general knowledge against *{}* (-.03)"
EQUIVALENT = "attacks equivalent to *retrained* at this n (margin .10, 5 %)"
COLOURS = {
    "original": "#888888",
    "retrained": "#222222",
    "teacher": "#8a5a9e",
    "merged": "#c8553d",
    "match": "#1b6ca8",
}
COMMANDS = {
    "never-seen-real": 'make never-seen-real ARGS="--seed N --no-pair"',
    "never-seen-real-gradients": 'make never-seen-real ARGS="--seed N --no-pair --gradients"',
}
Seeds = Mapping[str, Mapping[str, Any]]


def read_seed(out: Path) -> dict[str, Any]:
    """What is kept of one seed: scores by model, seconds of each stage, where the run stopped.

    Raises:
        UnlearnError: The job has not finished.
    """
    missing = [n for n in ("results.json", "attacked.json") if not (out / n).is_file()]
    if missing:
        raise UnlearnError(f"{out} has no {missing[0]}: run `python -m research never-seen` first.")
    results = json.loads((out / "results.json").read_text("utf-8"))
    verdicts = judged(results, attack_results(out / "eval"))
    found = json.loads((out / "attacked.json").read_text("utf-8"))
    models = {}
    for model in results["models"]:
        name = model["name"]
        forget = (model.get("collapse") or {}).get("forget") or {}
        models[name] = {
            **{key: model[key] for key in ("cells", "task_aggregate", "utility", "distance")
               if key in model},
            "broken": forget.get("broken"),
            "nonsense": forget.get("nonsense"),
            "verdict": verdicts[name].sentence,
            **found.get(name, {}),
            **attacks_of(out, name),
        }  # fmt: skip
    watched = out / "match" / "level.json"
    level = json.loads(watched.read_text("utf-8")) if watched.is_file() else {}
    teacher = out / "teacher" / "teacher.json"
    cost = json.loads(teacher.read_text("utf-8")) if teacher.is_file() else {}
    cost.pop("base", None)  # a path of this machine
    return {
        "models": models,
        "questions": results["models"][0].get("n", {}).get("utility"),
        "stages": results["stages"],
        "kept_step": level.get("kept_step"),
        "last_step": (level.get("watched") or [{}])[-1].get("step"),
        "teacher": cost,
    }


def attacks_of(out: Path, name: str) -> dict[str, Any]:
    """What the attacks on a job's model show: of each of `ATTACKS` the strongest way, above the
    control with its interval; ``inside`` by view; ``depth``. Those that were not made are not
    there."""
    found: dict[str, Any] = {}
    for kind in ATTACKS:
        attack = out / "eval" / f"{FILES.get(kind, kind)}-{name}.json"
        if attack.is_file():
            first, *rows = json.loads(attack.read_text("utf-8"))["rows"]  # first: not attacked
            rows = [row for row in rows if kind != "relearn" or row["x"] == STEPS]
            above = [row["above_control"]["recalled"] for row in rows]
            found[kind] = max(above, key=lambda one: one["value"], default=None)
    looked = out / "eval" / f"inside-{name}.json"
    if looked.is_file():
        views = json.loads(looked.read_text("utf-8"))["views"]
        found["inside"] = {
            view["title"]: {key: view[key] for key in ("auc", "control", "difference")}
            for view in views.values()
        }
    layers = out / "eval" / "uds.json"
    depths = json.loads(layers.read_text("utf-8"))["models"] if layers.is_file() else {}
    if name in depths:
        found["depth"] = {key: depths[name][key] for key in ("score", "low", "high")}
    return found


def _attacks(seeds: Seeds) -> list[str]:
    models = [model for seed in seeds.values() for model in seed["models"].values()]
    return [attack for attack in TITLES if all(attack in m["attacks"] for m in models)]


def _mean(seeds: Seeds, name: str, value: Callable[[Mapping], float | None]) -> float | None:
    found = [value(seed["models"][name]) for seed in seeds.values() if name in seed["models"]]
    known = [v for v in found if v is not None]
    return statistics.mean(known) if known else None


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def tables(seeds: Seeds) -> dict[str, dict[str, list]]:
    """``models`` and ``rivals`` (of ``--full``): means over the seeds that have them. ``marks``:
    whether `match` reaches each mark in each seed."""
    names = list(dict.fromkeys(n for seed in seeds.values() for n in seed["models"]))
    attacks = _attacks(seeds)
    columns = ["model", *(f"AUC {TITLES[a]}" for a in attacks), "forget cells", "retain cells",
               "utility", "broken / nonsense", "relearned"]  # fmt: skip
    rows = []
    for name in names:
        mean = lambda value, name=name: _mean(seeds, name, value)  # noqa: E731
        cells = {c: mean(lambda m, c=c: m["cells"].get(c)) for c in CELLS}
        sides = [
            " ".join(_number(v) for c, v in cells.items() if c.startswith(side))
            for side in ("forget", "retain")
        ]
        broken, nonsense = (mean(lambda m, k=k: m.get(k)) for k in ("broken", "nonsense"))
        relearn = mean(lambda m: (m.get("relearn") or {}).get("value"))
        rows.append(
            [
                f"*{name}*",
                *(_number(mean(lambda m, a=a: m["attacks"][a]["auc"])) for a in attacks),
                *sides,
                _number(mean(lambda m: m["utility"])),
                f"{_share(broken)} / {_share(nonsense)}" if broken is not None else "",
                "" if relearn is None else f"{relearn:+.3f}",
            ]
        )
    main = [f"*{name}*" for name in COLOURS]
    ours = sorted((row for row in rows if row[0] in main), key=lambda row: main.index(row[0]))
    found = {"models": {"columns": columns, "rows": ours}}
    if others := [row for row in rows if row[0] not in main]:
        found["rivals"] = {"columns": columns, "rows": others}
    return found | {"marks": marks(seeds)}


def pooled(seeds: Seeds, attack: str) -> tuple[float, float]:
    """AUC of `match` above *retrained*'s: mean over seeds, and half its 90 % interval.

    Seeds are independent, so the squared halves of their intervals add up.
    """
    gaps = [seed["models"]["match"]["attacks"][attack]["from_retrained"] for seed in seeds.values()]
    halves = [(gap["interval"][1] - gap["interval"][0]) / 2 for gap in gaps]
    return statistics.mean(gap["value"] for gap in gaps), math.hypot(*halves) / len(gaps)


def yardstick(seeds: Seeds) -> dict[str, list]:
    """How far two models that never saw the texts are apart: *teacher* from *retrained*.

    Beside it how far `match` is: absolute differences of the AUC, means over the seeds that have a
    teacher (two at least); last the mean of the two distances' difference, paired by seed, and its
    90 % interval (t).
    """
    known = [seed["models"] for seed in seeds.values() if "teacher" in seed["models"]]
    rows = []
    for attack in _attacks(seeds):
        teacher, match = (
            [abs(m[name]["attacks"][attack]["auc"] - m["retrained"]["attacks"][attack]["auc"])
             for m in known]
            for name in ("teacher", "match")
        )  # fmt: skip
        farther = [a - b for a, b in zip(match, teacher, strict=True)]
        half = t.ppf(0.95, len(known) - 1) * statistics.stdev(farther) / math.sqrt(len(known))
        means = [_number(statistics.mean(values), 3) for values in (teacher, match)]
        rows.append([TITLES[attack], *means, f"{statistics.mean(farther):+.3f} ± {half:.3f}"])
    columns = ["attack", "*teacher*", "*match*", "*match* farther by, 90 % interval"]
    return {"columns": columns, "rows": rows}


def general_error(seeds: Seeds, other: str) -> float | None:
    """Half the 90 % interval of the mean difference in general knowledge, over all seeds.

    Each model's answers are taken for independent draws, which is too wide where two models know
    the same. None where the number of questions was not kept.
    """
    variance = 0.0
    for seed in seeds.values():
        for model in (seed["models"]["match"], seed["models"][other]):
            if not seed.get("questions"):
                return None
            variance += model["utility"] * (1 - model["utility"]) / seed["questions"]
    return 1.645 * math.sqrt(variance) / len(seeds)


def marks(seeds: Seeds) -> dict[str, list]:
    """One row a mark, one column a seed, with the number and whether it is reached.

    With several seeds, the attacks are also judged over all of them, by the same equivalence test.
    """
    rows: dict[str, list[str]] = {}
    attacks = _attacks(seeds)
    # Earlier seeds were not looked into.
    inside = {v: None for s in seeds.values() for v in s["models"]["match"].get("inside", ())}

    def add(mark: str, text: str, reached: bool | None) -> None:
        rows.setdefault(mark, []).append(f"{text} {'yes' if reached else 'no'}" if text else "")

    for seed in seeds.values():
        match, retrained = seed["models"]["match"], seed["models"]["retrained"]
        for attack in attacks:
            gap = match["attacks"][attack]["auc"] - retrained["attacks"][attack]["auc"]
            add(WITHIN.format(TITLES[attack]), f"{gap:+.2f}", abs(gap) <= MARGIN)
        equivalent = [
            TITLES[a] for a in attacks
            if match["attacks"][a].get("from_retrained", {}).get("equivalent")
        ]  # fmt: skip
        add(
            EQUIVALENT,
            f"{len(equivalent)} of {len(attacks)}",
            len(equivalent) == len(attacks),
        )
        told = [
            cell for cell, gap in match.get("distance", {}).items()
            if cell in CELLS and cell.startswith("forget") and gap["p"] < 0.05 / 6
        ]  # fmt: skip
        add("forget cells told from *retrained* (p < .05 / 6)", f"{len(told)} of 6", not told)
        kept = min(
            match["cells"][c] / max(retrained["cells"][c], 1e-9)
            for c in CELLS
            if c.startswith("retain")
        )
        add("worst retain cell, share of *retrained*'s (.95)", f"{kept:.2f}", kept >= 0.95)
        gap = (match["nonsense"] or 0) - (retrained["nonsense"] or 0)
        gap = max(gap, (match["broken"] or 0) - (retrained["broken"] or 0))
        add("broken or nonsense outputs above *retrained*'s (5 points)", f"{gap:+.1%}", gap <= 0.05)
        original = seed["models"]["original"]
        for name, other in (("original", original), ("retrained", retrained)):
            gap = match["utility"] - other["utility"]
            add(GENERAL.format(name), f"{gap:+.2f}", gap >= -0.03)
        for kind, mark in ATTACKS.items():
            gain = match.get(kind)
            add(mark, f"{gain['value']:+.3f}" if gain else "", gain and gain["value"] <= 0.05)
        for view in inside:
            gap = match.get("inside", {}).get(view, {}).get("difference")
            text = "" if gap is None else f"{gap['value']:+.2f}"
            add(WITHIN.format(view), text, gap and abs(gap["value"]) <= MARGIN)
        rows.setdefault(DEPTH, []).append(_number((match.get("depth") or {}).get("score")))
    columns = ["mark", *(f"seed {seed}" for seed in seeds)]
    if len(seeds) > 1:
        columns.append("all seeds, 90 % interval")
        equal = 0
        for attack in attacks:
            value, half = pooled(seeds, attack)
            equal += (equivalent := abs(value) + half < MARGIN)
            text = f"{value:+.2f} ± {half:.2f}" + (", equivalent" if equivalent else "")
            rows[WITHIN.format(TITLES[attack])].append(text)
        rows[EQUIVALENT].append(f"{equal} of {len(attacks)}")
        for name in ("original", "retrained"):
            known = [seed["models"] for seed in seeds.values()]
            gaps = [models["match"]["utility"] - models[name]["utility"] for models in known]
            half = general_error(seeds, name)
            text = f"{statistics.mean(gaps):+.2f}" + ("" if half is None else f" ± {half:.2f}")
            rows[GENERAL.format(name)].append(text)
    return {
        "columns": columns,
        "rows": [
            [mark, *values, *[""] * (len(columns) - 1 - len(values))]
            for mark, values in rows.items()
        ],
    }


def attack_figure(seeds: Seeds) -> Figure:
    """AUC of each attack, a group of bars an attack, with the range over seeds."""
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    names = [n for n in COLOURS if any(n in seed["models"] for seed in seeds.values())]
    attacks = _attacks(seeds)
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        known = [seed["models"][name] for seed in seeds.values() if name in seed["models"]]
        values = [[model["attacks"][a]["auc"] for model in known] for a in attacks]
        x = [i + (number - (len(names) - 1) / 2) * width for i in range(len(attacks))]
        means = [statistics.mean(v) for v in values]
        errors = [
            [m - min(v) for m, v in zip(means, values, strict=True)],
            [max(v) - m for m, v in zip(means, values, strict=True)],
        ]
        axes.bar(x, means, width, yerr=errors, capsize=2, label=name, color=COLOURS[name])
    axes.axhline(0.5, color="black", lw=0.8, ls=":")
    axes.set_xticks(range(len(attacks)), [TITLES[a] for a in attacks])
    axes.set(ylim=(0, 1.15), ylabel="AUC (.5: cannot tell)")
    axes.legend(fontsize=8, ncols=len(names))
    return figure


def rank_figure(seeds: Seeds) -> Figure:
    """Loss of members (solid) and non-members (dashed) by token rank, means over seeds."""
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for name, colour in COLOURS.items():
        for side, style in ((0, "-"), (1, "--")):
            curves = [
                seed["models"][name]["ranks"][side]
                for seed in seeds.values()
                if "ranks" in seed["models"].get(name, {})
            ]
            if curves:
                mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
                label = name if side == 0 else None
                axes.plot(RANKS, mean, style, color=colour, label=label, lw=1.4)
    axes.set(
        xlabel="token rank in its text (0: least likely)",
        ylabel="loss, nats",
        xlim=(0, 0.8),
    )
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, title="members solid, non-members dashed", title_fontsize=8)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sources = "folders of finished jobs, or data files of earlier ones"
    parser.add_argument("seeds", nargs="+", type=Path, help=sources)
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--results", type=Path, default=Path("research/results"))
    parser.add_argument("--name", default="never-seen", help="of the job, its data and its plots")
    given = parser.parse_args(arguments)
    seeds = {}
    for folder in given.seeds:
        if folder.is_file():
            seeds |= json.loads(folder.read_text("utf-8"))["seeds"]
            continue
        found = read_seed(folder)
        # Of the documents; that of the training is another on real data.
        manifest = json.loads((folder / "data" / "manifest.json").read_text("utf-8"))
        seeds[str(manifest["seed"])] = found
    content = {
        "command": COMMANDS.get(given.name, "python -m research never-seen --seed N"),
        "versions": versions(),
        "seeds": seeds,
        "tables": tables(seeds),
    }
    path = write_json(given.results / f"{given.name}.json", content)
    images = given.docs / "images" / given.name
    for name, figure in (("attacks", attack_figure(seeds)), ("ranks", rank_figure(seeds))):
        # The same salt, so that a plot of the same numbers is the same file.
        with replacing(images / f"{name}.svg") as draft, rc_context({"svg.hashsalt": given.name}):
            figure.savefig(draft, metadata={"Date": None}, format="svg")
    print(f"{path}, {images}")


if __name__ == "__main__":
    main()
