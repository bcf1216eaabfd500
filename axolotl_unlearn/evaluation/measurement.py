"""What one model did, and how it was run: the currency between measuring and judging."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from axolotl_unlearn.device import device_name
from axolotl_unlearn.evaluation.sets import MIN_MEMBERS, PARTS, EvaluationSets, load_sets
from axolotl_unlearn.metrics.fluency import output_figures
from axolotl_unlearn.metrics.semeval import any_script_recall


def rounding(device: str | None, dtype: str | None, batch_size: int) -> list[Any]:
    """What decides how a model's figures are rounded; in float32 the batch size changes draws
    alone."""
    return [device and device.split(":")[0], dtype, None if dtype == "float32" else batch_size]


@dataclass(frozen=True)
class Settings:
    """How models are evaluated: whole in results.json, so that it can be done again.

    Attributes:
        device, dtype: Default the accelerator, else "cpu"; "float32" on a CPU, else the
            checkpoint's own.
        batch_size: The scores of half precision are the official ones with 1 only.
        join: Between input and output.
        device_map: "auto" for a model that does not fit one device: spread over all there are.
        min_members: Refuse fewer members or non-members; 0 measures no membership.
        limit: Only so many rows, interleaved over the cells, documents, questions (to try out).
        original: The model before unlearning, for gate and collapse check; default: the model
            called "original", else "memorised".
        store: Folder of measurements by content; default: ``cache`` in that of the results.
        canaries: Their file; default: that of the data folder.
        samples: Draws of each forget row at temperature 1, beside the greedy answer.
        backend: "vllm" generates by vLLM, "auto" where it can (`evaluation.in_vllm.backend`);
            default: transformers.
    """

    device: str | None = None
    dtype: str | None = None
    batch_size: int = 64
    max_gen_toks: int = 256
    join: str = " "
    keep_texts: bool = False
    device_map: str | None = None
    min_members: int = MIN_MEMBERS
    limit: int | None = None
    original: str | None = None
    seed: int = 0
    store: str | None = None
    canaries: str | None = None
    samples: int = 0
    backend: str | None = None

    def placed(self) -> Settings:
        """With device and precision as this machine has them."""
        device = device_name(self.device)
        dtype = self.dtype or ("float32" if device == "cpu" else "auto")
        return replace(self, device=device, dtype=dtype)

    @staticmethod
    def read(stored: Mapping[str, Any]) -> Settings:
        """From results.json; what an earlier version did not store has its default."""
        names = {one.name for one in fields(Settings)}
        kept = {name: value for name, value in stored.items() if name in names}
        paths = {n: os.fspath(v) for n, v in kept.items() if isinstance(v, os.PathLike)}
        return Settings(**kept | paths)

    def load_sets(self, folder: str | os.PathLike[str] | None) -> EvaluationSets:
        """The data of a folder, as these settings read them."""
        parts = PARTS if self.min_members else [part for part in PARTS if part != "mia"]
        given = {name: getattr(self, name) for name in ("min_members", "join", "canaries")}
        return load_sets(folder, parts=parts, **given).limited(self.limit)

    @property
    def key(self) -> list[Any]:
        """What can change a score of a model; the data have a digest of their own."""
        drawn = [self.samples, self.seed, self.batch_size] if self.samples else []
        how = [*rounding(self.device, self.dtype, self.batch_size), self.max_gen_toks]
        return [*how, self.join, self.backend, *drawn]


@dataclass(frozen=True)
class Options(Settings):
    """`Settings`, and what of one evaluation does not go into its results."""

    out_dir: str | os.PathLike[str] = "out/eval"
    progress: bool = True


@dataclass
class Measured:
    """What one model did: everything that the summary is computed from.

    Attributes:
        values, texts: Of each generated row, by its key ("forget/<id>"); texts are empty for rows
            that come from a cache without them.
        contained: Is the answer in the generation, for each question by row key.
        said_of_samples: Draws that say the answer, of `Settings.samples`, by forget row.
        any_script: Recall over words of every script, of completion rows that are not ASCII.
        outputs: Counts over the generations of each side (`metrics.fluency.output_figures`).
        options: 1 where the most probable option is the right one, 0 elsewhere.
        canary_loss: Of each row of `evaluation.canaries`.
        answers: Of each forget row, in file order: strength, tokens, longest run of greedy tokens,
            share of greedy tokens, and log-probability (nats, summed) of its answer.
        member, nonmember: Of each document: loss; ``attacks`` by name, low = member; strength of
            its second half; scored tokens, longest run and share of greedy tokens of the whole;
            ``features`` (`metrics.learned`).
    """

    values: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    contained: dict[str, bool] = field(default_factory=dict)
    said_of_samples: dict[str, int] = field(default_factory=dict)
    any_script: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: list[int] = field(default_factory=list)
    canary_loss: list[float] = field(default_factory=list)
    answers: list[dict[str, float]] = field(default_factory=list)
    member: list[dict[str, Any]] = field(default_factory=list)
    nonmember: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def member_loss(self) -> list[float]:
        return [one["loss"] for one in self.member]

    @property
    def nonmember_loss(self) -> list[float]:
        return [one["loss"] for one in self.nonmember]


def count_outputs(measured: Measured, sets: EvaluationSets) -> None:
    """What is kept of all texts instead of them."""
    if len(measured.texts) < len(sets.rows):
        return
    for side in ("retain", "forget"):
        rows = [row for row in sets.rows if row.side == side]
        texts = [measured.texts[row.key] for row in rows]
        measured.outputs[side] = output_figures(texts, [row.record.input for row in rows])
    asked = [row for row in sets.rows if row.record.kind == "completion"]
    asked = [(row.key, row.record.output) for row in asked if not row.record.output.isascii()]
    measured.any_script = {key: any_script_recall(measured.texts[key], text) for key, text in asked}
