"""`make reproduce`: the paper's tables and figures, and the merge search, over several seeds.

Each seed is a demo of its own with 160 members, 320 non-members and 160 utility questions, so that
either half has at least 80 of each, with 80 other facts of general knowledge among the retain rows,
with two retain rows beside each forget row of a step, with no end of sequence on forget rows, and
with 6 epochs instead of 9, so that a forgetting run has the demo's number of steps. The searches
(`tune-merge`, over the two parents and over all four runs that differ in beta alone) and the choice
between single runs see the validation half alone; every number of the comparison is of the test
half, from `axolotl-unlearn eval`. The single runs together have the budget of the two parents.

`make reproduce-real` needs a finished `make demo-real`: its memorised and its retrained model and
its data serve all seeds. A seed is that of the forgetting runs (LoRA draw, order, sampling), and 42
is demo-real's own. Nothing is chosen there, so all rows count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.errors import UnlearnError
from research.analysis import study
from research.analysis.paper import table_three
from research.harness.stages import Evaluate, Kind, Plan, Run, Search, Train
from research.studies.demo import (
    CPU,
    MEMBERS,
    PARENTS,
    TIES,
    TINY,
    data_stage,
    memories,
    pair,
    precision,
    real_pair,
)
from research.worlds.generate import Sizes

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
OWN_SEED = 42  # of examples/smollm2/{over,under}.yml
LIMIT = 120  # rows, documents and questions of a teacher-forced score of the real model
#: Two checkpoints on the way.
REAL_CHECKPOINTS = {"save_strategy": "steps", "save_steps": 0.34, "save_only_model": True}


def table(
    seed: int,
    *,
    tables: bool = True,
    pairs: bool = True,
    trials: int = 24,
    sizes: Sizes = SIZES,
    retain_per_forget: int = RETAIN_PER_FORGET,
    forget_eos: bool = False,
    held_out: int = 0,
    equal: bool = False,
) -> dict[str, Kind]:
    """The stages of one seed.

    Args:
        tables: also the paper's tables and figures.
        pairs: also other pairs of runs.
        retain_per_forget: retain rows beside each forget row of a step.
        forget_eos: also forget to end (the end of sequence is a label of forget rows).
        held_out: relations of general knowledge of which nothing is replayed (`Sizes.held_out`).
        equal: the same chance for all: each single run's scale is searched with as many candidates
            as the merges, the best of four runs stands beside the merge of four, and a second
            retrained model of another seed says how far two of them are apart.
    """
    sizes = replace(sizes, held_out=held_out)
    longer: dict[str, Any] = {"num_epochs": EPOCHS}
    if retain_per_forget != 1:
        longer["unlearn.pairing.retain_per_forget"] = retain_per_forget
    if not forget_eos:
        longer["unlearn.data.eos"] = "retain"
    if sizes.replay:
        retain = {"ds_type": "json", "type": "axolotl_unlearn.data.retain"}
        longer["datasets.2"] = {"path": "replay.jsonl"} | retain
    stages = {"data": data_stage(seed, sizes)} | memories(TINY) | pair()
    for name in ("over", "under"):
        stages[name] = replace(stages[name], changes={**stages[name].changes, **longer})
    stages["parents"] = Evaluate(PARENTS, options=MEMBERS, title="score the parents")
    stages["merged"] = TIES
    for name, differs in (SINGLES | (OTHERS if pairs else {})).items():
        forget = {f"unlearn.forget.{k}": v for k, v in differs.items() if k != "seed"}
        told = ", ".join(f"{key} {value}" for key, value in differs.items() if key != "seed")
        stages[name] = Train(
            "npo_over",
            "memorised",
            longer | forget | {"save_strategy": "no", "save_total_limit": None},
            seed_shift=int(differs.get("seed", 0)),
            title=f"forget as {name} ({told})",
        )
    title = "search the best merge on validation"
    stages["tuned"] = Search("memorised", ("over", "under"), trials, title=title)
    stages["tuned_four"] = Search("memorised", FOUR, trials, title=f"{title}, four runs")
    if tables:
        stages["reproduction"] = analysis(
            "reproduce",
            "reproduction/results.json",
            lambda plan: [
                *("--over", plan.adapter("over"), "--under", plan.adapter("under")),
                *("--data", plan.data, "--seed", seed, "--store", plan.store),
            ],
            title="tables and figures of the paper",
            needs=("over", "under"),
        )
    if pairs:
        trained = ("over", "under", *SINGLES, *OTHERS)
        stages["pairs"] = analysis(
            "pairs",
            "pairs/pairs.json",
            lambda plan: [
                *("--runs", *(f"{name}={plan.adapter(name)}" for name in trained)),
                *("--data", plan.data / "test", "--pairs", *PAIRS),
            ],
            title="merge other pairs of runs",
            needs=trained,
        )
    judged = {name: name for name in SINGLES}
    on_validation = dict(judged)
    last = {"retrained": "retrained"}
    if equal:
        searched = {f"tuned_{run[-1]}": run for run in SINGLES}
        for name, run in searched.items():
            scale = f"search the scale of {run} on validation"
            stages[name] = Search("memorised", (run,), trials, title=scale)
            judged[name] = name
        on_validation = {"over": "over", "under": "under", **judged}
        twin = replace(stages["retrained"], seed_shift=1000, title="retrain with another seed")
        stages["retrained_twin"] = twin
        last = {"retrained_twin": "retrained_twin", **last}
    stages["validation"] = Evaluate(
        {"original": "memorised", **on_validation},
        "validation",
        title="score the single runs on validation",
    )
    models = {"fixed": "merged", "tuned": "tuned", "tuned_four": "tuned_four"}
    stages["test"] = Evaluate(
        {**PARENTS, **models, **judged, **last}, "test", title="score all models on test"
    )
    return stages


def real_table(source: Path, seed: int) -> dict[str, Kind]:
    """The stages of one seed of the real model; demo-real's own runs are not made again."""
    base, retrained = (str(source / name / "merged") for name in ("memorised", "retrained"))
    own = seed == OWN_SEED
    stages = {} if own else real_pair(base, REAL_CHECKPOINTS)
    over, under = (str(source / name) if own else name for name in ("over", "under"))
    models = {
        "original": base,
        "over": f"{over}/merged" if own else over,
        "under": f"{under}/merged" if own else under,
        "merged": str(source / "merged") if own else "merged",
        "retrained": retrained,
    }
    stages["eval"] = Evaluate(models, title="score all models")
    stages["reproduction"] = analysis(
        "reproduce",
        "reproduction/results.json",
        lambda plan: [
            *("--short", "--over", plan.adapter(over), "--under", plan.adapter(under)),
            *("--data", plan.data, "--limit", LIMIT, "--seed", seed, "--store", plan.store),
        ],
        base=base,
        title="tables and figures of the paper",
        needs=() if own else ("over", "under"),
    )
    return stages


