"""TOFU's forget05 (arXiv 2401.06121) on SmolLM2-135M: methods at three strengths each, beside a retrained model.

    python -m research.studies.tofu OUT [--only NAME ...]      TOFU_DIR: TOFU's files
    python -m research.studies.tofu OUT --to tofu-forget05     of what is done: research/results
    python -m research.studies.tofu OUT --seed 542             a second seed, named before it ran

200 rows (ten authors) are forgotten, 300 of retain90 (15 authors) retained; the task `tofu` scores `ROWS` of each
set, evenly over authors. Nothing is chosen: every strength is in the table. Presets have their published settings
at three learning rates; *TNPO* is examples/smollm2/over.yml at three betas, *merged* each two of these by TIES.
All unlearn for 50 steps of a LoRA on the last 20 layers (RMU: 25; `match`: all, from its teacher's start, with 200
other rows of retain90 for its level). *shards* are eight by author, before and after one request for the ten
authors (``--way shards``). Intervals are 95 % over authors (of world facts: over questions), those of p, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.request import write_yaml
from axolotl_unlearn.requests.ways.shards import make, train_shards
from eval_tasks.tofu.utils import auc_of_rows, forget_quality, utility_of_rows
from research.analysis.seeds import facts
from research.harness import import_libraries
from research.runs import ROOT, in_parallel
from research.studies.exact_requests import processor
from research.studies.reproduce import REAL, SOURCES, Real
from research.worlds.smollm2 import fetch_smollm2

SEED, AUTHOR, FORGET, RETAIN = 541, 20, 200, 300
HELDOUT, UNSEEN = slice(300, 500), slice(500, 700)
ROWS = {"forget05_perturbed": 100, "retain_perturbed": 45, "holdout": 100,
        "real_authors_perturbed": 30, "world_facts_perturbed": 30}  # fmt: skip
RATES = (0.0005, 0.0015, 0.004)
PRESETS = {"NPO": "tofu-npo", "SimNPO": "tofu-simnpo", "RMU": "rmu-zephyr"}
BETAS, PAIRS = (REAL[0], REAL[3], REAL[5]), ((0, 1), (0, 2), (1, 2))
FRAME = {"num_epochs": 2, "peft_layers_to_transform": list(range(10, 30))}
#: Column -> figure of the task.
COLUMNS = {"ROUGE-L": "forget_rouge_l_recall", "truth ratio": "forget_truth_ratio",
           "extraction": "forget_extraction_strength", "forget quality (p)": "forget_quality",
           "AUC": "auc_min_k_plus_0.4", "utility": "model_utility"}  # fmt: skip
#: Of figures that are not of the forget set alone.
SETS = {"auc_min_k_plus_0.4": ("forget", "holdout"),
        "model_utility": ("retain", "real_authors", "world_facts")}  # fmt: skip


def spread(rows: list[Any], count: int) -> list[Any]:
    """Evenly over all rows: twenty neighbours are of one author."""
    return [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]


class Tofu(Real):
    def draw(self) -> None:
        self.base = self.out.parent / "smollm2"
        files = {path.stem: read_json_lines(path) for path in SOURCES["TOFU"].glob("*.jsonl")}
        files["forget05_perturbed"] = files["forget10_perturbed"][-FORGET:]
        files["retain_perturbed"] = files["retain_perturbed"][:RETAIN]
        files["holdout"] = files["retain90"][UNSEEN]
        sides = {"forget": files["forget05_perturbed"], "retain": files["retain90"][:RETAIN],
                 "heldout": files["retain90"][HELDOUT]}  # fmt: skip
        for name, rows in sides.items():
            write_lines(self.data / f"{name}.jsonl", rows)
        for name, count in ROWS.items():
            write_lines(self.data / "scored" / f"{name}.jsonl", spread(files[name], count))

    def learned(self, name: str, *rows: str) -> None:
        changes = {"base_model": self.base, "datasets": self.rows(*rows, kind="memorise")}
        self.runs.train(name, "tofu/memorise", changes)

    def unlearned(self, name: str, changes: dict[str, Any]) -> None:
        own = {"base_model": self.path("original"), "datasets": self.rows("forget", "retain")}
        self.runs.train(name, "tofu/forget", FRAME | own | changes)

    def deep(self, name: str, strength: int) -> None:
        text, _ = BETAS[strength]
        block = {"forget": [{"objective": "tnpo", "weight": 5.0, "beta": text}], "reference": "cached",
                 "retain": [{"objective": "nll", "weight": 2.0},
                            {"objective": "kl", "weight": 0.5, "direction": "reverse"}]}  # fmt: skip
        data = {f"unlearn.{key}": one for key, one in block.items()}
        self.unlearned(name, {"unlearn.preset": None, "learning_rate": 0.002} | data)

    def matched(self, name: str, rate: float) -> None:
        teacher = {"model": str(self.base), "adapter": str(self.out / "teacher")}
        data = {"unlearn.preset": "never-seen", "unlearn.teacher": teacher,
                "unlearn.original": self.path("original"), "learning_rate": rate,
                "unlearn.heldout": self.data / "heldout.jsonl"}  # fmt: skip
        start = {"base_model": self.out / "teacher-start", "peft_layers_to_transform": None}
        self.unlearned(name, data | start | {"lora_r": 64, "lora_alpha": 64})

    def sharded(self, name: str) -> None:
        """``shards/model``, or with ``deleted`` the request that follows; ``costs.json``: processor seconds."""
        data, costs = self.out / "data" / "authors.jsonl", self.out / "shards" / "costs.json"
        path, seen = self.out / "configs" / "shards.yml", processor()
        write_lines(data, [
            {"author": f"{side} {n // AUTHOR}", "segments": [
                {"label": False, "text": f"Question: {one['question']}\nAnswer:"},
                {"label": True, "text": f" {one['answer']}<|im_end|>"}]}
            for side in ("forget", "retain")
            for n, one in enumerate(read_json_lines(self.data / f"{side}.jsonl"))])  # fmt: skip
        config = yaml.safe_load((ROOT / "examples/tofu/memorise.yml").read_text("utf-8"))
        rows = {"path": str(data), "ds_type": "json", "type": "input_output"}
        config |= {"base_model": str(self.base), "datasets": [rows], "bf16": False}
        config["seed"], key = self.seed, str(self.seed).encode().ljust(32)
        if self.runs.dtype == "bfloat16":  # Axolotl refuses `bf16` on a processor
            os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        write_yaml(path, "", {k: v for k, v in config.items() if k not in ("plugins", "unlearn")})
        if name == "shards":
            made = train_shards(path, self.out / name, "author", 8, threads=1, key=key)
            found = {"rows": made["rows"]}
        else:
            wanted = Wanted(where=[("author", f"forget {n}") for n in range(FORGET // AUTHOR)])
            options = Options(model=self.out / "shards" / "model", steps=2)
            request = new_request(path, self.out / "requests" / "1", wanted, options).request
            seen = processor()
            with running.running(request, 1) as run:
                running.take(request, "shards")
                make(request, run)
            found = {"again": request.way["again"], **json.loads(costs.read_text("utf-8"))}
        write_json(costs, found | {name: round(processor() - seen, 1)})

    def path(self, name: str) -> Path:
        routed = {"shards": "shards/model", "deleted by shards": "requests/1/work/model"}
        return self.out / routed[name] if name in routed else super().path(name)

    def measure(self, name: str, *models: str) -> None:
        folder, own = self.out / "eval" / name, self.out / "eval" / "retrained" / "ratios.json"
        folder.mkdir(parents=True, exist_ok=True)
        given = {"data_dir": str(self.data / "scored"), "split": "forget05",
                 "holdout": str(self.data / "scored" / "holdout.jsonl"),
                 "truth_ratios_out": str(folder / "ratios.json")}  # fmt: skip
        given |= {} if name == "retrained" else {"retrained": str(own)}
        words = ["axolotl-unlearn", "tasks", "run", "--model", "hf-unlearn", "--tasks", "tofu",
                 "--model_args", f"pretrained={self.path(name)},dtype={self.runs.dtype}",
                 "--batch_size", 16,
                 "--metadata", json.dumps(given), "--gen_kwargs", "max_gen_toks=64",
                 "--log_samples", "--output_path", folder / "scores.json"]  # fmt: skip
        self.runs.command(
            f"eval-{name}", words, self.runs.key(self.path(name)), makes=folder / "ratios.json"
        )

    def scores(self, name: str) -> dict[str, list[float]]:
        """Figures of the task with 95 % intervals; empty where the model was not scored."""
        folder, units = self.out / "eval" / name, self.units(name)
        if not units:
            return {}
        found = json.loads(sorted(folder.glob("scores_*.json"))[-1].read_text("utf-8"))
        means = {key.split(",")[0]: value for key, value in found["results"]["tofu"].items()}
        theirs = sum(self.units("retrained")["forget"], [])
        own = {row["doc"]["number"]: row["forget_quality"][1] for row in theirs}
        statistics = {"forget_quality": lambda rows: quality(rows, own),
                      "auc_min_k_plus_0.4": lambda rows: auc_of_rows(
                          [row["auc_min_k_plus_0.4"] for row in rows], sign=-1),
                      "model_utility": lambda rows: utility_of_rows(
                          [row["model_utility"] for row in rows])}  # fmt: skip
        scores = {}
        for column, key in COLUMNS.items():
            of = statistics.get(key, lambda rows, key=key: fmean(row[key] for row in rows))
            parts = [units[one] for one in SETS.get(key, ("forget",))]
            known = not (key == "forget_quality" and name == "retrained")
            scores[column] = [means[key], *(over_units(parts, of) if known else ())]
        return scores

    def units(self, name: str) -> dict[str, list[list[dict[str, Any]]]]:
        """Samples by set and what is independent of each other: authors, of world facts each question."""
        files = sorted((self.out / "eval" / name).glob("samples_tofu_*.jsonl"))
        of: dict[str, Any] = defaultdict(lambda: defaultdict(list))
        sizes = {"forget": (FORGET, 100), "holdout": (200, 100), "retain": (RETAIN, 45)}
        for row in read_json_lines(files[-1]) if files else ():
            side, number = row["doc"]["set"], row["doc"]["number"]
            whole, count = sizes.get(side, (0, 0))
            unit = number * whole // count // AUTHOR if count else row["doc"]["answer"]
            of[side][unit].append(row)
        return {side: [*found.values()] for side, found in of.items()}


def quality(rows: list[dict[str, Any]], own: Mapping[int, float]) -> float:
    """p of the truth ratios against the retrained model's of the same rows."""
    theirs = [own[row["doc"]["number"]] for row in rows]
    return forget_quality([row["forget_quality"][1] for row in rows], theirs)[0]


