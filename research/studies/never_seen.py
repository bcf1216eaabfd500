"""``make never-seen``: forgetting judged by attacks against a model that never saw the texts.

A tiny model with a life like a real one (`research.worlds.life`): base -> original, beside it
retrained and the teacher; then `match`, the demo's over and under merged, and with ``full`` the
rivals. The retrained model only judges.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from axolotl_unlearn import __version__
from research.harness.stages import Evaluate, Kind, Make, Merge, Plan, Run, Train, near
from research.studies.demo import CPU, MEMBERS
from research.worlds.life import LifeSizes, make_life

JUDGED = ("original", "retrained", "teacher", "merged", "match")
#: Of ``full``: name in the results -> stage.
RIVALS = ("over", "under", "single", "tnpo", "simnpo", "masc", "match_lora")
#: The paper's two runs and their merge.
PAIR = ("over", "under", "merged")
#: Attacks on what was forgotten, beside *retrained*: fine-tuned on other forgotten documents,
#: rounded to 8 and 4 bits, asked in other ways, and looked into (members against others).
ATTACKS = {
    "relearn": ("--source", "forget", "--rows", "20", "--lr", "1e-3"),
    "quantise": (),
    "prompt": (),
    "inside": (),
}
#: What an attack writes begins with its name; relearning's also with its source.
FILES = {"relearn": "relearn-forget"}
#: The teacher reads a third of the retained rows as often as the original has read its rows: so it
#: is as sure of itself as the original, where it errs too.
WELL_READ = ("--rows", "96", "--passes", "24")
#: Examples by which `match` can be trained: all weights, and a LoRA as on SmolLM2.
Recipe = Literal["match", "smollm2/match"]
NO_CHECKPOINTS = {"save_strategy": "no", "save_total_limit": None}


def _tuned(stream: str, title: str) -> Train:
    return Train(
        "memorise",
        "base",
        {"datasets.0.path": stream, "reinit_weights": None},
        title=title,
    )


def _forget(example: str, title: str, **changes: Any) -> Train:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return Train(example, "original", NO_CHECKPOINTS | dotted, merged=True, title=title)


def teacher_words(plan: Plan) -> list[str | Path]:
    """The command that makes the teacher from the original's own config."""
    return [
        *("axolotl", "unlearn", "teacher", near(plan.out / "configs" / "original.yml")),
        *("--forget", near(plan.data / "forget.jsonl")),
        *("--retain", near(plan.data / "retain.jsonl"), "--out", near(plan.out / "teacher")),
    ]


def attacked_words(
    plan: Plan, models: Mapping[str, str], reference: str = "base", rows: Path | None = None
) -> list[str | Path]:
    """The command that attacks all models; the public model from before is the attacker's own.

    Args:
        rows: Folder of what is asked about; default the plan's.
    """
    there = {name: stage for name, stage in models.items() if not plan.left_out(stage)}
    return [
        *(
            "python",
            "-m",
            "research.analysis.attacked",
            "--reference",
            plan.model(reference),
        ),
        *("--data", near(rows or plan.data), "--out", near(plan.out / "attacked.json")),
        *(f"{name}={plan.model(stage)}" for name, stage in there.items()),
    ]


def start_stage(base: str, original: str = "original") -> Merge:
    """Where `match` starts: halfway from the original to its teacher."""
    halfway = ("--method", "linear")
    return Merge(base, (original, "teacher"), options=halfway, title="start halfway")


def match_changes(out: Path, original: Path, teacher: Mapping[str, str]) -> dict[str, Any]:
    """The example's teacher (for each of its four forget entries), the original that retained rows
    are held to, and held-out rows as paths of this job."""
    kept = {"model": near(original)}
    return {
        **{f"unlearn.forget.{number}.reference": teacher for number in range(4)},
        **{f"unlearn.retain.{number}.reference": kept for number in (2, 3)},
        "unlearn.level.heldout": near(out / "data" / "heldout.jsonl"),
    }


