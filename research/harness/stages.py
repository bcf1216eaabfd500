"""Stages as data: a job is a table ``name -> stage``, and a `Plan` makes commands of it.

How to write a new job (`studies/demo.py` is one; `never-seen` and `leaderboard` are meant to be
others): a table, a plan, a thin command.

    TABLE = {
        "data": Make(write_data, output="data/manifest.json", settings=settings_of_the_data),
        "base": Train("memorise", base="examples/tiny-olmo", changes={
            "datasets.0.path": "background.jsonl"}),
        "original": Train("memorise", base="base", changes={"reinit_weights": None}),
        "over": Train("npo_over", base="original", merged=True, changes={
            "unlearn.forget.beta": 0.02, "num_epochs": 6}),
        "under": Train("npo_under", base="original", merged=True),
        "merged": Merge("original", ("over", "under"), config="ties"),
        "tuned": Search("original", ("over", "under"), trials=24),
        "probe": Run(lambda plan: ["python", "-m", "research", "depth", plan.model("over")],
                     output="probe/depth.json", needs=("over",)),
        "eval": Evaluate(("original", "over", "under", "merged", "tuned")),
    }
    plan = Plan("my-job", out, TABLE, seed=0, console=console)
    results = plan.run()            # results.json of `eval`, with stages and seconds
    plan.report(results)            # report.html

Rules: a stage needs what it names (`base`, `parents`, `models`) and "data" by itself, `needs` adds
others. A name that is no stage of the table is a path to a model that is there already. Stages run
side by side as threads allow, in the order of the table; finished ones are kept as long as
configs, data, commands, versions and the stages before them are the same, so a job may be stopped
and repeated. Scores are kept by content in OUT/store (`axolotl_unlearn.store`), so a second table
over the same models and data measures nothing twice if its plan gets the same `store`.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml
from rich.console import Console

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write, write_json
from axolotl_unlearn.requests.steps import executable
from axolotl_unlearn.training.resume import checkpoints
from research.harness.runner import Job, Stage

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    # Each worker of `datasets` imports Axolotl again (10 s): none for some thousand rows.
    "AXOLOTL_DATASET_NUM_PROC": "0",
    # Waiting threads give the core away; on a busy machine spinning costs more.
    "OMP_WAIT_POLICY": "PASSIVE",
    # glibc gives every large tensor back to the system and asks for it again: half of the time of
    # a 135M model went into page faults.
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
#: Of a `Train` stage of a resumable job: its last state alone, until the run has ended.
RESUMED = {
    "save_strategy": "steps",
    "save_steps": 0.1,
    "save_total_limit": 1,
    "auto_resume_from_checkpoints": True,
}
MAX_NEW_TOKENS = 96  # the longest answers of the jobs' data have 51 and 81 tokens


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
        "examples/memorise.yml is not here; run the command in a checkout of the repository."
    )


def example_file(home: Path, example: str) -> Path:
    """A config by its name, below ``home``: the studies' own goes before a shipped example."""
    own = Path("research", "configs", f"{example}.yml")
    return own if (home / own).is_file() else Path("examples", f"{example}.yml")


def drop_checkpoints(run: Path) -> None:
    for folder in checkpoints(run):
        shutil.rmtree(folder)


def near(path: Path | str) -> str:
    """`path` relative to the working folder where it lies inside, else absolute."""
    absolute = Path(os.path.abspath(path))
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


