"""Models that were made of one that has learned the deleted rows: they have to be withdrawn, too.

A model below the given folders counts if its weights are those of such a model by digest, or if one
of its own files (adapter, merge and model config, model card) names such a model by path, name or
digest. Of what was found the same is asked.

Not found: a merge or quantised copy that names nothing; what lies elsewhere. GGUF files are not
read: each is listed as not known, and so is a model that cannot be read within bounds (size, a
pipe).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import ADAPTER_CONFIG, START, ModelSpec, weights_digest
from axolotl_unlearn.requests.erase import COPIES, size_of
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.request import Ledger, Request, shas
from axolotl_unlearn.requests.search import Found, forms, walk

#: Files of a model that may say what it was made of; by one of the first three it is known as one.
ORIGINS = (
    *(ADAPTER_CONFIG, "config.json", "mergekit_config.yml", START),
    *("unlearn_base.json", "README.md"),
)
#: How a model is listed that was not read; bytes of a config or card that are read.
UNKNOWN, LARGEST = "not known, look yourself", 2**22
#: A value of JSON or YAML, which nobody has to parse: in quotes, to the end of its line, a word.
_VALUE = re.compile(
    r"""\"([^\"\n]+)\"|'([^'\n]+)'|[:-] +([^\s"'\[{][^\n,"'\]}]*)|([^\s,"'\[\]{}]+)"""
)


@dataclass(frozen=True)
class Derived:
    """A folder or a GGUF file, and how it is known."""

    path: Path
    why: str
    bytes: int


@dataclass
class _Known:
    """What such a model is known by, digests of models that never read the rows, and models that
    are gone, of whose files nothing is known."""

    root: Path
    digests: set[str] = field(default_factory=set)
    lost: list[Path] = field(default_factory=list)
    paths: set[Path] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    clean: set[str] = field(default_factory=set)

    def says(self, text: str, near: Path) -> bool:
        """Whether a text of a file in ``near`` is one of them."""
        if text in self.digests or text in self.names:
            return True
        pieces = text.split("+") if len(text) < 4096 else ()
        ends = ("+".join(one) for n in range(len(pieces)) for one in (pieces[:n], pieces[n:]))
        parts = {*pieces, *ends}  # of a+b, where a path may hold "+", too
        places = [p / part for part in parts if part for p in (Path(), self.root, near)]
        return any(place.resolve() in self.paths for place in places)

    def why(self, model: Path, digest: str) -> str:
        """How a model is known; empty where it is not."""
        try:
            if self.digests & {digest, *shas(model)}:
                return "its weights are those of one"
            inside = model.name in COPIES or model.name.startswith("checkpoint-")
            if inside and model.parent.resolve() in self.paths:
                return f"it is the {model.name} of one"
            named = (name for name, text in _said(model) if self.says(text, model))
            return f"{name} names one" if (name := next(named, "")) else ""
        except (UnlearnError, OSError) as error:
            return f"{UNKNOWN}: {error}"


def derived(folder: Path | str, places: Iterable[Path]) -> list[Derived]:
    """Models below the places that were made of the one before a request, or of earlier ones.

    Raises:
        UnlearnError: The request was not carried out.
    """
    request = Request.load(folder)
    known, digests, found, seen = _known(request), {}, [], Found()
    # Folders of models, adapters or weights alone, and GGUF files, but for those of the requests.
    files = walk(places, [request.folder.parent], seen)
    models = dict.fromkeys(
        p if p.suffix == ".gguf" else p.parent for p in files
        if p.name in ORIGINS[:3] or p.suffix in (".gguf", ".safetensors")
    )  # fmt: skip
    found += [Derived(one, f"{UNKNOWN}: it cannot be read", 0) for one in seen.unreadable]
    gone = f"{UNKNOWN}: it is gone, so its files were compared with none"
    found += [Derived(one, gone, 0) for one in known.lost]
    for model in models:
        try:
            digests[model] = _digest(model)
        except (UnlearnError, OSError) as error:
            found.append(Derived(model, f"{UNKNOWN}: {error}", size_of(model)))
    left = [m for m in digests if m.resolve() not in known.paths and digests[m] not in known.clean]
    while new := {model: why for model in left if (why := known.why(model, digests[model]))}:
        left = [model for model in left if model not in new]
        of_one = {model for model, why in new.items() if not why.startswith(UNKNOWN)}
        known.paths |= {model.resolve() for model in of_one}
        known.digests |= {digests[model] for model in of_one} - {""}
        found += [Derived(model, why, size_of(model)) for model, why in new.items()]
    return sorted(found, key=lambda one: one.path)


def _known(request: Request) -> _Known:
    """The models before this request and earlier ones, and what those made: all have its rows."""
    known, ledger = _Known(request.root), Ledger(request.folder.parent)
    names = [*ledger.accepted()]
    if request.id not in names:
        raise UnlearnError(
            f"{request.folder} was not carried out; run `axolotl-unlearn request run`."
        )
    mine, files = names.index(request.id), set()
    for number, name in enumerate(names):
        folder = ledger.folder / name
        if not (folder / "record.json").is_file():
            continue
        statement = read(folder)
        model = statement["predicate"]["model"]
        clean = known.clean if number >= mine else known.digests
        clean.update({model["after"]["digest"]} - {None})
        if number >= mine:  # its shards, though `erase` of a later request has removed it
            known.clean |= {one["digest"]["sha256"] for one in statement["subject"]}
        if number > mine:
            continue
        known.digests |= {model["before"]["digest"]} - {None}
        other = Request.load(folder)
        source = str(other.facts["before"]["adapter"] or other.facts["before"]["model"])
        known.paths.add((place := other.root / source).resolve())
        known.names |= set() if place.exists() else {source}
        files |= {*other.facts["before"].get("files", ())}
        local = model["before"]["digest"] is not None  # and not on a hub
        if local and "files" not in other.facts["before"] and not place.exists():
            known.lost.append(place)
    base = shas(request.root / str(request.facts["base"]))
    known.digests |= files.union(*map(shas, known.paths)) - base - known.clean
    return known


def _digest(model: Path) -> str:
    """Of a folder. Raises `UnlearnError`: a GGUF file."""
    if not model.is_dir():
        raise UnlearnError("GGUF files are not read", code="derived.gguf")
    return weights_digest(ModelSpec("", str(model)))


def _said(model: Path) -> Iterator[tuple[str, str]]:
    """(file, text) of every text in the files that may say what a model was made of."""
    for path in (model / name for name in ORIGINS if (model / name).is_file()):
        if path.stat().st_size > LARGEST:
            says = f"{path} is too large, so it is not known whether the model stays."
            raise UnlearnError(says, code="derived.unreadable")
        text = path.read_text("utf-8", errors="replace")
        if path.name == "README.md":  # its head, between two lines of dashes
            text = "".join(text.split("---")[1:2]) if text.startswith("---") else ""
        values = {"".join(one).strip() for form in forms(text) for one in _VALUE.findall(form)}
        yield from ((path.name, part) for one in values for part in {one, *one.split()})
