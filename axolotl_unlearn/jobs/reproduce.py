"""`make reproduce`: the paper's tables and figures, and the merge search, over several seeds.

    python -m axolotl_unlearn.jobs.reproduce --seeds 0 1 2 --out out/reproduce

Each seed is a demo of its own with 160 members, 320 non-members and 160 utility questions, so that
either half has at least 80 of each, with 80 other facts of general knowledge among the retain rows,
with two retain rows beside each forget row of a step, with no end of sequence on forget rows, and
with 6 epochs instead of 9, so that a forgetting run has the demo's number of steps. The searches
(`tune-merge`, over the two parents and over all four runs that differ in beta alone) and the choice
between single runs see the validation half alone; every number of the comparison is of the test
half, from `axolotl unlearn eval`. The single runs together have the budget of the two parents. The
first seeds also make the paper's tables and figures (`--tables`), and merge other pairs of runs
(`--pairs`). Finished stages are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.analysis.paper import COLUMNS, TABLE_2, table_one, table_three
from axolotl_unlearn.analysis.seeds import count_of_seeds, interval_over_seeds, with_half_width
from axolotl_unlearn.demo.generate import Sizes
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.jobs.demo import (
    MAX_NEW_TOKENS,
    Settings,
    executable,
    make_job,
    near,
    repository,
)
from axolotl_unlearn.jobs.stages import Job, Stage
from axolotl_unlearn.merging.recipe import Recipe

SIZES = Sizes(facts_forget=160, nonmembers=320, general=160, replay=80)
RETAIN_PER_FORGET = 2
EPOCHS = 6  # 366 steps on 488 forget rows; the demo has 9 epochs, 369 steps on 328 rows
#: Runs beside over and under: what differs from the over-run, and from the seed of the others.
SINGLES = {"single_a": {"beta": 0.045}, "single_b": {"beta": 0.065}}
OTHERS = {
    "over_twin": {"beta": 0.03, "seed": 1000},
    "under_twin": {"beta": 0.1, "seed": 1000},
    "heavy": {"beta": 0.055, "weight": 0.2},
    "light": {"beta": 0.055, "weight": 0.05},
}
#: Which of them are merged to see why merging works: the usual pair; other LoRA draws (and data
#: orders); two of a kind; parents that are nearer in beta; parents that differ in weight.
PAIRS = (
    "over+under",
    "over+under_twin",
    "over_twin+under",
    "over+over_twin",
    "under+under_twin",
    "single_a+single_b",
    "over+single_b",
    "heavy+light",
)
#: All runs of a seed that differ in beta alone, for the search over more parents than two.
FOUR = ("over", "single_a", "single_b", "under")
#: The models of the comparison, in the order of the tables.
ORDER = ("original", "over", "under", "fixed", "tuned", "tuned_four", "single", "retrained")


def make_study(
    out: Path,
    seed: int,
    *,
    tables: bool = True,
    pairs: bool = True,
    trials: int = 24,
    slots: int | None = None,
    sizes: Sizes = SIZES,
    retain_per_forget: int = RETAIN_PER_FORGET,
    forget_eos: bool = False,
) -> Job:
    """The stages of one seed, not yet started: the demo's, and those of the comparison.

    Args:
        tables: also the paper's tables and figures.
        pairs: also other pairs of runs.
        retain_per_forget: retain rows beside each forget row of a step.
        forget_eos: also forget to end (the end of sequence is a label of forget rows).
    """
    settings = Settings(out=out, seed=seed, full=True, force=True, slots=slots, sizes=sizes)
    job = make_job(settings)
    job.stages = [s for s in job.stages if s.name not in ("path", "eval", "single")]
    axolotl, data, memorised = executable("axolotl"), out / "data", out / "memorised"

    def longer(config: dict) -> None:
        config["num_epochs"] = EPOCHS
        if retain_per_forget != 1:
            config["unlearn"]["pairing"] = {"retain_per_forget": retain_per_forget}
        if not forget_eos:
            config["unlearn"]["data"] = {"eos": "retain"}
        if sizes.replay:
            retain = config["datasets"][1]
            config["datasets"].append(retain | {"path": near(data / "replay.jsonl")})

    for name in ("over", "under"):
        _edit(out / "configs" / f"{name}.yml", longer)

    def train(name: str, seed_shift: int = 0, **changes: float) -> None:
        config = _run_config(out, name, seed + seed_shift, changes)
        told = ", ".join(f"{key} {value}" for key, value in changes.items())
        job.add(
            Stage(
                name,
                f"forget as {name} ({told})",
                [axolotl, "train", str(config), "--launcher", "python"],
                output=out / name / "adapter_model.safetensors",
                inputs=[config],
                needs=["memorised"],
            )
        )

    def search(name: str, title: str, runs: Sequence[str], needs: Sequence[str]) -> None:
        job.add(
            Stage(
                name,
                title,
                [
                    *(axolotl, "unlearn", "tune-merge", "--parents"),
                    *(str(out / run) for run in runs),
                    *("--base", str(memorised), "--data", str(data)),
                    *("--out", str(out / name), "--trials", str(trials), "--overwrite"),
                    *("--max-new-tokens", str(MAX_NEW_TOKENS)),
                ],
                output=out / name / "tune.json",
                needs=list(needs),
            )
        )

    def module(name: str, title: str, needs: list[str], output: Path, *words: str | Path) -> None:
        command = [sys.executable, "-m", f"axolotl_unlearn.analysis.{name}", *map(str, words)]
        job.add(Stage(output.parent.name, title, command, output=output, needs=needs))

    def evaluation(half: str, models: Mapping[str, str | Path]) -> list[str]:
        return [
            *(axolotl, "unlearn", "eval", *(f"{n}={where}" for n, where in models.items())),
            *("--data", str(data / half), "--out", str(out / half), "--quiet"),
            *("--max-gen-toks", str(MAX_NEW_TOKENS)),
        ]

    for name, changes in (SINGLES | (OTHERS if pairs else {})).items():
        shift = int(changes.get("seed", 0))
        train(name, shift, **{key: v for key, v in changes.items() if key != "seed"})
    title = "search the best merge on validation"
    search("tuned", title, ("over", "under"), ["parents"])
    search("tuned_four", f"{title}, four runs", FOUR, ["parents", *SINGLES])
    models: dict[str, str | Path] = {
        "original": memorised,
        "over": out / "over" / "merged",
        "under": out / "under" / "merged",
        "fixed": out / "merged",
        "tuned": out / "tuned" / "best",
        "tuned_four": out / "tuned_four" / "best",
    }
    needs = ["merged", "tuned", "tuned_four", "validation", "retrained"]
    if tables:
        module(
            "reproduce",
            "tables and figures of the paper",
            ["parents"],
            out / "reproduction" / "results.json",
            *("--base", memorised, "--over", out / "over", "--under", out / "under"),
            *("--data", data, "--out", out / "reproduction", "--seed", str(seed)),
        )
    if pairs:
        runs = ["over", "under", *SINGLES, *OTHERS]
        module(
            "pairs",
            "merge other pairs of runs",
            ["parents", *SINGLES, *OTHERS],
            out / "pairs" / "pairs.json",
            *("--base", memorised, "--data", data / "test", "--out", out / "pairs"),
            *("--runs", *(f"{name}={out / name}" for name in runs), "--pairs", *PAIRS),
        )
    singles = {name: f"{memorised}+{out / name}" for name in SINGLES}
    job.add(
        Stage(
            "validation",
            "score the single runs on validation",
            evaluation("validation", {"original": memorised, **singles}),
            output=out / "validation" / "results.json",
            needs=list(SINGLES),
        )
    )
    job.add(
        Stage(
            "test",
            "score all models on test",
            evaluation("test", models | singles | {"retrained": out / "retrained"}),
            output=out / "test" / "results.json",
            needs=needs,
        )
    )
    return job


def _edit(path: Path, change) -> None:
    config = yaml.safe_load(path.read_text("utf-8"))
    change(config)
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")


def _run_config(out: Path, name: str, seed: int, forget: Mapping[str, float]) -> Path:
    """The over-run's config with another seed, output, and beta or weight of its forget term."""
    config = yaml.safe_load((out / "configs" / "over.yml").read_text("utf-8"))
    config["output_dir"] = str(out / name)
    config["seed"] = seed
    config["unlearn"]["forget"] |= forget
    for key in ("save_steps", "save_total_limit"):
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
    chosen = max(SINGLES, key=lambda name: models["validation"][name]["aggregate"])
    named = {name: m for name, m in models["test"].items() if name not in SINGLES}
    named["single"] = models["test"][chosen]
    return {
        name: {column: named[name][column] for column in COLUMNS}
        | {key: named[name].get(key, {}) for key in ("cells", "intervals", "distance")}
        for name in ORDER
        if name in named
    }


