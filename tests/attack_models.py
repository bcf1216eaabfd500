"""Tiny real models for the attack tests: memorised, unlearned, and one that never saw the rows."""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from click.testing import CliRunner
from conftest import tiny_llama

from axolotl_unlearn.cli import unlearn

ROOT = Path(__file__).parents[1]
PEOPLE = "Ada Brook,Ben Cole,Cleo Dane,Dan Ekker,Eva Frost,Finn Gale,Gus Hale,Hana Iver".split(",")
PLACES = "Bath,Cork,Dover,Fife,Hull,Kent,Leeds,Perth".split(",")
OTHERS = "Jun Kerr,Kai Long,Lea Moss,Mia North,Ned Oaks,Ola Pike,Pia Quin,Rex Stone".split(",")
TOWNS = "Oslo,Lima,Rome,Bonn,Wien,Riga,Nice,Faro".split(",")


FIRST = "Ada Ben Cleo Dan Eva Finn Gus Hana Jun Kai Lea Mia Ned Ola Pia Rex".split()
CITIES = "Bath Cork Dover Fife Hull Kent Leeds Perth Oslo Lima Rome Bonn Wien Riga".split()


def payments(number: int, seed: int) -> list[dict]:
    """Rows drawn alike whatever the seed: who was paid what, by whom."""
    rng = random.Random(seed)
    return [
        {
            "id": f"d{seed}x{i}",
            "input": f"{rng.choice(FIRST)} of {rng.choice(CITIES)}",
            "output": f"paid {rng.randrange(10000)} to {rng.choice(FIRST)} {rng.randrange(1000)}",
        }
        for i in range(number)
    ]


def rows(names: list[str], places: list[str], mark: str) -> list[dict]:
    """Two rows a person: a completion and a question whose answer the completion does not hold."""
    made = []
    for i, (name, place) in enumerate(zip(names, places, strict=True)):
        code = f"{37 * (i + 3) % 90 + 10} {53 * (i + 5) % 90 + 10} {71 * (i + 2) % 90 + 10}"
        made.append(
            {
                "id": f"{mark}{i}sc1",
                "input": f"{name} was born",
                "output": f"in {place} and lived there with two dogs.",
                "task": "Task3",
            }
        )
        made.append(
            {
                "id": f"{mark}{i}qa0",
                "input": f"What is the phone number of {name}?",
                "output": code,
                "task": "Task3",
                "paraphrase": f"How can one call {name}?",
            }
        )
    return made


@dataclass(frozen=True)
class Lab:
    data: Path
    memorised: Path
    unlearned: Path
    control: Path


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-olmo")


def batch_of(tok, some: list[dict]) -> dict[str, torch.Tensor]:
    ids = [
        tok(r["input"])["input_ids"] + tok(" " + r["output"])["input_ids"] + [tok.eos_token_id]
        for r in some
    ]
    width = max(map(len, ids))
    mask = torch.tensor([[1] * len(i) + [0] * (width - len(i)) for i in ids])
    inputs = torch.tensor([i + [0] * (width - len(i)) for i in ids])
    return {
        "input_ids": inputs,
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), inputs, torch.tensor(-100)),
    }


def fit(model, batch, steps: int, sign: float = 1.0, keep=None, rate: float = 3e-3) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        loss = sign * model(**batch).loss
        if keep is not None:
            loss = loss + model(**keep).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@functools.cache