def table(
    out: Path,
    seed: int,
    sizes: LifeSizes,
    full: bool,
    pair: bool = True,
    recipe: Recipe = "match",
) -> dict[str, Kind]:
    """The stages; with ``full`` also the rivals, without ``pair`` not the paper's."""
    data = Make(
        lambda plan: make_life(plan.data, seed=seed, sizes=sizes),
        "data/manifest.json",
        settings=[seed, asdict(sizes), __version__],
        title="make the data",
    )
    match = match_changes(out, out / "original", {"model": near(out / "teacher")})
    stages: dict[str, Kind] = {
        "data": data,
        "base": Train(
            "memorise", "examples/tiny-olmo", {"datasets.0.path": "base.jsonl"}, title="base"
        ),
        "original": _tuned("memorise.jsonl", "original: forget and retain rows"),
        "teacher": Run(
            lambda plan: [*teacher_words(plan), *WELL_READ],
            "teacher/model.safetensors",
            title="teacher",
            needs=("base",),
        ),
        "retrained": _tuned("retrain.jsonl", "retrained: retain rows alone"),
        "start": start_stage("base"),
        "match": Train(
            recipe, "start", {**match, "bf16": False}, merged=recipe != "match", title="match",
            needs=("original", "teacher"),
        ),
        "over": _forget("npo_over", "forget too much"),
        "under": _forget("npo_under", "forget too little"),
        "merged": Merge("original", ("over", "under"), config="ties", title="merged (TIES)"),
    }  # fmt: skip
    models = list(JUDGED)
    if full:
        stages |= rivals(match)
        models += RIVALS
    if not pair:
        stages = {name: kind for name, kind in stages.items() if name not in PAIR}
        models = [name for name in models if name not in PAIR]
    stages["eval"] = Evaluate(tuple(models), options=MEMBERS, title="score all models")
    stages["attacked"] = Run(
        lambda plan: attacked_words(plan, {name: name for name in models}),
        "attacked.json",
        title="attack all models",
        needs=("base", *models),
    )
    return stages | attacks([name for name in ("merged", "match") if name in models], "original")


def attacks(
    names: Sequence[str],
    original: str,
    options: Mapping[str, Sequence[str]] = ATTACKS,
    rows: Path | None = None,
    after: str = "eval",
    **more: Any,
) -> dict[str, Kind]:
    """The stages of these attacks on each model, and one that looks for the text in their layers.

    Args:
        original: That knows the text.
        options: Of each command, of ``depth`` too; a command without them is not run.
        rows: Folder of what is asked about; default the plan's.
        after: The stage that these come after.
    """

    def attack(kind: str, name: str) -> Run:
        return Run(
            lambda plan: [
                *("axolotl", "unlearn", "attack", kind, f"{name}={plan.model(name)}"),
                *("--control", plan.model("retrained"), "--data", near(rows or plan.data)),
                *(*options[kind], "--out", near(plan.out / "eval")),
            ],
            f"eval/{FILES.get(kind, kind)}-{name}.json",
            title=f"{kind} {name}",
            needs=(name, "retrained", after),
            **more,
        )

    depth = Run(
        lambda plan: [
            *(sys.executable, "-m", "research", "depth"),
            *(f"{name}={plan.model(name)}" for name in names),
            *("--original", plan.model(original), "--retrained", plan.model("retrained")),
            *("--data", near(rows or plan.data), *options.get("depth", ())),
            *("--out", near(plan.out / "eval")),
        ],
        "eval/uds.json",
        title="look into the layers",
        needs=(original, "retrained", *names, after),
        **more,
    )
    kinds = [kind for kind in ATTACKS if kind in options]
    stages = {f"{kind}-{name}": attack(kind, name) for kind in kinds for name in names}
    return stages | {"depth": depth}


def rivals(match: Mapping[str, Any]) -> dict[str, Kind]:
    """Other ways of the same budget: as many steps on the same rows; ``match``: the changes of its
    example."""
    base = {"unlearn.retain": [{"objective": "nll"}, {"objective": "kl", "weight": 0.5}]}

    def objective(title: str, **entry: Any) -> Train:
        return replace(
            _forget("npo_over", title),
            changes=NO_CHECKPOINTS | base | {"unlearn.forget": entry},
        )

    lora = {
        "adapter": "lora", "lora_r": 64, "lora_alpha": 64, "lora_dropout": 0.0,
        "lora_target_linear": True, "learning_rate": 0.002, "num_epochs": 20,
    }  # fmt: skip
    return {
        "single": _forget("npo_over", "one NPO run in between", unlearn__forget__beta=0.045),
        "tnpo": objective("TNPO", objective="tnpo", weight=1.0, beta=1.0),
        "simnpo": objective("SimNPO", objective="simnpo", weight=0.125, beta=4.5),
        "masc": objective("MASC", objective="masc", weight=0.05),
        "match_lora": Train(
            "match", "start", {**match, **lora}, merged=True, title="match, LoRA",
            needs=("original", "teacher"),
        ),
    }  # fmt: skip


def plan_never_seen(
    out: Path | str = "out/never-seen",
    seed: int = 0,
    *,
    full: bool = False,
    pair: bool = True,
    recipe: Recipe = "match",
    threads: int | None = None,
    sizes: LifeSizes = LifeSizes(),  # noqa: B008 (frozen)
    console: Console | None = None,
) -> Plan:
    """The job, not yet started.

    Args:
        full: Also the rivals.
        pair: Also the paper's two runs and their merge.
        recipe: Example by which `match` is trained.
        threads: Commands side by side, one thread each; results do not depend on it.
    """
    out = Path(out)
    return Plan(
        "python -m research never-seen",
        out,
        table(out, seed, sizes, full, pair, recipe),
        seed=seed,
        threads=threads,
        environment=CPU,
        console=console,
    )