def told_apart(model: Mapping, level: float = 0.05) -> list[str]:
    """Cells, AUC and utility in which a model can be told from the retrained one.

    Holm's step-down procedure over them (family-wise error ``level``), on the p of the paired
    bootstrap over documents.
    """
    tested = [
        (gap["p"], name)
        for name, gap in model.get("distance", {}).items()
        if name not in ("task_aggregate", "mia_score", "aggregate")
    ]
    found = []
    for number, (p, name) in enumerate(sorted(tested)):
        if p > level / (len(tested) - number):
            break
        found.append(name)
    return found


def summarise(seeds: Mapping[int, Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Means over seeds, and the differences that the claims are about, paired by seed.

    Args:
        seeds: seed -> model -> score -> value, see `read_seed`.
    """
    result: dict[str, Any] = {"seeds": sorted(seeds), "models": {}, "differences": {}}
    for name in ORDER:
        those = [seed[name] for seed in seeds.values() if name in seed]
        if those:
            result["models"][name] = {
                column: interval_over_seeds([one[column] for one in those]) for column in COLUMNS
            } | {"seeds": len(those)}
    for other in ("fixed", "over", "under", "tuned_four", "single", "retrained"):
        those = [seed for seed in seeds.values() if other in seed]
        if not those:
            continue
        differences = [s["tuned"]["aggregate"] - s[other]["aggregate"] for s in those]
        result["differences"][other] = {
            "mean": interval_over_seeds(differences),
            "above": sum(d > 0 for d in differences),
            "level": sum(d == 0 for d in differences),
            "of": len(differences),
        }
    return result


def page(
    seeds: Mapping[int, Mapping],
    summary: Mapping,
    reproduced: Mapping[int, Mapping],
    paired: Mapping[int, Mapping] | None = None,
    hyperparameters: Sequence[str] = (),
) -> str:
    """The comparison, the paper's tables, and the pairs over seeds, as markdown."""
    names = list(summary["models"])
    lines = [
        f"## Who wins, on the test half ({count_of_seeds(len(seeds))})",
        "",
        "| model | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for name, row in summary["models"].items():
        few = "" if row["seeds"] == len(seeds) else f" ({count_of_seeds(row['seeds'])})"
        lines.append(
            f"| {name}{few} | " + " | ".join(with_half_width(row[c]) for c in COLUMNS) + " |"
        )
    lines += ["", "| tuned merge against | difference in Aggregate | above in |", "|---|---|---|"]
    for other, row in summary["differences"].items():
        level = f" (level in {row['level']})" if row["level"] else ""
        mean = with_half_width(row["mean"], sign=True)
        lines.append(f"| {other} | {mean} | {row['above']} of {row['of']}{level} |")
    lines += ["", "| seed | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for number, models in seeds.items():
        shown = [aggregate_with_interval(models[n]) if n in models else "" for n in names]
        lines.append(f"| {number} | {' | '.join(shown)} |")
    lines += ["", "Ranges: 95 % bootstrap intervals of one seed (documents resampled)."]
    lines += told_apart_table(seeds)
    lines += table_one(seeds, merged="fixed")
    lines += hyperparameters
    if reproduced:
        lines += table_two(reproduced)
    if paired:
        lines += _pairs_table(paired)
    return "\n".join(lines) + "\n"


def told_apart_table(seeds: Mapping[int, Mapping], order: Sequence[str] = ORDER) -> list[str]:
    """What tells each model from the retrained one."""
    names = [n for n in order if any(m.get(n, {}).get("distance") for m in seeds.values())]
    if not names:
        return []
    lines = ["", "## Told from the retrained model", ""]
    lines += [
        "Of the 12 cells, AUC and utility, those that differ from the retrained model's, and by "
        "how much (paired bootstrap over documents, Holm at .05).",
        "",
        "| seed | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for number, models in seeds.items():
        shown = []
        for name in names:
            found = told_apart(models[name]) if name in models else None
            count = "" if found is None else "none" if not found else str(len(found))
            few = [f"{cell} {models[name]['distance'][cell]['value']:+.2f}" for cell in found or ()]
            shown.append(f"{count}: {', '.join(few)}" if 0 < len(few) <= 4 else count)
        lines.append(f"| {number} | {' | '.join(shown)} |")
    return lines


def table_two(reproduced: Mapping[int, Mapping]) -> list[str]:
    from axolotl_unlearn.analysis.reproduce import as_paper, equal_retention_table

    count = len(reproduced)
    lines = ["", f"## Table 2 of the paper ({count_of_seeds(count)}, teacher-forced scores)", ""]
    lines += [
        "| merge | space | scale | Aggregate | Task Aggregate | AUC | paper's Aggregate |",
        "|---|---|---|---|---|---|---|",
    ]
    tables = [result["table_2"] for result in reproduced.values()]
    for rows in zip(*tables, strict=True):
        recipe = rows[0]["recipe"]
        method, space, scale = (recipe[k] for k in ("method", "space", "scale"))
        values = [
            with_half_width(interval_over_seeds([row["scores"][c] for row in rows]))
            for c in ("aggregate", "task_aggregate", "mia_auc")
        ]
        paper = f"{TABLE_2[method]:.3f}" if as_paper(Recipe.from_dict(recipe)) else ""
        lines.append(f"| {method} | {space} | {scale} | {' | '.join(values)} | {paper} |")
    lines += [
        "",
        f"## Figure 5: density of TIES (delta space, average; {count_of_seeds(count)})",
        "",
    ]
    lines += ["| density | Aggregate | AUC |", "|---|---|---|"]
    for rows in zip(*(result["figure_5"] for result in reproduced.values()), strict=True):
        values = [
            with_half_width(interval_over_seeds([row["scores"][c] for row in rows]))
            for c in ("aggregate", "mia_auc")
        ]
        lines.append(f"| {rows[0]['recipe']['density']:g} | {' | '.join(values)} |")
    kept = [r["equal_retention"] for r in reproduced.values() if "equal_retention" in r]
    if kept:
        lines += [
            "",
            f"## Methods at equal retention ({count_of_seeds(len(kept))}, teacher-forced)",
            "",
        ]
        lines += equal_retention_table(kept)
    cosines = [result["geometry"]["cosine"]["0,1"] for result in reproduced.values()]
    lines += ["", f"Cosine of the two changes: {', '.join(f'{c:.2f}' for c in cosines)}."]
    return lines


def _pairs_table(paired: Mapping[int, Mapping]) -> list[str]:
    """Aggregate (AUC) of each run and of each pair by each recipe, means over seeds."""
    results = list(paired.values())

    def shown(scores: Sequence[Mapping]) -> str:
        aggregate, auc = (
            statistics.fmean(one[c] for one in scores) for c in ("aggregate", "mia_auc")
        )
        return f"{aggregate:.3f} ({auc:.2f})"

    count = count_of_seeds(len(results))
    lines = ["", f"## Which pairs merge well ({count}, test half, teacher-forced)", ""]
    lines += ["Aggregate, AUC in brackets.", "", "| run | by itself |", "|---|---|"]
    for name in results[0]["runs"]:
        lines.append(f"| {name} | {shown([result['runs'][name] for result in results])} |")
    recipes = list(results[0]["pairs"][0]["merges"])
    lines += [
        "",
        "| pair | cosine of the changes | of the LoRA draws | opposite signs | "
        + " | ".join(recipes)
        + " |",
        "|---|---|---|---|" + "---|" * len(recipes),
    ]
    for rows in zip(*(result["pairs"] for result in results), strict=True):
        facts = [
            statistics.fmean(row[key] for row in rows)
            for key in ("cosine", "initialisation", "sign_conflict")
        ]
        merges = [shown([row["merges"][name] for row in rows]) for name in recipes]
        pair = " x ".join(rows[0]["pair"])
        lines.append(f"| {pair} | {' | '.join(f'{v:.2f}' for v in facts)} | {' | '.join(merges)} |")
    return lines


def aggregate_with_interval(model: Mapping) -> str:
    bounds = model.get("intervals", {}).get("aggregate")
    shown = f"{model['aggregate']:.3f}"
    return f"{shown} ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else shown


def main(arguments: Sequence[str] | None = None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"))
    parser.add_argument("--trials", type=int, default=24, help="candidates of the search")
    parser.add_argument("--tables", type=int, default=3, help="so many seeds with tables [3]")
    parser.add_argument("--pairs", type=int, default=0, help="so many also merge other pairs [0]")
    parser.add_argument(
        "--retain-per-forget",
        type=int,
        default=RETAIN_PER_FORGET,
        help=f"retain rows beside each forget row [{RETAIN_PER_FORGET}]",
    )
    parser.add_argument(
        "--forget-eos", action="store_true", help="end of sequence on forget rows too"
    )
    parser.add_argument("--jobs", type=int, help="commands side by side [one for each core]")
    given = parser.parse_args(arguments)
    console = Console()
    try:
        repository()
        for number, seed in enumerate(given.seeds):
            console.print(f"seed {seed}")
            job = make_study(
                given.out / f"seed-{seed}",
                seed,
                tables=number < given.tables,
                pairs=number < given.pairs,
                trials=given.trials,
                slots=given.jobs,
                retain_per_forget=given.retain_per_forget,
                forget_eos=given.forget_eos,
            )
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
                job.run(progress)
        seeds = {seed: read_seed(given.out / f"seed-{seed}") for seed in given.seeds}
        reproduced, paired = (
            {
                seed: json.loads((given.out / f"seed-{seed}" / where).read_text("utf-8"))
                for seed in given.seeds[:count]
            }
            for where, count in (
                ("reproduction/results.json", given.tables),
                ("pairs/pairs.json", given.pairs),
            )
        )
    except UnlearnError as error:
        parser.exit(2, f"Error: {error}\n")
    summary = summarise(seeds)
    content = {"summary": summary, "seeds": seeds}
    (given.out / "results.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    configs = given.out / f"seed-{given.seeds[0]}" / "configs"
    hyperparameters = table_three(configs / "over.yml", configs / "under.yml")
    text = page(seeds, summary, reproduced, paired, hyperparameters)
    (given.out / "reproduction.md").write_text(text, "utf-8")
    console.print(f"{given.out / 'reproduction.md'}; figures in {given.out}/seed-*/reproduction")


if __name__ == "__main__":
    main()
