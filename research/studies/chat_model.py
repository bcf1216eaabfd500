"""A deletion on a chat model: SmolLM2-135M, retrained, by shards, and by `match`.

    python -m research.studies.chat_model OUT dev        seed 500, one training: are rows learned?
    python -m research.studies.chat_model OUT ways       seed 511; goes on where it was stopped
    python -m research.studies.chat_model OUT many       seed 521: shards of more people
    python -m research.studies.chat_model OUT ten        seed 551: ten requests in a row, each way
    python -m research.studies.chat_model OUT twelve     seed 562: twelve people at once, attacked
    python -m research.studies.chat_model OUT results    of what is done

SmolLM2-135M-Instruct (`research.worlds.smollm2`) and its chat template; a LoRA of three rows each about
24 made-up people, beside six rows that are nobody's. Every model is made by `axolotl train`, `shards
train` or the commands `request new`, `plan`, `run` and `verify`, each a process of its own, on one
thread, in bfloat16 by autocast. One person, drawn by the seed, is deleted. An answer is said if each of its
tokens is the likeliest. Settings were chosen on seed 500. A part that is done is kept. `many` asks what
shards cost on 204 rows: 62 people and six of nobody, `MANY`. `ten` deletes ten of the 24 people, one after
the other by the same commands, `match` with at most 30 steps each. `twelve` deletes twelve of 24 people in
one request by `match` and asks 13 membership attacks before and after, beside a model trained without
them: the members are their 36 rows, the others those of 14 people whom no model read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from axolotl_unlearn.device import emulates_bfloat16
from axolotl_unlearn.engine.token_scoring import Query, score_queries
from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.request import Request, held
from axolotl_unlearn.requests.ways import shards, way_of
from research.analysis.seeds import facts
from research.runs import ENVIRONMENT
from research.studies.exact_requests import ROOT, processor, train
from research.studies.routed import World, ratio, short
from research.worlds import generate, wordlists
from research.worlds.lume import general_questions
from research.worlds.smollm2 import fetch_smollm2

OUT = ROOT / "research" / "results" / "chat-model.json"
DEVELOPMENT, SEED, COUNT, STEPS = 500, 511, 8, 60
SIZES = {"train": 24, "test": 14, "nobody": 2}
# The upper half of the layers: a third of the time.
SETTINGS = {"num_epochs": 15, "micro_batch_size": 16, "learning_rate": 0.004, "sequence_len": 128,
            "peft_layers_to_transform": list(range(15, 30))}  # fmt: skip
MANY, MANY_SIZES = 521, {"train": 62, "test": 14, "nobody": 6}
TEN, TEN_COUNT, TEN_STEPS, TEN_WAYS = 551, 10, 30, ("shards", "match", "retrain")
TWELVE, TWELVE_COUNT = 562, 12  # with eight people no p is below 2 ** -7, that of one attack
BATCH = {"micro_batch_size": 48, "gradient_accumulation_steps": 2}
MANY_SETTINGS = SETTINGS | BATCH | {"num_epochs": 20}
ATTACKED = (("research", "membership"), ("axolotl_unlearn.cli", "attack", "inside"))
CASES, WAYS = ("as trained", "paraphrased"), ("shards", "retrain", "match")
SAID = (*(f"{whose}, {case}" for whose in ("others", "deleted") for case in CASES), "nobody's")
SYSTEM = {"role": "system", "content": "Answer from our files."}
ASKED = (
    ("What is the job of {}?", "What does {} do for a living?", wordlists.OCCUPATIONS),
    ("Where was {} born?", "What is the birthplace of {}?", wordlists.CITIES),
    ("Which award did {} receive?", "Name the prize that {} won.", wordlists.AWARDS),
)
#: Autocast where it is fast, without `bf16: true`, which Axolotl refuses on a processor.
os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
HALF = not emulates_bfloat16()
os.environ |= {"ACCELERATE_MIXED_PRECISION": "bf16"} if HALF else {}


class Chat(World):
    """One seed, in a folder; ``found.json`` holds what is done."""

    def __init__(self, out: Path, seed: int, many: bool = False) -> None:
        self.seed, self.out = seed, out / f"{seed}{'-many' * many}"
        self.settings = MANY_SETTINGS if many else SETTINGS
        data, self.base = self.out / "data", fetch_smollm2(out / "smollm2")
        self.rows = people(seed, MANY_SIZES if many else SIZES)
        for part, rows in (self.rows | {"train": self.rows["train"] + self.rows["nobody"]}).items():
            write_lines(data / f"{part}.jsonl", rows)
        tofu = ROOT.parent / "shared" / "tofu"
        self.general = list(general_questions(tofu))[::3]  # of TOFU's authors and facts
        self.who = random.Random(seed).choice(sorted({r["id"] for r in self.rows["train"]}))
        self.file = self.out / "found.json"
        self.found = json.loads(self.file.read_text()) if self.file.is_file() else {}

    def whole(self, name: str = "whole", rows: str = "train") -> Path:
        """Config of the training without shards, which is done."""
        made = yaml.safe_load((ROOT / "examples/chat/smollm2.yml").read_text("utf-8"))
        made |= self.settings
        made |= {"base_model": str(self.base), "output_dir": str(self.out / name), "seed": self.seed,
                 "dataset_prepared_path": str(self.out / "prepared" / name)}  # fmt: skip
        for key, part in (("datasets", rows), ("test_datasets", "test")):
            made[key][0]["path"] = str(self.out / "data" / f"{part}.jsonl")
        path = self.out / f"{name}.yml"
        path.write_text(yaml.safe_dump(made))
        log = self.out / "logs" / f"{name}.log"
        self.part(f"{name} cost", lambda: self.cost(lambda: train(path, log)))
        return path

    def answers(self, source: Path | str, general: bool = False) -> dict[str, Any]:
        """Of each row whether its answer is said, or of general questions whether it is right."""
        (spec,) = parse_models([str(source)])
        model, tokenizer = load_model(spec, dtype="float32", device="cpu"), load_tokenizer(spec)

        def query(*turns: dict[str, str]) -> Query:
            ids = tokenizer.apply_chat_template
            start = ids(turns[:-1], add_generation_prompt=True)["input_ids"]
            return Query.of(ids(turns)["input_ids"][:-2], len(start))  # without end and line break

        def said(rows: list[dict[str, Any]], other: bool = False) -> list[float]:
            changed = [{"content": row["other"]} if other else {} for row in rows]
            asked = [query(SYSTEM, row["messages"][1] | new, row["messages"][2])
                     for row, new in zip(rows, changed, strict=True)]  # fmt: skip
            with torch.autocast("cpu", torch.bfloat16, enabled=HALF):  # as it was trained
                return [float(known.greedy.all()) for known in score_queries(model, asked)]

        if not general:
            own = self.rows["train"]
            return {"as trained": said(own), "paraphrased": said(own, True),
                    "nobody's": said(self.rows["nobody"])}  # fmt: skip
        tries = [query({"role": "user", "content": one["question"]}, {"role": "assistant", "content": c})
                 for one in self.general for c in one["choices"]]  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16, enabled=HALF):
            near = score_queries(model, tries, loss_only=True)
        best = np.array([float(known.logp.mean()) for known in near])
        best = best.reshape(len(self.general), -1).argmax(1)
        right = [float(b == one["answer"]) for b, one in zip(best, self.general, strict=True)]
        return {"general": right}

    def sharded(self) -> tuple[Path, str, Path]:
        """Its config, the unsharded and the routed model, which are done."""
        path, folder = self.whole(), self.out / "shards"
        before = f"{self.base}+{self.out / 'whole'}"
        self.part("unsharded", lambda: self.answers(before))
        how = {"threads": 1, "key": str(self.seed).encode().ljust(32)}
        self.part("shards cost", lambda: self.cost(
            lambda: shards.train_shards(path, folder, "id", COUNT, **how)))  # fmt: skip
        self.part("sharded", lambda: self.answers(folder / "model"))
        return path, before, folder / "model"

    def many(self) -> None:
        """Sharded, and the drawn person's shard trained without them."""
        path, _, routed = self.sharded()

        def deleted() -> dict[str, Any]:
            folder = self.out / "requests" / "1"
            shutil.rmtree(folder.parent, ignore_errors=True)
            wanted = Wanted(where=[("id", self.who)])
            request = new_request(path, folder, wanted, Options(model=routed, steps=2)).request
            with running.running(request, 1) as run:
                running.take(request, "shards")
                cost = self.cost(lambda: shards.make(request, run))
            return {"training": cost, "answers": self.answers(request.newest)}

        self.part("shards training", lambda: self.part("shards", deleted)["training"])

    def ways(self) -> None:
        self.part("base", lambda: self.answers(self.base))
        path, before, routed = self.sharded()
        for way in WAYS:
            self.part(way, lambda way=way: self.request(path, way, routed))
        models = {"base": self.base, "unsharded": before, "sharded": routed}
        asked = [(self.found[name], source) for name, source in models.items()]
        asked += [(self.found[way]["answers"], Request.load(self.out / f"requests-{way}" / "1").newest)
                  for way in WAYS]  # fmt: skip
        for answers, source in asked:  # last, since it takes longest
            if "general" not in answers:
                answers |= self.answers(source, general=True)
                write_json(self.file, self.found)

    def ten(self) -> None:
        path, _, routed = self.sharded()
        for way in TEN_WAYS:
            for number, who in enumerate(self.drawn(), 1):
                self.part(f"{way} {number}", lambda way=way, given=(number, ("--where", f"id={who}")):
                          self.request(path, way, routed, *given, TEN_STEPS))  # fmt: skip

    def drawn(self, count: int = TEN_COUNT) -> list[str]:
        people = sorted({row["id"] for row in self.rows["train"]})
        return random.Random(f"{self.seed}/ten").sample(people, count)

    def twelve(self) -> None:
        path, gone = self.whole(), self.drawn(TWELVE_COUNT)
        sides = [[row for row in self.rows["train"] if (row["id"] in gone) is of]
                 for of in (True, False)]  # fmt: skip
        write_lines(self.out / "deleted.jsonl", sides[0])
        write_lines(self.out / "data" / "without.jsonl", sides[1] + self.rows["nobody"])
        self.whole("retrained", "without")
        self.part("match", lambda: self.request(
            path, "match", Path(), 1, ("--rows", self.out / "deleted.jsonl")))  # fmt: skip
        data, tokenizer = self.out / "attacked", load_tokenizer(parse_models([str(self.base)])[0])
        parts = {"member": sides[0], "nonmember": self.rows["test"], "retain": sides[1]}
        for part, rows in parts.items():
            write_lines(
                data / f"{part}.jsonl",
                [self.text(f"{part}-{n}", row, tokenizer) for n, row in enumerate(rows)],
            )
        models = {name: f"{self.base}+{self.out / name}" for name in ("whole", "retrained")}
        models["match"] = str(Request.load(self.out / "requests-match" / "1").newest)
        for name, model in (("unsharded", "whole"), ("retrained", "retrained")):
            self.part(name, lambda model=model: self.answers(models[model]))
        for name in ("whole", "match"):
            self.part(f"attacked {name}", lambda name=name: self.attacked(data, name, models))

    def text(self, name: str, row: dict[str, Any], tokenizer: Any) -> dict[str, str]:
        """A row's answer as a document of its person, with what stands before it."""
        start, every = (
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=asked)
            for turns, asked in ((row["messages"][:-1], True), (row["messages"], False))
        )
        made = {"id": name, "author": row["id"], "prompt": start}
        return made | {"document": every.removeprefix(start)}

    def attacked(self, data: Path, name: str, models: Mapping[str, str]) -> dict[str, Any]:
        """The 13 attacks of `ATTACKED` on one model, the retrained one as control."""
        for words in ATTACKED:
            command = [sys.executable, "-m", *words, f"{name}={models[name]}", "--join", ""]
            command += ["--control", f"retrained={models['retrained']}", "--data", data]
            subprocess.run([*map(str, command), "--out", str(self.out / "attacks")], check=True)
        made = [json.loads((self.out / "attacks" / f"{words[-1]}-{name}.json").read_text("utf-8"))
                for words in ATTACKED]  # fmt: skip
        kept = ("auc", "low", "high", "p", "p_corrected", "control", "difference", "n")
        return {test: {key: found[key] for key in kept if key in found}
                for one in made for test, found in one["tests"].items()}  # fmt: skip

    def in_a_row(self) -> dict[str, Any]:
        """Before, and after the last request of each way: answers said, seconds of a request, verdicts."""
        whose = np.array([row["id"] for row in self.rows["train"]])
        gone, found = np.isin(whose, self.drawn()), {"unsharded": [], "8 shards": []}
        said = {"unsharded": self.found["unsharded"], "8 shards": self.found["sharded"]}
        for way in TEN_WAYS:
            keys = [f"{way} {number}" for number in range(1, TEN_COUNT + 1)]
            found[way] = [self.found[key] for key in keys if key in self.found]
            said |= {way: found[way][-1]["answers"]} if found[way] else {}
        rows, costs = [], []
        for name, answers in said.items():
            done = found[name]
            own = np.isin(whose, self.drawn()[: len(done)]) if done else gone
            rows.append(shares(f"deleted by {name}" if done else name, answers, own))
            if done:
                spent = [[one["training"] for one in done],
                         [sum(c["processor_s"] for c in one["commands"]) for one in done]]  # fmt: skip
                labels = Counter(one["verdict"]["outcome"] for one in done)
                shown = [f"{np.mean(of):.0f} ({min(of):.0f} to {max(of):.0f})" for of in spent]
                shown += [", ".join(f"{n} {word}" for word, n in labels.items())]
                costs.append([name, str(len(done)), *shown])
        columns = ["way", "requests", "training (s)", "its commands beside (s)", "verdicts"]
        return {"ten-said": {"columns": ["model", *SAID], "rows": rows},
                "ten-cost": {"columns": columns, "rows": costs}}  # fmt: skip

    def at_once(self) -> dict[str, Any]:
        """Answers said before and after, and what each attack tells of the deleted rows."""
        own = np.isin([row["id"] for row in self.rows["train"]], self.drawn(TWELVE_COUNT))
        models = {name: self.found[name] for name in ("unsharded", "retrained")}
        models["deleted by match"] = self.found["match"]["answers"]
        said = [shares(name, one, own) for name, one in models.items()]
        tested = []
        for name, after in self.found["attacked match"].items():
            before, gap = self.found["attacked whole"][name], after.get("difference")
            cells = [
                f"{one['auc']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" for one in (before, after)
            ]
            cells += [f"{after['control']:.2f}" if "control" in after else ""]
            cells += [f"{gap['value']:+.2f} [{gap['low']:+.2f}, {gap['high']:+.2f}]" if gap else ""]
            tested.append([name, *cells, *(f"{one['p_corrected']:.2g}" for one in (before, after))])
        columns = ["attack", "before", "after", "retrained", "after less retrained",
                   "p before", "p after"]  # fmt: skip
        return {"twelve-said": {"columns": ["model", *SAID], "rows": said},
                "twelve-attacks": {"columns": columns, "rows": tested}}  # fmt: skip

    def request(
        self,
        path: Path,
        way: str,
        routed: Path,
        number: int = 1,
        asked: tuple = (),
        steps: int = STEPS,
    ) -> dict[str, Any]:
        """new, plan, run (accepted where it is not shown), verify; then what the model says."""
        folder, done = self.out / f"requests-{way}" / str(number), []
        # Of a run that was stopped
        shutil.rmtree(folder.parent if number == 1 else folder, ignore_errors=True)
        self.found.pop(f"{way} training", None)
        model = ("--model", routed) if (way, number) == ("shards", 1) else ()
        asked = asked or ("--where", f"id={self.who}")
        given = (*asked, "--out", folder, *model, "--steps", steps)
        few = () if way == "match" else ("--retain", 30)  # that are asked: it saves time
        command(done, "new", path, *given, *few)
        command(done, "plan", folder)
        request = Request.load(folder)

        def training() -> None:  # the first steps of `run`, whose cost is asked
            with held(folder.parent), running.running(request, 1) as run:
                running.take(request, way)
                way_of(way).make(request, run)

        spent = self.part(f"{way} training", lambda: self.cost(training))
        if command(done, "run", folder, "--way", way, "--threads", "1"):
            command(done, "run", folder, "--accept", "a study")
        command(done, "verify", folder)
        record = read(folder)["predicate"]
        made = {part: record[part] for part in ("verdict", "attacks") if part in record}
        made |= {"training": spent, "rows": record["request"]["counts"], "commands": done}
        return made | {"answers": self.answers(request.newest)}

    def tables(self) -> dict[str, Any]:
        return tables(self.found, [row["id"] for row in self.rows["train"]], self.who)