@dataclass
class Plan:
    """A table of stages with a place, a seed and a machine.

    Attributes:
        name: Of the job, for its messages and files' heads.
        out: Folder of the job.
        table: Name -> stage.
        seed: Of all training runs; None leaves the examples' own.
        data: Folder of the data; default ``out/data``.
        store: Folder of scores by content; default ``out/store``.
        train_options: Added to every ``axolotl train``.
        resumable: Runs of hours: each training run that keeps no checkpoints saves its state at
            every tenth of its steps, until it has ended, and goes on from there after a kill.
        environment: Variables of the commands.
        threads: In all; default one a core.
        ray: Address of a cluster of Ray whose tasks the commands are.
        console: Where progress goes; default standard output.
    """

    name: str
    out: Path
    table: Mapping[str, Kind]
    seed: int | None = None
    data: Path | None = None
    store: Path | None = None
    train_options: Sequence[str] = ()
    resumable: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    ray: str | None = None
    console: Console | None = None

    def __post_init__(self) -> None:
        self.home = repository()
        self.console = self.console or Console()
        self.out = Path(self.out)
        self.data = Path(self.data or self.out / "data")
        self.store = Path(self.store or self.out / "store")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.job = Job(
            self.out,
            threads=self.threads,
            environment={**ENVIRONMENT, **self.environment, "PATH": path},
            ray=self.ray,
            console=self.console,
        )
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnlearnError(
                f"Cannot write to {self.out}: {error.strerror}; give --out a folder you may write."
            ) from error
        for name, kind in self.table.items():
            for stage in kind.stages(self, name):
                self.job.add(stage)

    def model(self, name: str) -> str:
        """What `axolotl-unlearn eval` takes for a stage's model: a folder, or base+adapter."""
        if name in self.table:
            return near(self.table[name].model(self, name))
        ours = self.home / name  # examples/... from another working folder
        return near(ours) if ours.exists() and not Path(name).exists() else str(name)

    def adapter(self, name: str) -> str:
        """A training stage's own output: the adapter of a LoRA run."""
        return near(self.out / name) if name in self.table else str(name)

    def left_out(self, name: str) -> str | None:
        """Why a stage was left out, or None."""
        outcome = self.job.outcomes.get(name)
        return (outcome.reason or None) if outcome else None

    def maker(self, name: str) -> list[str]:
        """The stage to wait for before a name of the table can be used; none for a path."""
        known = {stage.name for stage in self.job.stages}
        if f"{name}-merged" in known:
            return [f"{name}-merged"]
        return [name] if name in self.table else []

    def needs(self, kind: Kind, *names: str) -> list[str]:
        data = [stage.name for stage in self.job.stages if stage.name == "data"]
        used = [stage for name in names for stage in self.maker(name)]
        others = [(self.maker(name) or [name])[0] for name in kind.needs]
        return list(dict.fromkeys([*data, *used, *others]))

    def given(self, *names: str) -> list[Path]:
        """Weights of models that the table does not make: their content is part of the keys."""
        folders = [Path(part) for n in names if n not in self.table for part in str(n).split("+")]
        return [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]

    def rows(self, part: str = "") -> list[Path]:
        return sorted((self.data / part).glob("*.jsonl"))

    def config_file(self, name: str) -> Path:
        return self.out / "configs" / f"{name}.yml"

    def write_config(self, name: str, example: str, config: Mapping[str, Any]) -> Path:
        path = self.config_file(name)
        # Not the job's name: another job in this folder keeps the stages that it shares.
        head = f"# Written from {example}.\n"
        return write(path, head + yaml.safe_dump(config, sort_keys=False))

    def share(self, share: float | None) -> int:
        """A share of the threads; None is one thread, so that results do not depend on cores."""
        return 1 if share is None else max(1, int(self.job.threads * share))

    def run(self, results: str = "eval") -> dict[str, Any]:
        """Run or resume; write and return ``out/results.json``.

        A job that fails or is stopped after its evaluation leaves that file too.

        Args:
            results: The `Evaluate` stage whose results these are.

        Returns:
            The results of that evaluation, with ``job``, ``seed``, ``seconds`` (wall clock, or the
            sum over stages if earlier calls did some), ``cpu_seconds`` (of this call's commands),
            ``stages`` (name -> state and seconds), ``left_out`` (name -> sentence) and, of a job
            that was stopped, ``unfinished`` (names of stages).

        Raises:
            UnlearnError: A stage failed.
        """
        try:
            self.job.run()
        except BaseException:
            if results in self.job.outcomes and not self.left_out(results):
                self._collect(results)
            raise
        return self._collect(results)

    def _collect(self, results: str) -> dict[str, Any]:
        outcomes = self.job.outcomes
        content = json.loads((self.out / results / "results.json").read_text("utf-8"))
        content |= {
            "job": self.name,
            "seed": self.seed,
            "seconds": round(self.job.total_seconds(), 1),
            "cpu_seconds": round(self.job.cpu_seconds(), 1),
            "stages": {n: {"state": o.state, "seconds": o.seconds} for n, o in outcomes.items()},
            "left_out": {n: o.reason for n, o in outcomes.items() if o.reason},
        }
        if unfinished := [s.name for s in self.job.stages if s.name not in outcomes]:
            content["unfinished"] = unfinished
        write_json(self.out / "results.json", content, ensure_ascii=False)
        audit = self.out / results / "audit.jsonl"
        if audit.is_file():  # the page looks for it beside its results
            shutil.copy(audit, self.out)
        return content

    def _attacks(self, results: str = "eval") -> list[dict[str, Any]]:
        """Of the attacks beside an evaluation; what no stage has made yet is of earlier models."""
        from axolotl_unlearn.report.inputs import attack_results

        outcomes = self.job.outcomes
        missing = [s for s in self.job.stages if s.name not in outcomes or outcomes[s.name].reason]
        return attack_results(self.out / results, [stage.output for stage in missing])

    def report(self, results: Mapping[str, Any]) -> Path:
        """Write the HTML page of a finished job and return its path."""
        from axolotl_unlearn.report import find_inputs, write_report

        extras = find_inputs(results, self.out)
        layers, curves = (self.out / "eval" / name for name in ("uds.json", "depth.json"))
        if layers.is_file():  # of `python -m research depth`
            told = json.loads(layers.read_text("utf-8")).get("models", {}).items()
            said = {f"depth of {name}": one["sentence"] for name, one in told if "sentence" in one}
            extras["attack_sentences"] = extras.get("attack_sentences", {}) | said
            extras["attacks"] = [*extras.get("attacks", []), *json.loads(curves.read_text("utf-8"))]
        return write_report(results, self.out / "report.html", extras=extras)

    def show(self) -> dict[str, Any]:
        """Run or resume, write the page, print the scores and where they lie; the results."""
        from axolotl_unlearn.report import reasons, table

        results = self.run()
        page = self.report(results)
        self.console.print(table(results, self._attacks()))
        self.console.print(reasons(results, self._attacks()), soft_wrap=True, end="")
        where = f"{results['seconds']:.0f} s. Scores: {self.out / 'results.json'}\nPage: {page}"
        self.console.print(where, soft_wrap=True)
        return results