def analysis(
    module: str,
    output: str,
    words: Callable[[Plan], Sequence[Any]],
    *,
    base: str = "memorised",
    **more: Any,
) -> Run:
    """A module of `analysis` on runs that started from ``base``."""

    def command(plan: Plan) -> list[str]:
        start = [sys.executable, "-m", f"research.analysis.{module}"]
        folder = (plan.out / output).parent
        return [
            *start,
            *("--base", plan.model(base), "--out", str(folder)),
            *map(str, words(plan)),
        ]

    return Run(command, output, **more)


def plan_seed(out: Path, seed: int, *, threads: int | None = None, console=None, **options) -> Plan:
    """One seed, not yet started; ``options`` are those of `table`."""
    stages = table(seed, **options)
    return Plan(
        "python -m research reproduce", out, stages, seed, threads=threads, environment=CPU,
        console=console,
    )  # fmt: skip


def plan_real_seed(
    source: Path,
    out: Path,
    seed: int,
    *,
    bf16: bool | None = None,
    threads: int | None = None,
    console: Console | None = None,
) -> Plan:
    """One seed of the real model. Scores that demo-real knows are not measured again.

    Raises:
        UnlearnError: The demo is not there.
    """
    for part in ("memorised/merged", "retrained/merged", "data", "configs", "eval"):
        if not (source / part).is_dir():
            raise UnlearnError(f"{source / part} does not exist: run `make demo-real` first.")
    return Plan(
        "python -m research reproduce-real", out, real_table(source, seed), seed,
        data=source / "data", store=source / "store", train_options=precision(bf16),
        threads=threads, console=console,
    )  # fmt: skip


def reproduce(
    out: Path,
    seeds: Sequence[int] = (0,),
    *,
    command: str = "research.studies.reproduce",
    tables: int = 3,
    pairs: int = 0,
    source: Path | None = None,
    console: Console | None = None,
    **options: Any,
) -> Path:
    """All seeds, then ``results.json`` and ``reproduction.md``; returns the latter.

    Args:
        command: what ``results.json`` says it was made by.
        tables: so many seeds also make the paper's tables and figures.
        pairs: so many also merge other pairs of runs.
        source: a finished demo-real, whose model it is then, with tables of all seeds.
        options: of `plan_seed`, or of `plan_real_seed`.
    """
    console = console or Console()
    folders = {seed: out / f"seed-{seed}" for seed in seeds}
    for number, (seed, folder) in enumerate(folders.items()):
        console.print(f"seed {seed}")
        if source:
            plan_real_seed(source, folder, seed, console=console, **options).run()
        else:
            flags = {"tables": number < tables, "pairs": number < pairs}
            plan_seed(folder, seed, console=console, **flags, **options).run("test")

    def read(where: str, count: int) -> dict[int, Mapping]:
        return {
            seed: json.loads((folders[seed] / where).read_text("utf-8")) for seed in seeds[:count]
        }

    reproduced = read("reproduction/results.json", len(seeds) if source else tables)
    configs = (source or folders[seeds[0]]) / "configs"
    settings = table_three(configs / "over.yml", configs / "under.yml")
    if source:
        found = {seed: study.read_models(folder / "eval") for seed, folder in folders.items()}
        title = "SmolLM2-135M and LUME, seeds of the forgetting runs"
        text = study.page(title, found, reproduced, None, settings, shared=study.SHARED)
    else:
        found = {seed: study.read_seed(folder) for seed, folder in folders.items()}
        paired = read("pairs/pairs.json", pairs)
        text = study.page("Who wins, on the test half", found, reproduced, paired, settings)
    return study.write_study(out, command, found, text)
