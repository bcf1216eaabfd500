"""`lasting` on LUME, TOFU and the tiny world, on a machine with many cores and one accelerator.

    python -m research.studies.lasting_device --lume DIR --tofu DIR --out OUT --work NEW --minutes 6
    python -m research.studies.lasting_device collect OUT/lasting-device.json

Models with a life are made from nothing. Worker processes import Axolotl once and then do a table
of tasks, by priority, until the time is up; what is timed runs while all others wait. OUT gets
``lasting-device.json``, written anew after each task. The second command writes it, with its tables,
to research/results.

Development seed of all worlds: 401. Every method, `match` too, has six tries there (`TRIED`,
`MATCH`), and the one chosen is, of those that recall at most `lasting.NEAR` more than *retrained*,
that whose retained rows lose least; if there is none, the one that recalls least. Fresh seeds, named here
before their models were made: LUME 421, TOFU 422, tiny 412. One try of each method runs on them.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from axolotl_unlearn.files import write_json
from research.harness.stages import ENVIRONMENT, Plan, Train
from research.studies import lasting, never_seen

DEVELOPMENT, FRESH = 401, {"lume": 421, "tofu": 422, "tiny": 412}
#: Method -> its six strengths; of the paper's pair the beta of the run that forgets too much.
TRIED: Mapping[str, Sequence[float]] = {
    "NPO": (0.01, 0.02, 0.045, 0.1, 0.2, 0.4),
    "merged": (0.005, 0.01, 0.02, 0.03, 0.045, 0.06),
    "SimNPO": (0.8, 2.0, 5.0, 12.0, 30.0, 75.0),
    "RMU": (20.0, 50.0, 100.0, 200.0, 400.0, 1000.0),
    "RepSelect": (0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
}
#: The six tries of `match`, each another way to cut its cost: start (share of the way to the
#: teacher), and what differs from `lasting.short` (4 passes, 4 + 8 rows a step, labels of documents
#: four times as heavy); "preset" is `preset: never-seen` with its ten passes.
MATCH: Mapping[str, tuple[float, dict[str, Any]]] = {
    "preset": (0.5, {"num_epochs": 10, "learning_rate": 1.6e-3}),
    "short": (0.6, {}),
    "half": (  # half of the retained rows a step and of the steps
        0.6,
        {"micro_batch_size": 8, "unlearn.pairing": {"retain_per_forget": 1}, "learning_rate": 2e-3},
    ),
    "batch": (  # four times the rows a step
        0.6,
        {
            "micro_batch_size": 16,
            "num_epochs": 6,
            "learning_rate": 2.4e-3,
            "unlearn.level": {"rows": 50, "every": 20},
        },
    ),
    "near": (0.8, {"micro_batch_size": 8, "num_epochs": 3, "learning_rate": 1e-3}),
    "lean": (  # no terms but `match`, `nckd` and the retained rows'; ends at 0.1 nats; few looks
        0.7,
        {
            "micro_batch_size": 8,
            "learning_rate": 2e-3,
            "unlearn.level": {"rows": 30, "every": 40, "retain": 0.1},
        },
    ),
}
#: Method -> its run, where a command says which (`--take`), without tries.
TAKEN: dict[str, str] = {}
#: Those that are timed alone.
TIMED = ("short", "batch", "lean")
STEPS, LEARNED = lasting.STEPS, lasting.LEARNED
TOKENS = 64
ATTACKS = ("loss", "zlib", "min_k_20", "min_k_plus_20", "entropy", "reference")
#: Retained rows that the teacher reads, and its passes: as many as those of the tuned models.
TAUGHT = {"rows": 48, "passes": 24}
#: Of all runs; --smoke adds to it.
CHANGES: dict[str, Any] = {"sequence_len": 512, "dataloader_num_workers": 0}


def small() -> None:
    """The same on a processor in some minutes."""
    CHANGES.update(max_steps=6)
    for name in TRIED:
        TRIED[name] = TRIED[name][3:4]
    for name in ("short", "preset", "half", "near"):
        MATCH.pop(name, None)
    globals().update(STEPS=(1, 3), TOKENS=8, TAUGHT={"rows": 16, "passes": 2})
    from axolotl_unlearn.attacks import relearn

    relearn.RATES = relearn.RATES[-1:]


def smoke() -> bool:
    return "max_steps" in CHANGES


# --- what a worker does ------------------------------------------------------------------------


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def clocked(into: dict[str, Any]) -> Any:
    """Wall seconds of the training loop (``loop``) and of its looks, and its steps."""
    from transformers import Trainer

    from axolotl_unlearn.training.level import LevelCallback

    train, watch = Trainer.train, LevelCallback.watch
    into.update(loop=0.0, looks=0.0, look=0, steps=0)

    def timed(work: Callable, name: str) -> Callable:
        def run(self: Any, *args: Any, **more: Any) -> Any:
            wait_for_device()
            start = time.perf_counter()
            try:
                return work(self, *args, **more)
            finally:
                wait_for_device()
                into[name] += time.perf_counter() - start
                if name == "loop":
                    into["steps"] += self.state.global_step
                else:
                    into["look"] += 1

        return run

    Trainer.train, LevelCallback.watch = timed(train, "loop"), timed(watch, "looks")
    try:
        yield
    finally:
        Trainer.train, LevelCallback.watch = train, watch


def data(out: Path, world: str, seed: int, folders: Mapping[str, str], much: bool) -> dict:
    """Rows and configs of one seed (0: of the base)."""
    from research.worlds import life, real_text

    base = out.parent / "base"
    rows: dict[str, Any] = {}
    if not seed:
        if world == "tiny":
            sizes = life.LifeSizes(background=(30, 20, 80)) if smoke() else life.LifeSizes()
            life.make_life(out / "data", 0, sizes)
            blank = lasting.ROOT / "examples/tiny-olmo"
        else:
            folder = Path(folders[world])
            rows = real_text.make_corpus(folder, out / "data", world, 0, small=smoke())
            blank = out / "blank"
            real_text.blank(
                lasting.ROOT / "examples/tiny-olmo", blank, out / "data/background.jsonl"
            )
        stages = {"base": Train("memorise", blank, {"datasets.0.path": "base.jsonl", **CHANGES})}
        Plan("lasting", out, stages, seed=42, threads=1)
        return rows
    if world == "tiny":
        lasting.make_data(base, out / "data", seed)
    else:
        folder = Path(folders[world])
        rows = real_text.make_corpus(folder, out / "data", world, seed, much, smoke())
    (out / "base").symlink_to(base / "base")
    tuned = never_seen.table(out, seed, lasting.SIZES, False)
    stages: dict[str, Train] = {
        name: replace(tuned[name], base=out / "base") for name in ("original", "retrained")
    }
    stages |= {"under": tuned["under"]} | lasting.rivals(TRIED)
    stages |= {f"match-{name}": recipe(out, world, name) for name in MATCH}
    for name, stage in stages.items():
        # Adapters are merged by `train`, without the command `axolotl`, which a device may lack.
        stages[name] = replace(stage, changes={**stage.changes, **CHANGES}, merged=False)
    Plan("lasting", out, stages, seed=seed, threads=1)
    return rows


def recipe(out: Path, world: str, name: str) -> Train:
    """One of the six ways of `match`."""
    share, changes = MATCH[name]
    if name == "preset":
        made = lasting.match(out, **changes)
    else:
        made = lasting.short(out, **changes)
        if name == "lean":
            forget = made.changes["unlearn.forget"]
            forget[:] = [one for one in forget if not one["objective"].endswith("_matching")]
    own = {} if world == "tiny" else {"datasets": lasting.OWN_ROWS}
    return replace(made, base=out / f"start-{share}", changes={**made.changes, **own})


def train(out: Path, name: str) -> dict[str, Any]:
    """Train by ``configs/NAME.yml`` and merge a LoRA; what the run itself saw at its last look."""
    import yaml
    from axolotl.cli.train import do_cli
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    marks: dict[str, Any] = {}
    config, folder = out / "configs" / f"{name}.yml", out / name
    with clocked(marks):
        sys.argv = ["axolotl"]
        do_cli(config=str(config))
    if (folder / "adapter_config.json").is_file():
        base = yaml.safe_load(config.read_text("utf-8"))["base_model"]
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        model.merge_and_unload().save_pretrained(folder / "merged")
        AutoTokenizer.from_pretrained(base).save_pretrained(folder / "merged")
    if (folder / "level.json").is_file():
        seen = lasting.read_json(folder / "level.json")
        kept = [one for one in seen["watched"] if one["step"] == seen["kept_step"]]
        marks |= {"kept_step": seen["kept_step"], "kept": kept, "retained": seen["retained"]}
        marks["seen_at"] = [one["step"] for one in seen["watched"]]
    return marks


def teacher(out: Path) -> dict[str, Any]:
    marks: dict[str, Any] = {}
    with clocked(marks):
        lasting.WELL_READ = TAUGHT
        lasting.taught(out, "teacher")
    return marks


def start(out: Path, share: float) -> dict[str, Any]:
    """Between the original and its teacher; a base that read little is far from both (force)."""
    parents, weights = [out / "original", out / "teacher"], [1 - share, share]
    how = {"method": "linear", "weights": weights, "overwrite": True, "force": True}
    lasting.merge(parents, out / "base", out / f"start-{share}", **how)
    return {}


def ties(out: Path, name: str) -> dict[str, Any]:
    """The paper's pair."""
    parents = [lasting._model(out, one) for one in (name.replace("merged", "over"), "under")]
    how = {"method": "ties", "density": 0.8, "overwrite": True}
    lasting.merge(parents, out / "original", out / name, **how)
    return {}


