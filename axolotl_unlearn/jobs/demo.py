"""The whole job on embedded data, through the commands a user would type.

memorise -> forget too much and too little -> merge -> evaluate -> report, each stage a subprocess
of ``axolotl``, ``mergekit-yaml`` or ``axolotl unlearn`` on a config written to ``OUT/configs``.
Independent stages run side by side, one thread each; finished ones are kept (see `stages`).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn import __version__
from axolotl_unlearn.demo.generate import Sizes, make_data
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.jobs.stages import Job, Stage

# One thread a command: two of them fill two cores, and results do not depend on the core count.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",  # the demo's numbers are those of float32 on a CPU
    "PYTHONUNBUFFERED": "1",
}
SINGLE_BETA = 0.045
TIME_BUDGET = 600.0  # seconds; beyond it the single run waits for --full
AFTER_SINGLE = 60.0  # seconds for what follows the single run
LEAST_CELL, LEAST_MEAN = 0.1, 0.5
SAVE_EVERY = 0.34  # of the steps: two adapters on the way and the last
MAX_NEW_TOKENS = 96  # the longest answer of the data has 51 tokens


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        out: Folder of the job.
        seed: Seed of data, weights, adapters and orders.
        full: Always train the single run, whatever the time.
        force: Merge even if a parent fails the gate.
        slots: Commands side by side; default one for each core.
        sizes: Of the data.
    """

    out: Path = Path("out/demo")
    seed: int = 0
    full: bool = False
    force: bool = False
    slots: int | None = None
    sizes: Sizes = Sizes()


def repository() -> Path:
    """The checkout that holds ``examples`` and ``mergekit_configs``.

    Raises:
        UnlearnError: The package is installed without them.
    """
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (folder / "examples" / "memorise.yml").is_file() and (
            folder / "mergekit_configs" / "ties.yml"
        ).is_file():
            return folder
    raise UnlearnError(
        "examples/memorise.yml is not here; run `axolotl unlearn demo` in a checkout of the "
        "repository."
    )


