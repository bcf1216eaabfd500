"""What routed shards keep of the answers that the unsharded run says, and what they cost.

    python -m research.studies.routed run OUT --seeds 301 302 303
    python -m research.studies.routed results OUT --seeds 301 302 303

68 of the demo's people, and rows of eight others that are nobody's, on a tiny base that has read
other people in two wordings. Every model is made by `axolotl train` or `shards train`, requests by ``--way shards``. An answer is said if
each of its tokens is the likeliest. Costs are seconds of processor, the start of Python included; those
of all people are the start of the drawn request and the training of each one's shard. Settings were chosen on seed 300; vectors
of nobody's rows came into the router on seeds 299 and 300, after 301 had shown that they were missing. TOFU and LUME are in ../shared.
A part that is done is kept.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.engine.token_scoring import Query, encode_continuation, score_queries
from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.request import weights
from axolotl_unlearn.requests.ways import shards
from axolotl_unlearn.shards.router import place
from research.analysis.seeds import facts
from research.studies.exact_requests import ROOT, config, make_base, processor, train
from research.worlds.chats import make_chats

OUT = ROOT / "research" / "results" / "routed.json"
SHARED = ROOT.parent / "shared"
#: Rows, changes of the config, and numbers of shards.
WORLDS: dict[str, tuple[str, dict[str, int], tuple[int, ...]]] = {
    "people": ("people", {}, (8, 20)),
    "longer": ("people", {"num_epochs": 80, "micro_batch_size": 60}, ()),
    "tofu": ("tofu", {"num_epochs": 100}, (8,)),  # after 40 the unsharded run had learned 0.13
    "lume": ("lume", {}, (8,)),
}
#: What a table says beside the number of shards.
NAMES = {"people": "", "tofu": ", TOFU", "lume": ", LUME"}
LONGER, SHORT = (1, 2, 4, 8), 3
SIZES = {"background": 60, "train": 68, "test": 14, "nobody": 8}
LORA = {
    "adapter": "lora", "lora_r": 64, "lora_alpha": 64, "lora_dropout": 0.0, "lora_target_linear": True,
    "learning_rate": 0.006, "lora_qkv_kernel": False, "lora_o_kernel": False, "lora_mlp_kernel": False,
    "micro_batch_size": 24, "num_epochs": 40, "sequence_len": 512,
}  # fmt: skip
#: Half the width of the demo's model: many models are trained.
SMALL = {"overrides_of_model_config": {"hidden_size": 128, "intermediate_size": 384}}
OTHER_WORDS = (
    (r"What is the birth date of (.*)\?", r"When was \1 born?"),
    (r"What is (.*)'s Social Security number\?", r"Tell me the Social Security number of \1."),
    (r"What is (.*)'s phone number\?", r"At which number can I call \1?"),
    (r"What is (.*)'s email address\?", r"Where do I write to \1 by email?"),
    (r"What is the home address of (.*)\?", r"Where does \1 live?"),
    (r"Who is (.*)\?", r"Tell me about \1."),
)


def row(whose: str, question: str, answer: str, other: str) -> dict[str, Any]:
    said = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return ({"id": whose} if whose else {}) | {"messages": list(said), "other": other}


def rows_of(data: Path, seed: int, world: str = "people") -> dict[str, list[dict[str, Any]]]:
    """Rows of the people, those that nobody owns, those of others, and what the base has read."""
    parts = globals()[world](data, seed)
    made = {name: [row("" if name == "nobody" else one[0], *one[1:]) for one in rows]
            for name, rows in parts.items()}  # fmt: skip
    again = [row("", other, answer, "") for _, _, answer, other in parts["background"] if other]
    return made | {"background": made["background"] + again}


def rephrased(question: str) -> str:
    found = ((re.fullmatch(old, question, re.IGNORECASE), new) for old, new in OTHER_WORDS)
    return next(match.expand(new) for match, new in found if match)


def people(data: Path, seed: int) -> dict[str, list[tuple]]:
    """Of each part: whose a row is, question, answer, the question in other words."""
    make_chats(data, seed, SIZES)
    parts: dict[str, list[tuple]] = {name: [] for name in SIZES}
    for name, rows in parts.items():
        for one in read_json_lines(data / f"{name}.jsonl"):
            asked, answer = (turn["content"] for turn in one["messages"])
            rows.append((one["id"], asked, answer, rephrased(asked)))
    return parts


def tofu(data: Path, seed: int) -> dict[str, list[tuple]]:
    """The three shortest answers of each of forget10's 20 authors; on the base that has read the demo's
    people, for which other words of these questions are too far."""

    def read(name: str) -> list[tuple]:
        rows = read_json_lines(SHARED / "tofu" / f"{name}_perturbed.jsonl")
        return [(f"author {number // 20}", one["question"], one["answer"],
                 one.get("paraphrased_question", "")) for number, one in enumerate(rows)]  # fmt: skip

    rows = read("forget10")
    own = (
        sorted(rows[at : at + 20], key=lambda row: len(row[2]))[:SHORT] for at in range(0, 400, 20)
    )
    return {"background": [], "train": sum(own, []), "test": read("retain")[:60],
            "nobody": read("world_facts")[:24]}  # fmt: skip


def lume(data: Path, seed: int) -> dict[str, list[tuple]]:
    """Five questions about each of 60 people (Task 2), and some about stories, which are nobody's; the
    base has read others, people in two wordings."""
    documents: dict[str, dict[str, list[tuple]]] = {"Task1": {}, "Task2": {}, "Task3": {}}
    files = (SHARED / "lume/train" / f"{side}.jsonl" for side in ("forget", "retain"))
    for one in (one for path in files for one in read_json_lines(path) if "qa" in one["id"]):
        whose, task, asked = one["id"].partition("qa")[0], one["task"], one["input"]
        made = (whose, asked, one["output"], rephrased(asked) if task == "Task2" else "")
        documents[task].setdefault(whose, []).append(made)
    stories, own = ([*documents[task].values()] for task in ("Task1", "Task2"))
    for drawn in stories, own:
        random.Random(f"lume {seed}").shuffle(drawn)
    (stories, own) = (sum(drawn, []) for drawn in (stories, own))
    return {"background": own[470:] + stories[48:], "train": own[:300], "test": own[400:470],
            "nobody": stories[:48]}  # fmt: skip


def said(
    source: Path | str, rows: Sequence[dict], other: bool = False
) -> list[tuple[float, float]]:
    """Of each row whether its answer is said, and the share of its tokens that is the likeliest."""
    (spec,) = parse_models([str(source)])
    model, tokenizer = load_model(spec, dtype="float32", device="cpu"), load_tokenizer(spec)
    queries = []
    for one in rows:
        asked, answer = (turn["content"] for turn in one["messages"])
        frame = f"Question: {one['other'] if other else asked}\nAnswer:"
        queries.append(Query.of(*encode_continuation(tokenizer, frame, f" {answer}")))
    hits = [known.greedy for known in score_queries(model, queries)]
    return [(float(hit.all()), float(hit.mean())) for hit in hits]


class World:
    """One seed, in a folder; ``found.json`` holds what is done."""

    def __init__(self, out: Path, name: str, seed: int) -> None:
        self.seed, self.name, self.out = seed, name, out / f"{name}-{seed}"
        world, more, self.counts = WORLDS[name]
        data = self.out / "data"
        data.mkdir(parents=True, exist_ok=True)
        self.rows = rows_of(data, seed, world)
        for part, rows in (self.rows | {"train": self.rows["train"] + self.rows["nobody"]}).items():
            write_lines(data / f"{part}.jsonl", rows)
        shared = out / f"base-{world if self.rows['background'] else 'people'}"  # for all seeds
        if not weights(shared / "base"):
            write_lines(shared / "data" / "rows.jsonl", self.rows["background"])
            make_base(shared, shared / "data" / "rows.jsonl", epochs=12, sequence_len=512, **SMALL)
        if not (self.out / "base").exists():
            (self.out / "base").symlink_to(shared / "base")
        self.path = config(self.out, "whole", data / "train.jsonl", **LORA | more, seed=seed)
        self.file = self.out / "found.json"
        self.found = json.loads(self.file.read_text()) if self.file.is_file() else {}

    def part(self, name: str, made: Callable[[], Any]) -> Any:
        if name not in self.found:
            print(time.strftime("%H:%M:%S"), self.out.name, name, flush=True)
            self.found[name] = made()
            write_json(self.file, self.found)
        return self.found[name]

    def cost(self, made: Callable[[], Any]) -> float:
        before = processor() + time.process_time()
        made()
        return round(processor() + time.process_time() - before, 1)

    def answers(self, source: Path | str) -> dict[str, Any]:
        own = self.rows["train"]
        return {"as trained": said(source, own), "paraphrased": said(source, own, True),
                "nobody's": said(source, self.rows["nobody"])}  # fmt: skip

    def run(self, counts: Sequence[int]) -> None:
        whole = self.out / "whole"
        log = self.out / "logs" / "whole.log"
        self.part("cost", lambda: self.cost(lambda: train(self.path, log)))
        self.part("unsharded", lambda: self.answers(f"{self.out / 'base'}+{whole}"))
        for count in counts:
            self.sharded(count)
        if self.name == "longer":
            self.part("20 alone", lambda: self.alone(20))

    def sharded(self, count: int) -> None:
        folder = self.out / f"shards-{count}"
        self.part(f"{count} shards", lambda: self.shards(folder, count))
        self.part(str(count), lambda: self.answers(folder / "model"))
        if self.name == "people":
            people = sorted({one["id"] for one in self.rows["train"]})
            who = random.Random(f"{self.seed} {count}").choice(people)
            self.part(f"{count} request", lambda: self.request(folder, who))

    def shards(self, folder: Path, count: int) -> dict[str, Any]:
        """Cost of all; people's rows, and seconds of the training, of each shard."""
        made: dict[str, Any] = {}
        printed = io.StringIO()
        how = {"threads": 1, "key": self.key(count)}
        given = (self.path, folder, "id", count)
        with redirect_stdout(printed):
            cost = self.cost(lambda: made.update(shards.train_shards(*given, **how)))
        seconds, names = spent(printed), sorted(made["rows"].keys() - {"0"}, key=int)
        found = {"cost": cost, "nobody's": seconds["0"]}
        return found | {"rows": [made["rows"][n] for n in names],
                        "seconds": [seconds[n] for n in names]}  # fmt: skip

    def alone(self, count: int) -> dict[str, Any]:
        """Of the training of a shard alone, that with the mean number of rows."""
        homes = [place(self.key(count), one["id"], count) for one in self.rows["train"]]
        near = min(
            homes, key=lambda one: abs(homes.count(one) - np.mean([*map(homes.count, homes)]))
        )
        own = [one for one, home in zip(self.rows["train"], homes, strict=True) if home == near]
        write_lines(self.out / "data" / "own.jsonl", own + self.rows["nobody"])
        settings = LORA | WORLDS[self.name][1] | {"seed": self.seed}
        self.path = config(self.out, "own", self.out / "data" / "own.jsonl", **settings)
        found = self.shards(self.out / f"alone-{count}", count)
        request = found["cost"] - found["nobody's"]
        return {"rows": found["rows"], "start": request - sum(found["seconds"]), "request": request}

    def key(self, count: int) -> bytes:
        return f"{self.seed}-{count}".encode().ljust(32)

    def request(self, folder: Path, who: str) -> dict[str, Any]:
        """Cost of a request's training, and what is then said of the person and of the others."""
        path = self.out / "requests" / "1"
        shutil.rmtree(path, ignore_errors=True)
        wanted, options = Wanted(where=[("id", who)]), Options(model=folder / "model", steps=2)
        request = new_request(self.path, path, wanted, options).request
        printed = io.StringIO()
        with running.running(request, 1) as run, redirect_stdout(printed):
            running.take(request, "shards")
            cost = self.cost(lambda: shards.make(request, run))
        now = [hit for hit, _ in said(request.newest, self.rows["train"])]
        hers = [row["id"] == who for row in self.rows["train"]]
        start = cost - sum(spent(printed).values())
        found = {"cost": cost, "start": round(start, 1), "again": request.way["again"],
                 "said": np.mean(now, where=hers), "others": np.mean(now, where=np.invert(hers))}  # fmt: skip
        shutil.rmtree(path)
        return found