def subjects(out: Path, name: str, control: str | None = None) -> tuple[Any, Any]:
    from axolotl_unlearn.attacks.target import make_subjects
    from axolotl_unlearn.data.records import read_records

    named = [
        one and f"{one.partition('-')[0]}={lasting._model(out, one)}" for one in (name, control)
    ]
    how = {"max_new_tokens": TOKENS, "batch_size": 256, "device": device(), "quiet": True}
    return make_subjects(named[0], read_records(out / "data/forget.jsonl"), named[1], **how)


def score(out: Path, name: str) -> dict[str, Any]:
    """Recall of the forget rows, and the mean NLL of the retained rows."""
    import torch

    from axolotl_unlearn.attacks.probes import plain_probes
    from axolotl_unlearn.attacks.target import collate
    from axolotl_unlearn.config import DataArgs
    from axolotl_unlearn.data.encode import Encoder
    from axolotl_unlearn.data.records import read_records

    subject, _ = subjects(out, name)
    model, tokenizer = subject.load()
    encoder, losses = Encoder(tokenizer, DataArgs(), max_length=512), []
    for record in read_records(out / "data/retain.jsonl"):
        row = encoder.encode(record)
        labels = encoder.labels(row, encoder.labelled(record.kind))
        with torch.no_grad():
            losses.append(model(**collate([(row.input_ids, labels)], model.device)).loss)
    scores = subject.ask(model, tokenizer, plain_probes(subject.records), "asked")
    figures = {m: sum(getattr(scores, m)) / len(scores.ids) for m in ("recalled", "probability")}
    return figures | {"retained": float(torch.stack(losses).mean())}


