"""Nothing that is found is executed: each command in a process of its own, on a folder of traps."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import kills
import pytest
import yaml
from click.testing import CliRunner
from requests_folder import SECRET, no_caches
from test_requests_new import TRAIN, config, people, write
from test_requests_run import home  # noqa: F401

from axolotl_unlearn.cli import unlearn

#: Raised by Python before it does so; of the arguments the first.
WATCHED = (
    *("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system"),
    *("pickle.find_class", "socket.connect", "socket.getaddrinfo", "ctypes.dlopen"),
)
MARK = "T_R_A_P"


class Reduced:
    """A pickle that runs a command where it is read."""

    def __reduce__(self):
        return os.system, (f"touch {MARK}-pickle",)


def set_traps(folder: Path) -> None:
    """Whatever runs where somebody reads, imports, renders, asks git or follows it."""
    git = folder / "vendor" / ".git"
    for name in ("objects", "refs", "hooks"):
        (git / name).mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "config").write_text(
        f'[core]\n\tfsmonitor = touch {MARK}-git\n\tsshCommand = touch {MARK}-ssh\n'
        '[extensions]\n\tpartialClone = origin\n[remote "origin"]\n'
        f"\turl = ext::touch {MARK}-ext\n\tpromisor = true\n[protocol]\n\tallow = always\n"
    )  # fmt: skip
    (folder / "vendor" / "rows.txt").write_text(SECRET)
    bad = pickle.dumps(Reduced())
    model = folder / "places" / "model"
    model.mkdir(parents=True)
    for name in ("model.pt", "payload.pkl", "training_args.bin", "state", "model.ckpt"):
        (model / name).write_bytes(bad)
    with zipfile.ZipFile(model / "torch.pth", "w") as archive:
        archive.writestr("archive/data.pkl", bad)
    with zipfile.ZipFile(folder / "inner.zip", "w") as archive:
        archive.writestr("archive/data.pkl", bad)
        archive.writestr("rows.txt", SECRET)
    code = f"import os; os.system('touch {MARK}-import')\nclass Evil: pass\n"
    for name in ("sitecustomize.py", "conftest.py", "usercustomize.py", "modeling_evil.py"):
        (folder / name).write_text(code)
        (model / name).write_text(code)
    auto = {"AutoConfig": "modeling_evil.Evil", "AutoTokenizer": ["modeling_evil.Evil", None]}
    auto |= {"AutoModelForCausalLM": "modeling_evil.Evil"}
    evil = {"model_type": "evil", "auto_map": auto, "architectures": ["Evil"]}
    (model / "config.json").write_text(json.dumps(evil))
    (model / "tokenizer_config.json").write_text(json.dumps(evil | {"tokenizer_class": "Evil"}))
    template = "{{ cycler.__init__.__globals__.os.popen('touch " + MARK + "-jinja').read() }}"
    (model / "chat_template.jinja").write_text(template)
    (model / "README.md").write_text(
        f"---\nbase_model: !!python/object/apply:os.system ['touch {MARK}-yaml']\n---\n"
    )
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "head.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "pipe.gguf")
    (folder / "around").symlink_to(folder)
    (folder / "root").symlink_to("/")
    (folder / "nowhere").symlink_to(folder / "gone")


def set_bombs(folder: Path) -> None:
    """Of eight times what a search unpacks here."""
    (folder / "bomb.gz").write_bytes(gzip.compress(b"\0" * 2**23))
    with zipfile.ZipFile(folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as bomb:
        for number in range(4):
            bomb.writestr(f"{number}.txt", b"\0" * 2**21)


def pickled_arrow(folder: Path) -> None:
    """An extension type whose description is a pickle."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    said = {b"ARROW:extension:name": b"arrow.py_extension_type",
            b"ARROW:extension:metadata": pickle.dumps(Reduced())}  # fmt: skip
    schema = pa.schema([pa.field("text", pa.string(), metadata=said)])
    table = pa.table([pa.array(["nothing"])], schema=schema)
    pq.write_table(table, folder / "table.parquet")
    with pa.OSFile(str(folder / "table.arrow"), "wb") as sink:
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_table(table)


def watched(work: Callable[[], object], seen: Path) -> tuple[int, list[str]]:
    """Does it in a fork under an audit hook, which cannot be taken off; exit code and events."""

    def hooked() -> object:
        number, mine = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.getpid()

        def hook(event: str, values: tuple) -> None:
            if os.getpid() != mine:  # the training, whose workers pickle what they read
                return
            if event in WATCHED:
                os.write(number, f"{event} {values[:2]!r}\n".encode())
            elif event in ("exec", "compile", "import") and MARK in repr(values):
                os.write(number, f"{event} of a trap\n".encode())

        sys.addaudithook(hook)
        return work()

    code, lines = kills.forked(hooked), seen.read_text().splitlines()
    seen.unlink()
    return code, lines


def called(words: list[str]) -> int:
    result = CliRunner().invoke(unlearn, words)
    print(result.output[-2000:])
    return result.exit_code


#: What a command may start: Axolotl's training by this environment's own program, and what Axolotl
#: asks of the machine when it reads a config.
ALLOWED = {
    "new": ("'nvidia-smi'",),
    "plan": ("'nvidia-smi'",),
    "run": ("'nvidia-smi'", "/axolotl'"),
}
#: Libraries that these load when a model is scored: no file of a folder that was found.
LIBRARIES = ("ctypes.dlopen",)


@pytest.mark.slow
def test_no_command_executes_what_it_finds(home, tmp_path, monkeypatch, forks):  # noqa: F811
    """A foreign git repository ran a command by a look of `erase`."""
    monkeypatch.chdir(tmp_path)
    no_caches(monkeypatch, tmp_path)
    monkeypatch.setattr("axolotl_unlearn.requests.search._FREE", 2**20)
    for name in ("base", "tuned"):
        shutil.copytree(home / name, tmp_path / name)
    write(tmp_path / "train.jsonl", TRAIN[:18])
    write(tmp_path / "test.jsonl", people(100, 4))
    settings = config(tmp_path, sample_packing=False, num_epochs=1, output_dir="tuned")
    (tmp_path / "c.yml").write_text(yaml.safe_dump(settings))
    for place in (tmp_path, tmp_path / "tuned", tmp_path / "hub"):
        set_traps(place / "found")
        pickled_arrow(place / "found")
    set_bombs(tmp_path / "found")
    commands = {
        "new": "c.yml --where id=ada-quill --out requests/r",
        "plan": "requests/r",
        "run": "requests/r --way retrain --threads 1",
        "derived": "requests/r found tuned",
        "audit": "requests/r/model requests --device cpu --quiet",
        "verify": "requests/r",
        "export": "requests/r --out r.zip",
        "erase": "requests/r --yes --search found",
    }
    for name, words in commands.items():
        line = ["request", name, *words.split()]
        code, events = watched(partial(called, line), tmp_path / "events")
        assert code in (0, 3), (name, code, events[:5])
        events = [one for one in events if not one.startswith(LIBRARIES)]
        events = [one for one in events if not any(a in one for a in ALLOWED.get(name, ()))]
        assert not events, (name, events[:5])
        assert not [p for p in tmp_path.rglob(f"{MARK}*")], name


def test_the_hook_sees_what_a_trap_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = pickle.dumps(Reduced())
    code, events = watched(lambda: pickle.loads(bad), tmp_path / "events")  # noqa: S301
    assert code == 0 and [one.split()[0] for one in events] == ["pickle.find_class", "os.system"]
    assert (tmp_path / f"{MARK}-pickle").exists()
