"""Twins: the level of text that was never seen, from the starting model alone.

Where no model from before is at hand, the starting model is asked about each forget row's *twin*,
with other names, dates and numbers (`make_twins.py`): what it would say of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from axolotl_unlearn.columns import IGNORE, ROLES
from axolotl_unlearn.data.strategy import load_strategy
from axolotl_unlearn.engine.needs import ForwardResult, ForwardSpec, States, label_positions
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.asking import row_sets
from axolotl_unlearn.training.extensions import Extension

Row = Mapping[str, Any]


def alignment(row: Row, twin: Row) -> list[int]:
    """For each token of a row its place in the twin.

    Tokens that both have stand for each other, and of what was exchanged the first for the first;
    prompt and answer never mix.

    Raises:
        UnlearnError: Labels begin and end in another order.
    """
    sides = [
        [[y for _, y in part] for _, part in groupby(_tokens(one), key=lambda token: token[0])]
        for one in (row, twin)
    ]
    if len(sides[0]) != len(sides[1]) or (row["labels"][0] == IGNORE) != (
        twin["labels"][0] == IGNORE
    ):
        raise UnlearnError(
            f"`reference.twins`: the twin of forget row {int(row['row'])} has prompt and answer in "
            "another order; give it the row's own shape."
        )
    places, start = [], 0
    for ours, theirs in zip(*sides, strict=True):
        for _, a0, a1, b0, b1 in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            places += [
                start + min(b0 + (b1 - b0) * k // (a1 - a0), len(theirs) - 1)
                for k in range(a1 - a0)
            ]
        start += len(theirs)
    return places


def _tokens(row: Row) -> list[tuple[bool, int]]:
    """Whether each token has a label, and the token."""
    return [(y != IGNORE, x) for x, y in zip(row["input_ids"], row["labels"], strict=True)]


def own_twins(forget: Sequence[Row], twins: Sequence[Row]) -> list[Row]:
    """The twin of each forget row: the one of the same id.

    Raises:
        UnlearnError: A row has none, or is its own.
    """
    known = {int(row["pair"]): row for row in twins}
    own = [known.get(int(row["pair"])) for row in forget]
    if missing := own.count(None):
        raise UnlearnError(
            f"`reference.twins`: {missing} of {len(forget)} forget rows have no twin; write them "
            "with `axolotl-unlearn augment twins`."
        )
    pairs = zip(forget, own, strict=True)
    if same := sum(list(a["input_ids"]) == list(b["input_ids"]) for a, b in pairs):
        raise UnlearnError(
            f"`reference.twins`: {same} of {len(forget)} forget rows are their own twins, so they "
            "would not be forgotten; change their twins."
        )
    return own


class Twins:
    """Puts twins in the place of forget rows in a batch, and what was found of them back."""

    def __init__(self, forget: Sequence[Row], twins: Sequence[Row]) -> None:
        self._of = {
            _key(torch.as_tensor(row["input_ids"]), torch.as_tensor(row["labels"])): (
                torch.as_tensor(twin["input_ids"]),
                torch.as_tensor(twin["labels"]),
                # A position predicts the token after it, which is never a row's first.
                torch.as_tensor(alignment(row, twin)[1:]).clamp(min=1) - 1,
            )
            for row, twin in zip(forget, twins, strict=True)
        }

    def exchange(self, batch: dict[str, Tensor], needs: ForwardSpec) -> Asked:
        """The batch to ask instead, and the positions in it."""
        rows = []
        for ids, labels, real in zip(
            *(batch[name].cpu() for name in ("input_ids", "labels", "attention_mask")), strict=True
        ):
            ids, labels = ids[real.bool()], labels[real.bool()]
            rows.append(self._of.get(_key(ids, labels), (ids, labels, torch.arange(len(ids)))))
        ids, labels, places = zip(*rows, strict=True)
        device = batch["input_ids"].device
        other = {
            "input_ids": pad_sequence(ids, batch_first=True).to(device),
            "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], True).to(device),
            "labels": pad_sequence(labels, True, padding_value=IGNORE).to(device),
        }
        at = torch.zeros_like(batch["input_ids"])
        for i, place in enumerate(places):
            at[i, : len(place)] = place.to(device)
        where = None
        if needs.labels is not None:
            where = label_positions(other) & needs.labels.any(-1, keepdim=True)
        states = {}
        for layer, mask in needs.states.items():
            row, time = mask.nonzero(as_tuple=True)
            states[layer] = torch.zeros_like(other["input_ids"], dtype=torch.bool)
            states[layer][row, at[row, time]] = True
        return Asked(other, ForwardSpec(where, states), at, needs)


@dataclass(frozen=True)
class Asked:
    """What is asked in place of a batch: the twins', their needs, ``[R, T]`` the twin's position
    for each of the row's, and what was needed of the rows."""

    batch: dict[str, Tensor]
    needs: ForwardSpec
    at: Tensor
    asked: ForwardSpec

    def back(self, result: ForwardResult) -> ForwardResult:
        """What was found of the twins, at the positions of the rows."""
        logp = result.logp.gather(1, self.at)
        if self.asked.labels is not None:
            logp = logp.where(self.asked.labels, 0.0)
        states = {}
        for layer, mask in self.asked.states.items():
            row, time = mask.nonzero(as_tuple=True)
            states[layer] = States(result.states[layer].at(row, self.at[row, time]), mask)
        return ForwardResult(logp, states, logits=result.logits)


def _key(ids: Tensor, labels: Tensor) -> bytes:
    return ids.to(torch.int64).numpy().tobytes() + labels.to(torch.int64).numpy().tobytes()


class AskTwins(Extension):
    """A reference is asked about the twin of every forget row, the row of its id."""

    def on_reference(self, trainer: Any, source: Any, reference: Any) -> None:
        if not source.twins:
            return
        forget = [
            rows[int(i)]
            for rows in row_sets(trainer)
            for i in np.flatnonzero(np.asarray(rows["role"][:]) == ROLES["forget"])
        ]
        twins = load_strategy(
            "forget", trainer.processing_class, trainer.axolotl_cfg, {"path": source.twins}
        ).wrap_dataset(None)
        reference.twins = Twins(forget, own_twins(forget, list(twins)))
