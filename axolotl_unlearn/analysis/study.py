"""`make reproduce`: the paper's tables and figures, and the merge search, over several seeds.

    python -m axolotl_unlearn.analysis.study --seeds 0 1 2 --out out/reproduce

Each seed is a demo of its own with 160 members and 320 non-members, so that either half has at
least 80 of both. The search (`tune-merge`) and the choice between single runs see the validation
half alone; every number of the comparison is of the test half, from `axolotl unlearn eval`. The
single runs together have the budget of the two parents. Finished stages are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.demo.generate import Sizes
from axolotl_unlearn.demo.run import MAX_NEW_TOKENS, Settings, executable, make_job, repository
from axolotl_unlearn.demo.stages import Job, Stage
from axolotl_unlearn.errors import UnlearnError

SIZES = Sizes(facts_forget=160, nonmembers=320)
SINGLE_BETAS = {"single_a": 0.045, "single_b": 0.065}
COLUMNS = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")
#: The models of the comparison, in the order of the tables.
ORDER = ("original", "over", "under", "fixed", "tuned", "single", "retrained")


def make_study(
    out: Path, seed: int, *, trials: int = 24, slots: int | None = None, sizes: Sizes = SIZES
) -> Job:
    """The stages of one seed, not yet started: the demo's, and those of the comparison."""
    settings = Settings(out=out, seed=seed, full=True, force=True, slots=slots, sizes=sizes)
    job = make_job(settings)
    job.stages = [s for s in job.stages if s.name not in ("path", "eval", "single")]
    axolotl, data = executable("axolotl"), out / "data"
    for name, beta in SINGLE_BETAS.items():
        config = _single_config(out, name, beta)
        job.add(
            Stage(
                name,
                f"forget in between, beta {beta}",
                [axolotl, "train", str(config), "--launcher", "python"],
                output=out / name / "adapter_model.safetensors",
                inputs=[config],
                needs=["memorised"],
            )
        )
    job.add(
        Stage(
            "tuned",
            "search the best merge on validation",
            [
                *(axolotl, "unlearn", "tune-merge", "--parents"),
                *(str(out / "over"), str(out / "under")),
                *("--base", str(out / "memorised"), "--data", str(data)),
                *("--out", str(out / "tuned"), "--trials", str(trials), "--overwrite"),
                *("--max-new-tokens", str(MAX_NEW_TOKENS)),
            ],
            output=out / "tuned" / "tune.json",
            needs=["parents"],
        )
    )
    job.add(
        Stage(
            "reproduction",
            "tables and figures of the paper",
            [
                *(sys.executable, "-m", "axolotl_unlearn.analysis.reproduce"),
                *("--base", str(out / "memorised"), "--over", str(out / "over")),
                *("--under", str(out / "under"), "--data", str(data)),
                *("--out", str(out / "reproduction"), "--seed", str(seed)),
            ],
            output=out / "reproduction" / "results.json",
            needs=["parents"],
        )
    )

    def evaluation(half: str, models: Mapping[str, str | Path]) -> list[str]:
        return [
            *(axolotl, "unlearn", "eval", *(f"{n}={where}" for n, where in models.items())),
            *("--data", str(data / half), "--out", str(out / half), "--quiet"),
            *("--max-gen-toks", str(MAX_NEW_TOKENS)),
        ]

    memorised = out / "memorised"
    singles = {name: f"{memorised}+{out / name}" for name in SINGLE_BETAS}
    job.add(
        Stage(
            "validation",
            "score the single runs on validation",
            evaluation("validation", {"original": memorised, **singles}),
            output=out / "validation" / "results.json",
            needs=list(SINGLE_BETAS),
        )
    )
    models: dict[str, str | Path] = {
        "original": memorised,
        "over": out / "over" / "merged",
        "under": out / "under" / "merged",
        "fixed": out / "merged",
        "tuned": out / "tuned" / "best",
        **singles,
        "retrained": out / "retrained",
    }
    job.add(
        Stage(
            "test",
            "score all models on test",
            evaluation("test", models),
            output=out / "test" / "results.json",
            needs=["merged", "tuned", "validation", "retrained"],
        )
    )
    return job


def _single_config(out: Path, name: str, beta: float) -> Path:
    """The over-run's config with another beta and output."""
    config = yaml.safe_load((out / "configs" / "over.yml").read_text("utf-8"))
    config["output_dir"] = str(out / name)
    config["unlearn"]["forget"]["beta"] = beta
    for key in ("save_strategy", "save_steps", "save_total_limit"):
        config.pop(key, None)
    config["save_strategy"] = "no"
    path = out / "configs" / f"{name}.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return path


