"""Does forgetting last, and what does it cost? A smaller world than `never_seen`'s, on its base.

    python -m research.studies.lasting do BASE OUT SEED ITEM ...
    python -m research.studies.lasting collect OUT SEED ...     # > research/results/lasting.json

The first writes the data and all configs of a seed and does the items, each in a fork of a process
that has imported Axolotl once, noting the seconds of processor:

    teacher, train:NAME, merge:NAME, score:NAME, relearn:NAME[:SOURCE[:best]], member:NAME

The second replaces what the results say of these seeds and keeps the others.

BASE is a folder of ``make never-seen`` (seed 0 here): all seeds share its *base*, as all forget
sets of one public model do; nobody whom the base has read of is in the data of a seed. Seed 401 is
for development: recipes are chosen by its scores. Seeds 411 and 412 were named in a commit before any of their models was made; no recipe
is chosen by them.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml
from matplotlib.axes import Axes

from axolotl_unlearn.attacks.probes import plain_probes
from axolotl_unlearn.attacks.relearn import Training, chosen_rows, collate, relearn_attack
from axolotl_unlearn.attacks.target import make_subjects
from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.encode import Encoder
from axolotl_unlearn.data.records import read_records
from axolotl_unlearn.files import write_json
from axolotl_unlearn.merging.run import merge
from axolotl_unlearn.store import Store, versions
from research.benchmarks.retain_size import apart, clocked
from research.harness.stages import Plan, Train, near
from research.studies import never_seen
from research.studies.demo import CPU
from research.studies.methods import METHODS
from research.worlds import generate
from research.worlds.life import LifeSizes, make_life

DEVELOPMENT, FRESH = ("401",), ("411", "412")
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
WELL_READ = {"rows": 48, "passes": 24}
#: The attacker's steps and learning rate, rows learned and asked.
STEPS, RATE, LEARNED, ASKED = (5, 20, 100, 500), 1e-3, 20, 40
ROOT = Path(__file__).resolve().parents[2]
#: Passes over the forget rows of all methods but the paper's pair, which keep their nine.
EPOCHS = 5
#: Method -> the strengths that were tried on the development seed. Chosen is, of those that recall at
#: most `NEAR` more than *retrained*, the one whose retained rows lose least; if there is none, the
#: one that recalls least. Of the paper's pair it is the beta of the run that forgets too much.
TRIED = {
    "NPO": (0.02, 0.045, 0.1),
    "SimNPO": (5.0, 12.0, 30.0),
    "RMU": (50.0, 200.0, 1000.0),
    "RepSelect": (1.0, 3.0, 10.0),
    "merged": (0.01, 0.02, 0.03),
}
NEAR = 0.05
#: Rows to forget; seconds of retraining, teacher and `match` that research/notebook/tofu.md has.
NOTED = (("forget10 (seed 42)", 400, 694, 258, 5584), ("forget05 (seed 44)", 200, 302, 99, 1136))
#: Starts: share of the way from the original to its teacher.
STARTS = {"start": 0.5, "near": 0.8, "nearer": 0.6}
ORDER = (
    "original",
    "retrained",
    "teacher",
    "match",
    "match_near",
    "match_long",
    "match_short",
    "match_lora",
    *(name.lower() for name in TRIED),
)


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
    return Train("match", out / start, changes)


def _rows(*roles: str) -> list[dict[str, str]]:
    return [
        {"path": f"{role}.jsonl", "ds_type": "json", "type": f"axolotl_unlearn.data.{role}"}
        for role in roles
    ]


#: The rows of both sides, and none that only the base had read.
OWN_ROWS = _rows("forget", "retain")
#: `match` with the learning rate of the original's own run: twice the passes, or a start nearer to
#: the teacher.
VARIANTS = {
    "match_long": {"num_epochs": 2 * EPOCHS, "learning_rate": 1.6e-3},
    "match_near": {"start": "near", "learning_rate": 1.6e-3},
}
#: `short` in a LoRA, at a higher rate.
LORA = {
    "learning_rate": 4e-3,
    "adapter": "lora",
    "lora_r": 64,
    "lora_alpha": 64,
    "lora_dropout": 0.0,
    "lora_target_linear": True,
}


def short(out: Path, **more: Any) -> Train:
    """The cheapest try that came near: documents' labels weigh four times as much, fewer rows a step
    and none that only the base has read, from six tenths of the way to the teacher."""
    teacher, original = ({"model": near(out / name)} for name in ("teacher", "original"))
    texts, taught = {"kinds": "completion"}, {"tasks": [1, 2, 3]}
    forget = [
        {"objective": "match", "weight": 4, "reference": teacher, **texts},
        {"objective": "match", "kinds": "question", "reference": teacher},
        {"objective": "nckd", "reference": teacher},
        {"objective": "feature_matching", "weight": 0.05, **texts},
        {"objective": "hidden_matching", "weight": 2, **texts},
    ]
    retain = [
        {"objective": "nll", "weight": 4, **texts, **taught},
        {"objective": "nll", "kinds": "question", **taught},
        {"objective": "kl", "direction": "reverse", "reference": original},
    ]
    own = {"unlearn.forget": forget, "unlearn.retain": retain, "datasets": OWN_ROWS}
    own |= {"unlearn.level": {"rows": 50, "every": 33}}
    own |= {"num_epochs": 4, "micro_batch_size": 4, "learning_rate": 1.4e-3}
    return match(out, "nearer", **own | more)


def rivals(tried: Mapping[str, Sequence[float]] = TRIED) -> dict[str, Train]:
    """METHOD-STRENGTH -> its run; of a merge that of the run that forgets too much."""
    found = {}
    for name, strengths in tried.items():
        for value in strengths:
            changes = {"unlearn__forget__beta": value}
            if name != "merged":
                changes = METHODS[name].changes(value) | {"num_epochs": EPOCHS}
            stage = "over" if name == "merged" else name.lower()
            found[f"{stage}-{value:g}"] = never_seen._forget("npo_over", name, **changes)
    return found


def prepare(base: Path, out: Path, seed: str) -> None:
    """Data, base, and the configs of all runs, if they are not there."""
    if not (out / "base").is_dir():
        shutil.copytree(base / "base", out / "base")
    if not (out / "data" / "manifest.json").is_file():
        make_data(base, out / "data", int(seed))
    stages = never_seen.table(out, int(seed), SIZES, False)
    chosen = {n: replace(stages[n], base=out / "base") for n in ("original", "retrained")}
    chosen |= {"under": stages["under"], "match": match(out), **rivals()}
    chosen |= {name: match(out, **changes) for name, changes in VARIANTS.items()}
    chosen |= {"match_short": short(out), "match_lora": short(out, **LORA)}
    Plan("lasting", out, chosen, seed=int(seed), threads=1, environment=CPU)


def _subjects(out: Path, name: str, against: str | None) -> tuple[Any, Any]:
    forget = read_records(out / "data" / "forget.jsonl")
    control = against and f"{against}={_model(out, against)}"
    model = f"{name}={_model(out, name)}"
    return make_subjects(model, forget, control, max_new_tokens=48, quiet=True)


def relearned(out: Path, name: str, source: str = "forget", best: str = "") -> dict[str, Any]:
    """Recall of forget documents while a model is trained on ``source``, beside *retrained*."""
    subject, control = _subjects(out, name, None if name == "retrained" else "retrained")
    given = chosen_rows(source, subject.records, out / "data", LEARNED, ASKED, choose=bool(best))
    given["choose_on"] = (given["choose_on"] or [])[: ASKED // 2] or None
    result, _ = relearn_attack(
        subject,
        Store(out / "relearn-scores"),
        **given,
        steps=STEPS[:-1] if best else STEPS,  # of five rates
        how=Training(rate=RATE),
        control=control,
    )
    parts = [name, *([source] if source != "forget" else []), *([best] if best else [])]
    write_json(out / "relearned" / f"{':'.join(parts)}.json", result)
    return {}


def scored(out: Path, name: str) -> dict[str, Any]:
    """Recall of the rows that relearning asks about, and the mean NLL of the retained rows."""
    subject, _ = _subjects(out, name, None)
    asked = chosen_rows("forget", subject.records, out / "data", LEARNED, ASKED)["asked"]
    model, tokenizer = subject.load()
    encoder, losses = Encoder(tokenizer, DataArgs(), max_length=256), []
    for record in read_records(out / "data" / "retain.jsonl"):
        row = encoder.encode(record)
        labels = encoder.labels(row, encoder.labelled(record.kind))
        losses.append(float(model(**collate([(row.input_ids, labels)], "cpu")).loss))
    figures = subject.ask(model, tokenizer, plain_probes(asked), "asked").figures()
    return {"asked": figures, "retained": fmean(losses)}


def merged(out: Path, name: str) -> dict[str, Any]:
    """A start between the original and its teacher, or the paper's pair by TIES."""
    start = time.process_time()
    if name in STARTS:
        share = STARTS[name]
        how = {"method": "linear", "weights": [1 - share, share]}
        parents, base = [out / "original", out / "teacher"], out / "base"
    else:
        how = {"method": "ties", "density": 0.8}
        pair = (name.replace("merged", "over"), "under")
        parents, base = [_model(out, one) for one in pair], out / "original"
    merge(parents, base, out / name, overwrite=True, **how)
    return {"seconds": time.process_time() - start}