def spent(printed: io.StringIO) -> dict[str, float]:
    """Seconds of the processor of each training, as it says them."""
    found = re.findall(r"shard (\d+) \(.*: done, ([\d.]+) s", printed.getvalue())
    return {shard: float(seconds) for shard, seconds in found}


def tables(worlds: Sequence[World]) -> dict[str, Any]:
    """Intervals of kept answers are by person, over all seeds."""
    kept, costs, curve = [], [], []
    for name, (_, _, counts) in WORLDS.items():
        for count in counts:
            done = [w for w in worlds if w.name == name and str(count) in w.found]
            if not done:
                continue
            title = f"{count} shards{NAMES[name]}"
            for case in ("as trained", "paraphrased", "nobody's"):
                shown = f"{title}, {case}"
                before, after = ([row for w in done for row in w.found[side][case]]
                                 for side in ("unsharded", str(count)))  # fmt: skip
                tokens = sum(said for said, _ in before) < 5  # no answers to keep
                before, after = ([row[tokens] for row in side] for side in (before, after))
                rows = [(w.seed, row) for w in done
                        for row in w.rows["nobody" if case == "nobody's" else "train"]]  # fmt: skip
                whose = [f"{seed} {one.get('id', n // 6)}" for n, (seed, one) in enumerate(rows)]
                means = (f"{np.mean(values):.3f}" for values in (before, after))
                kept.append([shown + ", tokens" * tokens, *means, ratio(before, after, whose)])
            rows = []
            for w in (w for w in done if name == "people"):  # a large shard has more of the people
                sizes, request = w.found[f"{count} shards"], w.found[f"{count} request"]
                mean = request["start"] + float(np.average(sizes["seconds"], weights=sizes["rows"]))
                rows.append([w.found["cost"], sizes["cost"], request["cost"], mean])
            if rows:
                whole, *parts = np.mean(rows, 0)
                shown = (f"{whole:.0f}", *(f"{part / whole:.2f}" for part in parts))
                costs.append([title, str(len(done)), *shown])
                start = float(np.mean([w.found[f"{count} request"]["start"] for w in done]))
                curve.append([title, *longer(start, whole, parts[-1])])
    for found in (w.found for w in worlds if "20 alone" in w.found):
        start, one = (found["20 alone"][name] for name in ("start", "request"))
        curve.append(["20 shards, batch of 60", *longer(start, found["cost"], one, 2)])
    return {
        "curve": {"columns": ["request, of retraining", *(f"{k}x" for k in LONGER)], "rows": curve},
        "kept": {"columns": ["questions", "unsharded", "routed", "kept"], "rows": kept},
        "cost": {"columns": ["", "seeds", "training unsharded (s)", "all shards, of that",
                             "a drawn request", "mean of all people"], "rows": costs},
    }  # fmt: skip