def given(out: Path, subject: Any, source: str) -> dict[str, Any]:
    from axolotl_unlearn.attacks.relearn import chosen_rows

    return chosen_rows(source, subject.records, out / "data", LEARNED, None, choose=True)


def rate(out: Path, name: str, source: str, number: int) -> dict[str, Any]:
    """One model at one of the five rates; `curve` finds the scores in the store."""
    from axolotl_unlearn.attacks import relearn
    from axolotl_unlearn.store import Store

    subject, _ = subjects(out, name)
    rows = given(out, subject, source)
    asked = [*rows["choose_on"], *rows["asked"]]
    how = relearn.Training(rate=relearn.RATES[number])
    try:
        store = Store(out / "scores")
        relearn.scores_after(subject, store, rows["training_rows"], asked, STEPS, how)
    except relearn.Diverged as fault:
        return {"diverged": str(fault)}
    return {}


def curve(out: Path, name: str, source: str) -> dict[str, Any]:
    """Recall of forget rows at each number of steps, model and control each at its best rate."""
    from axolotl_unlearn.attacks.relearn import relearn_attack
    from axolotl_unlearn.metrics.intervals import smallest_difference
    from axolotl_unlearn.store import Store

    subject, control = subjects(out, name, None if name == "retrained" else "retrained")
    rows = given(out, subject, source)
    counts = {side: [len(rows[side]), len({one.document for one in rows[side]})]
              for side in ("training_rows", "choose_on", "asked")}  # fmt: skip
    store = Store(out / "scores")
    result, _ = relearn_attack(subject, store, **rows, steps=STEPS, control=control)
    for row in result["rows"]:
        for one in row.get("above_control", {}).values():
            one["smallest"] = smallest_difference(one["low"], one["high"])
    return result | {"counts": counts}


def members(out: Path, names: Sequence[str]) -> dict[str, Any]:
    """Each membership attack on each model, and whether its AUC equals *retrained*'s: two one-sided
    tests within 0.05, by document (TOFU: author)."""
    import numpy as np

    from axolotl_unlearn.attacks.registry import Target, by_rank
    from axolotl_unlearn.data.documents import read_documents
    from axolotl_unlearn.data.records import document_id
    from axolotl_unlearn.metrics.membership import auc_equivalence
    from research.attacks import REGISTRY

    sides = [read_documents(out / f"data/{side}.jsonl") for side in ("member", "nonmember")]
    texts = [[text for _, text in side] for side in sides]
    clusters = tuple([document_id(name) for name, _ in side] for side in sides)

    def target(name: str, control: Any = None) -> Any:
        model, tokenizer = subjects(out, name)[0].load()
        return Target(model, tokenizer, control)

    base = target("base")
    seen = {
        name: {
            attack: by_rank(
                *np.split(REGISTRY[attack].look(one, [*texts[0], *texts[1]]), [len(texts[0])]),
                clusters,
            )
            for one in [target(name, base)]
            for attack in ATTACKS
        }
        for name in dict.fromkeys(["retrained", *names])
    }
    found: dict[str, Any] = {
        "texts": [len(side) for side in sides],
        "clusters": [len(set(side)) for side in clusters],
    }
    for name, outcomes in seen.items():
        found[name] = {}
        for attack, one in outcomes.items():
            control = seen["retrained"][attack]
            pairs = ((each.members, each.nonmembers) for each in (one, control))
            same = auc_equivalence(*pairs, margin=0.05, clusters=clusters)
            bound = max(abs(same.low), abs(same.high))
            found[name][attack] = {
                **{key: getattr(one, key) for key in ("auc", "low", "high", "p")},
                "above_retrained": asdict(same) | {"equivalent": same.equivalent, "bound": bound},
            }
    return found