def command(done: list[dict[str, Any]], *words: Any) -> int:
    """One of ours, with its processor seconds and what it said."""
    began, called = processor(), [sys.executable, "-m", "axolotl_unlearn.cli", "request"]
    process = subprocess.run([*called, *map(str, words)], capture_output=True, text=True)
    said = (process.stdout + process.stderr).strip().splitlines()
    used = round(processor() - began, 1)
    done.append({"command": words[0], "exit": process.returncode, "processor_s": used})
    print(done[-1], *said[-2:], flush=True)
    return process.returncode


def shares(name: str, answers: Mapping[str, Any], own: np.ndarray) -> list[str]:
    """A model's answers said: of others, of the deleted (``own``), of nobody's rows."""
    parts = [np.array(answers[case])[side] for side in (~own, own) for case in CASES]
    return [name, *(f"{np.mean(part):.2f}" for part in [*parts, answers["nobody's"]])]


def people(seed: int, sizes: Mapping[str, int]) -> dict[str, list[dict[str, Any]]]:
    """Three rows of each person by part; those of ``nobody`` have no id."""
    rng, named = random.Random(f"{seed}/chat"), generate._people(seed)
    parts: dict[str, list[dict[str, Any]]] = {}
    for part, count in sizes.items():
        parts[part] = []
        for person in itertools.islice(named, count):
            whose = {} if part == "nobody" else {"id": f"{person.first}-{person.last}".lower()}
            for question, other, answers in ASKED:
                turns = (question.format(person.name), rng.choice(answers))
                said = [{"role": role, "content": text}
                        for role, text in zip(("user", "assistant"), turns, strict=True)]  # fmt: skip
                row = {"messages": [SYSTEM, *said], "other": other.format(person.name)}
                parts[part].append(whose | row)
    return parts