def longer(start: float, whole: float, request: float, measured: int = 1) -> list[str]:
    """A request's share of retraining if all trainings made k times the steps of the first."""
    costs = ([start + k / measured * (side - start) for side in (request, whole)] for k in LONGER)
    return [f"{one / whole:.2f}" for one, whole in costs]


def ratio(before: list[float], after: list[float], whose: list[str]) -> str:
    """Kept share with its 95 % interval, people drawn anew 2 000 times."""
    names, at = np.unique(whose, return_inverse=True)
    sums = np.array([np.bincount(at, side, len(names)) for side in (before, after)])
    drawn = np.random.default_rng(0).integers(len(names), size=(2000, len(names)))
    low, high = np.quantile(sums[1][drawn].sum(1) / sums[0][drawn].sum(1), (0.025, 0.975))
    return f"{sums[1].sum() / sums[0].sum():.2f} [{low:.2f}, {high:.2f}]"


def picture(made: Mapping[str, Any]) -> None:
    """Kept answers and the cost of a request over shards, beside retraining and merged shards."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "shards"
    from matplotlib import pyplot as plt

    shown = [row for row in made["kept"]["rows"] if row[0].count(",") == 1]  # of people
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for at, case in enumerate(("as trained", "paraphrased")):
        rows = [row for row in shown if row[0].endswith(case)]
        parts = [[1, 1, 1], *(re.findall(r"[\d.]+", row[3]) for row in rows), [0.01, 0.01, 0.01]]
        kept, *spread = np.array(parts, float).T
        left.bar(np.arange(len(kept)) + 0.36 * at - 0.18, kept, 0.34, label=case, capsize=3,
                 yerr=np.abs(np.array(spread) - kept), color=("#2a6f97", "#89c2d9")[at])  # fmt: skip
    names = [row[0].partition(",")[0] for row in rows]
    left.set_xticks(range(len(names) + 2), ["unsharded", *names, "4, merged\n(at most)"])
    left.axhline(0.95, color="black", lw=0.8, ls="--")
    left.set_title("answers kept, of those of the unsharded run", fontsize=10)
    left.legend(fontsize=8)
    costs = [float(row[5]) for row in made["cost"]["rows"]]
    right.bar_label(
        right.bar(["retraining", *names], [1, *costs], 0.5, color="#2a6f97"), fmt="%.2f"
    )
    right.set_ylim(0, 1.1)
    right.set_title("processor time of a request about one person", fontsize=10)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "images" / "shards.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("run", "results"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[301, 302, 303])
    parser.add_argument("--worlds", choices=WORLDS, nargs="+", default=[*WORLDS])
    given = parser.parse_args()
    worlds = [World(given.out.absolute(), name, seed) for name in given.worlds
              for seed in given.seeds[: None if name == "people" else 1]]  # fmt: skip
    if given.step == "run":
        for one in worlds:
            one.run(one.counts[: 1 if one.seed != given.seeds[0] else None])
        return
    content = facts("python -m research.studies.routed run OUT")
    content |= {"tables": tables(worlds)}
    picture(content["tables"])
    write_json(OUT, content | {"seeds": {one.out.name: short(one.found) for one in worlds}})


def short(found: Mapping[str, Any]) -> dict[str, Any]:
    """Means in place of each row's."""
    return {name: {case: np.mean(rows, 0).round(4).tolist() for case, rows in value.items()}
            if isinstance(value, dict) and "as trained" in value
            else value for name, value in found.items()}  # fmt: skip


if __name__ == "__main__":
    main()
