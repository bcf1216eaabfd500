"""`make demo-request`: one person deleted from a tiny chat model by the three commands.

A base reads chats about other people; plain `axolotl train` makes a chat model of it, without a
word about unlearning. One person is deleted; the result is fine-tuned further on other people and
audited; record, model and ledger are checked, and one changed byte in each is found.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from axolotl_unlearn.demo.chats import TEMPLATE, make_chats
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write, write_json
from axolotl_unlearn.jobs.demo import CPU
from axolotl_unlearn.jobs.runner import Job, Stage
from axolotl_unlearn.jobs.stages import ENVIRONMENT, executable, near, repository

#: Budget of the forgetting run.
STEPS = 150
#: The way is shown to its end, whatever the verdict, which is printed.
ACCEPTED = "demo on made-up data"
ROW = {"ds_type": "json", "type": "chat_template"}
PLAIN: dict[str, Any] = {
    "chat_template": "jinja",
    "chat_template_jinja": TEMPLATE,
    "sequence_len": 256,
    "pad_to_sequence_len": False,
    "dataset_num_proc": 0,
    "micro_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "optimizer": "adamw_torch",
    "adam_beta2": 0.98,
    "lr_scheduler": "linear",
    "warmup_ratio": 0.05,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "seed": 42,
    "bf16": False,
    "fp16": False,
    "save_strategy": "no",
    "logging_steps": 20,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "device_map": {"": "cpu"},
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
}


def configs(out: Path, home: Path) -> dict[str, dict[str, Any]]:
    """Plain Axolotl configs: base, finetune, and later fine-tuning of the result."""
    data, request = out / "data", out / "requests" / "2026-001"

    def run(name: str, base: str | Path, rows: str, **more: Any) -> dict[str, Any]:
        return {
            "base_model": near(base),
            "output_dir": near(out / name),
            "dataset_prepared_path": near(out / "prepared"),
            **PLAIN,
            "datasets": [{"path": near(data / f"{rows}.jsonl"), **ROW}],
            **more,
        }

    tests = {"test_datasets": [{"path": near(data / "test.jsonl"), "split": "train", **ROW}]}
    return {
        "base": run(
            "base",
            home / "examples" / "tiny-olmo",
            "background",
            reinit_weights=True,
            num_epochs=5,
            learning_rate=0.002,
        ),
        "finetune": run("chat", out / "base", "train", num_epochs=18, learning_rate=0.0016, **tests)
        | {"eval_strategy": "no"},
        "later": run("later", request / "model", "later", num_epochs=4, learning_rate=0.0005),
    }


def stages(out: Path, threads: int) -> list[Stage]:
    """The table: three trainings, the three commands, and what is found afterwards."""
    home, request = repository(), out / "requests" / "2026-001"
    made = configs(out, home)
    for name, config in made.items():
        text = yaml.safe_dump(config, sort_keys=False)
        write(out / f"{name}.yml", f"# Written by `make demo-request`.\n{text}")
    quick = [sys.executable, "-m", "axolotl_unlearn.cli"]
    person = made_up(out)

    def train(name: str, title: str, needs: str, rows: str) -> Stage:
        folder = Path(made[name]["output_dir"])
        return Stage(
            name,
            title,
            [executable("axolotl"), "train", near(out / f"{name}.yml"), "--launcher", "python"],
            folder / "model.safetensors",
            inputs=[out / f"{name}.yml", out / "data" / f"{rows}.jsonl"],
            needs=[needs] if needs else [],
            before=lambda: shutil.rmtree(folder, ignore_errors=True),
            threads=threads,
        )

    def command(name: str, title: str, words: list[str], output: Path, needs: str) -> Stage:
        return Stage(name, title, [*quick, *words], output, needs=[needs], threads=threads)

    new = command(
        "new",
        "request new: one person is chosen",
        ["request", "new", near(out / "finetune.yml"), "--where", f"id={person}"]
        + ["--out", near(request), "--steps", str(STEPS)],
        request / "request.json",
        "finetune",
    )
    new.before = lambda: shutil.rmtree(request.parent, ignore_errors=True)
    return [
        train("base", "a base that reads about other people", "", "background"),
        train("finetune", "a chat model by plain axolotl train", "base", "train"),
        new,
        command(
            "run",
            "request run: forget, evaluate, attack, record",
            ["request", "run", near(request), "--accept", ACCEPTED],
            request / "record.json",
            "new",
        ),
        train("later", "fine-tuned further on other people", "run", "later"),
        command(
            "audit",
            "audit of what came out",
            ["audit", near(out / "later"), near(request.parent), "--quiet"]
            + ["--json", near(out / "audit.json"), "--junit", near(out / "audit.xml")],
            out / "audit.json",
            "later",
        ),
        Stage(
            "verify",
            "one byte changed in model, record and ledger",
            None,
            out / "verify.json",
            needs=["audit"],
            action=lambda: find_changes(request, out),
        ),
    ]


def made_up(out: Path) -> str:
    """Write the data; the id of the person who will be deleted."""
    return make_chats(out / "data")["train"][0]


def find_changes(request: Path, out: Path) -> None:
    """Verify the record; then change a byte of each file in a copy, which has to be found.

    Raises:
        UnlearnError: A change that was not found.
    """
    from axolotl_unlearn.requests.record import verify

    found: dict[str, str] = {"unchanged": "; ".join(verify(request))}
    copy = out / "changed"
    for name in ("model/model.safetensors", "record.json", "../ledger.jsonl"):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(request.parent, copy)
        path = copy / request.name / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        try:
            verify(copy / request.name, model=str(copy / request.name / "model"))
        except UnlearnError as error:
            found[path.name] = str(error)
        else:
            raise UnlearnError(f"a changed byte in {path.name} was not found.")
    shutil.rmtree(copy)
    write_json(out / "verify.json", found)


def demo_request(
    out: Path | str = "out/demo-request", *, threads: int | None = None
) -> dict[str, Any]:
    """Run or resume the demo; returns and writes ``results.json``.

    Raises:
        UnlearnError: A stage failed.
    """
    out, console = Path(out), Console()
    job = Job(out, threads=threads, environment={**ENVIRONMENT, **CPU}, console=console)
    for stage in stages(out, job.threads):
        job.add(stage)
    outcomes = job.run()
    request = out / "requests" / "2026-001"
    verdict = json.loads((request / "verdict.json").read_text("utf-8"))
    evaluated = json.loads((request / "eval" / "results.json").read_text("utf-8"))
    audit = json.loads((out / "audit.json").read_text("utf-8"))
    results = {
        "seconds": round(job.total_seconds(), 1),
        "stages": {name: outcome.seconds for name, outcome in outcomes.items()},
        "verdict": {name: verdict[name] for name in ("good", "status", "reasons")},
        "documents": [
            {name: line.get(name) for name in ("reading", "p", "rank", "answers_said")}
            | {"said_before": (line.get("before") or {}).get("answers_said")}
            for line in verdict["documents"]
        ],
        "retain": {m["name"]: _retained(m) for m in evaluated["models"]},
        "audit": audit["says"],
        "verify": json.loads((out / "verify.json").read_text("utf-8")),
    }
    write_json(out / "results.json", results)
    show(results, console)
    return results


def _retained(model: Mapping[str, Any]) -> dict[str, float]:
    cells = model.get("cells") or {}
    return {n: v for n, v in cells.items() if n.startswith("retain") and v is not None}


def show(results: Mapping[str, Any], console: Console) -> None:
    """What came out, in a few lines."""
    rows = results["documents"]
    said = [sum(row[key] or 0 for row in rows) for key in ("said_before", "answers_said")]
    verdict = results["verdict"]
    reasons = f" ({'; '.join(verdict['reasons'])}); accepted: {ACCEPTED}" * (not verdict["good"])
    console.print(f"verdict: {verdict['status']}{reasons}", highlight=False, markup=False)
    console.print(f"answers of the person that are said: {said[0]} before, {said[1]} after")
    for name, cells in results["retain"].items():
        shown = ", ".join(f"{cell} {value:.2f}" for cell, value in cells.items())
        console.print(f"kept, {name}: {shown}")
    console.print(f"audit after further fine-tuning: {results['audit']}")
    for name, sentence in results["verify"].items():
        console.print(f"{name}: {sentence}", highlight=False)
    console.print(f"{results['seconds']:.0f} s")


if __name__ == "__main__":
    demo_request(*sys.argv[1:2])