def read_seed(folder: Path) -> dict[str, dict[str, float]]:
    """Test scores of one finished seed, the single run that was better on validation as `single`.

    Raises:
        UnlearnError: The seed has not finished.
    """
    models = {}
    for half in ("validation", "test"):
        path = folder / half / "results.json"
        if not path.is_file():
            raise UnlearnError(f"{path} does not exist: run this seed to its end first.")
        models[half] = {m["name"]: m for m in json.loads(path.read_text("utf-8"))["models"]}
    chosen = max(SINGLE_BETAS, key=lambda name: models["validation"][name]["aggregate"])
    named = {name: m for name, m in models["test"].items() if name not in SINGLE_BETAS}
    named["single"] = models["test"][chosen]
    return {
        name: {column: named[name][column] for column in COLUMNS}
        | {"cells": named[name]["cells"], "intervals": named[name].get("intervals", {})}
        for name in ORDER
    }


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval over seeds (Student's t); nan for one seed."""
    from scipy.stats import t

    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return mean, float(t.ppf(0.975, len(values) - 1)) * error


def summarise(seeds: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Means over seeds, and the differences that the claims are about, paired by seed.

    Args:
        seeds: seed -> model -> score -> value, see `read_seed`.
    """
    result: dict[str, Any] = {"seeds": sorted(seeds), "models": {}, "differences": {}}
    for name in ORDER:
        result["models"][name] = {
            column: mean_interval([seed[name][column] for seed in seeds.values()])
            for column in COLUMNS
        }
    for other in ("fixed", "over", "under", "single", "retrained"):
        differences = [s["tuned"]["aggregate"] - s[other]["aggregate"] for s in seeds.values()]
        result["differences"][other] = {
            "mean": mean_interval(differences),
            "above": sum(d > 0 for d in differences),
            "level": sum(d == 0 for d in differences),
            "of": len(differences),
        }
    return result


def page(seeds: Mapping[int, Mapping], summary: Mapping, reproduced: Mapping[int, Mapping]) -> str:
    """The comparison and the paper's table 2 over seeds, as markdown."""
    from axolotl_unlearn.analysis.reproduce import PAPER, PEFT_SCALE

    count = len(seeds)
    lines = [
        f"## Who wins, on the test half ({count} seeds)",
        "",
        "| model | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for name, row in summary["models"].items():
        lines.append(f"| {name} | " + " | ".join(_pair(row[c]) for c in COLUMNS) + " |")
    lines += ["", "| tuned merge against | difference in Aggregate | above in |", "|---|---|---|"]
    for other, row in summary["differences"].items():
        level = f" (level in {row['level']})" if row["level"] else ""
        lines.append(
            f"| {other} | {_pair(row['mean'], sign=True)} | {row['above']} of {row['of']}{level} |"
        )
    lines += ["", "| seed | " + " | ".join(ORDER) + " |", "|---|" + "---|" * len(ORDER)]
    for number, models in seeds.items():
        lines.append(f"| {number} | {' | '.join(_aggregate(models[n]) for n in ORDER)} |")
    lines += ["", "Ranges: 95 % bootstrap intervals of one seed (documents resampled)."]
    if reproduced:
        lines += ["", f"## Table 2 of the paper ({count} seeds, teacher-forced scores)", ""]
        lines += [
            "| merge | space | scale | Aggregate | Task Aggregate | AUC | paper's Aggregate |",
            "|---|---|---|---|---|---|---|",
        ]
        tables = [result["table_2"] for result in reproduced.values()]
        for rows in zip(*tables, strict=True):
            recipe = rows[0]["recipe"]
            method, space, scale = (recipe[k] for k in ("method", "space", "scale"))
            values = [
                _pair(mean_interval([row["scores"][c] for row in rows]))
                for c in ("aggregate", "task_aggregate", "mia_auc")
            ]
            same = space == "factors" and PEFT_SCALE.get(method, "average") == scale
            paper = f"{PAPER[method]:.3f}" if same else ""
            lines.append(f"| {method} | {space} | {scale} | {' | '.join(values)} | {paper} |")
        lines += ["", "## Figure 5: density of TIES (delta space, average)", ""]
        lines += ["| density | Aggregate | AUC |", "|---|---|---|"]
        for rows in zip(*(result["figure_5"] for result in reproduced.values()), strict=True):
            values = [
                _pair(mean_interval([row["scores"][c] for row in rows]))
                for c in ("aggregate", "mia_auc")
            ]
            lines.append(f"| {rows[0]['recipe']['density']:g} | {' | '.join(values)} |")
        cosines = [result["geometry"]["cosine"]["0,1"] for result in reproduced.values()]
        lines += ["", f"Cosine of the two changes: {', '.join(f'{c:.2f}' for c in cosines)}."]
    return "\n".join(lines) + "\n"


def _aggregate(model: Mapping) -> str:
    bounds = model.get("intervals", {}).get("aggregate")
    shown = f"{model['aggregate']:.3f}"
    return f"{shown} ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else shown


def _pair(value: tuple[float, float], sign: bool = False) -> str:
    mean, half = value
    shown = f"{mean:+.3f}" if sign else f"{mean:.3f}"
    return shown if math.isnan(half) else f"{shown} ± {half:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"))
    parser.add_argument("--trials", type=int, default=24, help="candidates of the search")
    parser.add_argument("--jobs", type=int, help="commands side by side [one for each core]")
    given = parser.parse_args(arguments)
    console = Console()
    try:
        repository()
        for seed in given.seeds:
            console.print(f"seed {seed}")
            folder = given.out / f"seed-{seed}"
            job = make_study(folder, seed, trials=given.trials, slots=given.jobs)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
                job.run(progress)
        seeds, reproduced = {}, {}
        for seed in given.seeds:
            folder = given.out / f"seed-{seed}"
            seeds[seed] = read_seed(folder)
            text = (folder / "reproduction" / "results.json").read_text("utf-8")
            reproduced[seed] = json.loads(text)
    except UnlearnError as error:
        parser.exit(2, f"Error: {error}\n")
    summary = summarise(seeds)
    content = {"summary": summary, "seeds": seeds}
    (given.out / "results.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    (given.out / "reproduction.md").write_text(page(seeds, summary, reproduced), "utf-8")
    console.print(f"{given.out / 'reproduction.md'}; figures in {given.out}/seed-*/reproduction")


if __name__ == "__main__":
    main()