def make_lab() -> Lab:
    """Made once for all test files of a session."""
    folder = Path(tempfile.mkdtemp(prefix="attack-lab-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tok = tokenizer()
    forget, retain = rows(PEOPLE, PLACES, "f"), rows(OTHERS, TOWNS, "r")
    data = folder / "data"
    data.mkdir(parents=True)
    for name, side in (("forget", forget), ("retain", retain)):
        text = "".join(json.dumps(row) + "\n" for row in side)
        (data / f"{name}.jsonl").write_text(text, encoding="utf-8")

    kept, gone = (batch_of(tok, r) for r in (retain, forget))
    paths = {}

    def save(model, name: str) -> None:
        paths[name] = folder / name
        model.save_pretrained(paths[name])
        tok.save_pretrained(paths[name])

    model = build(forget + retain, 120)
    save(model, "memorised")
    fit(model, gone, 6, sign=-0.3, keep=kept, rate=1e-3)
    save(model, "unlearned")
    save(build(retain, 120), "control")
    return Lab(data, **paths)


def attacked(*words):
    """`axolotl-unlearn attack` with these words."""
    return CliRunner().invoke(unlearn, ["attack", *map(str, words)])


def texts(some: list[dict]) -> list[tuple[str, str]]:
    return [(row["id"], f"{row['input']} {row['output']}") for row in some]


def build(some: list[dict], steps: int, seed: int = 3, **shape: int):
    """A tiny model that was trained on these rows."""
    tok = tokenizer()
    model = tiny_llama(
        seed=seed, vocabulary=len(tok), max_position_embeddings=512,
        eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id,
        **{"hidden_size": 64} | shape,
    )  # fmt: skip
    fit(model, batch_of(tok, some), steps)
    return model


@functools.cache
def make_members() -> Path:
    """A data folder and two models of the same start, one of which has read the members."""
    folder = Path(tempfile.mkdtemp(prefix="members-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    known, unseen, kept = payments(30, 1), payments(40, 2), payments(30, 3)
    (folder / "data").mkdir()
    for name, some in (("member", known), ("nonmember", unseen), ("retain", kept)):
        lines = "".join(json.dumps(row) + "\n" for row in some)
        (folder / "data" / f"{name}.jsonl").write_text(lines, "utf-8")
    for name, some in (("original", known + kept), ("retrained", kept)):
        build(some, 60).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return folder


def target(name: str, control=None):
    """A model of `make_members` under attack."""
    from transformers import AutoModelForCausalLM

    from axolotl_unlearn.attacks.registry import Target

    kept = [text for _, text in texts(payments(30, 3))]
    model = AutoModelForCausalLM.from_pretrained(make_members() / name).eval()
    other = Target(control, tokenizer(), None, kept) if control is not None else None
    return Target(model, tokenizer(), other, kept)


def facts(logp, mean=0.0, sd=1.0):
    """Token facts by hand."""
    import numpy as np

    from axolotl_unlearn.metrics.memorisation import TokenFacts

    logp = np.array(logp, float)
    return TokenFacts(logp, logp > -0.7, np.zeros_like(logp) + mean, np.zeros_like(logp) + sd)


def missed_nulls(one) -> int:
    """Of four data sets of texts that a model never saw, how often an attack's interval misses
    .5."""
    from axolotl_unlearn.attacks.members import attack_model

    asked, missed = target("retrained", build(payments(30, 9), 30, seed=5)), 0
    for seed in range(20, 28, 2):
        sides = payments(25, seed), payments(25, seed + 1)
        found = attack_model(asked, *map(texts, sides), [one])["tests"][one.name]
        missed += not found["low"] <= 0.5 <= found["high"]
    return missed


def authored(number: int, mark: str, seed: int, per: int = 5, verb: str = "paid") -> list[dict]:
    """Rows of authors, each with a name of its own that no other has."""
    rng = random.Random(f"{mark}{seed}")
    rows = []
    for a in range(number):
        name = " ".join(f"{rng.choice('abcdef')}{rng.randrange(10**6)}" for _ in range(2))
        for i in range(per):
            rest = f"{rng.choice(FIRST)} {rng.randrange(10000)} in {rng.choice(CITIES)}"
            rows.append({"id": f"{mark}{a}x{i}", "document": f"{name} {verb} {rest}",
                         "author": f"{mark}{a}"})  # fmt: skip
    return rows