def near(path: Path) -> str:
    """`path` relative to the working folder where it lies inside, else absolute."""
    absolute = Path(os.path.abspath(path))
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def write_configs(settings: Settings, home: Path) -> dict[str, Path]:
    """Derive the run's configs from the examples.

    Nothing changes but paths, seed, the beta of the single run, and which checkpoints are kept.

    Returns:
        Name (memorise, retrained, over, under, single, ties) -> path in ``out/configs``.
    """
    out = settings.out
    folder = out / "configs"
    folder.mkdir(parents=True, exist_ok=True)
    data = out / "data"

    def derived(example: str, name: str, **changes: Any) -> Path:
        config = yaml.safe_load((home / "examples" / example).read_text("utf-8"))
        config |= {
            "output_dir": near(out / name),
            "dataset_prepared_path": near(out / "prepared"),
            "seed": settings.seed,
        }
        config |= changes
        # The first stage has made the data.
        config["unlearn"].pop("demo_data", None)
        if not config["unlearn"]:
            del config["unlearn"]
        for entry in config["datasets"]:
            entry["path"] = near(data / Path(entry["path"]).name)
        path = folder / f"{name}.yml"
        head = f"# Written by `axolotl unlearn demo` from examples/{example}.\n"
        path.write_text(head + yaml.safe_dump(config, sort_keys=False), "utf-8")
        return path

    tiny = near(home / "examples" / "tiny-olmo")
    memorised = near(out / "memorised")
    way = {"save_strategy": "steps", "save_steps": SAVE_EVERY, "save_total_limit": None}
    configs = {
        "memorised": derived("memorise.yml", "memorised", base_model=tiny),
        "retrained": derived("memorise.yml", "retrained", base_model=tiny),
        "over": derived("npo_over.yml", "over", base_model=memorised, **way),
        "under": derived("npo_under.yml", "under", base_model=memorised, **way),
        "single": derived("npo_over.yml", "single", base_model=memorised),
    }
    _edit(
        configs["retrained"], lambda c: c["datasets"][0].update(path=near(data / "retrain.jsonl"))
    )
    _edit(configs["single"], lambda c: c["unlearn"]["forget"].update(beta=SINGLE_BETA))
    ties = (home / "mergekit_configs" / "ties.yml").read_text("utf-8")
    recipe = yaml.safe_load(ties)
    # mergekit takes "a/b" for the name of a hub repository: absolute paths.
    recipe["base_model"] = os.path.abspath(out / "memorised")
    for entry in recipe["models"]:
        entry["model"] = os.path.abspath(out / Path(entry["model"]).relative_to("out"))
    configs["ties"] = folder / "ties.yml"
    head = "# Written by `axolotl unlearn demo` from mergekit_configs/ties.yml.\n"
    configs["ties"].write_text(head + yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    return configs


def _edit(path: Path, change) -> None:
    head, _, text = path.read_text("utf-8").partition("\n")
    config = yaml.safe_load(text)
    change(config)
    path.write_text(head + "\n" + yaml.safe_dump(config, sort_keys=False), "utf-8")


def retain_fault(model: dict[str, Any]) -> str | None:
    """Why a parent may not be merged, or None.

    A parent that lost what it should retain drags the merge down with it: the harmonic mean of
    the merge is 0 once one of its cells is. Refused are a retain cell below `LEAST_CELL` and a
    mean of the six below `LEAST_MEAN`. What it says to forget prompts is no reason: an
    over-forgetting parent may well babble there.
    """
    kept = {name: v for name, v in model["cells"].items() if name.startswith("retain_")}
    kept = {name: v for name, v in kept.items() if v is not None}
    worst = min(kept, key=kept.get)
    if kept[worst] < LEAST_CELL:
        return f"{model['name']} keeps {kept[worst]:.2f} of {worst} (at least {LEAST_CELL})"
    mean = statistics.mean(kept.values())
    if mean < LEAST_MEAN:
        return f"{model['name']} keeps {mean:.2f} of the retain set on average ({LEAST_MEAN})"
    return None


def executable(name: str) -> str:
    """A command of this environment, even if the environment is not activated."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise UnlearnError(
            f"the command `{name}` is missing; install the package with `make setup`."
        )
    return found


def make_job(settings: Settings, say=print) -> Job:
    """The stages of the demo, not yet started."""
    out, home = settings.out, repository()
    try:
        configs = write_configs(settings, home)
    except OSError as error:
        raise UnlearnError(
            f"Cannot write to {out}: {error.strerror}; give --out a folder you may write."
        ) from error
    axolotl, mergekit = executable("axolotl"), executable("mergekit-yaml")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    slots = settings.slots or os.cpu_count() or 1
    job = Job(out, slots=slots, environment={**ENVIRONMENT, "PATH": path}, say=say)
    data = out / "data"

    job.add(
        Stage(
            "data",
            "make the data",
            None,
            output=data / "manifest.json",
            action=lambda: make_data(data, seed=settings.seed, sizes=settings.sizes) and None,
            settings=[settings.seed, asdict(settings.sizes), __version__],
        )
    )

    def train(name: str, title: str, needs: list[str], weights: str, **more) -> None:
        job.add(
            Stage(
                name,
                title,
                # `python` spares the second start of Python under `accelerate launch`.
                [axolotl, "train", near(configs[name]), "--launcher", "python"],
                output=out / name / weights,
                inputs=[configs[name]],
                needs=needs,
                settings=__version__,
                # Checkpoints of an earlier run must not be taken for this one's.
                before=lambda: shutil.rmtree(out / name, ignore_errors=True),
                **more,
            )
        )

    def merge_lora(name: str) -> None:
        job.add(
            Stage(
                f"{name}-merged",
                f"merge the adapter of {name}",
                [axolotl, "merge-lora", near(configs[name])],
                output=out / name / "merged" / "model.safetensors",
                needs=["memorised", name],
            )
        )

    train("memorised", "memorise", ["data"], "model.safetensors")
    train("retrained", "retrain without the forget set", ["data"], "model.safetensors")
    train("over", "forget too much", ["memorised"], "adapter_model.safetensors")
    train("under", "forget too little", ["memorised"], "adapter_model.safetensors")
    merge_lora("over")
    merge_lora("under")

    def evaluation(models: dict[str, Path | str]) -> list[str]:
        found = [f"{name}={near(where)}" for name, where in models.items()]
        return [
            *(axolotl, "unlearn", "eval", *found, "--data", near(data)),
            *("--out", near(out / "eval"), "--quiet"),
            *("--max-gen-toks", str(MAX_NEW_TOKENS), "--min-members", "10"),
        ]

    parents = {
        "original": out / "memorised",
        "over": out / "over" / "merged",
        "under": out / "under" / "merged",
    }
    found = out / "eval" / "results.json"
    job.add(
        Stage(
            "parents",
            "score the parents",
            evaluation(parents),
            output=out / "eval" / "parents.json",
            inputs=[data / f"{part}.jsonl" for part in _PARTS],
            needs=["data", "over-merged", "under-merged"],
            before=lambda: found.unlink(missing_ok=True),
            action=lambda: shutil.copy(found, out / "eval" / "parents.json") and None,
        )
    )

    def late() -> str | None:
        wanted = job.seconds() + 1.05 * job.outcomes["over"].seconds + AFTER_SINGLE
        if settings.full or wanted <= TIME_BUDGET:
            return None
        return f"It would end after about {wanted:.0f} s; `--full` (make demo FULL=1) includes it."

    def gate() -> str | None:
        models = json.loads((out / "eval" / "parents.json").read_text("utf-8"))["models"]
        reasons = [retain_fault(m) for m in models if m["name"] in ("over", "under")]
        reasons = [reason for reason in reasons if reason]
        if not reasons or settings.force:
            for reason in reasons:
                say(f"Merged all the same (--force): {reason}.")
            return None
        return f"A parent has lost the retain set: {'; '.join(reasons)}. --force merges anyway."

    train(
        "single",
        "forget in between (one run)",
        ["memorised", "over", "under"],
        "adapter_model.safetensors",
        skip_if=late,
    )
    job.add(
        Stage(
            "merged",
            "merge over and under (TIES)",
            [mergekit, near(configs["ties"]), near(out / "merged")],
            output=out / "merged" / "config.json",
            inputs=[configs["ties"]],
            needs=["parents"],
            skip_if=gate,
        )
    )

    def all_models() -> list[str]:
        models: dict[str, Path | str] = dict(parents)
        if job.outcomes["merged"].state != "left out":
            models["merged"] = out / "merged"
        if job.outcomes["single"].state != "left out":
            models["single"] = f"{near(out / 'memorised')}+{near(out / 'single')}"
        models["retrained"] = out / "retrained"
        return evaluation(models)

    def on_the_way() -> dict[str, Path | str]:
        return {
            f"{name}@{folder.name.partition('-')[2]}": f"{near(out / 'memorised')}+{near(folder)}"
            for name in ("over", "under")
            for folder in _checkpoints(out / name)[:-1]
        }

    job.add(
        Stage(
            "path",
            "score checkpoints on the way",
            lambda: evaluation(on_the_way()),
            output=out / "trajectory.json",
            inputs=[data / f"{part}.jsonl" for part in _PARTS],
            needs=["data", "parents", "over", "under", "merged"],
            before=lambda: found.unlink(missing_ok=True),
            action=lambda: write_trajectory(out),
            skip_if=lambda: None if settings.full else "`--full` (make demo FULL=1) includes it.",
        )
    )
    job.add(
        Stage(
            "eval",
            "score all models",
            all_models,
            output=found,
            inputs=[data / f"{part}.jsonl" for part in _PARTS],
            needs=["data", "parents", "merged", "single", "retrained", "path"],
        )
    )
    return job


def _checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a training run, first to last."""
    return sorted(run.glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))


