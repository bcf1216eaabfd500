"""`make demo-request`: people deleted from a chat model by the three commands.

Plain `axolotl train` makes a chat model, without a word about unlearning: of a tiny base that has
read chats about other people, or (``--real``) of SmolLM2-135M-Instruct with its own chat template,
as a LoRA. Some people are deleted; the result is fine-tuned further on others and audited; record,
model and ledger are checked, and one changed byte in each is found.

    python -m research.studies.demo_request [OUT] [--real] [--seed N] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.verdict import judged
from research.harness.stages import Kind, Make, Plan, Run, Train, near
from research.studies.demo import CPU, MODEL, wheel
from research.studies.people import shown, tables
from research.worlds.chats import SIZES, make_chats

REQUEST = "requests/2026-001"
#: Budget of the tiny model's forgetting run.
STEPS = 100
QUICK = (sys.executable, "-m", "axolotl_unlearn.cli")


@dataclass(frozen=True)
class Life:
    """Which model, and how many people.

    Attributes:
        people: In each part of the data; ``turns`` of a conversation.
        deleted: How many of those in "train".
        steps: Budget of the forgetting run.
        later: Changes of the chat model's config for the fine-tuning afterwards.
    """

    real: bool = False
    people: Mapping[str, int] = field(default_factory=lambda: SIZES)
    turns: int = 1
    deleted: int = 1
    steps: int = STEPS
    seed: int = 0
    later: Mapping[str, Any] = field(
        default_factory=lambda: {"num_epochs": 4, "learning_rate": 0.0005}
    )


TINY = Life()
REAL = Life(
    True,
    {"train": 16, "test": 21, "later": 4},
    turns=3,
    deleted=3,
    steps=60,
    later={"num_epochs": 3, "learning_rate": 0.0005},
)


def table(out: Path, life: Life) -> dict[str, Kind]:
    """The trainings, the three commands, and what is found afterwards."""
    made = chat_model(out, life)
    request = out / REQUEST
    later: dict[str, Any] = {"datasets.0.path": "later.jsonl", "test_datasets": None, **life.later}
    if life.real:  # further training of the LoRA
        later["lora_model_dir"] = near(request / "model")
    return {
        **made,
        "new": Run(
            lambda plan: [
                *(*QUICK, "request", "new", near(plan.config_file("finetune"))),
                *(word for person in chosen(plan, life) for word in ("--where", f"id={person}")),
                *("--out", near(request), "--steps", life.steps),
            ],
            f"{REQUEST}/request.json",
            clears="requests",
            title=f"request new: {life.deleted} of {life.people['train']} people are chosen",
            needs=("finetune",),
            share=1,
        ),
        "run": Run(
            lambda plan: [
                *(*QUICK, "request", "run", near(request)),
                *("--way", "match", *threads(plan)),
            ],
            f"{REQUEST}/record.json",
            title="request run: forget, evaluate, attack, record",
            needs=("new",),
            share=1,
        ),
        "later": Train(
            "chat/smollm2" if life.real else "chat/finetune",
            MODEL if life.real else request / "model",
            later,
            title="fine-tuned further on other people",
            needs=("run",),
            share=1,
        ),
        "audit": Run(
            lambda plan: [
                *(
                    *QUICK,
                    "request",
                    "audit",
                    near(plan.out / "later"),
                    near(request.parent),
                    "--quiet",
                ),
                *("--figures", near(plan.out / "audit.json")),
                *("--junit", near(plan.out / "audit.xml")),
            ],
            "audit.json",
            title="audit of what came out",
            needs=("later",),
            share=1,
        ),
        "verify": Make(
            lambda plan: find_changes(request, plan.out),
            "verify.json",
            title="one byte changed in model, record and ledger",
            needs=("audit",),
        ),
        "people": Run(
            lambda plan: [
                *(sys.executable, "-m", "research.studies.people"),
                *(near(request), near(plan.out)),
            ],
            "people.json",
            title="deleted, held-out and retained people side by side",
            needs=("verify",),
            share=1,
        ),
    }


def chat_model(out: Path, life: Life = TINY) -> dict[str, Kind]:
    """The data, the base and ``finetune``, the chat model by plain Axolotl."""
    data = Make(
        lambda plan: make_chats(plan.data, life.seed, life.people, life.turns),
        "data/train.jsonl",
        settings=[life.seed, dict(life.people), life.turns],
        title="make the chats",
    )
    if life.real:
        return {"data": data, MODEL: wheel(out), "finetune": learned(out, life, MODEL)}
    base = {"reinit_weights": True, "num_epochs": 3, "learning_rate": 0.002}
    base |= {"datasets.0.path": "background.jsonl", "test_datasets": None}
    read = Train(
        "chat/finetune",
        "examples/tiny-olmo",
        base,
        title="a base that reads about other people",
        share=1,
    )
    return {"data": data, "base": read, "finetune": learned(out, life)}


def learned(out: Path, life: Life = TINY, base: str = "base", rows: str = "train") -> Train:
    """A chat model of the rows in ``data/ROWS.jsonl``."""
    return Train(
        "chat/smollm2" if life.real else "chat/finetune",
        base,
        {
            "datasets.0.path": f"{rows}.jsonl",
            "test_datasets.0.path": near(out / "data" / "test.jsonl"),
        },
        title="a chat model by plain axolotl train",
        share=1,
    )


def threads(plan: Plan) -> tuple[str, str]:
    return "--threads", str(plan.job.threads)


def chosen(plan: Plan, life: Life) -> list[str]:
    """Ids of the people to delete: the first ones."""
    lines = (plan.data / "train.jsonl").read_text("utf-8").splitlines()
    return list(dict.fromkeys(json.loads(line)["id"] for line in lines))[: life.deleted]


def find_changes(request: Path, out: Path) -> Path:
    """Verify the record; then change a byte of each file in a copy, which has to be found.

    Raises:
        UnlearnError: A change that was not found.
    """
    from axolotl_unlearn.requests.verify import verify

    found: dict[str, str] = {"unchanged": "; ".join(verify(request).says)}
    copy = out / "changed"
    weights = next(request.joinpath("model").glob("*.safetensors")).name
    for name in (f"model/{weights}", "record.json", "../ledger.jsonl"):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(request.parent, copy)
        path = copy / request.name / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        try:
            verify(copy / request.name, model=str(copy / request.name / "model")).require()
        except UnlearnError as error:
            found[path.name] = str(error)
        else:
            raise UnlearnError(f"a changed byte in {path.name} was not found.")
    shutil.rmtree(copy)
    return write_json(out / "verify.json", found)


def plan_request(
    out: Path | str | None = None,
    life: Life = TINY,
    *,
    threads: int | None = None,
    console: Console | None = None,
) -> Plan:
    """The job, not yet started."""
    out = Path(out or ("out/demo-request-real" if life.real else "out/demo-request"))
    return Plan(
        "make demo-request",
        out,
        table(out, life),
        threads=threads,
        environment={} if life.real else CPU,
        console=console,
    )


def demo_request(
    out: Path | str | None = None, *, life: Life = TINY, threads: int | None = None
) -> dict[str, Any]:
    """Run or resume the demo; returns and writes ``results.json``.

    Raises:
        UnlearnError: A stage failed, or the model is not good enough to be handed over.
    """
    plan = plan_request(out, life, threads=threads)
    evaluated = plan.run(f"{REQUEST}/eval")

    def read(name: str) -> dict[str, Any]:
        return json.loads((plan.out / name).read_text("utf-8"))

    verdict, found, audit = read(f"{REQUEST}/verdict.json"), read("people.json"), read("audit.json")
    after = judged(evaluated)["after"]
    results = {
        "seconds": evaluated["seconds"],
        "cpu_seconds": evaluated["cpu_seconds"],
        "threads": plan.job.threads,
        "stages": {name: one["seconds"] for name, one in evaluated["stages"].items()},
        "verdict": {name: verdict[name] for name in ("good", "status", "reasons")},
        "documents": [
            {name: line.get(name) for name in ("reading", "p", "rank", "answers_said")}
            | {"said_before": (line.get("before") or {}).get("answers_said")}
            for line in verdict["documents"]
        ],
        "retain": {model["name"]: _retained(model) for model in evaluated["models"]},
        "attacks": {n: a["auc"] for n, a in after.attacks.items()},
        "run": read(f"{REQUEST}/record.json")["predicate"]["seconds"],
        **found,
        "audit": audit["says"],
        "verify": read("verify.json"),
        "tables": tables(found),
    }
    write_json(plan.out / "results.json", results)
    show(results, plan.console)
    return results


def _retained(model: Mapping[str, Any]) -> dict[str, float]:
    cells = model.get("cells") or {}
    return {n: v for n, v in cells.items() if n.startswith("retain") and v is not None}


def show(results: Mapping[str, Any], console: Console) -> None:
    """What came out, in a few lines."""
    rows = results["documents"]
    said = [sum(row[key] or 0 for row in rows) for key in ("said_before", "answers_said")]
    verdict = results["verdict"]
    console.print(f"verdict: {verdict['status']}", highlight=False, markup=False)
    console.print(f"answers of the deleted that are said: {said[0]} before, {said[1]} after")
    for name, cells in results["retain"].items():
        kept = ", ".join(f"{cell} {value:.2f}" for cell, value in cells.items())
        console.print(f"kept, {name}: {kept}")
    for name, groups in results["models"].items():
        told = ", ".join(f"{group} {shown(one['said'])}" for group, one in groups.items())
        console.print(f"answers in the likeliest words, {name}: {told}", markup=False)
    console.print(f"audit after further fine-tuning: {results['audit']}")
    for name, sentence in results["verify"].items():
        console.print(f"{name}: {sentence}", highlight=False)
    console.print(f"{results['seconds']:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--real", action="store_true", help="SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=0, help="of the people")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    life = replace(REAL if given.real else TINY, seed=given.seed)
    demo_request(given.out, life=life, threads=given.threads)


if __name__ == "__main__":
    main()