def taught(out: Path, name: str) -> dict[str, Any]:
    """The teacher, by ``axolotl-unlearn teacher`` within this process."""
    from axolotl.cli.train import do_cli

    from axolotl_unlearn.training import teacher

    def run(command: Sequence[str], check: bool) -> SimpleNamespace:
        sys.argv = ["axolotl"]
        do_cli(config=command[2])
        return SimpleNamespace(returncode=0)

    start, config = time.process_time(), out / "configs" / "original.yml"
    sides = {side: [out / "data" / f"{side}.jsonl"] for side in ("forget", "retain")}
    with patch.object(teacher.subprocess, "run", run):
        cost = teacher.make_teacher(config, out / name, **sides, **WELL_READ)
    steps = cost.read // yaml.safe_load(config.read_text("utf-8"))["micro_batch_size"]
    return {"seconds": time.process_time() - start, "steps": steps, "looks": []}


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
    if (folder / "adapter_config.json").is_file():
        base = yaml.safe_load(config.read_text("utf-8"))["base_model"]
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        model.merge_and_unload().save_pretrained(folder / "merged")
        AutoTokenizer.from_pretrained(base).save_pretrained(folder / "merged")
    steps = len(marks["steps"]) or read_json(folder / "cost.json")["steps"]
    return {"seconds": whole, "steps": steps, "looks": marks["looks"]}


