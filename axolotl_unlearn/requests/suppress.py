"""``suppression.json`` of a folder of requests: what was deleted and must not be learned again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from axolotl_unlearn.data.records import read_json_lines, read_rows
from axolotl_unlearn.data.suppression import LIST, Suppression
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_lines
from axolotl_unlearn.requests.request import Ledger
from axolotl_unlearn.requests.rows import DELETED


def suppress(requests: Path | str) -> tuple[Path, int, int]:
    """Put the rows of every accepted request of a folder on its list.

    What is on the list stays, though the rows may be gone. Texts that kept rows of a request have
    too, such as a system prompt, are not put on it.

    Returns:
        The list, its digests, and how many of them are new.

    Raises:
        UnlearnError: A broken ledger, or a list that was changed.
    """
    ledger = Ledger(requests)
    path, key, folders = ledger.folder / LIST, ledger.key(), ledger.accepted()
    if key is None or not folders:
        raise UnlearnError(f"{requests} has no request that was carried out, or no ledger.key.")
    before = Suppression.read(path) if path.exists() else Suppression(path, key)
    digests = set(before.digests)
    for data in sorted(ledger.folder / entry["request"] / "data" for entry in folders):
        # `erase` removes kept rows, after it has written this list: what they share is not known
        # any more, and whole rows alone are put on a list that was lost since.
        spent = not (data / "retain.jsonl").is_file()

        def of(parts: Iterable[str], data: Path = data, spent: bool = spent) -> set[str]:
            files = [one for part in parts if (one := data / f"{part}.jsonl").is_file()]
            rows = [line.get("row", line) for file in files for line in read_json_lines(file)]
            return {one for row in rows for one in before.digests_of(row, whole=spent)}

        digests |= of(DELETED) - of(("retain", "heldout", "judge"))
    Suppression(path, key, frozenset(digests)).write()
    return path, len(digests), len(digests - before.digests)


def filtered(path: Path, rows: Path, out: Path) -> tuple[int, int]:
    """Write the rows of a file that are not on the list; how many stay, and how many do not.

    Raises:
        UnlearnError: ``out`` exists, or the list or the rows cannot be read.
    """
    if out.exists():
        raise UnlearnError(f"{out} exists; name another file with --out.")
    listed = Suppression.read(path)
    every = [dict(row) for _, row in read_rows(rows)]
    kept = [row for row in every if not listed.holds(row)]
    write_lines(out, kept, private=True)
    return len(kept), len(every) - len(kept)


def checked(requests: Path) -> list[str]:
    """For `record.verify`: a sentence on the list, if there is one.

    Raises:
        UnlearnError: It was changed.
    """
    path = requests / LIST
    if not path.exists():
        return []
    if Ledger(requests).key() is None:
        return ["suppression list: cannot be compared without ledger.key"]
    return [f"suppression list: {len(Suppression.read(path).digests)} digests as written"]