WORK = {
    one.__name__: one for one in (data, train, teacher, start, ties, score, rate, curve, members)
}


def worker(pipe: Any, log: Path, smoke: bool) -> None:
    """Do tasks until the pipe ends; what Axolotl prints goes to a log beside the work."""
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import axolotl.cli.train  # noqa: F401
    import axolotl.core.builders  # noqa: F401
    import torch
    from transformers import set_seed

    torch.set_num_threads(1)
    if smoke:
        small()
    pipe.send({"device": torch.cuda.get_device_name() if device() == "cuda" else "cpu"})
    with contextlib.suppress(EOFError):
        while True:
            what, args = pipe.recv()
            wait_for_device()
            begun, cpu = time.perf_counter(), time.process_time()
            set_seed(0)  # whatever this worker has done before
            try:
                made = WORK[what](*args)
                wait_for_device()
            except BaseException as fault:
                traceback.print_exc()
                made = {"failed": f"{type(fault).__name__}: {fault}"[:300]}
                made["trace"] = traceback.format_exc()[-1500:]
            made["seconds"] = round(time.perf_counter() - begun, 3)
            pipe.send(made | {"cpu_seconds": round(time.process_time() - cpu, 3)})


# --- the table and who does it -----------------------------------------------------------------


@dataclass
class Task:
    """What a worker is to do.

    Attributes:
        key: Its name in the results.
        priority: Lower goes first.
        ask: The function and its arguments, asked when the task can begin; None: not needed.
        needs: Must have succeeded.
        after: Must have ended, or never begin.
        alone: Timed: nothing else runs, always in the same worker.
    """

    key: str
    priority: float
    ask: Callable[[], tuple[str, tuple] | None]
    needs: Sequence[str] = ()
    after: Sequence[str] = ()
    alone: bool = False


