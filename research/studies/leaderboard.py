"""``make leaderboard``: all methods on one data set with one budget, one table and one page.

Every method starts from the same original, reads the same rows for the same number of steps beside
the same retain losses, and may try as many strengths of its own (the knob that its authors turn) as
any other. The validation half chooses among them; what is shown is of the test half, with two
attacks on the chosen model: relearning from a few forgotten documents, and rounding to 4 bits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write, write_json
from research.analysis import study
from research.analysis.leaderboard import broken_down, line, page
from research.harness.stages import Evaluate, Kind, Plan, Run, Train, near
from research.studies.demo import CPU, TINY, data_stage, precision
from research.studies.methods import RETAIN, Applied, Method, Tried, chosen_methods, slug
from research.studies.never_seen import FILES
from research.worlds.generate import Sizes

SIZES = Sizes(stories=16, pii=12, facts_retain=40)
EPOCHS = 4
TRIALS = 6
ATTACKS = {
    "relearn": ("--source", "forget", "--rows", "10", "--steps", "20"),
    "quantise": ("--schemes", "int4"),
}
ASKED = ("--limit", "40", "--max-new-tokens", "64")


TRUSTED = (sys.executable, "-m", "research", "trusted")


class Trusted(Evaluate):
    """`axolotl-unlearn eval` of models with code of their own."""

    def command(self, plan: Plan, name: str) -> list[str]:
        return [*TRUSTED, *super().command(plan, name)[2:]]


@dataclass(frozen=True)
class World:
    """What the methods are compared on.

    Attributes:
        example: config below ``examples/`` that gives LoRA, learning rate and batch.
        epochs: of each run; None leaves the example's; ``changes``: further ones of the example.
        model, retrained: folders of a model of the user's own, and of one that never saw the forget
            rows; None makes both on embedded data.
        data: their data: forget.jsonl and retain.jsonl to train on, the halves ``validation`` and
            ``test`` to evaluate on.
        layer: of objectives on hidden states; None is that of the tiny model.
        teacher: folder of a model that never saw the forget rows (or its ``model`` and
            ``adapter``), for methods that compare with one; the embedded data's is a model that
            read other biographies, after a pass over the retain rows.
        retain: losses on retained rows, of all methods but those that bring their own.
        rate: the attacker's learning rate in relearning.
    """

    example: str = "npo_over"
    epochs: int | None = EPOCHS
    model: Path | None = None
    retrained: Path | None = None
    data: Path | None = None
    layer: int | None = None
    teacher: Path | Mapping[str, str] | None = None
    sizes: Sizes = SIZES
    changes: Mapping[str, Any] = field(default_factory=dict)
    retain: Sequence[Mapping[str, Any]] = field(default_factory=lambda: RETAIN)
    rate: float = 1e-3

    def placed(self, methods: Mapping[str, Tried], out: Path) -> dict[str, Tried]:
        """The methods that this world has all for, with its layer, teacher and retain losses."""
        own = {} if self.layer is None else {"layer": self.layer}
        teacher = self.teacher if self.model else out / "teacher"
        if teacher:
            known = isinstance(teacher, Mapping)
            own |= {"reference": dict(teacher) if known else {"model": near(teacher)}}
        return {
            name: m
            if isinstance(m, Applied)
            else (replace(m, retain=self.retain) if m.retain is RETAIN else m).placed(**own)
            for name, m in methods.items()
            if isinstance(m, Applied) or teacher or not m.teacher
        }

    @property
    def original(self) -> str:
        return "original" if self.model is None else near(self.model)

    @property
    def control(self) -> str:
        return "retrained" if self.model is None else near(self.retrained)


def table(
    out: Path, seed: int, methods: Mapping[str, Tried], world: World, trials: int = TRIALS
) -> dict[str, Kind]:
    """The stages of one seed."""
    stages: dict[str, Kind] = {}
    trained = {name: m for name, m in methods.items() if isinstance(m, Method)}
    if world.model is None:
        without = {"datasets.0.path": "retrain.jsonl"}
        stages["data"] = data_stage(seed, world.sizes)
        stages["original"] = Train("memorise", TINY, title="memorise")
        stages["retrained"] = Train("memorise", TINY, without, title="retrain without forget rows")
        if any(method.teacher for method in trained.values()):
            stages["before"] = Train("memorise", TINY, {"datasets.0.path": "background.jsonl"})
            kind = {"datasets.0.path": "retain.jsonl", "reinit_weights": None}
            stages["teacher"] = Train("memorise", "before", kind)
    made = tuple(name for name in ("original", "retrained") if name in stages)
    for kind, file in {"idk": "alternative", "self": "self"}.items():
        other = next((slug(name) for name, m in trained.items() if _rows(m) == kind), None)
        if other:
            stages[file] = Run(
                lambda plan, kind=kind, file=file, other=other: [
                    *("axolotl", "unlearn", "augment", kind, near(plan.config_file(f"{other}-0"))),
                    *("--out", near(plan.out / f"{file}.jsonl"), "--seed", str(seed)),
                ],
                f"{file}.jsonl",
                title=f"write rows ({kind})",
                needs=("original",) if kind == "self" and world.model is None else (),
            )
    for name, method in methods.items():
        search = _search if isinstance(method, Method) else _applied
        stages |= search(out, name, method, world, trials)
    chosen = tuple(f"{slug(name)}-validation" for name in methods)
    stages["test"] = (Trusted if "GUARD-IT" in methods else Evaluate)(
        lambda plan: {
            **{"original": world.original, "retrained": world.control},
            **{slug(name): best(plan.out, name)["name"] for name in methods},
        },
        "test",
        title="score the chosen on test",
        needs=(*made, *chosen),
    )
    for name in methods:
        for attack, options in ATTACKS.items():
            options += ("--lr", f"{world.rate:g}") if attack == "relearn" else ()
            stages[f"{slug(name)}-{attack}"] = Run(
                lambda plan, name=name, attack=attack, options=options: [
                    *(TRUSTED if name == "GUARD-IT" else ("axolotl", "unlearn")),
                    *("attack", attack),
                    f"{slug(name)}={plan.model(best(plan.out, name)['name'])}",
                    *("--data", near(plan.data / "test"), "--control", plan.model(world.control)),
                    *("--out", near(plan.out / "attacks"), *options, *ASKED),
                ],
                f"attacks/{FILES.get(attack, attack)}-{slug(name)}.json",
                title=f"{attack} {name}",
                needs=(*made, f"{slug(name)}-validation"),
            )
    return stages


def _search(out: Path, name: str, method: Method, world: World, trials: int) -> dict[str, Kind]:
    """The runs of a method, and their scores on validation."""
    changes: dict[str, Any] = {"save_strategy": "no", "save_total_limit": None, "logging_steps": 10}
    changes |= world.changes
    if world.epochs:
        changes["num_epochs"] = world.epochs
    needs: tuple[str, ...] = ()
    if method.teacher and world.model is None:
        needs = ("teacher",)
    if kind := _rows(method):
        role = {"idk": "alternative", "self": "forget"}[kind]
        needs = ("alternative" if kind == "idk" else kind,)
        entry = {"ds_type": "json", "type": f"axolotl_unlearn.data.{role}"}
        changes["datasets.2"] = {"path": out / f"{needs[0]}.jsonl"} | entry
    runs: dict[str, Kind] = {
        f"{slug(name)}-{number}": Train(
            world.example,
            world.original,
            changes | method.changes(value),
            title=f"{name}, {method.knob} {value:g}",
            needs=needs,
        )
        for number, value in enumerate(method.tried(trials))
    }
    scored = Evaluate(
        {"original": world.original, **{run: run for run in runs}},
        "validation",
        title=f"choose among {name}",
    )
    return runs | {f"{slug(name)}-validation": scored}


def _rows(method: Method) -> str:
    """The rows that are written for it: a kind of `axolotl-unlearn augment`, or none."""
    return method.rows or ("idk" if method.alternatives else "")


def _applied(out: Path, name: str, method: Applied, world: World, trials: int) -> dict[str, Kind]:
    """The same of a method that is no training."""

    def words(plan: Plan, run: str, value: float) -> list[Any]:
        given = {"ORIGINAL": plan.model(world.original), "DATA": near(plan.data)}
        if method.after:
            given["CHOSEN"] = plan.model(best(plan.out, method.after)["name"])
        knob = (f"--{method.knob}", f"{value:g}")
        return [
            *(sys.executable, "-m", "research", *(given.get(word, word) for word in method.words)),
            *(*knob, "--out", near(plan.out / run)),
        ]

    needs = ("original",) if world.model is None else ()
    needs += (f"{slug(method.after)}-validation",) if method.after else ()
    runs: dict[str, Kind] = {
        run: Run(
            lambda plan, run=run, value=value: words(plan, run, value),
            f"{run}/config.json",
            title=f"{name}, {method.knob} {value:g}",
            needs=needs,
        )
        for run, value in (
            (f"{slug(name)}-{number}", value) for number, value in enumerate(method.tried(trials))
        )
    }
    scored = (Trusted if name == "GUARD-IT" else Evaluate)(
        {"original": world.original, **{run: run for run in runs}},
        "validation",
        title=f"choose among {name}",
    )
    return runs | {f"{slug(name)}-validation": scored}


def best(out: Path, name: str) -> dict[str, Any]:
    """The run of a method with the best Aggregate on validation, of those that are usable.

    Returns:
        Its entry in the results. Where all have collapsed or lost their utility, the best of them.
    """
    path = out / f"{slug(name)}-validation" / "results.json"
    models = json.loads(path.read_text("utf-8"))["models"]
    runs = [model for model in models if model["role"] == "candidate"]
    return max(runs, key=lambda run: (not broken_down(run), run["aggregate"] or 0.0))


def read_seed(out: Path, methods: Mapping[str, Tried], trials: int) -> dict[str, dict[str, Any]]:
    """Lines of one finished seed: original, retrained, and each method with what was tried."""
    models = json.loads((out / "test" / "results.json").read_text("utf-8"))["models"]
    by_name = {model["name"]: model for model in models}
    lines = {name: line(by_name[name]) for name in ("original", "retrained")}
    for name, method in methods.items():
        run = best(out, name)["name"]
        place = int(run.rpartition("-")[2])
        lines[name] = line(by_name[slug(name)]) | {
            "knob": method.knob,
            "value": method.tried(trials)[place],
            "at_end": place in (0, trials - 1),
        }
        if isinstance(method, Method):
            cost = json.loads((out / run / "cost.json").read_text("utf-8"))
            lines[name] |= {"seconds": cost["seconds"] / cost["steps"], "mib": cost["peak_mib"]}
        for attack in ATTACKS:
            path = out / "attacks" / f"{FILES.get(attack, attack)}-{slug(name)}.json"
            last = json.loads(path.read_text("utf-8"))["rows"][-1]
            lines[name][attack] = last["recalled"]["value"]
            if "control" in last:
                lines["retrained"][attack] = last["control"]["recalled"]["value"]
    return lines


def leaderboard(
    out: Path,
    seeds: Sequence[int] = (0, 1, 2),
    methods: str | None = None,
    *,
    world: World | None = None,
    trials: int = TRIALS,
    threads: int | None = None,
    ray: str | None = None,
    console: Console | None = None,
    command: str | None = None,
) -> Path:
    """All seeds, then ``results.json`` and ``leaderboard.md``; returns the latter.

    Args:
        ray: Address of a cluster of Ray: each run, scoring and attack is a task of it.
        command: What the results say they come from; None is `make leaderboard`.

    Raises:
        UnlearnError: An unknown method, more trials than a method has strengths, or a failed stage.
    """
    chosen, world = chosen_methods(methods), world or World()
    console = console or Console()
    left_out = [name for name in chosen if name not in world.placed(chosen, out)]
    if methods and left_out:
        raise UnlearnError(f"{left_out[0]} compares with a teacher: name its folder (--teacher).")
    for name in left_out:
        console.print(f"{name} is left out: it compares with a teacher (--teacher).")
        del chosen[name]
    most = min(len(method.values) for method in chosen.values())
    if not 1 <= trials <= most:
        raise UnlearnError(f"`--trials {trials}`: give 1 to {most}, the strengths of a method.")
    content: dict[str, Any] = {
        "schema": "leaderboard",
        **study.facts(command or command_of(seeds, methods)),
    }
    content |= {"trials": trials, "seeds": {}}
    for seed in seeds:
        console.print(f"seed {seed}")
        folder = out / f"seed-{seed}"
        chosen = world.placed(chosen, folder)
        Plan(
            "make leaderboard",
            folder,
            table(folder, seed, chosen, world, trials),
            seed=seed,
            data=world.data,
            threads=threads,
            ray=ray,
            train_options=precision() if world.model else [],
            environment=CPU if world.model is None else {},
            console=console,
        ).run("test")
        content["seeds"][str(seed)] = read_seed(folder, chosen, trials)
    write_json(out / "results.json", content)
    return write(out / "leaderboard.md", page(content))


def command_of(seeds: Sequence[int], methods: str | None) -> str:
    """The command line that a leaderboard is the result of."""
    named = f' METHODS="{methods}"' if methods else ""
    return f'make leaderboard SEEDS="{" ".join(map(str, seeds))}"{named}'
