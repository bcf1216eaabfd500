"""A request that was run, as `request run` leaves it: real files, made-up figures."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from axolotl_unlearn.cli import unlearn

SECRET = "Ada Quill keeps a brass key under the third stone of the old mill"
FIGURES = {"p": 0.6, "q": 0.6, "told": False, "rank": 0.4, "loss": 2.0, "extraction_strength": 0.1}


def said(*words: object, code: int | tuple[int, ...] = 0, typed: str | None = None) -> Result:
    """`axolotl-unlearn request ...` as one types it, which ends with this code."""
    done = CliRunner().invoke(unlearn, ["request", *map(str, words)], input=typed)
    assert done.exit_code in (code if isinstance(code, tuple) else (code,)), done.output
    return done


def answered(*words: object, code: int | tuple[int, ...] = 0) -> dict[str, Any]:
    """Likewise: what ``--json`` says of it."""
    return json.loads(said(*words, "--json", code=code).stdout)


def no_caches(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The caches of Hugging Face are ``cache`` and ``hub`` of a folder, which need not be there."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", folder / "cache/downloads")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def model_folder(folder: Path, content: bytes = b"weights") -> Path:
    """What `model_facts` takes for a full model; nobody loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    (folder / "README.md").write_text("free to change")
    return folder


def adapter_folder(folder: Path, base: Path, content: bytes = b"adapter") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", {"base_model_name_or_path": str(base)})
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def finished_request(
    requests_dir: Path,
    name: str = "1",
    before: dict[str, str | None] | None = None,
    *,
    good: bool = True,
    accepted: str | None = None,
    reading: str = "not told",
    forget: list[dict[str, Any]] | None = None,
    documents: tuple[str, ...] = ("ada-quill",),
    outputs: dict[str, str] | None = None,
) -> Path:
    """Everything that `record.write` reads; the new model stands on the base of the old one.

    Args:
        before: Default a whole model beside the requests.
    """
    folder = requests_dir / name
    if before is None:
        before = {"model": str(model_folder(requests_dir.parent / "old")), "adapter": None}
    adapter = before["adapter"] is not None
    model = folder / "model"
    if adapter:
        adapter_folder(model, Path(before["model"]), f"new {name}".encode())
    else:
        model_folder(model, f"new {name}".encode())
    config = folder / "finetune.yml"
    config.write_text(json.dumps({"base_model": "base", **(outputs or {})}))
    forget = forget or [{"id": documents[0], "dataset": 0, "row": {"text": SECRET}}]
    write_lines(folder / "data" / "forget.jsonl", forget)
    write_lines(folder / "data" / "retain.jsonl", [{"id": "r1", "row": {"text": "a kept row"}}])
    write_json(
        folder / "request.json",
        {
            "schema": 1,
            "id": name,
            "created": "2026-11-22T07:00:00+00:00",
            "config": {
                "path": str(config),
                "digest": hashlib.sha256(config.read_bytes()).hexdigest(),
            },
            "base": before["model"] if adapter else "base",
            "before": before,
            "chosen": {"how": ["--where id=ada-quill"], "near": 0, "mentions": 2},
            "counts": {"forget": len(forget), "retain": 1, "heldout": 0, "documents": 1},
            "adapter": adapter,
            "root": os.path.relpath(".", folder),
            "limits": ["There are no held-out rows, so membership cannot be tested."],
        },
    )
    write_json(
        folder / "verdict.json",
        {
            "good": good,
            "status": "good" if good else "still known",
            "reasons": [f"document {documents[0]} is {reading}"],
            "accepted": accepted,
            "documents": [],
        },
    )
    write_json(folder / "work" / "stamps" / "forget.json", {"key": "k"})
    lines = []
    for document in documents:
        before_line = FIGURES | {"rank": 0.0, "extraction_strength": 1.0}
        line = {"document": document, "reading": reading, **FIGURES, "before": before_line}
        line |= {"answers": 1, "answers_said": 0, "answer_said": False}
        rows = [{"id": document, "prompt": "who?", "expected": SECRET, "generated": SECRET}]
        lines += [{"model": "before", **line}, {"model": "after", **line, "rows": rows}]
    write_lines(folder / "eval" / "audit.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """PEM files: private, public, and the public one of somebody else."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    pytest.importorskip("model_signing")
    place = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        private, public = place / f"{name}.pem", place / f"{name}.pub"
        make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private]
        subprocess.run(make, check=True)
        subprocess.run(["openssl", "ec", "-in", private, "-pubout", "-out", public], check=True)
    return place / "mine.pem", place / "mine.pub", place / "other.pub"
