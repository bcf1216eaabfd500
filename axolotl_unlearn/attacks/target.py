"""The attacked model, the rows it should have forgotten, and how it is asked about them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from axolotl_unlearn.attacks.probes import Probe, Scores, score_probes
from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.engine.batch import Batch
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.measure import ProgressBars
from axolotl_unlearn.evaluation.measurement import rounding
from axolotl_unlearn.evaluation.sets import interleave, need_file, side_records
from axolotl_unlearn.evaluation.tasks import CODE
from axolotl_unlearn.models import (
    ModelSpec,
    load_model,
    load_tokenizer,
    parse_models,
    weights_digest,
)


@dataclass(frozen=True)
class AttackTarget:
    """A model to attack: the forget rows it is asked about, what stands between input and output
    as in training, where and in which precision it runs; ``quiet``: no progress bars."""

    spec: ModelSpec
    records: Sequence[Record]
    join: str = " "
    max_new_tokens: int = 128
    batch_size: int = 32
    device: str = "cpu"
    dtype: str = "float32"
    quiet: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @functools.cached_property
    def identity(self) -> tuple:
        """Everything about the model and the way it is asked that could change its answers."""
        how = rounding(self.device, self.dtype, self.batch_size)
        return (weights_digest(self.spec), self.join, self.max_new_tokens, *how)

    def load(self) -> tuple[Any, Any]:
        """A fresh copy of the model, and its tokenizer."""
        model = load_model(self.spec, dtype=getattr(torch, self.dtype), device=self.device)
        return model, load_tokenizer(self.spec)

    def ask(
        self, model: Any, tokenizer: Any, probes: Sequence[Probe], what: str, **options: Any
    ) -> Scores:
        """`score_probes` under a progress bar."""
        options |= {"max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}
        bars = ProgressBars(not self.quiet)
        with bars.progress, bars.bar(f"{self.name}: {what}", len(probes)) as advance:
            options["on_batch"] = lambda numbers, _: advance(len(numbers))
            return score_probes(model, tokenizer, probes, **options)


def make_subjects(
    model: str, records: Sequence[Record], control: str | None = None, **settings: Any
) -> tuple[AttackTarget, AttackTarget | None]:
    """The attacked model and the control (a model that never saw the forget set), checked."""
    specs = with_control([model], control)
    first, *other = (AttackTarget(spec, records, **settings) for spec in specs)
    return first, other[0] if other else None


def with_control(models: Sequence[str], control: str | None) -> list[ModelSpec]:
    """The models, then their control, if there is one; raises UnlearnError where it is one."""
    specs = parse_models([*models, *([control] if control else [])])
    own = weights_digest(specs[-1]) if control else None
    for one in specs[: len(models)]:
        if own and weights_digest(one) == own:
            says = f"--control: {specs[-1].name} has the weights of {one.name} and shows nothing"
            cure = "name a model that never saw the rows"
            raise UnlearnError(f"{says}; {cure}.", code="attack.own-control")
    return specs


def read_side(data_dir: Path, side: str) -> tuple[Path, list[Record]]:
    """``forget`` or ``retain`` rows of a data folder; raises UnlearnError where there are none."""
    path = need_file(data_dir, side)
    return path, side_records(path)


def bound_to(model: ModelSpec, control: ModelSpec | None) -> dict[str, str]:
    """What a result is of, as results.json says it: digests of weights, and the code's version."""
    facts = {"weights": weights_digest(model), "code": CODE}
    return facts | ({"control_weights": weights_digest(control)} if control else {})


def limited(records: Sequence[Record], limit: int | None) -> list[Record]:
    """The first ``limit`` rows, tasks and kinds in turn."""
    if limit is None or limit >= len(records):
        return list(records)
    if limit < 1:
        raise UnlearnError(f"--limit is {limit}; it must be 1 or more.", code="attack.limit")
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.task, record.kind), []).append(record)
    return interleave(groups.values())[:limit]


def collate(rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: Any) -> Batch:
    """Ids and labels of rows, padded on the right."""
    ids, labels = ([torch.tensor(list(x)) for x in side] for side in zip(*rows, strict=True))
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
    }
    return Batch.sent({name: part.numpy() for name, part in batch.items()}, device)