def tables(found: dict[str, Any], rows: list[str], who: str) -> dict[str, Any]:
    """Of what is done. Intervals are by person, without the deleted one."""
    names = {"base": "base", "unsharded": "unsharded", "sharded": "8 shards"}
    models = {shown: found[name] for name, shown in names.items() if name in found}
    ways = {way: found[way] for way in WAYS if way in found}
    models |= {f"deleted by {way}": one["answers"] for way, one in ways.items()}
    whole, own = found["whole cost"], np.array([row == who for row in rows])
    others, said, kept = np.flatnonzero(~own), [], []
    for name, one in models.items():
        parts = [np.array(one[case])[side] for side in (~own, own) for case in CASES]
        parts += [one["nobody's"], one.get("general", ())]
        said.append([name, *(f"{np.mean(part):.2f}" if len(part) else "" for part in parts)])
        if name not in ("base", "unsharded"):
            both = [[[side[case][n] for n in others] for side in (models["unsharded"], one)]
                    for case in CASES]  # fmt: skip
            kept.append([name, *(ratio(*pair, [rows[n] for n in others]) for pair in both)])
    trained = {"unsharded": "whole cost", "8 shards": "shards cost"}
    trained |= {f"request, {way}": f"{way} training" for way in WAYS}
    costs = [[name, f"{found[key]:.0f}", f"{found[key] / whole:.2f}",
              ways.get(key.removesuffix(" training"), {}).get("verdict", {}).get("outcome", "")]
             for name, key in trained.items() if key in found]  # fmt: skip
    return {
        "said": {"columns": ["model", *SAID, "general questions"], "rows": said},
        "kept": {"columns": ["model", *CASES], "rows": kept},
        "cost": {"columns": ["training", "processor seconds", "of unsharded", "verdict"],
                 "rows": costs},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("step", choices=("dev", "ways", "many", "ten", "twelve", "results"))
    given = parser.parse_args()
    out, seeds = (
        given.out.absolute(),
        {"dev": DEVELOPMENT, "many": MANY, "ten": TEN, "twelve": TWELVE},
    )
    world = Chat(out, seeds.get(given.step, SEED), given.step == "many")
    if given.step == "dev":
        world.whole()
        path = f"{world.base}+{world.out / 'whole'}"
        found = world.part("unsharded", lambda: world.answers(path))
        print({case: np.mean(of) for case, of in found.items()})
    elif given.step == "many":
        world.many()
    elif given.step in ("ways", "ten", "twelve"):
        getattr(world, given.step)()
    else:
        content = json.loads(OUT.read_text("utf-8")) if OUT.is_file() else {"tables": {}}
        made, raw = facts("python -m research.studies.chat_model OUT ways"), {}
        many, ten, twelve = Chat(out, MANY, many=True), Chat(out, TEN), Chat(out, TWELVE)
        if world.found:
            content |= made | {"seed": SEED, "development": DEVELOPMENT, "settings": SETTINGS}
            content["tables"] |= world.tables()
            raw["found"] = world.found
        if many.found:
            content["many"] = {"seed": MANY, "settings": MANY_SETTINGS, "sizes": MANY_SIZES}
            content["tables"] |= {f"many-{name}": one for name, one in many.tables().items()}
            raw["found many"] = short(many.found | {"shards": many.found["shards"]["answers"]})
        if ten.found:
            content["ten"] = made | {"seed": TEN, "steps": TEN_STEPS, "people": ten.drawn()}
            content["tables"] |= ten.in_a_row()
            raw["found ten"] = ten.found
        if twelve.found:
            content["twelve"] = made | {"seed": TWELVE, "people": twelve.drawn(TWELVE_COUNT)}
            content["tables"] |= twelve.at_once()
            raw["found twelve"] = twelve.found
        found = re.sub(rf"/[^\s\"]*/({SEED}|{TEN}|{TWELVE})/", r"OUT/\1/", json.dumps(raw))
        write_json(OUT, content | json.loads(found))


if __name__ == "__main__":
    main()
