"""Writers under faults: full disk, no permission, broken disk, kills; and what clean removes."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from fault_codes import fails

from axolotl_unlearn import cli, files
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.cache import Cache
from axolotl_unlearn.evaluation.canaries import draw
from axolotl_unlearn.models import parse_models
from axolotl_unlearn.store import Store, digest, file_digest

OLD, NEW = "the file of before\n", "the file of now " * 5000

#: Every way that this package writes one file.
WRITERS = {
    "text": lambda path: files.write(path, NEW),
    "private": lambda path: files.write(path, NEW, private=True),
    "json": lambda path: files.write_json(path, {"text": NEW}),
    "lines": lambda path: files.write_lines(path, [{"text": NEW}]),
    "store": lambda path: _store(path),
    "draft": lambda path: _by_draft(path),
}
#: Where a system call may fail on the way.
PLACES = ("open", "write", "fsync", "replace", "mkdir")


def _store(path: Path) -> None:
    Store(path.parent).put(path.stem, {"text": NEW})


@pytest.mark.parametrize(
    "damaged",
    [
        lambda raw: '{"said": "é'.encode()[:-1],  # half a letter
        lambda raw: b"[" * 100_000,
        lambda raw: b'{"of": "another version"}',
        lambda raw: raw.replace(b"0.25", b"0.75"),
        lambda raw: raw[:-5],
    ],
)
def test_what_is_damaged_in_the_store_is_no_value(tmp_path, damaged):
    """JSON of another form was an unexpected error, and another figure was believed."""
    Store(tmp_path).put("key", value := {"said": "é", "loss": 0.25, "more": None})
    assert Store(tmp_path).get("key") == value
    Cache(tmp_path).add_rows("key", [{"key": 0, "value": 0.5}, {"key": 1, "value": 0.25}])
    for path in tmp_path.iterdir():
        path.write_bytes(damaged(path.read_bytes()))
    assert Store(tmp_path).get("key") is None
    kept = Cache(tmp_path).rows_so_far("key")
    Cache(tmp_path).add_rows("key", [{"key": 2, "value": 1}])
    assert {"key": 1, "value": 0.25} not in kept and {"value": 0.75} not in kept
    assert all(row == {"key": 0, "value": 0.5} for row in kept)


def _by_draft(path: Path) -> None:
    with files.replacing(path) as draft:
        draft.write_text(NEW)


class Fault:
    """One of the system calls fails, or ends this process, the first time."""

    def __init__(self, monkeypatch, place: str, number: int) -> None:
        self.number, self.hits = number, 0
        if place == "write":
            self._around(monkeypatch, Path, "write_bytes", half=True)
            self._around(monkeypatch, Path, "write_text", half=True)
        elif place == "open":
            self._around(monkeypatch, os, "open")
        elif place == "fsync":
            self._around(monkeypatch, os, "fsync")
        else:
            self._around(monkeypatch, Path, place)

    def _around(self, monkeypatch, owner, name, half: bool = False) -> None:
        real = getattr(owner, name)

        def failing(*args, **kwargs):
            self.hits += 1
            if half:  # as far as the room went
                real(args[0], args[1][: len(args[1]) // 2], *args[2:], **kwargs)
            raise OSError(self.number, os.strerror(self.number))

        monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_leaves_the_file_of_before(tmp_path, monkeypatch, writer, number, place):
    path = tmp_path / "deep" / "kept.json"
    path.parent.mkdir()
    path.write_text(OLD)
    with monkeypatch.context() as patch:
        fault = Fault(patch, place, number)
        with pytest.raises(UnlearnError, match="kept.json cannot be written") as told:
            WRITERS[writer](path)
    assert fault.hits and os.strerror(number) in str(told.value)
    assert path.read_text() == OLD
    assert [one.name for one in path.parent.iterdir()] == ["kept.json"]  # no draft is left
    WRITERS[writer](path)  # the disk has room again
    assert "file of now" in path.read_text()


KILLED = """
import os, signal, sys
from pathlib import Path
from axolotl_unlearn import files

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "replace":
    Path.replace = die
else:
    os.fsync = die