def told(out: Path, name: str) -> dict[str, Any]:
    """Membership attacks that nothing here is trained against (G-Drift), beside *retrained*."""
    from research.__main__ import research

    words = ["membership", f"{name}={_model(out, name)}", "--data", str(out / "data")]
    words += ["--control", f"retrained={out / 'retrained'}", "--out", str(out / f"member-{name}")]
    research([*words, "--attacks", "loss,min_k_plus_20,g_drift"], standalone_mode=False)
    return {}


def _model(out: Path, name: str) -> Path:
    merged = out / name / "merged"
    return merged if merged.is_dir() else out / name


def done(out: Path, items: Sequence[str]) -> None:
    """Each item that ``cost.json`` does not name, in a fork of its own; its seconds go there."""
    import axolotl.cli.train  # noqa: F401 (before the forks)
    import axolotl.core.builders  # noqa: F401

    work = {
        "train": trained, "teacher": taught, "merge": merged, "score": scored,
        "relearn": relearned, "member": told,
    }  # fmt: skip
    path = out / "cost.json"
    for item in items:
        if path.is_file() and item in read_json(path):
            continue
        what, *words = item.split(":")
        made = apart(lambda what=what, words=words: work[what](out, *words or [what]))
        write_json(path, (read_json(path) if path.is_file() else {}) | {item: made})
        print(item, {key: one for key, one in made.items() if key != "looks"}, flush=True)


