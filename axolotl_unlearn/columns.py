"""What the integers in the columns of a row mean, and which label is none: said once.

Needs nothing but the standard library, so that configs are checked without torch.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

Side = Literal["forget", "retain"]
Role = Literal["forget", "retain", "alternative"]
Kind = Literal["completion", "question"]

#: The sides of the loss, which have objectives.
SIDES: tuple[Side, ...] = ("forget", "retain")
#: Column ``role``: what a row is for; an alternative is another answer to a forget row.
ROLES: dict[Role, int] = {"forget": 0, "retain": 1, "alternative": 2}
#: A role that no objective has rows of.
NOBODYS = -1
#: Column ``kind``: how a row asks, which decides its labels (`unlearn.data.labels`).
KINDS: dict[Kind, int] = {"completion": 0, "question": 1}
#: Label of a position that none is asked about (PyTorch's cross entropy ignores it).
IGNORE = -100
#: The integer columns of a row; -1 where a dataset lacks one.
FACTS = ("role", "kind", "task", "row")
#: Column by which an alternative finds its forget row: `pair_number` of the id that both have.
PAIR = "pair"
#: Column of the document that a row belongs to: `pair_number` of its name.
DOCUMENT = "document"

_NUMBERED = re.compile(r"(?:task[\s_-]*)?(\d{1,9})", re.IGNORECASE)


def task_number(task: int | str) -> int:
    """Column ``task``: the number that rows and ``tasks:`` of an entry give to one task.

    3 for 3, "3", "Task3" and "task 3"; 0 for no task; a name without a number is a category of its
    own, whatever its case, with a number below -1 (a hash, so that it is the same in every file
    and in every cache).
    """
    name = str(task).strip().casefold()
    numbered = _NUMBERED.fullmatch(name)
    if numbered:
        return int(numbered[1])
    if not name:
        return 0
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
    return -2 - digest % (2**31 - 2)


def pair_number(record_id: str) -> int:
    """Columns ``pair`` and ``document``: a hash of the id in 63 bits."""
    digest = hashlib.blake2b(record_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