def table(work: Path, worlds: Sequence[str], folders: Mapping[str, str], results: dict,
          goals: Sequence[str] = ()) -> list:  # fmt: skip
    """All tasks, or ``goals`` with what they need; those that depend on what was chosen ask ``results``."""
    tasks: list[Task] = []

    def add(key: str, priority: float, what: str, *args: Any, **more: Any) -> str:
        tasks.append(Task(key, priority, lambda: (what, args), **more))
        return key

    def chosen(world: str, method: str, by: str = "retained") -> str | None:
        """The try of a method by the rule of this study; ``by`` "cost": of those that were
        timed the quickest that recalls no more and loses at most 0.1 nats."""
        dev = f"{world}/{DEVELOPMENT}"
        if method in TAKEN:
            return TAKEN[method]
        names = [
            *(f"match-{one}" for one in MATCH if method == "match"),
            *(f"{method.lower()}-{value:g}" for value in TRIED.get(method, ())),
        ]
        made = {n: results.get(f"{dev}/score:{n}", {}) for n in names}
        made = {name: one for name, one in made.items() if "recalled" in one}
        if not made:
            return None
        most = results[f"{dev}/score:retrained"]["recalled"] + lasting.NEAR
        held = results[f"{dev}/score:original"]["retained"] + 0.1
        near = [name for name, one in made.items() if one["recalled"] <= most]
        kept = [f"match-{n}" for n in TIMED]
        kept = [name for name in kept if name in near and made[name]["retained"] <= held]
        if by == "cost" and kept:
            return min(kept, key=lambda name: results[f"{dev}/train:{name}"]["seconds"])
        if near:
            return min(near, key=lambda name: made[name]["retained"])
        return min(made, key=lambda name: made[name]["recalled"])

    for place, world in enumerate(worlds):
        late = 0 if world != "tiny" else 20  # all of the tiny world comes last
        base, dev, fresh, much = (
            work / world / name
            for name in ("base", str(DEVELOPMENT), str(FRESH[world]), f"{FRESH[world]}-4x")
        )
        at = {one: f"{world}/{one.name}" for one in (base, dev, fresh, much)}
        first = add(f"{at[base]}/data", late, "data", base, world, 0, folders, False)
        read = add(f"{at[base]}/train:base", late, "train", base, "base", needs=[first])
        for out, seed in ((dev, DEVELOPMENT), (fresh, FRESH[world]), (much, FRESH[world])):
            one, more = at[out], 2.5 if out == much else 0.5
            rows = add(
                f"{one}/data", late + more, "data", out, world, seed, folders, out == much,
                needs=[first],
            )  # fmt: skip
            known = add(
                f"{one}/train:original", late + more, "train", out, "original", needs=[rows, read]
            )
            alone = {"alone": out != dev}
            again = add(
                f"{one}/train:retrained", late + more + (2 if out != dev else 0), "train", out,
                "retrained", needs=[rows, read], **alone,
            )  # fmt: skip
            taught = add(
                f"{one}/teacher", late + more + (2 if out != dev else 0), "teacher", out,
                needs=[rows, read], **alone,
            )  # fmt: skip
            for name in ("original", "retrained"):
                add(
                    f"{one}/score:{name}", late + more + 0.4, "score", out, name,
                    needs=[known if name == "original" else again],
                )  # fmt: skip
            if out == dev:
                for share in sorted({share for share, _ in MATCH.values()}):
                    add(
                        f"{one}/start-{share}",
                        late + 0.5,
                        "start",
                        out,
                        share,
                        needs=[known, taught],
                    )
        # `match`: six tries on the development seed and one on the fresh seed.
        one = at[dev]
        for number, (name, (share, _)) in enumerate(MATCH.items()):
            alone, more = name in TIMED, 1 + place / 10 + number / 100 if name in TIMED else 0.9
            run = add(
                f"{one}/train:match-{name}", late + more, "train", dev, f"match-{name}",
                needs=[f"{one}/start-{share}"], alone=alone,
            )  # fmt: skip
            add(f"{one}/score:match-{name}", late + 1.9, "score", dev, f"match-{name}", needs=[run])
        tried = {
            "match": [f"{one}/score:match-{name}" for name in MATCH],
            **{m: [f"{one}/score:{m.lower()}-{v:g}" for v in TRIED[m]] for m in TRIED},
        }
        for method, scores in tried.items():
            scores += [f"{one}/score:original", f"{one}/score:retrained"]
            if method in TAKEN:
                scores.clear()

        def later(
            key: str, priority: float, what: str, out: Path, method: str, *args: Any,
            by: str = "retained", rename: str = "", world: str = world, **more: Any,
        ) -> str:  # fmt: skip
            """Of the try of ``method`` that was chosen; ``start`` needs its share."""

            def ask() -> tuple[str, tuple] | None:
                name = method if method == "retrained" else chosen(world, method, by)
                if name is None or (by == "cost" and out.name == str(FRESH[world])
                                    and name == chosen(world, method)):  # fmt: skip
                    return None
                if what == "start":
                    return what, (out, MATCH[name.removeprefix("match-")][0])
                if rename:
                    name = name.replace(*rename.split(">"))
                return what, (out, name, *args)

            tasks.append(Task(key, priority, ask, **more))
            return key

        for out in (fresh, much):
            one, more = at[out], late + (4.55 if out == much else 2 + place / 10)
            by = "cost" if out == much else "retained"
            ways = [("match", by), *([("match-cheap", "cost")] if out == fresh else [])]
            for name, by in ways:
                options = {"by": by, "after": tried["match"]}
                begun = later(
                    f"{one}/start:{name}", more, "start", out, "match", alone=True,
                    needs=[f"{one}/train:original", f"{one}/teacher"], **options,
                )  # fmt: skip
                run = later(
                    f"{one}/train:{name}", more + 0.01, "train", out, "match", needs=[begun],
                    alone=True, **options,
                )  # fmt: skip
                later(f"{one}/score:{name}", more + 1, "score", out, "match", needs=[run], by=by)

        # The other methods: six tries on the development seed, one on the fresh one.
        timed = [f"{at[fresh]}/train:match-cheap"]
        for number, (method, strengths) in enumerate(TRIED.items()):
            more, merged = late + 3 + (number > 1) * 2, method == "merged"
            for out in (dev, fresh) if merged else ():
                add(f"{at[out]}/train:under", more, "train", out, "under",
                    needs=[f"{at[out]}/train:original"], after=timed)  # fmt: skip
            for value in strengths:
                one, name = at[dev], f"{method.lower()}-{value:g}"
                made = add(
                    f"{one}/train:{name.replace('merged', 'over')}", more, "train", dev,
                    name.replace("merged", "over"), needs=[f"{one}/train:original"], after=timed,
                )  # fmt: skip
                if merged:
                    made = add(f"{one}/ties:{name}", more, "ties", dev, name,
                               needs=[made, f"{one}/train:under"])  # fmt: skip
                add(f"{one}/score:{name}", more, "score", dev, name, needs=[made])
            one = at[fresh]
            made = later(
                f"{one}/train:{method.lower()}", more + 0.1, "train", fresh, method,
                rename="merged>over", needs=[f"{one}/train:original"], after=tried[method],
            )  # fmt: skip
            if merged:
                made = later(f"{one}/ties:merged", more + 0.1, "ties", fresh, method,
                             needs=[made, f"{one}/train:under"])  # fmt: skip
            later(f"{one}/score:{method.lower()}", more + 0.1, "score", fresh, method, needs=[made])

        # Relearning: each rate is a task of its own, the curve finds what they stored.
        from axolotl_unlearn.attacks.relearn import RATES

        def relearned(
            source: str, method: str, priority: float, one: str = at[fresh], fresh: Path = fresh,
            later: Callable = later, late: int = late,
        ) -> None:  # fmt: skip
            name = method.lower()
            kind = "ties" if method == "merged" else "train"
            rates = [
                later(
                    f"{one}/rate:{name}:{source}:{n}",
                    late + priority,
                    "rate",
                    fresh,
                    method,
                    source,
                    n,
                    needs=[f"{one}/{kind}:{name}"],
                )  # fmt: skip
                for n in reversed(range(len(RATES)))
            ]
            if method != "retrained":
                rates += [f"{one}/rate:retrained:{source}:{n}" for n in range(len(RATES))]
            if (method, source) != ("retrained", "same"):
                later(f"{one}/curve:{name}:{source}", late + priority - 3, "curve", fresh, method,
                      source, after=rates, needs=[f"{one}/{kind}:{name}"])  # fmt: skip

        for number, method in enumerate(("retrained", "match", *TRIED)):
            relearned("forget", method, 4 if number < 4 else 6)
        for source in ("neighbours", "retain", "same"):
            for method in ("retrained", "match"):
                relearned(source, method, 8)

        def judged(out: Path = fresh, world: str = world) -> tuple[str, tuple]:
            names = [chosen(world, method) for method in ("match", *TRIED)]
            there = [n for n in names if n and (lasting._model(out, n) / "config.json").is_file()]
            return "members", (out, ["original", *there])

        needs = [f"{at[fresh]}/train:{name}" for name in ("original", "retrained", "match")]
        for priority, after in (
            (2.9, ()),
            (6.1, [f"{at[fresh]}/score:{m.lower()}" for m in TRIED]),
        ):
            key = f"{at[fresh]}/members" + (":all" if after else "")
            tasks.append(Task(key, late + priority, judged, needs, after))
    keys = [task.key for task in tasks]
    if goals:
        named = {task.key: task for task in tasks}
        kept, queue = set(), list(goals)
        while queue:
            kept.add(key := queue.pop())
            queue += named[key].needs
            queue += [other for other in named[key].after if "/rate:" in other]
        tasks = [
            replace(named[key], after=kept & {*named[key].after}) for key in keys if key in kept
        ]
        keys = [task.key for task in tasks]
    unknown = {key for task in tasks for key in (*task.needs, *task.after)} - set(keys)
    assert not unknown and len(set(keys)) == len(keys), unknown
    return sorted(tasks, key=lambda task: task.priority)