def over_units(
    parts: list[list[list[Any]]], statistic: Callable[[list[Any]], float], draws: int = 2000
) -> tuple[float, float]:
    """95 % interval of a figure of rows: of each part its units are drawn, each with all of its rows."""
    rng, found = random.Random(0), []
    for _ in range(draws):
        drawn = [one for units in parts for one in rng.choices(units, k=len(units))]
        found.append(statistic(sum(drawn, [])))
    found.sort()
    return found[draws // 40], found[-draws // 40 - 1]


def graph(world: Tofu) -> dict[str, Any]:
    """Jobs in the order of worth: name -> (names before it, what makes the model)."""
    jobs = {"retrained": ((), lambda: world.learned("retrained", "retain")),
            "original": ((), lambda: world.learned("original", "forget", "retain"))}  # fmt: skip

    def add(name: str, after: tuple[str, ...], step: Any, *given: Any) -> None:
        jobs[name] = (after, lambda: step(name, *given))

    for n in range(3):
        add(f"TNPO{n}", ("original",), world.deep, n)
    for one, two in PAIRS:
        pair = f"TNPO{one}", f"TNPO{two}"
        add(f"merged{one}{two}", pair, world.merged, *pair)
    for method in PRESETS:
        for n, rate in enumerate(RATES):
            changes = {"unlearn.preset": PRESETS[method], "learning_rate": rate}
            if method == "RMU":  # whose layer is the seventh
                changes["peft_layers_to_transform"] = list(range(5, 30))
            add(f"{method}{n}", ("original",), world.unlearned, changes)
    jobs["teacher"] = ("original",), world.teacher
    for n, rate in enumerate((0.002, 0.001, 0.004)):
        add(f"match{n}", ("teacher",), world.matched, rate)
    jobs["shards"] = (), lambda: world.sharded("shards")
    jobs["deleted by shards"] = ("shards",), lambda: world.sharded("deleted by shards")
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=6000)
    parser.add_argument("--only", nargs="+", help="jobs by name; what they stand on is there")
    parser.add_argument("--to", help="write research/results/NAME.json of what is done")
    given = parser.parse_args()
    out = given.out.absolute()
    fetch_smollm2(out / "smollm2")
    world = Tofu(out, given.seed, threads=1, forks=True)
    jobs = graph(world)
    if given.to:
        scores = {name: one for name in jobs if (one := world.scores(name))}
        write_json(ROOT / "research" / "results" / f"{given.to}.json", results(world, scores))
        return
    import_libraries("axolotl_unlearn.cli", "lm_eval")

    def work(name: str) -> None:
        jobs[name][1]()
        if name != "teacher":
            world.measure(name)

    chosen = {n: ([a for a in jobs[n][0] if a in (given.only or jobs)], lambda n=n: work(n))
              for n in given.only or jobs}  # fmt: skip
    ended = in_parallel(chosen, given.jobs, given.minutes)
    if failed := [name for name in chosen if not ended.get(name)]:
        raise SystemExit(f"not done: {', '.join(failed)}; logs lie in {world.out}/logs")


