"""Rows whose place in the training data a coin decided: an exact test of what a model knows.

Before training a coin decides for each of some rows, alike and used nowhere else, whether it is
trained on. A model that is as if it had never seen them cannot tell how the coins fell, so whatever
the rows look like, each fall is as likely: the p-value is exact for any model and any number of
rows, and no held-out texts have to be found afterwards. After Steinke, Nasr and Jagielski (arXiv
2305.08846), whose guesses are here the ranks of the losses.

Shape letter: n rows.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import declare, write_lines
from axolotl_unlearn.metrics.intervals import LEVEL, auc

#: Whether a row was trained on, in the file of all rows; its name in a data folder.
COIN, NAME = "included", "canaries"
#: With fewer rows no p-value is below .05 / 32 even if all coins are guessed.
LEAST = 10


def draw(rows: str | os.PathLike[str], out: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Toss a coin for each row of a file, where nobody can foresee or repeat it.

    Returns:
        ``train.jsonl``, the rows to train on and later to forget, and ``canaries.jsonl``, all rows
        with their coin, for `axolotl-unlearn eval --canaries` and `request new --canaries`.

    Raises:
        UnlearnError: There are too few rows, coins were tossed before, or ``train.jsonl`` is there.
    """
    given = [dict(row) for _, row in read_rows(rows)]
    if len(given) < LEAST:
        raise UnlearnError(
            f"{rows} has {len(given)} rows; the test needs {LEAST} at least, 60 to find what is "
            "half known: add rows like them.",
            code="canaries.few",
        )
    train, key = Path(out, "train.jsonl"), Path(out, f"{NAME}.jsonl")
    for file, what in ((key, "these coins were tossed"), (train, "it would be replaced")):
        if file.exists():
            raise UnlearnError(
                f"{file} is there: {what}; name another folder with --out.", code="canaries.tossed"
            )
    tossed = [(row, bool(secrets.randbits(1))) for row in given]
    both = [row for row, coin in tossed if coin], [row | {COIN: coin} for row, coin in tossed]
    for file, some in zip((train, key), both, strict=True):
        declare(Path(out), file, "texts")
        write_lines(file, some, private=True)
    return train, key


def read_coins(path: str | os.PathLike[str]) -> list[bool]:
    """How the coins of rows of any format fell.

    Raises:
        UnlearnError: A row has no coin, or there are too few rows.
    """
    coins = []
    for place, row in read_rows(path):
        if not isinstance(row.get(COIN), bool):
            raise UnlearnError(
                f"{path}, {place}: field {COIN!r} must be true or false, as the coin fell; "
                "`axolotl-unlearn canaries ROWS` tosses it.",
                code="canaries.no-coin",
            )
        coins.append(row[COIN])
    if len(coins) < LEAST:
        raise UnlearnError(
            f"{path} has {len(coins)} rows; the test needs {LEAST}.", code="canaries.few"
        )
    return coins


def coin_test(scores: ArrayLike, coins: Sequence[bool]) -> dict[str, Any]:
    """Do scores tell how the coins fell?

    The statistic is the sum of centred ranks of rows that were included minus that of the others;
    its distribution over all 2^n falls of the coins is computed exactly, in n^3 / 2 steps.

    Args:
        scores: ``[n]``, high = rather trained on, made without knowing the coins.

    Returns:
        ``n``, ``included``, ``auc`` (None where all coins fell alike), ``p_known`` (a sum so high),
        ``p_pushed`` (so low) and two-sided ``p``.
    """
    scores, coins = np.asarray(scores, float), np.asarray(coins, bool)
    weights = (2 * rankdata(scores) - len(scores) - 1).round().astype(int)
    value = int(np.where(coins, weights, -weights).sum())
    known, pushed = _tail(weights, value), _tail(weights, -value)
    area = float(auc(scores[coins], scores[~coins])) if 0 < coins.sum() < len(coins) else None
    counts = {"n": len(scores), "included": int(coins.sum()), "auc": area}
    return counts | {"p_known": known, "p_pushed": pushed, "p": min(1.0, 2 * min(known, pushed))}


def _tail(weights: NDArray[np.int_], value: int) -> float:
    """P(sum of +-w >= value), each sign by a fair coin."""
    chances = np.ones(1)
    for weight in np.abs(weights):
        chances = (np.pad(chances, (0, 2 * weight)) + np.pad(chances, (2 * weight, 0))) / 2
    return float(min(1.0, chances[len(chances) // 2 + value :].sum()))


def add_canaries(
    results: Sequence[dict[str, Any]],
    losses: Mapping[str, Sequence[float]],
    coins: Sequence[bool],
) -> None:
    """``canaries`` of each entry: `coin_test` of minus the loss, less that of the retrained
    model where there is one; ``sentence``.

    Args:
        losses: By model, of each row.
    """
    roles = {one["role"]: one["name"] for one in reversed(results)}
    control, before = roles.get("retrained"), roles.get("original")
    found = {
        name: coin_test(
            np.subtract(losses[control] if control not in (None, name) else 0, own), coins
        )
        for name, own in losses.items()
    }
    able = before is None or found[before]["p_known"] < 1 - LEVEL
    for entry in results:
        one = entry["canaries"] = found[entry["name"]]
        one["sentence"] = sentence(one, able or entry["name"] == before)


def sentence(found: Mapping[str, Any], able: bool = True) -> str:
    """The answer in words; ``able``: whether the model before unlearning is told by these rows."""
    rows = f"{found['included']} of {found['n']} rows were trained on by coin"
    if found["p"] >= 1 - LEVEL:
        text = f"{rows}; the model does not tell which (p {found['p']:.2g})"
        return text + ("." if able else ", nor does the one before: these rows can show nothing.")
    side = "known" if found["p_known"] < found["p_pushed"] else "pushed away"
    return f"{rows}, and the model tells which: they are {side} (exact p {found['p']:.2g})."