def write_trajectory(out: Path) -> Path:
    """Scores of both parents from the original over their checkpoints to the end.

    Reads ``eval/parents.json`` and ``eval/results.json`` (models named ``run@step``) and writes
    ``trajectory.json``, a list of ``{"run", "step", "scores"}`` that the report draws.
    """
    parents = json.loads((out / "eval" / "parents.json").read_text("utf-8"))["models"]
    between = json.loads((out / "eval" / "results.json").read_text("utf-8"))["models"]
    known = {model["name"]: model for model in parents + between}
    points = []
    for run in ("over", "under"):
        steps = [int(folder.name.partition("-")[2]) for folder in _checkpoints(out / run)]
        named = [(0, "original"), *((s, f"{run}@{s}") for s in steps[:-1]), (steps[-1], run)]
        for step, name in named:
            scores = {metric: known[name][metric] for metric in _METRICS}
            points.append({"run": run, "step": step, "scores": scores})
    path = out / "trajectory.json"
    path.write_text(json.dumps(points, indent=1) + "\n", "utf-8")
    return path


_METRICS = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")
_PARTS = ("forget", "retain", "member", "nonmember", "general")


def run_demo(settings: Settings, console=None) -> dict[str, Any]:
    """Run or resume the demo; write ``results.json`` and ``report.html`` into its folder.

    Args:
        settings: See `Settings`.
        console: A `rich.console.Console`; default standard output.

    Returns:
        The content of ``results.json``: that of the evaluation, with ``seed``, ``seconds`` (wall
        clock, or the sum over stages if earlier calls did some), ``cpu_seconds`` (of the commands
        of this call), ``stages`` (name -> state and seconds) and ``gate`` (the sentence if the
        merge was left out, else None).

    Raises:
        UnlearnError: A stage failed, or the examples are not there.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = console or Console()
    job = make_job(settings, say=lambda line: console.print(line, highlight=False, soft_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        outcomes = job.run(progress)
    results = json.loads((settings.out / "eval" / "results.json").read_text("utf-8"))
    results |= {
        "seed": settings.seed,
        "seconds": round(job.total_seconds(), 1),
        "cpu_seconds": round(job.cpu_seconds(), 1),
        "stages": {n: {"state": o.state, "seconds": o.seconds} for n, o in outcomes.items()},
        "gate": outcomes["merged"].reason or None,
    }
    path = settings.out / "results.json"
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return results


def report_demo(settings: Settings, results: dict[str, Any]) -> Path:
    """Write the HTML page of a finished demo and return its path."""
    from axolotl_unlearn.report import find_inputs, write_report

    configs = sorted((settings.out / "configs").glob("*.yml"))
    inputs = find_inputs(results, settings.out, configs=configs)
    return write_report(results, settings.out / "report.html", **inputs)