def collected(out: Path, seeds: Sequence[str], before: dict[str, Any]) -> dict[str, Any]:
    """What ``before`` and these seeds' folders show, and the tables of the docs."""
    found = before["seeds"]
    for seed in seeds:
        folder, one = out / seed, found.setdefault(seed, {})
        looks = {p.parent.name: read_json(p) for p in sorted(folder.glob("*/level.json"))}
        costs = read_json(folder / "cost.json")
        one |= {
            "relearned": one.get("relearned", {})
            | {p.stem: read_json(p) for p in sorted((folder / "relearned").glob("*.json"))},
            "membership": one.get("membership", {})
            | {
                path.parent.name.removeprefix("member-"): {
                    read_json(path)["model"]: {"attacks": read_json(path)["tests"]}
                }
                for path in sorted(folder.glob("member-*/membership-*.json"))
            },
            "scored": one.get("scored", {})
            | {k.partition(":")[2]: v for k, v in costs.items() if k.startswith("score:")},
            "cost": priced(costs) | one.get("cost", {}),
            "kept": one.get("kept", {})
            | {
                name: {
                    "retained": seen["retained"],
                    "kept": next(x for x in seen["watched"] if x["step"] == seen["kept_step"]),
                }
                for name, seen in looks.items()
                if name.startswith("match") and seen["kept_step"] is not None
            },
        }
    tables = before["tables"]
    for seed in seeds:
        one, costs = found[seed], read_json(out / seed / "cost.json")
        for way in dict.fromkeys(name.partition(":")[2] for name in one["relearned"]):
            results = {
                name.partition(":")[0]: result
                for name, result in one["relearned"].items()
                if name.partition(":")[2] == way
            }
            if "retrained" in results:
                tables["-".join(filter(None, ("relearned", seed, way)))] = relearn_table(results)
        tables[f"cost-{seed}"] = cost_table(one["cost"])
        one["rows"] = [
            sum(1 for _ in (out / seed / "data" / f"{side}.jsonl").open("rb"))
            for side in ("forget", "retain")
        ]
        if one["scored"]:
            tables[f"scored-{seed}"] = scored_table(one["scored"])
        if lora := one["kept"].get("match_lora"):
            last, cost = lora["kept"], one["cost"]["train:match_lora"]
            share = (cost["seconds"] + costs["teacher"]["seconds"]) / cost["beside"]
            tried = ["0.6", "4", "0.004", "the same, a LoRA of rank 64", str(cost["steps"])]
            tried += [f"{share:.1f}", f"{last['loss']:.2f} ({last['expected']['loss']:.2f})"]
            tried += [f"{last['learned']:.2f}"]
            tried += [f"{last['retain_loss'] - lora['retained']['loss']:+.2f}"]
            others = tables[f"tries-{seed}"]["rows"][:8]
            tables[f"tries-{seed}"]["rows"] = [*others, tried]
    tables["sizes"] = sizes_table(found)
    command = "python -m research.studies.lasting collect"
    return {"command": command, "versions": versions(), "seeds": found, "tables": tables}


def priced(costs: Mapping[str, Any]) -> dict[str, Any]:
    """The runs of ``cost.json``; a merge of two counts both."""
    runs = {"train:" + k.removeprefix("train:"): v for k, v in costs.items() if _is_run(k)}
    for item, one in costs.items():
        if item.startswith("merge:merged"):
            pair = [runs[f"train:over{item.removeprefix('merge:merged')}"], runs["train:under"]]
            runs["train:" + item.removeprefix("merge:")] = {
                "seconds": one["seconds"] + sum(each["seconds"] for each in pair),
                "steps": sum(each["steps"] for each in pair),
                "looks": [],
            }
    beside = costs["train:retrained"]["seconds"]
    return {
        k: {n: v[n] for n in ("seconds", "steps", "looks")} | {"beside": beside}
        for k, v in runs.items()
        if "steps" in v
    }


def _is_run(item: str) -> bool:
    return item == "teacher" or item.startswith("train:")


def ordered(names: Iterable[str]) -> list[str]:
    """Those of `ORDER`, each with its strengths."""
    known = [name for name in names if name.rpartition("-")[0] in ORDER or name in ORDER]
    return sorted(known, key=lambda n: (ORDER.index(n if n in ORDER else n.rpartition("-")[0]), n))