@dataclass(frozen=True)
class Kind:
    """What all stages have.

    Attributes:
        title: What the display says; default the name.
        needs: Further names of the table to wait for.
        skip_if: Called with the plan when the stage could start; a sentence leaves it out.
        share: Of the job's threads; None is one thread.
    """

    title: str = field(default="", kw_only=True)
    needs: Sequence[str] = field(default=(), kw_only=True)
    skip_if: Callable[[Plan], str | None] | None = field(default=None, kw_only=True)
    share: float | None = field(default=None, kw_only=True)

    #: File below the job's folder that the stage writes; {} is its name.
    writes: ClassVar[str] = "{}/config.json"

    def model(self, plan: Plan, name: str) -> str | Path:
        """Where the model of this stage lies."""
        return plan.out / name

    def uses(self) -> Sequence[str]:
        """Models that the stage starts from: names of the table, or paths."""
        return ()

    def command(self, plan: Plan, name: str) -> list[str]:
        """What to run; asked when the stage can start."""
        raise NotImplementedError

    def files(self, plan: Plan, name: str) -> Iterable[Path]:
        """Files whose content the result depends on, beside the weights of models used."""
        return ()

    def stages(self, plan: Plan, name: str, **more: Any) -> Iterable[Stage]:
        skip = self.skip_if
        yield Stage(
            name,
            self.title or name,
            **{
                "command": lambda: self.command(plan, name),
                "output": plan.out / self.writes.format(name),
                "inputs": lambda: [*self.files(plan, name), *plan.given(*self.uses())],
                "needs": plan.needs(self, *self.uses()),
                "skip_if": (lambda: skip(plan)) if skip else None,
                "threads": plan.share(self.share),
                **more,
            },
        )


@dataclass(frozen=True)
class Make(Kind):
    """Something this process does: ``make(plan)`` writes ``output`` (below the job's folder)."""

    make: Callable[[Plan], Any]
    output: str
    settings: object = None
    inputs: Sequence[Path] = ()

    def files(self, plan: Plan, name: str) -> Iterable[Path]:
        return self.inputs

    def stages(self, plan: Plan, name: str, **more: Any) -> Iterable[Stage]:
        return super().stages(
            plan,
            name,
            command=None,
            action=lambda: self.make(plan) and None,
            settings=self.settings,
            output=plan.out / self.output,
        )


@dataclass(frozen=True)
class Run(Kind):
    """Any command: ``words(plan)``, called when it can start, writes ``output``.

    Attributes:
        clears: Folder below the job's that goes before the command starts.
    """

    words: Callable[[Plan], Sequence[Any]]
    output: str
    clears: str = ""

    def command(self, plan: Plan, name: str) -> list[str]:
        first, *rest = map(str, self.words(plan))
        return [executable(first) if os.sep not in first else first, *rest]

    def stages(self, plan: Plan, name: str, **more: Any) -> Iterable[Stage]:
        clear = lambda: shutil.rmtree(plan.out / self.clears, ignore_errors=True)  # noqa: E731
        before = clear if self.clears else None
        return super().stages(plan, name, output=plan.out / self.output, before=before)


