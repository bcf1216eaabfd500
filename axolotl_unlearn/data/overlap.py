"""Rows of different roles that meet: to be forgotten and kept at once, found by what the model
reads; and alternatives of forget rows, found by their ids.

For the former ids, paths and raw rows do not count: one chat is the same in another file, under
another id and in another format. Two rows are one where their tokens up to the last label are,
special tokens left out, and a token has a label in both.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from axolotl_unlearn.columns import IGNORE, PAIR, ROLES, pair_number
from axolotl_unlearn.data.near import near_texts
from axolotl_unlearn.data.records import KEPT
from axolotl_unlearn.errors import UnlearnError

#: Columns: `reads` of the row, and `pair_number` of the path that its entry names.
READS, FILE = "reads", "file"
#: What to do about rows of these roles that are forget rows, too.
CURES = {"retain": KEPT, "alternative": "write another answer"}
#: Rows up to which near-duplicates are looked for: pairs take time.
MOST_COMPARED = 10_000


def reads(input_ids: Sequence[int], labels: Sequence[int], special: Collection[int]) -> int:
    """A hash in 63 bits of the tokens up to the last label, without those that are ``special``."""
    end = max((place for place, label in enumerate(labels) if label != IGNORE), default=-1) + 1
    said = array("q", (token for token in input_ids[:end] if token not in special))
    return int.from_bytes(hashlib.blake2b(said.tobytes(), digest_size=8).digest(), "big") >> 1


def check_sides(rows: Any, paths: Iterable[str] = ()) -> None:
    """Refuse tokenised rows that are to be forgotten and kept, or answered and forgotten.

    Args:
        rows: Dataset with the columns of `axolotl_unlearn.data.strategy`.
        paths: What the entries of the config name, for the message.

    Raises:
        UnlearnError: Says how many there are and where the first is, never what it says.
    """
    if READS not in rows.column_names:
        return  # rows of types that are not ours
    names = {pair_number(path): path for path in paths}
    role, said, number, file = (np.asarray(rows[key][:]) for key in ("role", READS, "row", FILE))
    forget = np.flatnonzero(role == ROLES["forget"])
    places = defaultdict(list)
    for row in forget[np.isin(said[forget], said[role != ROLES["forget"]])]:
        places[said[row]].append(int(row))
    for side, cure in CURES.items():
        both = []
        for row in np.flatnonzero((role == ROLES[side]) & np.isin(said, list(places))).tolist():
            for other in places[said[row]]:
                labels = zip(rows[row]["labels"], rows[other]["labels"], strict=False)
                if any(a != IGNORE and b != IGNORE for a, b in labels):
                    both.append((row, other))
                    break
        if both:
            where = " and ".join(
                f"row {number[row] + 1} of {names.get(int(file[row]), f'a {kind} set')}"
                for row, kind in zip(both[0][::-1], ("forget", side), strict=True)
            )
            raise UnlearnError(
                f"{side} rows say what forget rows say, token for token ({len(both)}; the first is "
                f"{where}); {cure}.",
                code="data.both-sides",
            )


def near_note(rows: Any) -> list[str]:
    """A sentence with the number of retain rows that hardly differ from a forget row, if there are
    any: of the tokens that have labels."""
    if READS not in rows.column_names:
        return []
    if len(rows) > MOST_COMPARED:
        return [f"retain rows that hardly differ from forget rows were not looked for: {len(rows)} "
                f"rows are more than {MOST_COMPARED}."]  # fmt: skip
    texts: dict[int, dict[int, str]] = {number: {} for number in ROLES.values()}
    for place, (role, labels) in enumerate(zip(rows["role"][:], rows["labels"][:], strict=True)):
        texts[role][place] = " ".join(str(one) for one in labels if one != IGNORE)
    kept = texts[ROLES["retain"]]
    if not (near := near_texts(texts[ROLES["forget"]], kept)):
        return []
    return [
        f"{len(near)} of {len(kept)} retain rows hardly differ from forget rows, so what is "
        "forgotten would be kept."
    ]


#: Columns that say which forget row an alternative answers.
COLUMNS = ("role", PAIR, "kind", "task", "row")


def matched(columns: Mapping[str, Sequence[int]]) -> dict[int, list[int]]:
    """Place of each forget row -> places of its alternatives, in the order of their file.

    Args:
        columns: `COLUMNS`, an integer a row each.

    Raises:
        UnlearnError: They do not match.
    """
    roles, pair, kind, task, number = (np.asarray(columns[name]) for name in COLUMNS)
    rows = np.flatnonzero(roles == ROLES["forget"]).tolist()
    forget = {int(pair[row]): row for row in rows}
    if len(forget) < len(rows):
        raise UnlearnError(
            "two forget rows have the same id (or files without ids, or a text that was cut into "
            "several rows), so alternatives cannot find theirs; give ids that occur once.",
            code="data.alternatives-ambiguous",
        )
    answers: dict[int, list[int]] = {row: [] for row in rows}
    given = np.flatnonzero(roles == ROLES["alternative"])
    for row in given[np.argsort(number[given], kind="stable")].tolist():
        own = forget.get(int(pair[row]))
        if own is None or (kind[row], task[row]) != (kind[own], task[own]):
            raise UnlearnError(
                f"alternative {number[row] + 1} of its file answers no forget row of its kind and "
                "task; give it the `id` of one (or leave out all ids and keep their order).",
                code="data.alternative-without-forget",
            )
        answers[own].append(row)
    without = [number[row] for row, several in answers.items() if not several]
    if without:
        raise UnlearnError(
            f"{len(without)} of {len(forget)} forget rows have no alternative, the first is row "
            f"{min(without) + 1}; add one for each (`axolotl-unlearn augment`).",
            code="data.forget-without-alternative",
        )
    return answers
