"""The folder of a request: what was asked for, and where its parts lie.

    request.json    what was chosen and from which config (ids and digests, no text of a row)
    finetune.yml    copy of the config that made the model
    data/           forget, retain and held-out rows as they stand in the user's files
    teacher.yml  forget.yml    what `request run` trains with
    work/           teacher, model under work, eval-data, stamps and logs of the run
    eval/  attacks/ verdict.json    what was measured
    way.json  exact.json    of an exact way: how it was carried out, what it has shown
    model/          the result, once its verdict is good or was accepted

Folders are for their owner alone (0700), files too (0600): rows to forget are sensitive.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn import files
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import private_folder

SCHEMA = 1
#: Where Axolotl prepares rows if a config names no folder.
PREPARED = "last_run_prepared"


@dataclass(frozen=True)
class Request:
    """A request on disk; ``facts`` is its request.json."""

    folder: Path
    facts: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path | str) -> Request:
        """Raises `UnlearnError` where there is no request."""
        folder = Path(folder)
        try:
            facts = json.loads((folder / "request.json").read_text("utf-8"))
        except FileNotFoundError:
            raise UnlearnError(
                f"{folder} holds no request; make one with `axolotl unlearn request new`."
            ) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            raise UnlearnError(
                f"{folder / 'request.json'} cannot be read; make the request again."
            ) from None
        needed = {"id", "before", "adapter"}
        if not isinstance(facts, dict) or facts.get("schema") != SCHEMA or needed - set(facts):
            raise UnlearnError(
                f"{folder / 'request.json'} is not of this version; make the request again."
            )
        found = cls(folder, facts)
        if not found.at_home and found.root.is_dir():
            for holder, key in (
                (facts, "base"),
                (facts["before"], "model"),
                (facts["before"], "adapter"),
            ):
                place = holder.get(key) and found.root / holder[key]
                if place and place.exists():
                    holder[key] = str(place)
        return found

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

    def outputs(self) -> list[Path]:
        """Folders that the training run of the config has written to."""
        from axolotl_unlearn.requests.rows import read_config

        config = read_config(self.path("finetune.yml"))
        names = [config.get("output_dir"), config.get("dataset_prepared_path") or PREPARED]
        found = [self.root / str(name) for name in names if name]
        if shards := self.way.get("shards"):  # the served model that they came with
            found.append(Path(os.path.normpath(self.path(shards, "model"))))
        return found

    @property
    def before(self) -> str:
        """The model before, as `axolotl unlearn eval` takes it."""
        return spec(self.facts["before"])

    @property
    def way(self) -> Mapping[str, Any]:
        """How it is carried out: ``way`` (see `axolotl_unlearn.requests.ways`) and ``base``, the
        model under an adapter that comes out, else None."""
        path = self.path("way.json")
        if path.is_file():
            return json.loads(path.read_text("utf-8"))
        return {
            "way": "match",
            "base": self.facts["before"]["model"] if self.facts["adapter"] else None,
        }

    @property
    def after(self) -> str:
        """The result, likewise; there once it was handed over."""
        return self.made(self.path("model"))

    def made(self, place: Path) -> str:
        """The result at another place."""
        base = self.way["base"]
        return f"{base}+{place}" if base else str(place)

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    def rows(self, part: str) -> Path:
        """The file of forget, retain or heldout rows."""
        return self.path("data", f"{part}.jsonl")


def spec(model: Mapping[str, Any]) -> str:
    """ "model" or "model+adapter"."""
    return f"{model['model']}+{model['adapter']}" if model.get("adapter") else str(model["model"])


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
