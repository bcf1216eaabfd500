"""The folder of a request: what was asked for, and where its parts lie.

    request.json    what was chosen and from which config (ids and digests, no text of a row)
    finetune.yml    copy of the config that made the model
    data/           forget, retain and held-out rows as they stand in the user's files
    teacher.yml  forget.yml    what `request run` trains with
    work/           teacher, model under work, stamps and logs of the run
    eval/  attacks/ verdict.json    what was measured
    way.json  exact.json    of an exact way: how it was carried out, what it has shown
    model/          the result, once its verdict is good or was accepted

Folders are for their owner alone (0700), files too (0600): rows to forget are sensitive.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn import files
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import private_folder

SCHEMA = 1
#: How long a start waits for what a killed run of the same folder has left.
LOCK_SECONDS = 20.0


@dataclass(frozen=True)
class Request:
    """A request on disk; ``facts`` is its request.json."""

    folder: Path
    facts: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path | str) -> Request:
        """Raises `UnlearnError` where there is no request."""
        if Path(folder).is_symlink():  # its ledger is beside the folder and not beside the link
            folder = Path(folder).resolve()
        path = Path(folder) / "request.json"
        try:
            if path.exists() and not path.is_file():
                raise ValueError  # a pipe would be read for ever
            facts = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            what = "holds no request" if Path(folder).exists() else "does not exist"
            raise UnlearnError(
                f"{folder} {what}; make a request with `axolotl-unlearn request new`.",
                code="requests.none",
            ) from None
        except (OSError, ValueError, RecursionError):
            raise UnlearnError(
                f"{path} cannot be read; make the request again.", code="requests.unreadable"
            ) from None
        try:
            if "after" in facts:  # that of a record v0.1
                facts.setdefault("adapter", facts["after"]["adapter"] is not None)
            before, _, _ = facts["before"], facts["adapter"], facts["counts"]["forget"]
            texts = [facts["id"], before["model"], before["adapter"] or ""]
            sound = facts["schema"] == SCHEMA and all(plain(one) == one for one in texts)
        except (KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            says = f"{path} is not of this version; make the request again."
            raise UnlearnError(says, code="requests.version")
        request = cls(Path(folder), facts)
        if not request.at_home and request.root.is_dir():
            for holder, key in ((facts, "base"), (before, "model"), (before, "adapter")):
                if holder.get(key) and (place := request.root / holder[key]).exists():
                    holder[key] = str(place)
        return request

    @property
    def at_home(self) -> bool:
        """We are where `request new` ran, so that paths may be relative."""
        return self.root.resolve() == Path.cwd()

    @property
    def id(self) -> str:
        return str(self.facts["id"])

    @property
    def root(self) -> Path:
        """Where `request new` ran: paths of the config are relative to it."""
        place = self.facts.get("root")
        return Path() if place is None else Path(os.path.normpath(self.folder / place))

    @property
    def before(self) -> str:
        """The model before, as `axolotl-unlearn eval` takes it."""
        model = self.facts["before"]
        adapter = model.get("adapter")
        return f"{model['model']}+{adapter}" if adapter else str(model["model"])

    @property
    def way(self) -> Mapping[str, Any]:
        """How it is carried out: ``way`` (see `axolotl_unlearn.requests.ways`) and ``base``, the
        model under an adapter that comes out, else None."""
        base = self.facts["before"]["model"] if self.facts["adapter"] else None
        return read_json(self.path("way.json")) or {"way": "match", "base": base}

    @property
    def matched(self) -> bool:
        """It is carried out by `match`, so that tests have to show what an exact way proves."""
        return self.way["way"] == "match"

    @property
    def after(self) -> str:
        """The result, likewise; there once it was handed over."""
        return self.made(self.path("model"))

    def made(self, place: Path) -> str:
        """The result at another place."""
        base = self.way["base"]
        return f"{base}+{place}" if base else str(place)

    @property
    def newest(self) -> Path:
        """The folder of the result, before or after it is handed over."""
        made = self.path("work", "model")
        return made if made.is_dir() else self.path("model")

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    def rows(self, part: str) -> Path:
        """The file of forget, retain or heldout rows."""
        return self.path("data", f"{part}.jsonl")


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """The right to a folder: a lock that lasts as long as anybody has the descriptor open.

    Raises:
        UnlearnError: Somebody else keeps it.
    """
    with (folder / ".lock").open("a") as file:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise UnlearnError(
                        f"{folder} is being run by another process; wait until it has ended, or "
                        "take another folder.",
                        code="requests.held",
                    ) from None
                time.sleep(0.2)
            except OSError:  # a file system without locks
                break
        yield file.fileno()


def cores() -> int:
    """How many may compute at a time: `OMP_NUM_THREADS`, or all."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return (int(given) if given.isdecimal() else os.cpu_count()) or 1


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights(folder: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of each file of weights of a model, adapter or routed folder, as a record writes
    them."""
    files = [*folder.glob("*.safetensors"), *folder.glob("shard-*/*.safetensors")]
    return {str(p.relative_to(folder)): {"sha256": digest(p)} for p in sorted(files)}


def read_json(path: Path) -> Any:
    """What a command of ours wrote there, or None."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def home(folder: Path | str) -> Path:
    """The folder of a request with its own name: that of the working folder is not ``.``."""
    folder = Path(folder)
    return folder if folder.name not in ("", "..") else Path(os.path.abspath(folder))


def plain(text: str) -> str:
    """With every character that moves the cursor, breaks the line or turns the order as an escape.

    What comes from a file could else forge a line of ours.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str, option: str) -> str:
    """A text that is printed and signed.

    Raises:
        UnlearnError: It has a line break or another control character.
    """
    if plain(text) != text:
        raise UnlearnError(
            f"{option}: {plain(text)!r} has a line break or a control character; give one line of "
            "plain text.",
            code="requests.control-character",
        )
    return text


def write_private(path: Path, text: str | bytes) -> None:
    """Readable by the owner alone, in a folder of the owner's."""
    private_folder(path.parent)
    files.write(path, text, private=True)


def write_json(path: Path, content: Any) -> None:
    private_folder(path.parent)
    files.write_json(path, content, private=True, ensure_ascii=False)


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    private_folder(path.parent)
    files.write_lines(path, rows, private=True)


def write_yaml(path: Path, head: str, content: Mapping[str, Any]) -> None:
    write_private(path, f"# {head}\n" + yaml.safe_dump(dict(content), sort_keys=False))


def counted(count: int, one: str, more: str = "") -> str:
    """``1 row``, ``2 rows``."""
    return f"{count} {one if count == 1 else more or one + 's'}"
