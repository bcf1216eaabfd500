"""Every file that this package writes: whole or not at all; and the list of what must go again.

A file is written beside its place, brought to the disk, and moved: a full disk, a kill or a power
cut leaves the file of before. Whatever holds forget texts, their tokens or log-probs is listed in
``run_manifest.json`` before it is written: `request erase` removes it, and a model is handed over
without it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from axolotl_unlearn.errors import UnlearnError

MANIFEST = "run_manifest.json"
Holds = Literal["texts", "tokens", "log-probs"]


@contextmanager
def replacing(path: Path | str, *, private: bool = False) -> Iterator[Path]:
    """A draft that takes the place of ``path`` at the end of the block, or goes with its error.

    Args:
        private: For its owner alone, with the folder if it is made here.

    Raises:
        UnlearnError: The disk is full, the folder may not be written, ...; ``path`` is as before.
    """
    path = Path(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if private and not path.parent.exists():
            private_folder(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)  # of a kill, for others to read; or a link that leads away
        if private:
            draft.touch(0o600, exist_ok=False)
        yield draft
        _to_disk(draft)
        draft.replace(path)
    except OSError as error:
        says = f"{path} cannot be written ({error.strerror or error})"
        cure = "make room or allow writing, and run the command again"
        raise UnlearnError(f"{says}; {cure}.", code="files.cannot-write") from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    with suppress(OSError):  # some file systems cannot
        _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write(path: Path | str, content: str | bytes, *, private: bool = False) -> Path:
    """Texts as UTF-8; see `replacing`."""
    try:
        raw = content.encode() if isinstance(content, str) else content
    except UnicodeEncodeError as error:
        says = f"{path} would hold half of a surrogate pair, or a file's name that is not UTF-8"
        cure = f"(character {error.start}); mend the row, or rename the file"
        raise UnlearnError(f"{says} {cure}.", code="files.no-unicode") from None
    with replacing(path, private=private) as draft:
        draft.write_bytes(raw)
    return Path(path)


def write_json(path: Path | str, value: Any, *, private: bool = False, **how: Any) -> Path:
    """One JSON value; ``how`` goes to `json.dumps`."""
    return write(path, json.dumps(value, **{"indent": 1} | how) + "\n", private=private)


def write_lines(path: Path | str, rows: Iterable[Any], *, private: bool = False) -> Path:
    """JSON lines; dates and the like as texts."""
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    return write(path, "".join(lines), private=private)


def private_folder(path: Path | str) -> Path:
    """The folder, made for its owner alone."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
    except OSError as error:
        says = f"{path} cannot be made a folder for you alone ({error.strerror})"
        raise UnlearnError(f"{says}; choose another.", code="files.cannot-make") from None
    return path


def declare(
    out: Path | str,
    path: Path | str,
    holds: Holds,
    *,
    folder: bool = False,
) -> Path:
    """List a file or folder in ``out/run_manifest.json`` before it is written.

    Folders that are made here, ``out`` too, are for their owner alone.

    Args:
        folder: ``path`` is a folder.
    """
    out, path = Path(out), Path(path)
    for made in (out, path if folder else path.parent):
        if not made.exists():
            private_folder(made)
    with locked(out):  # several processes, one list
        known = read_manifest(out)
        entry = {"path": os.path.relpath(path, out), "holds": holds}
        if entry not in known["entries"]:
            manifest = {"schema": 1, "entries": [*known["entries"], entry]}
            write_json(out / MANIFEST, manifest, private=True)
    return path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is in the block; for a file that several of them add to."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def read_manifest(out: Path | str) -> dict[str, Any]:
    """``entries`` (path, holds), relative to ``out``; empty where there is none.

    Raises:
        UnlearnError: It is damaged.
    """
    path = Path(out) / MANIFEST
    if not path.exists():
        return {"schema": 1, "entries": []}
    try:
        manifest = json.loads(path.read_text("utf-8"))
        paths = [entry["path"] for entry in manifest["entries"]]
        if not all(isinstance(one, str) for one in paths):
            raise TypeError
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        says = f"{path} cannot be read as a list of files"
        cure = "remove by hand what the run has written"
        raise UnlearnError(f"{says}; {cure}.", code="files.damaged-list") from None
    return manifest


def listed(out: Path) -> Iterator[Path]:
    """What the run of a list has written and is there, drafts too."""
    for entry in read_manifest(out)["entries"]:
        path = Path(os.path.normpath(out / entry["path"]))
        drafts = path.parent.glob(f"{path.name}.*.tmp") if path.parent.is_dir() else ()
        yield from filter(os.path.lexists, (path, *drafts))


def strip(out: Path) -> None:
    """Remove what a run listed within ``out``, and the list: before the folder is handed over."""
    inside = out.resolve()
    for one in listed(out):
        if inside in one.resolve().parents and inside in (one.parent.resolve() / "x").parents:
            remove(one)
    (out / MANIFEST).unlink(missing_ok=True)


def real(name: str) -> str:
    """The path without links; a name that no file can have as it is."""
    try:
        return os.path.realpath(name)
    except ValueError:
        return name


def remove(path: Path) -> None:
    """A file, a link or a folder; nothing if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
