"""`make reproduce-real`: the real model's runs over seeds, and the paper's tables from them.

    python -m axolotl_unlearn.jobs.reproduce_real --source out/real --seeds 42 1 2

Needs a finished `make demo-real`. Its memorised and its retrained model and its data serve all
seeds; a seed is that of the forgetting runs (LoRA draw, order, sampling), and 42 is demo-real's
own. Nothing is chosen, so all rows count. Finished stages are kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.analysis.paper import COLUMNS, table_one, table_three
from axolotl_unlearn.analysis.seeds import interval_over_seeds, with_half_width
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.jobs.demo import executable
from axolotl_unlearn.jobs.demo_real import MAX_NEW_TOKENS, cpu_has_bf16, environment, ties_command
from axolotl_unlearn.jobs.reproduce import aggregate_with_interval, table_two, told_apart_table
from axolotl_unlearn.jobs.stages import Job, Stage

OWN_SEED = 42  # of examples/smollm2/{over,under}.yml
LIMIT = 120  # rows, documents and questions of a teacher-forced score
MODELS = ("original", "over", "under", "merged", "retrained")


def make_study(source: Path, out: Path, seed: int, *, bf16: bool | None = None) -> Job:
    """The stages of one seed, not yet started; two commands side by side, one thread each.

    Raises:
        UnlearnError: The demo is not there.
    """
    for part in ("memorised/merged", "retrained/merged", "data", "configs", "eval"):
        if not (source / part).is_dir():
            raise UnlearnError(f"{source / part} does not exist: run `make demo-real` first.")
    axolotl = executable("axolotl")
    job = Job(out, slots=2, environment=environment(1), say=lambda line: None)
    base = source / "memorised" / "merged"
    precision = [] if (cpu_has_bf16() if bf16 is None else bf16) else ["--bf16=false"]
    runs = {name: (source if seed == OWN_SEED else out) / name for name in ("over", "under")}
    merged = source / "merged" if seed == OWN_SEED else out / "merged"
    if seed != OWN_SEED:
        _train_and_merge(job, source, out, seed, axolotl, precision)
    models = {
        "original": base,
        "over": runs["over"] / "merged",
        "under": runs["under"] / "merged",
        "merged": merged,
        "retrained": source / "retrained" / "merged",
    }
    needs = [] if seed == OWN_SEED else ["merged"]

    def known() -> None:
        """What is known of models by content is not measured again."""
        shutil.copytree(source / "eval" / "cache", out / "eval" / "cache", dirs_exist_ok=True)

    job.add(
        Stage(
            "eval",
            "score all models",
            [
                *(axolotl, "unlearn", "eval"),
                *(f"{name}={where}" for name, where in models.items()),
                *("--data", str(source / "data"), "--out", str(out / "eval"), "--quiet"),
                *("--max-gen-toks", str(MAX_NEW_TOKENS)),
            ],
            output=out / "eval" / "results.json",
            needs=needs,
            before=known,
        )
    )
    job.add(
        Stage(
            "reproduction",
            "tables and figures of the paper",
            [
                *(sys.executable, "-m", "axolotl_unlearn.analysis.reproduce", "--short"),
                *("--base", str(base), "--data", str(source / "data")),
                *("--over", str(runs["over"]), "--under", str(runs["under"])),
                *("--limit", str(LIMIT), "--out", str(out / "reproduction"), "--seed", str(seed)),
            ],
            output=out / "reproduction" / "results.json",
            needs=needs,
        )
    )
    return job


def _train_and_merge(
    job: Job, source: Path, out: Path, seed: int, axolotl: str, precision: list[str]
) -> None:
    for name in ("over", "under"):
        config = write_config(source, out, name, seed)
        job.add(
            Stage(
                name,
                f"forget as {name}",
                [axolotl, "train", str(config), "--launcher", "python", *precision],
                output=out / name / "adapter_model.safetensors",
                inputs=[config],
                before=lambda name=name: shutil.rmtree(out / name, ignore_errors=True),
            )
        )
        job.add(
            Stage(
                f"{name}-merged",
                f"merge the adapter of {name}",
                [axolotl, "merge-lora", str(config), "--bf16=false"],
                output=out / name / "merged" / "config.json",
                needs=[name],
            )
        )
    job.add(
        Stage(
            "merged",
            "merge over and under (TIES)",
            ties_command(source / "memorised" / "merged", out),
            output=out / "merged" / "config.json",
            needs=["over-merged", "under-merged"],
        )
    )


def write_config(source: Path, out: Path, name: str, seed: int) -> Path:
    """demo-real's config with another seed and output, and two checkpoints on the way."""
    config = yaml.safe_load((source / "configs" / f"{name}.yml").read_text("utf-8"))
    config |= {"seed": seed, "output_dir": str(out / name)}
    config |= {"save_strategy": "steps", "save_steps": 0.34, "save_only_model": True}
    path = out / "configs" / f"{name}.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return path


def read_seed(folder: Path) -> dict[str, dict[str, Any]]:
    """Scores of one finished seed by model."""
    path = folder / "eval" / "results.json"
    if not path.is_file():
        raise UnlearnError(f"{path} does not exist: run this seed to its end first.")
    return {m["name"]: m for m in json.loads(path.read_text("utf-8"))["models"]}


def page(
    seeds: Mapping[int, Mapping],
    reproduced: Mapping[int, Mapping],
    hyperparameters: Sequence[str] = (),
) -> str:
    """Tables 1 to 3 with intervals over seeds, and figure 5, as markdown."""
    lines = [
        f"## SmolLM2-135M and LUME ({len(seeds)} seeds of the forgetting runs)",
        "",
        "| model | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for name in MODELS:
        shown = []
        for column in COLUMNS:
            values = [models[name][column] for models in seeds.values()]
            # One model for all seeds: no spread to speak of.
            shared = name in ("original", "retrained")
            shown.append(
                f"{values[0]:.3f}" if shared else with_half_width(interval_over_seeds(values))
            )
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines += ["", "| seed | " + " | ".join(MODELS) + " |", "|---|" + "---|" * len(MODELS)]
    for seed, models in seeds.items():
        shown = [aggregate_with_interval(models[name]) for name in MODELS]
        lines.append(f"| {seed} | {' | '.join(shown)} |")
    lines += ["", "Ranges: 95 % bootstrap intervals of one seed (documents resampled)."]
    lines += told_apart_table(seeds, MODELS)
    lines += table_one(seeds)
    lines += hyperparameters
    lines += table_two(reproduced)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=Path("out/real"), help="a demo-real")
    parser.add_argument("--seeds", type=int, nargs="+", default=[OWN_SEED, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("out/reproduce-real"))
    given = parser.parse_args(arguments)
    console = Console()
    seeds, reproduced = {}, {}
    try:
        for seed in given.seeds:
            console.print(f"seed {seed}")
            folder = given.out / f"seed-{seed}"
            job = make_study(given.source, folder, seed)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
                job.run(progress)
            seeds[seed] = read_seed(folder)
            text = (folder / "reproduction" / "results.json").read_text("utf-8")
            reproduced[seed] = json.loads(text)
    except UnlearnError as error:
        parser.exit(2, f"Error: {error}\n")
    configs = given.source / "configs"
    hyperparameters = table_three(configs / "over.yml", configs / "under.yml")
    (given.out / "results.json").write_text(json.dumps(seeds, indent=1) + "\n", "utf-8")
    (given.out / "reproduction.md").write_text(page(seeds, reproduced, hyperparameters), "utf-8")
    console.print(f"{given.out / 'reproduction.md'}; figures in {given.out}/seed-*/reproduction")


if __name__ == "__main__":
    main()
