"""Rows that must not be learned again: a list of keyed digests, without a text or a name.

`axolotl-unlearn request erase` and `request suppress` write ``suppression.json`` beside
``ledger.key``, whose HMAC the digests are: a plain hash of a name can be guessed. A row is on the
list if a text of it with `SHORTEST` words or more is, or all its texts together are; capitals,
punctuation, Unicode forms, and the names and the order of fields do not count. A field such as
``document`` counts where it holds a text and no name.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write
from axolotl_unlearn.normal_form import words

LOG = logging.getLogger(__name__)
LIST, KEY = "suppression.json", "ledger.key"
#: Words from which a text is hardly ever that of somebody else; and of a field for names, whose
#: names are shared by many rows.
SHORTEST, LABELLED = 4, 8
#: Fields that say nothing of the row's content where they hold fewer.
_LABELS = {"id", "document", "role", "from", "kind", "task"}
Row = TypeVar("Row")


def forms(row: Mapping[str, Any]) -> Iterator[str]:
    """What is put on the list of a row: each longer text, and all of them together; also with each
    text that is JSON, as a chat in a CSV file is, as what it says."""
    yield from _forms(row)
    with suppress(RecursionError):
        if (told := _told(row)) != row:
            yield from [*_forms(told)]


def _told(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):
            return _told(json.loads(value))
    if isinstance(value, Mapping):
        return {key: _told(part) for key, part in value.items()}
    return [_told(part) for part in value] if isinstance(value, (list, tuple)) else value


def _forms(row: Mapping[str, Any]) -> Iterator[str]:
    every, unlabelled = ([one for one in _texts(row, long) if one] for long in (True, False))
    yield from (f"text {one}" for one in every if _is_long(one, SHORTEST))
    # Without a long name of a document; one text alone would be that of others, too.
    for some in (every, unlabelled if len(unlabelled) > 1 else []):
        if some:
            yield f"row {' | '.join(sorted(some))}"


def older(row: Mapping[str, Any]) -> Iterator[str]:
    """What lists that were written before hold of a row with texts."""
    if texts := [one for one in _texts(row, False) if one]:
        yield f"row {' | '.join(texts)}"


def _texts(value: Any, labels: bool) -> Iterator[str]:
    """The words of each; ``labels``: also of labels that hold texts."""
    if isinstance(value, Mapping):
        parts = ((key in _LABELS, list(_texts(part, labels))) for key, part in value.items())
        for label, said in parts:
            yield from (one for one in said if not label or (labels and _is_long(one, LABELLED)))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part, labels)
    elif isinstance(value, (str, int)) and not isinstance(value, bool):
        yield " ".join(words(str(value)))


def _is_long(said: str, least: int) -> bool:
    return said.count(" ") >= least - 1


@dataclass(frozen=True)
class Suppression:
    """A list on disk, with the key that its digests are made with."""

    path: Path
    key: bytes
    digests: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path | str) -> Suppression:
        """
        Raises:
            UnlearnError: The list or its key is missing, or the list was changed.
        """
        path = Path(path)
        try:
            key = bytes.fromhex((path.parent / KEY).read_text("ascii").strip())
            raw = path.read_bytes()
        except (OSError, ValueError):
            raise UnlearnError(
                f"{path} and {KEY} beside it cannot be read, so rows that were deleted could be "
                "learned again; copy both from the folder of the requests.",
                code="data.suppression-missing",
            ) from None
        try:
            digests = frozenset(json.loads(raw)["digests"])
        except (ValueError, KeyError, TypeError):
            digests = frozenset()
        listed = cls(path, key, digests)
        if not hmac.compare_digest(listed._content(), raw):
            raise UnlearnError(
                f"{path} is not as it was written with {KEY}; restore it from a copy, or write it "
                "again with `axolotl-unlearn request suppress`.",
                code="data.suppression-changed",
            )
        return listed

    def write(self) -> None:
        write(self.path, self._content())

    def _content(self) -> bytes:
        listed = sorted(self.digests)
        mac = self._mac(f"list {' '.join(listed)}")
        return (json.dumps({"schema": 1, "mac": mac, "digests": listed}, indent=0) + "\n").encode()

    def _mac(self, text: str) -> str:
        content = b"suppression\0" + text.encode("utf-8", "surrogatepass")
        return hmac.new(self.key, content, hashlib.sha256).hexdigest()[:32]

    def digests_of(self, row: Mapping[str, Any], whole: bool = False) -> set[str]:
        """
        Args:
            whole: Of all its texts together alone.
        """
        return {self._mac(form) for form in forms(row) if not whole or form.startswith("row ")}

    def holds(self, row: Mapping[str, Any]) -> bool:
        return not self.digests.isdisjoint(self.digests_of(row) | {*map(self._mac, older(row))})


def allowed(rows: Sequence[Row], path: str, source: str) -> list[Row]:
    """The rows (`Record` or `Source`) that are not on the list at ``path``; the log counts them.

    Raises:
        UnlearnError: The list cannot be read, or no row is left.
    """
    listed = Suppression.read(path)
    kept = [row for row in rows if not listed.holds(row.content)]
    gone = len(rows) - len(kept)
    level = logging.WARNING if gone else logging.INFO
    LOG.log(level, "%s: %d of %d rows are on %s and left out.", source, gone, len(rows), path)
    if not kept:
        raise UnlearnError(
            f"{source}: all {gone} rows are on {path}; give rows that may be learned.",
            code="data.all-suppressed",
        )
    return kept