files.write(sys.argv[1], "new" * 10000)
"""


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_kill_leaves_the_file_of_before_and_the_next_write_works(tmp_path, place):
    path = tmp_path / "kept.json"
    path.write_text(OLD)
    done = subprocess.run([sys.executable, "-c", KILLED, path, place])
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == OLD
    files.write(path, NEW)
    assert path.read_text() == NEW


def test_private_is_private(tmp_path):
    before = os.umask(0o022)
    try:
        files.private_folder(tmp_path / "own")
        files.write(tmp_path / "own" / "a.json", "x", private=True)
        files.write(tmp_path / "b.json", "x")
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert modes == {"own": 0o700, "a.json": 0o600, "b.json": 0o644}


def test_what_is_in_the_place_of_a_draft_is_not_written_through(tmp_path):
    """Of a killed command with the same number it was open to others; a folder of somebody else's
    may have a link for every number, which led away."""
    draft = tmp_path / f"a.json.{os.getpid()}.tmp"
    (outside := tmp_path / "outside").write_text(OLD)
    for private in (True, False):
        for put in (draft.symlink_to, draft.hardlink_to, lambda _: draft.touch(0o644)):
            put(outside)
            made = files.write(tmp_path / "a.json", NEW, private=private)
            assert outside.read_text() == OLD and made.read_text() == NEW
            assert not private or stat.S_IMODE(made.stat().st_mode) == 0o600
            assert not made.is_symlink() and made.stat().st_nlink == 1


def test_in_a_folder_that_is_there_files_with_texts_are_private_too(tmp_path):
    """Coins and their rows, and rows of an evaluation that was stopped."""
    files.write_lines(rows := tmp_path / "rows.jsonl", [{"text": f"row {n}"} for n in range(60)])
    (out := tmp_path / "out").mkdir(0o755)
    draw(rows, out)
    Cache(out).add_rows("key", [{"key": 0}])
    assert len({*out.iterdir()}) == 4
    assert {stat.S_IMODE(one.stat().st_mode) for one in out.iterdir()} == {0o600}


def test_a_pipe_is_waited_for_nowhere(tmp_path):
    os.mkfifo(pipe := tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (endless := tmp_path / "endless").symlink_to("/dev/zero")
    for read in (digest, file_digest):
        for path in (pipe, endless):
            with pytest.raises(OSError, match="it is no file"):
                read(path)
    with fails("models.no-weights"):
        parse_models([str(tmp_path)])


def test_no_writer_of_the_package_goes_around():
    """Files are written by `files` alone; what streams says here why it may."""
    streams = {
        "files.py": "the writer itself",
        "reference/store.py": "appends rows; each has a checksum, half ones are cut off",
        "evaluation/cache.py": "appends rows of a model under work; half lines are made again",
        "requests/verify.py": "in the export's own script, which runs elsewhere",
        "requests/request.py": "the ledger appends under a lock, its key is new and exclusive",
        "requests/steps.py": "logs of commands",
        "training/level.py": "into a draft",
    }
    writes = re.compile(
        r"""\.write_text\(|\.write_bytes\(|json\.dump\(|open\(([^()]*, )?["'](w|a|x)"""
        r"""|torch\.save\(|np\.savez?\("""
    )
    package = Path(files.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if writes.search(path.read_text("utf-8"))
    }
    assert found == set(streams)
    for path in package.rglob("*.py"):  # what others write, they write into a draft
        for line in path.read_text("utf-8").splitlines():
            assert not re.search(r"savefig\(|save_file\(", line) or "draft" in line, (path, line)


def test_nothing_in_the_package_runs_what_it_reads():
    """No pickle, no YAML with objects, no shell, no code of a model unless the config asks."""
    bad = re.compile(
        r"torch\.load\((?!.*weights_only=True)|\byaml\.(unsafe_)?load\(|pickle\.loads?\("
        r"|shell=True|os\.system\(|(?<![\w.])(eval|exec)\(|trust_remote_code=True"
    )
    root = Path(files.__file__).parents[1]
    for path in [*root.glob("axolotl_unlearn/**/*.py"), *root.glob("eval_tasks/**/*.py")]:
        assert not bad.search(path.read_text("utf-8")), path


def test_an_unexpected_error_is_told_without_its_message(monkeypatch):
    """Libraries quote the value that they stumble over."""
    row = "-".join(("quillmarsh", "heron"))

    @click.command()
    def command() -> None:
        raise TypeError(f"could not convert {row!r} to double")

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: command)
    told = CliRunner().invoke(cli.unlearn, ["check"])
    assert told.exit_code == 1 and "unexpected TypeError" in told.output
    assert row not in told.output
    assert row in str(CliRunner().invoke(cli.unlearn, ["--debug", "check"]).exception)


def test_nothing_in_the_package_knows_research():
    """Studies are built on the package and are not in the wheel."""
    package = Path(files.__file__).parent
    asks = re.compile(r"^\s*(from|import) research\b", re.M)
    assert not [path for path in package.rglob("*.py") if asks.search(path.read_text("utf-8"))]