def cost_table(cost: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of processor, and what they are of *retrained* (``beside``: of the same hour)."""
    rows = []
    for name in ordered(item.removeprefix("train:") for item in cost):
        one = cost[f"train:{name}"]
        share = one["seconds"] / one.get("beside", cost["train:retrained"]["seconds"])
        looks = sum(one.get("looks") or [])
        cells = (f"{looks:.0f}", f"{one['seconds']:.0f}", f"{share:.2f}")
        rows.append([f"*{name}*", str(one["steps"]), *cells])
    return {"columns": ["run", "steps", "looks, s", "in all, s", "of retraining"], "rows": rows}


def scored_table(scored: Mapping[str, Any]) -> dict[str, Any]:
    """Recall of forgotten documents, and what retained rows have lost, nats."""
    rows = [
        [
            f"*{name}*",
            f"{scored[name]['asked']['recalled']['value']:.2f}",
            f"{scored[name]['retained'] - scored['original']['retained']:+.2f}",
        ]
        for name in ordered(scored)
    ]
    return {"columns": ["model", "recall", "retained rows, nats"], "rows": rows}


def sizes_table(found: Mapping[str, Any]) -> dict[str, Any]:
    """Teacher and `match` beside retraining on every data set, and the retained rows from which they
    cost less (retraining's seconds follow the rows; theirs do not)."""
    rows = []

    def add(what: str, forget: int, retain: int, retrained: float, ours: float) -> None:
        share, cells = ours / retrained, (f"{retrained:.0f}", f"{ours:.0f}")
        pays = round(retain * share, -1)
        rows.append([what, str(forget), str(retain), *cells, f"{share:.1f}", f"{pays:.0f}"])

    for seed, one in found.items():
        runs, cost = ("retrained", "teacher", "match_short"), one["cost"]
        if f"train:{runs[-1]}" in cost and seed not in DEVELOPMENT:
            seconds = [cost[f"train:{name}"]["seconds"] for name in runs]
            add(f"tiny (seed {seed})", *one["rows"], seconds[0], sum(seconds[1:]))
    results = ROOT / "research" / "results"
    for times, size in read_json(results / "retain-size.json")["sizes"].items():
        seconds = [size[name]["seconds"] for name in ("retrain", "teacher", "match")]
        add(f"tiny ({times}x)", 328, size["retained_rows"], seconds[0], sum(seconds[1:]))
    for seed, one in read_json(results / "never-seen-real.json")["seeds"].items():
        seconds = {name: stage["seconds"] for name, stage in one["stages"].items()}
        ours = seconds["teacher"] + seconds["start"] + seconds["match"]
        add(f"SmolLM2 on LUME (seed {seed})", 164, 134, seconds["retrained"], ours)
    same = read_json(results / "tofu-same.json")["seconds"]
    add(
        "SmolLM2 on TOFU forget10 (seed 43)",
        400,
        200,
        same["retrain"],
        same["teacher"] + same["match"],
    )
    for what, count, *seconds in NOTED:
        add(f"SmolLM2 on TOFU {what}", count, 200, seconds[0], sum(seconds[1:]))
    columns = ["model and data", "rows to forget", "to retain", "retraining (s)"]
    columns += ["teacher and `match` (s)", "of retraining", "less from (rows)"]
    return {"columns": columns, "rows": rows}


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
    for name in ordered(results):
        cells = [f"*{name}*"]
        for row in results[name]["rows"]:
            cells.append(f"{row['recalled']['value']:.2f}")
            if name != "retrained":
                above = row["above_control"]["recalled"]
                cells[-1] += f" ({above['value']:+.2f} [{above['low']:+.2f}, {above['high']:+.2f}])"
        rows.append(cells)
    steps = [f"{row['x']} steps" for row in results["retrained"]["rows"]]
    return {"columns": ["model", *steps], "rows": rows}


#: A method has one colour in all panels.
NAMED = ("retrained", "match", "npo", "simnpo", "rmu", "repselect", "merged")
COLOURS = {name: f"C{number}" for number, name in enumerate(NAMED)}


def draw(axes: Axes, results: Mapping[str, Any]) -> None:
    """Recall of forget documents against steps on others."""
    recalls = curves(results)
    for number, name in enumerate(ordered(recalls)):
        steps, value, low, high = zip(*recalls[name], strict=True)
        errors = abs(np.array([low, high]) - value)
        label = name.partition("-")[0].removesuffix("_short")
        axes.errorbar(
            [step * 1.03 ** (number - 3) if step else 0 for step in steps], value, errors,
            label=label, color=COLOURS[label], lw=2.2 if label in ("retrained", "match") else 1,
            elinewidth=0.7, ls="-" if label in ("retrained", "match") else "--", marker=".",
        )  # fmt: skip
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xticks([0, *STEPS], map(str, (0, *STEPS)))
    axes.minorticks_off()
    axes.set(xlabel="relearning steps", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first == "do":
        base, folder, seed, *items = rest
        prepare(Path(base), Path(folder) / seed, seed)
        done(Path(folder) / seed, items)
    else:
        folder, *seeds = rest
        path = ROOT / "research/results/lasting.json"
        content = collected(Path(folder), seeds, read_json(path))
        write_json(path, content)