@dataclass(frozen=True)
class Train(Kind):
    """`axolotl train` on a copy of an example.

    Attributes:
        example: Path below ``research/configs/`` or ``examples/`` without ".yml".
        base: A name of the table or a folder; None leaves the example's own base model.
        changes: Keys joined by dots -> value; None removes the key, the number after a list's last
            appends to it. A dataset path that is text is a file of the job's data folder; a `Path`
            stays what it is.
        merged: Also `axolotl merge-lora`: the model is then a folder with full weights.
        seed_shift: Added to the plan's seed.
    """

    example: str
    base: str | Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    merged: bool = False
    seed_shift: int = 0

    def uses(self) -> Sequence[str]:
        return () if self.base is None else (str(self.base),)

    def config(self, plan: Plan, name: str) -> dict[str, Any]:
        """The example with this stage's paths, seed and changes."""
        path = plan.home / example_file(plan.home, self.example)
        config = yaml.safe_load(path.read_text("utf-8"))
        config["output_dir"] = near(plan.out / name)
        config["dataset_prepared_path"] = near(plan.out / "prepared")
        if plan.seed is not None:
            config["seed"] = plan.seed + self.seed_shift
        if self.base is not None:
            config["base_model"] = plan.model(str(self.base))
        for key, value in self.changes.items():
            change(config, key, value)
        if plan.resumable and config.get("save_strategy") == "no":
            config |= RESUMED
        for entry in config["datasets"]:
            given = entry["path"]
            entry["path"] = near(given if isinstance(given, Path) else plan.data / Path(given).name)
        return config

    def command(self, plan: Plan, name: str) -> list[str]:
        path = near(plan.config_file(name))
        # `python` spares the second start of Python under `accelerate launch`.
        return [executable("axolotl"), "train", path, "--launcher", "python", *plan.train_options]

    def files(self, plan: Plan, name: str) -> Iterable[Path]:
        data = [Path(entry["path"]) for entry in self.config(plan, name)["datasets"]]
        return [plan.config_file(name), *data]

    def stages(self, plan: Plan, name: str, **more: Any) -> Iterable[Stage]:
        config = self.config(plan, name)
        path = plan.write_config(name, str(example_file(plan.home, self.example)), config)
        weights = "adapter_model" if "adapter" in config else "model"
        resumes = RESUMED.items() <= config.items()
        yield from super().stages(
            plan,
            name,
            output=plan.out / name / f"{weights}.safetensors",
            # Checkpoints of an earlier run must not be taken for this one's.
            before=lambda: shutil.rmtree(plan.out / name, ignore_errors=True),
            resumes=resumes,
            action=(lambda: drop_checkpoints(plan.out / name)) if resumes else None,
            **more,
        )
        if self.merged:
            yield Stage(
                f"{name}-merged",
                f"merge the adapter of {name}",
                # In float32: bfloat16 would round most of a LoRA-sized change away.
                [executable("axolotl"), "merge-lora", near(path), "--bf16=false"],
                plan.out / name / "merged" / "config.json",
                needs=[*plan.maker(str(self.base)), name],
                skip_if=lambda: plan.left_out(name),
                threads=plan.share(self.share),
            )

    def model(self, plan: Plan, name: str) -> str | Path:
        if self.merged:
            return plan.out / name / "merged"
        if "adapter" in self.config(plan, name):
            return f"{plan.model(str(self.base))}+{near(plan.out / name)}"
        return plan.out / name


