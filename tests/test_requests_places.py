"""A canary in each of many places: what `request erase` does of each is what the docs say."""

from __future__ import annotations

import base64
import json
import os
import re
import tarfile
from pathlib import Path

import pytest
import torch
from requests_folder import SECRET, finished_request, model_folder, write_lines
from test_requests_erase import CELLS, RUNS, home, in_sqlite, office, repository  # noqa: F401

from axolotl_unlearn.requests.erase import erase, plan
from axolotl_unlearn.requests.record import write as record

DOCS = Path(__file__).parents[1] / "docs" / "deleting-data.md"


def text(path: Path, content: str | bytes = SECRET) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def backup(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        archive.add("train.jsonl")


def link(path: Path) -> None:
    text(Path("../elsewhere/notes.txt"))
    path.symlink_to(Path("../elsewhere").absolute())


def token_ids(path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("requests/2026-001/model")
    path.write_text(json.dumps(tokenizer(SECRET)["input_ids"]))


def weights(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, path)


def other_request(path: Path) -> None:
    """Carried out; a copy of her row stands among those that it kept."""
    folder = finished_request(Path("requests"), "2026-000", {"model": "base", "adapter": None})
    write_lines(folder / "data" / "forget.jsonl", [{"id": "b", "row": {"text": "about Bob"}}])
    write_lines(path, [{"id": "a", "row": {"text": SECRET}}])
    for name in ("audit.jsonl",):
        (folder / "eval" / name).write_text(
            (folder / "eval" / name).read_text().replace(SECRET, "")
        )
    record(folder)


def there(path: Path) -> None:
    """The fixture has made it."""
    assert path.exists()


TUNED = "out/tuned"
#: Place as the docs call it -> where the canary lies, and how it came there.
PLACES = {
    "weights of the model before": (f"{TUNED}/adapter_model.safetensors", there),
    "its checkpoints": (f"{TUNED}/checkpoint-10", there),
    "its merged copy": (f"{TUNED}/merged", lambda path: model_folder(path)),
    "Axolotl's log and TensorBoard in its folder": (f"{TUNED}/runs", there),
    "samples that a manifest lists": (f"{TUNED}/samples.jsonl", there),
    "other files in its folder": (f"{TUNED}/generated.txt", text),
    "prepared data of the config": ("prepared/0123456789abcdef0123456789abcdef", there),
    "teacher and work of the request": ("requests/2026-001/work", there),
    "your training file": ("train.jsonl", there),
    "other folders where you work": ("out/third/notes.txt", text),
    "retained rows of another request": ("requests/2026-000/data/retain.jsonl", other_request),
    "rows that audits of another request need": (
        "requests/2026-000/data/judge.jsonl",
        lambda path: write_lines(path, [{"id": "a", "row": {"text": SECRET}}]),
    ),
    "cache of `datasets`": ("cache/json/rows.txt", text),
    "downloads of the hub": ("hub/datasets--x/blobs/1", text),
    "history of a git repository": (
        "repository/.git",
        lambda path: repository(path.parent),
    ),
    "spreadsheet": ("people.xlsx", lambda path: office(path, "xl/sharedStrings.xml", CELLS)),
    "word processor's document": (
        "notes.docx",
        lambda path: office(path, "word/document.xml", RUNS),
    ),
    "SQLite": ("app.db", in_sqlite),
    "backup (.tar.gz)": ("backup.tar.gz", backup),
    "e-mail with an attachment": (
        "mail.eml",
        lambda path: path.write_bytes(base64.encodebytes(f"{SECRET} {SECRET} {SECRET}".encode())),
    ),
    "folder behind a link": ("linked", link),
    "PDF": ("scan.pdf", lambda path: text(path, b"%PDF-1.7 " + SECRET.encode("utf-16")[::-1])),
    "picture, sound": ("photo.png", lambda path: text(path, b"\x89PNG\r\n")),
    "encrypted archive, 7z, rar": ("old.7z", lambda path: text(path, b"7z\xbc\xaf\x27\x1c")),
    "weights of other models": ("out/third/model.safetensors", weights),
    "folders of programs (`.venv`, `node_modules`)": ("node_modules", lambda p: text(p / "a.js")),
    "token ids outside tables": ("ids.json", token_ids),
    "said in other words": ("retold.txt", lambda p: text(p, "Quill hides her key at the mill.")),
    "another disk or machine": ("../other-disk/copy.txt", text),
}


def outcome(planned, path: Path) -> str:
    """What erase does of a place."""

    def covers(found) -> bool:
        places = [Path(os.path.abspath(one)) for one in found]
        inner = Path(os.path.abspath(path))
        return any(one == inner or inner in one.parents for one in places)

    if covers(item.path for item in planned.removable):
        return "removed"
    kept = [item.path for item in planned.items if item.why]
    if covers([*kept, *planned.stays(planned.found.left), *planned.stays(planned.found.named)]):
        return "named"
    return "counted" if covers(planned.found.unsearched) else "missed"


@pytest.fixture
def planned(home):  # noqa: F811
    for place, make in PLACES.values():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        make(Path(place))
    return plan("requests/2026-001")


def test_each_place_is_what_the_docs_say(planned):
    measured = {name: outcome(planned, Path(place)) for name, (place, _) in PLACES.items()}
    section = DOCS.read_text("utf-8").split("| `erase` | places |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (\w+) \| (.+?) \|$", section, re.MULTILINE)
    assert {name: what for what, names in rows for name in names.split("; ")} == measured
    erase(planned)
    for name, (place, _) in PLACES.items():
        assert Path(place).exists() == (measured[name] != "removed"), name
