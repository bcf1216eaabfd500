"""Does forgetting last, and what does it cost? A smaller world than `never_seen`'s, on its base.

    python -m research.studies.lasting BASE OUT SEED [STAGE ...]     # a second call goes on
    python -m research.studies.lasting do OUT SEED train:match relearn:match member:match ...
    python -m research.studies.lasting collect OUT SEED [SEED ...]   # > research/results/lasting.json

The second command trains by the configs that the first has written, one after the other in forks of
a process that has imported Axolotl once, and notes the seconds of processor of each.

BASE is a folder of ``make never-seen`` (seed 0 here): all seeds share its *base*, as all forget
sets of one public model do; nobody whom the base has read of is in the data of a seed. Seed 401 is
for development: recipes are chosen by its scores. Seeds 411 and 412 were named in a commit before
any of their models was made; no recipe is chosen by them.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml
from matplotlib import rc_context
from matplotlib.figure import Figure

from axolotl_unlearn.attacks.relearn import Training, relearn_attack, split_forget
from axolotl_unlearn.attacks.target import limited, make_subjects
from axolotl_unlearn.data.records import read_records
from axolotl_unlearn.files import write_json
from axolotl_unlearn.store import Store, versions
from research.benchmarks.retain_size import apart, clocked
from research.harness.stages import Kind, Make, Merge, Plan, Train, near
from research.studies import never_seen
from research.studies.demo import CPU
from research.studies.methods import METHODS
from research.worlds import generate
from research.worlds.life import LifeSizes, make_life

DEVELOPMENT, FRESH = (401,), (411, 412)
#: Half of `never_seen`'s documents.
SIZES = LifeSizes(
    stories=12,
    pii=10,
    facts_forget=40,
    facts_retain=30,
    nonmembers=80,
    heldout=(36, 30, 120),
    background=(0, 0, 0),
)
#: A third of the retained rows, as in `never_seen`.
WELL_READ = ("--rows", "48", "--passes", "24")
#: The attacker's steps and learning rate, and rows asked.
STEPS, RATE, ASKED = (5, 20, 100, 500), 1e-3, 40
ORDER = (
    "retrained",
    "teacher",
    "match",
    "match_near",
    "match_long",
    "match_short",
    "npo",
    "merged",
    "simnpo",
    "rmu",
    "repselect",
)
ROOT = Path(__file__).resolve().parents[2]
#: Passes over the forget rows of all methods but the paper's pair, which keep their nine.
EPOCHS = 5
#: Method -> its strength: that which the leaderboard chose on most of its seeds, of six tries each.
RIVALS = {"NPO": 0.1, "SimNPO": 12.0, "RMU": 50.0, "RepSelect": 1.0}
#: What every recipe needs, and what judges it.
WORLD = ("data", "base", "original", "teacher", "retrained", "start")


def make_data(base: Path, out: Path, seed: int) -> Any:
    """The data of a seed, about people whom the base has not read of."""
    read = (base / "data" / "background.jsonl").read_text()
    everybody = generate._people

    def strangers(seed: int) -> Iterator[generate.Person]:
        return (one for one in everybody(seed) if f"{one.first} {one.last}" not in read)

    with patch.object(generate, "_people", strangers):
        made = make_life(out, seed, SIZES)
    for name in ("replay", "general"):  # what this base has read
        shutil.copy(base / "data" / f"{name}.jsonl", out)
    return made


def match(out: Path, start: str = "start", **more: Any) -> Train:
    """`preset: never-seen`, the same five lines for every model."""
    block = {
        "preset": "never-seen",
        "teacher": near(out / "teacher"),
        "original": near(out / "original"),
        "heldout": near(out / "data" / "heldout.jsonl"),
    }
    changes = {"unlearn": block, "num_epochs": EPOCHS, "learning_rate": 8e-4, **more}
    return Train("match", start, changes, title="match", needs=("original", "teacher"))


#: `match` with the learning rate of the original's own run: twice the passes, or a start nearer to
#: the teacher.
VARIANTS = {
    "match_long": {"num_epochs": 2 * EPOCHS, "learning_rate": 1.6e-3},
    "match_near": {"start": "near", "learning_rate": 1.6e-3},
}


def short(out: Path) -> Train:
    """The cheapest try that came near: documents' labels weigh four times as much, fewer rows a step
    and none that only the base has read, from six tenths of the way to the teacher."""
    teacher, original = ({"model": near(out / name)} for name in ("teacher", "original"))
    texts, taught = {"kinds": "completion"}, {"tasks": [1, 2, 3]}
    forget = [
        {"objective": "match", "weight": 4, "reference": teacher, **texts},
        {"objective": "match", "kinds": "question", "reference": teacher},
        {"objective": "nckd", "reference": teacher},
        {"objective": "alike", "weight": 0.05, **texts},
        {"objective": "alike_states", "weight": 2, **texts},
    ]
    retain = [
        {"objective": "nll", "weight": 4, **texts, **taught},
        {"objective": "nll", "kinds": "question", **taught},
        {"objective": "kl", "direction": "reverse", "reference": original},
    ]
    rows = [
        {"path": f"{role}.jsonl", "ds_type": "json", "type": f"axolotl_unlearn.data.{role}"}
        for role in ("forget", "retain")
    ]
    own = {"unlearn.forget": forget, "unlearn.retain": retain, "datasets": rows}
    looks = {"unlearn.level": {"rows": 50, "every": 33}}
    run = {"num_epochs": 4, "micro_batch_size": 4, "learning_rate": 1.4e-3}
    return match(out, "nearer", **own, **looks, **run)


def plan(base: Path, out: Path, seed: int, *names: str, threads: int = 4) -> Plan:
    """The stages of these names, by the tables of `never_seen` and this study."""
    stages: dict[str, Kind] = never_seen.table(out, seed, SIZES, False)
    taught = replace(stages["teacher"], words=lambda p: [*never_seen.teacher_words(p), *WELL_READ])
    made = Make(
        lambda p: make_data(base, p.data, seed), "data/manifest.json", settings=[seed, str(SIZES)]
    )
    copied = Make(lambda p: shutil.copytree(base / "base", p.out / "base"), "base/config.json")
    stages |= {"data": made, "base": copied, "teacher": taught, "match": match(out)}
    for name, ours in (("near", 0.2), ("nearer", 0.4)):
        towards = ("--method", "linear", "--weights", str(ours), f"{1 - ours:g}")
        stages[name] = Merge("base", ("original", "teacher"), options=towards)
    stages |= {name: match(out, **changes) for name, changes in VARIANTS.items()}
    stages["match_short"] = short(out)
    for name, strength in RIVALS.items():
        changes = METHODS[name].changes(strength) | {"num_epochs": EPOCHS}
        stages[name.lower()] = never_seen._forget("npo_over", name, **changes)
    chosen = {name: kind for name, kind in stages.items() if name in (*WORLD, *names)}
    return Plan("lasting", out, chosen, seed=seed, threads=threads, environment=CPU)


def relearned(out: Path, name: str) -> dict[str, Any]:
    """Recall of other forget documents while a model is trained on some, beside *retrained*."""
    forget = read_records(out / "data" / "forget.jsonl")
    rows, asked = split_forget(forget, 20)
    against = None if name == "retrained" else f"retrained={out / 'retrained'}"
    model = f"{name}={_model(out, name)}"
    subject, control = make_subjects(model, forget, against, max_new_tokens=48, quiet=True)
    result, _ = relearn_attack(
        subject,
        Store(out / "relearn-scores"),
        rows,
        limited(asked, ASKED),
        source="forget",
        steps=STEPS,
        how=Training(rate=RATE),
        control=control,
    )
    write_json(out / "relearned" / f"{name}.json", result)
    return {}


def trained(out: Path, name: str) -> dict[str, Any]:
    """Train by ``configs/NAME.yml``, merge a LoRA, and return where the processor's time went."""
    from axolotl.cli.train import do_cli
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, config = out / name, out / "configs" / f"{name}.yml"
    shutil.rmtree(folder, ignore_errors=True)
    sys.argv = ["axolotl"]
    start = time.process_time()
    with clocked() as marks:
        do_cli(config=str(config))
    whole = time.process_time() - start
    gaps = [b - a for a, b in zip(marks["steps"], marks["steps"][1:], strict=False)]
    if (folder / "adapter_config.json").is_file():
        base = yaml.safe_load(config.read_text("utf-8"))["base_model"]
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        model.merge_and_unload().save_pretrained(folder / "merged")
        AutoTokenizer.from_pretrained(base).save_pretrained(folder / "merged")
    step = sorted(gaps)[len(gaps) // 2]
    return {"seconds": whole, "steps": len(gaps) + 1, "step_median": step, "looks": marks["looks"]}


def told(out: Path, name: str) -> dict[str, Any]:
    """Membership attacks that nothing here is trained against (G-Drift), beside *retrained*."""
    from axolotl_unlearn.cli import unlearn

    words = ["attack", "membership", f"{name}={_model(out, name)}", "--data", str(out / "data")]
    words += ["--control", f"retrained={out / 'retrained'}", "--out", str(out / f"member-{name}")]
    unlearn([*words, "--attacks", "loss,min_k_plus_20,g_drift"], standalone_mode=False)
    return {}


def _model(out: Path, name: str) -> Path:
    merged = out / name / "merged"
    return merged if merged.is_dir() else out / name


def done(out: Path, items: Sequence[str]) -> None:
    """Each ``WHAT:NAME`` in a fork of its own; the seconds go to ``cost.json``."""
    import axolotl.cli.train  # noqa: F401 (before the forks)
    import axolotl.core.builders  # noqa: F401

    work = {"train": trained, "relearn": relearned, "member": told}
    path = out / "cost.json"
    for item in items:
        what, name = item.split(":")
        cost = apart(lambda what=what, name=name: work[what](out, name))
        write_json(path, (read_json(path) if path.is_file() else {}) | {item: cost})


def collected(out: Path, seeds: Sequence[str]) -> dict[str, Any]:
    """What all seeds show, and the tables of the docs."""
    found: dict[str, Any] = {}
    for seed in seeds:
        folder = out / seed
        found[seed] = {
            "relearned": {p.stem: read_json(p) for p in sorted((folder / "relearned").glob("*.json"))},
            "membership": {
                path.parent.name.removeprefix("member-"): read_json(path)["models"]
                for path in sorted(folder.glob("member-*/membership.json"))
            },
            "cost": read_json(folder / "cost.json") if (folder / "cost.json").is_file() else {},
        }  # fmt: skip
    return {
        "command": "python -m research.studies.lasting collect",
        "versions": versions(),
        "seeds": found,
        "tables": {
            f"{kind}-{seed}": table(one[key])
            for seed, one in found.items()
            for kind, key, table in (
                ("relearned", "relearned", relearn_table),
                ("cost", "cost", cost_table),
            )
        },
    }


def cost_table(cost: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of processor, and what they are of *retrained* (``beside``: of the same hour)."""
    rows = []
    for name in (name for name in ORDER if f"train:{name}" in cost):
        one = cost[f"train:{name}"]
        share = one["seconds"] / one.get("beside", cost["train:retrained"]["seconds"])
        looks = sum(one.get("looks") or [])
        cells = (f"{looks:.0f}", f"{one['seconds']:.0f}", f"{share:.2f}")
        rows.append([f"*{name}*", str(one["steps"]), *cells])
    return {"columns": ["run", "steps", "looks, s", "in all, s", "of retraining"], "rows": rows}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def curves(results: Mapping[str, Any]) -> dict[str, list[tuple[float, float, float, float]]]:
    """Model -> (steps, recalled, its interval over documents)."""
    found = {}
    for name, result in results.items():
        rows = [(row["x"], row["recalled"]) for row in result["rows"]]
        found[name] = [(x, one["value"], one["low"], one["high"]) for x, one in rows]
    return found


def relearn_table(results: Mapping[str, Any]) -> dict[str, Any]:
    """Recall at each number of steps, and what that is above *retrained*."""
    rows = []
    for name in (name for name in ORDER if name in curves(results)):
        cells = [f"*{name}*"]
        for row in results[name]["rows"]:
            cells.append(f"{row['recalled']['value']:.2f}")
            if name != "retrained":
                above = row["above_control"]["recalled"]
                cells[-1] += f" ({above['value']:+.2f} [{above['low']:+.2f}, {above['high']:+.2f}])"
        rows.append(cells)
    steps = [f"{row['x']} steps" for row in results["retrained"]["rows"]]
    return {"columns": ["model", *steps], "rows": rows}


def figure(results: Mapping[str, Any]) -> Figure:
    """Recall of forget documents against steps on others."""
    drawing = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = drawing.subplots()
    found = curves(results)
    for number, name in enumerate(name for name in ORDER if name in found):
        steps, value, low, high = zip(*found[name], strict=True)
        errors = abs(np.array([low, high]) - value)
        strong = name in ("retrained", "match_long")
        axes.errorbar(
            [step * 1.03 ** (number - 3) if step else 0 for step in steps], value, errors,
            label=name, color=f"C{number}", lw=2.2 if strong else 1, elinewidth=0.7,
            ls="-" if strong else "--", marker=".",
        )  # fmt: skip
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xticks([0, *STEPS], map(str, (0, *STEPS)))
    axes.minorticks_off()
    axes.set(xlabel="relearning steps on other forget documents", ylabel="recall", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return drawing


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first == "do":
        folder, seed, *items = rest
        done(Path(folder) / seed, items)
    elif first == "collect":
        folder, *seeds = rest
        content = collected(Path(folder), seeds)
        write_json(ROOT / "research/results/lasting.json", content)
        with rc_context({"svg.hashsalt": "lasting"}):
            figure(content["seeds"][seeds[0]]["relearned"]).savefig(
                ROOT / "docs/images/relearning.svg", metadata={"Date": None}
            )
    else:
        folder, seed, *names = rest
        plan(Path(first), Path(folder) / seed, int(seed), *names).job.run()