@dataclass(frozen=True)
class Merge(Kind):
    """A merge of models of one base, by a mergekit config or by `axolotl-unlearn merge`.

    Attributes:
        base: Name or folder of the model that all started from.
        parents: Names or folders, in the order of the config's models.
        config: Name in ``mergekit_configs/`` without ".yml", run by `mergekit-yaml`.
        options: Instead of a config: options of `axolotl-unlearn merge` ("--method", "ties", ...).
    """

    base: str
    parents: Sequence[str]
    config: str | None = None
    options: Sequence[str] = ()

    def uses(self) -> Sequence[str]:
        return (self.base, *self.parents)

    def command(self, plan: Plan, name: str) -> list[str]:
        base, *parents = map(plan.model, self.uses())
        if self.config:
            return [
                executable("mergekit-yaml"),
                *map(near, (plan.config_file(name), plan.out / name)),
            ]
        return [
            *(executable("axolotl"), "unlearn", "merge", *self.options, "--parents", *parents),
            *("--base", base, "--out", near(plan.out / name), "--overwrite"),
        ]

    def files(self, plan: Plan, name: str) -> Iterable[Path]:
        return [plan.config_file(name)] if self.config else []

    def stages(self, plan: Plan, name: str, **more: Any) -> Iterable[Stage]:
        if self.config:
            # mergekit takes "a/b" for the name of a hub repository: absolute paths.
            base, *parents = (os.path.abspath(plan.model(model)) for model in self.uses())
            path = plan.home / "mergekit_configs" / f"{self.config}.yml"
            recipe = yaml.safe_load(path.read_text("utf-8")) | {"base_model": base}
            for entry, parent in zip(recipe["models"], parents, strict=True):
                entry["model"] = parent
            plan.write_config(name, f"mergekit_configs/{self.config}.yml", recipe)
        return super().stages(plan, name, **more)


@dataclass(frozen=True)
class Search(Kind):
    """`python -m research tune-merge`: the best merge of adapters on the validation half."""

    base: str
    parents: Sequence[str]
    trials: int = 24
    options: Sequence[str] = ()
    writes: ClassVar[str] = "{}/tune.json"

    def uses(self) -> Sequence[str]:
        return (self.base, *self.parents)

    def command(self, plan: Plan, name: str) -> list[str]:
        return [
            *(sys.executable, "-m", "research", "tune-merge", "--parents"),
            *(plan.adapter(parent) for parent in self.parents),
            *("--base", plan.model(self.base), "--data", near(plan.data)),
            *("--out", near(plan.out / name), "--trials", str(self.trials), "--overwrite"),
            *("--max-new-tokens", str(MAX_NEW_TOKENS), *self.options),
        ]

    def files(self, plan: Plan, name: str) -> Iterable[Path]:
        return [path for half in ("validation", "test") for path in plan.rows(half)]

    def model(self, plan: Plan, name: str) -> Path:
        return plan.out / name / "best"


@dataclass(frozen=True)
class Evaluate(Kind):
    """`axolotl-unlearn eval` of several models; those whose stage was left out are left out too.

    Attributes:
        models: Names of the table, or a mapping from names in the results to names of the table or
            paths, or a function from the plan to such a mapping, called at the start.
        part: Folder below the data: "", "validation" or "test".
        options: Further options of the command.
        then: Called with the plan when the results are there.
    """

    models: Sequence[str] | Mapping[str, str] | Callable[[Plan], Mapping[str, str]]
    part: str = ""
    options: Sequence[str] = ()
    then: Callable[[Plan], Any] | None = None
    writes: ClassVar[str] = "{}/results.json"

    def _named(self, plan: Plan) -> Mapping[str, str]:
        if callable(self.models):
            return self.models(plan)
        return self.models if isinstance(self.models, Mapping) else {n: n for n in self.models}

    def uses(self) -> Sequence[str]:
        if callable(self.models):
            return ()
        return tuple(self.models.values() if isinstance(self.models, Mapping) else self.models)

    def command(self, plan: Plan, name: str) -> list[str]:
        models = {n: where for n, where in self._named(plan).items() if not plan.left_out(where)}
        return [
            *(executable("axolotl"), "unlearn", "eval"),
            *(f"{n}={plan.model(where)}" for n, where in models.items()),
            *("--data", near(plan.data / self.part), "--out", near(plan.out / name)),
            *("--store", near(plan.store), "--max-gen-toks", str(MAX_NEW_TOKENS), "--quiet"),
            *self.options,
        ]

    def files(self, plan: Plan, name: str) -> Iterable[Path]:
        return plan.rows(self.part)

    def stages(self, plan: Plan, name: str, **more: Any) -> Iterable[Stage]:
        then = self.then
        action = (lambda: then(plan) and None) if then else None
        return super().stages(plan, name, action=action, **more)


def change(config: dict[str, Any], key: str, value: Any) -> None:
    """Set (or with None remove) a nested key, "datasets.0.path"; makes what is on the way.

    Raises:
        UnlearnError: A list has no such place.
    """
    value = copy.deepcopy(value)  # what is changed in the config later is the config's own
    *way, last = key.split(".")
    place: Any = config
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    if isinstance(place, list):
        if int(last) > len(place):
            raise UnlearnError(f"{key}: the list has {len(place)} entries only.")
        place[int(last) : int(last) + 1] = [] if value is None else [value]
    elif value is None:
        place.pop(last, None)
    else:
        place[last] = value