def results(world: Tofu, scores: dict[str, Any]) -> dict[str, Any]:
    def shown(column: str, mean: float, *ends: float) -> str:
        how = ".2g" if column.startswith("forget") else ".2f"
        found = f" [{ends[0]:{how}}, {ends[1]:{how}}]" if ends else ""
        return "" if math.isnan(mean) else f"{mean:{how}}{found}"

    costs = {name: one["processor"] for name, one in world.runs.done.items()}
    spent, file = sum(costs.values()), world.out / "shards" / "costs.json"
    costs |= json.loads(file.read_text("utf-8")) if file.is_file() else {}
    cost = [[name, f"{costs[name]:.0f}"] for name in ("teacher", *scores) if name in costs]
    rows = [
        [name, *(shown(key, *figure) for key, figure in one.items())]
        for name, one in scores.items()
    ]
    return facts(f"python -m research.studies.tofu OUT --seed {world.seed}") | {
        "seed": world.seed, "rows": ROWS, "rates": RATES, "betas": [text for text, _ in BETAS],
        "processor_hours": round(spent / 3600, 2), "scores": scores,
        "tables": {"ours": {"columns": ["model", *COLUMNS], "rows": rows},
                   "cost": {"columns": ["training", "processor seconds"], "rows": cost}},
    }  # fmt: skip


if __name__ == "__main__":
    main()