def run(tasks: Sequence[Task], results: dict, out: Path, workers: int, until: float, smoke: bool,
        log: Path) -> None:  # fmt: skip
    """Give tasks to workers, the first by priority that can begin, until the time is up."""
    context, begun = mp.get_context("spawn"), time.monotonic()
    pool: dict[Any, Any] = {}
    for number in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=worker, args=(theirs, log / f"{number}.log", smoke), daemon=True
        )
        process.start()
        theirs.close()
        pool[ours] = process
    first, idle, busy = next(iter(pool)), [], dict.fromkeys(pool)  # None: still importing
    waiting = list(tasks)
    ended: dict[str, bool] = {}

    def save() -> None:
        write_json(
            out / "lasting-device.json",
            {"wall": round(time.monotonic() - begun, 1), **about, "tasks": results},
        )

    about: dict[str, Any] = {"workers": workers, "seeds": FRESH, "development": DEVELOPMENT}
    about |= {"tried": dict(TRIED), "match": {name: list(one) for name, one in MATCH.items()}}

    def pick() -> Task | None:
        for task in list(waiting):
            if any(ended.get(key) is False for key in task.needs):
                waiting.remove(task)
                ended[task.key] = False
                results[task.key] = {"failed": "what it needs"}
            elif all(key in ended for key in (*task.needs, *task.after)):
                return task
        return None

    while time.monotonic() < until and (waiting or any(busy.values())):
        while idle and (task := pick()):
            timed = [one for one in busy.values() if one and one.alone]
            if timed or (task.alone and (busy or first not in idle)):
                break
            waiting.remove(task)
            try:
                asked = task.ask()
            except KeyError as fault:  # nothing to choose by
                asked, results[task.key] = None, {"failed": f"no {fault}"}
            if asked is None:
                results.setdefault(task.key, {"not_needed": True})
                ended[task.key] = "failed" not in results[task.key]
                continue
            pipe = first if task.alone else idle[-1]
            idle.remove(pipe)
            pipe.send(asked)
            busy[pipe] = task
            results.setdefault(task.key, {})["did"] = [asked[0], *map(str, asked[1][1:3])]
        for pipe in multiprocessing.connection.wait(
            list(busy), timeout=min(1.0, max(0.05, until - time.monotonic()))
        ):
            task = busy.pop(pipe)
            try:
                made = pipe.recv()
            except EOFError:
                made = {"failed": "its worker died"}
                del pool[pipe]
                first = first if first in pool else next(iter(pool))
            else:
                idle.append(pipe)
                idle.sort(key=lambda one: one is first, reverse=True)
            if task is None:
                about |= made
                about["ready"] = round(time.monotonic() - begun, 1)
                continue
            made["ended"] = round(time.monotonic() - begun, 1)
            results[task.key] |= made
            ended[task.key] = "failed" not in made
            print(
                f"{made['ended']:6.1f} {made.get('seconds', 0):6.1f} s  {task.key}  {made.get('failed', '')}",
                flush=True,
            )
            save()
    about["left"] = [task.key for task in waiting] + [one.key for one in busy.values() if one]
    save()
    print(f"{time.monotonic() - begun:.0f} s; not done: {len(about['left'])}", flush=True)
    for process in pool.values():
        process.kill()


# --- what the docs say of it -------------------------------------------------------------------


def add_later(tasks: dict[str, Any], later: Mapping[str, Any]) -> None:
    """What a second run adds. Costs that are compared with its own are its own; what else both have
    stays under ``KEY@cpu``."""
    for key, one in later.items():
        if "cpu_seconds" in one:  # beside others, whose load is not this one's
            one["seconds"] = one["cpu_seconds"]
        missing = "seconds" not in tasks.get(key, {}) or "failed" in tasks[key]
        costs = key.endswith(("/train:retrained", "/teacher", "/members"))
        own = missing or costs or "-4x/" in key
        tasks[key if own else f"{key}@cpu"] = one | {"device": "cpu"}


def figure(content: Mapping[str, Any]) -> None:
    """Recall against steps: the tiny world of `lasting`, LUME and TOFU."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    tiny = lasting.read_json(lasting.ROOT / "research/results/lasting.json")
    first = tiny["seeds"][lasting.FRESH[0]]["relearned"]
    panels = {"tiny": {name: one for name, one in first.items() if ":" not in name}}
    for world in ("lume", "tofu"):
        heads = (f"{world}/{FRESH[world]}/curve:", ":forget")
        panels[world.upper()] = {
            key.removeprefix(heads[0]).removesuffix(heads[1]): one
            for key, one in content["tasks"].items()
            if key.startswith(heads[0]) and key.endswith(heads[1]) and "rows" in one
        }
    with rc_context({"svg.hashsalt": "lasting"}):
        drawing = Figure(figsize=(9.6, 3.6), layout="constrained")
        for axes, (name, results) in zip(
            drawing.subplots(1, len(panels), sharey=True), panels.items(), strict=True
        ):
            lasting.draw(axes, results)
            axes.set_title(name)
        drawing.axes[0].set_ylabel("recall of forgotten documents")
        drawing.savefig(lasting.ROOT / "docs/images/relearning.svg", metadata={"Date": None})


def collected(made: dict[str, Any]) -> dict[str, Any]:
    """What was measured, and its tables: ``WHAT-WORLD``."""
    tasks = {key: one for key, one in made.pop("tasks").items() if "seconds" in one}
    for one in tasks.values():
        one.pop("trace", None)
    tables: dict[str, Any] = {}
    sizes = []
    for world, seed in FRESH.items():
        for name in (str(seed), f"{seed}-4x"):
            here = _of(tasks, f"{world}/{name}/")
            if "train:retrained" not in here:
                continue
            tables[f"cost-{world}{name.removeprefix(str(seed))}"] = _cost_table(here)
            sizes += _sizes(f"{world} ({name})", here)
        dev, fresh = (_of(tasks, f"{world}/{one}/") for one in (DEVELOPMENT, seed))
        if any(key.startswith("score:match") for key in dev):
            tables[f"tries-{world}"] = _tries_table(dev, made["match"], fresh)
        curves = {key.split(":", 1)[1]: one for key, one in fresh.items()
                  if key.startswith("curve:") and "rows" in one and "@" not in key}  # fmt: skip
        for source in dict.fromkeys(key.partition(":")[2] for key in curves):
            some = {k.partition(":")[0]: v for k, v in curves.items() if k.endswith(f":{source}")}
            if "retrained" not in some:
                rows = next(iter(some.values()))["rows"]
                some["retrained"] = {"rows": [{"x": row["x"], **row["control"]} for row in rows]}
            tables[f"relearned-{world}-{source}"] = lasting.relearn_table(some)
        told = {**fresh.get("members", {}), **fresh.get("members:all", {})}
        if "retrained" in told:
            tables[f"members-{world}"] = _members_table(told)
    columns = ["world", "rows to forget", "to retain", "retraining (s)", "teacher and `match` (s)"]
    tables["sizes"] = {"columns": [*columns, "of retraining", "less from (rows)"], "rows": sizes}
    return {**made, "tasks": tasks, "tables": tables}


def _of(tasks: Mapping[str, Any], head: str) -> dict[str, Any]:
    return {key.removeprefix(head): one for key, one in tasks.items()
            if key.startswith(head) and "failed" not in one}  # fmt: skip


def _cost_table(here: Mapping[str, Any]) -> dict[str, Any]:
    """Wall seconds alone on the device, those of the training loop, and shares of *retrained*."""
    rows, base = [], here["train:retrained"]
    names = (
        "train:retrained",
        "teacher",
        "start:match",
        "train:match",
        "start:match-cheap",
        "train:match-cheap",
    )
    for name in (name for name in names if name in here):
        one = here[name]
        cells = [str(one.get("steps", "")), f"{one['seconds']:.1f}"]
        cells += [f"{one[key]:.1f}" if key in one else "" for key in ("loop", "looks")]
        share = one["seconds"] / base["seconds"]
        inner = f"{one['loop'] / base['loop']:.2f}" if "loop" in one else ""
        rows.append([name.partition(":")[2] or name, *cells, f"{share:.2f}", inner])
    columns = [
        "run",
        "steps",
        "in all, s",
        "training, s",
        "of it looks, s",
        "of retraining",
        "training alone",
    ]
    return {"columns": columns, "rows": rows}


def _sizes(what: str, here: Mapping[str, Any]) -> list[list[str]]:
    """Teacher, start and the cheaper `match` beside retraining, and from how many rows they pay."""
    name = "match-cheap" if "train:match-cheap" in here else "match"
    parts = ("teacher", f"start:{name}", f"train:{name}")
    if not all(key in here for key in ("data", *parts)):
        return []
    ours, theirs = sum(here[key]["seconds"] for key in parts), here["train:retrained"]["seconds"]
    rows = here["data"].get("rows") or {"forget": 0, "retain": 0}
    share, counts = ours / theirs, [str(rows["forget"]), str(rows["retain"])]
    pays = f"{round(rows['retain'] * share, -1):.0f}"
    return [[what, *counts, f"{theirs:.1f}", f"{ours:.1f}", f"{share:.2f}", pays]]


def _tries_table(dev: Mapping, ways: Mapping, fresh: Mapping) -> dict[str, Any]:
    """The tries of all methods on the development seed; in the last column the one chosen."""
    taken = {one["did"][1] for key, one in fresh.items() if key.startswith("score:")}
    rows = []
    for key in (key for key in dev if key.startswith("score:")):
        name, one = key.removeprefix("score:"), dev[key]
        run = dev.get(f"train:{name.replace('merged', 'over')}", {})
        kept = (run.get("kept") or [{}])[0]
        cells = [
            str(run.get("steps", "")),
            f"{run.get('seconds', 0):.1f}",
            f"{one['recalled']:.2f}",
        ]
        cells.append(f"{one['retained'] - dev['score:original']['retained']:+.2f}")
        cells.append(f"{kept['loss']:.2f}" if "loss" in kept else "")
        rows.append([f"*{name}*", *cells, "yes" if name in taken else ""])
    columns = ["run", "steps", "s", "recall", "retained rows, nats", "AUC loss", "chosen"]
    return {"columns": columns, "rows": rows}


def _members_table(told: Mapping[str, Any]) -> dict[str, Any]:
    """AUC, and the bound within which it equals *retrained*'s (90 % interval, by document)."""
    rows = []
    for name, attacks in told.items():
        if not isinstance(attacks, Mapping) or "loss" not in attacks:
            continue
        cells = []
        for one in attacks.values():
            same = one["above_retrained"]
            cells.append(f"{one['auc']:.2f}")
            if name != "retrained":
                mark = ", equal" if same["equivalent"] else ""
                cells[-1] += f" ({same['value']:+.2f}, within {same['bound']:.2f}{mark})"
        rows.append([f"*{name}*", *cells])
    return {"columns": ["model", *ATTACKS], "rows": rows}


def main() -> None:
    if sys.argv[1:2] == ["collect"]:  # FILE [FILES of what was run on a processor afterwards]
        made, *later = (lasting.read_json(Path(path)) for path in sys.argv[2:])
        for other in later:
            add_later(made["tasks"], other["tasks"])
        content = collected(made)
        write_json(lasting.ROOT / "research/results/lasting-device.json", content)
        figure(content)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--lume", default=os.environ.get("LUME_DIR", "shared/lume"))
    parser.add_argument("--tofu", default=os.environ.get("TOFU_DIR", "shared/tofu"))
    parser.add_argument("--worlds", default="lume,tofu,tiny")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="models; an empty folder")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--goals", nargs="+", default=(), help="these tasks, and what they need")
    parser.add_argument("--take", nargs="+", default=(), metavar="METHOD=RUN")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    TAKEN.update(one.split("=", 1) for one in args.take)
    until = time.monotonic() + 60 * args.minutes
    os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    os.environ["HF_HOME"] = str(args.work.absolute() / "hub")
    if args.smoke:
        small()
    args.work.mkdir(parents=True)
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    folders = {"lume": os.path.abspath(args.lume), "tofu": os.path.abspath(args.tofu)}
    tasks = table(args.work.absolute(), args.worlds.split(","), folders, results, args.goals)
    run(tasks, results, args.out, args.workers, until, args.smoke, args.work)


if __name__ == "__main__":
    main()
