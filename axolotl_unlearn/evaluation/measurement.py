"""What one model did, and how it was run: the currency between measuring and judging."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from axolotl_unlearn.evaluation.sets import MIN_MEMBERS, EvaluationSets, load_sets


@dataclass(frozen=True)
class Settings:
    """How models are evaluated: whole in results.json, so that `compare` can do it again.

    Attributes:
        device: default: "cuda" where there is one, else "cpu".
        dtype: default: "float32" on a CPU and the checkpoint's own elsewhere.
        batch_size: the scores of half precision are the official ones with 1 only.
        join: what stands between input and output.
        keep_texts: store generated texts.
        device_map: "auto" for a model that does not fit one device: spread over all there are.
        mmlu_dir: MMLU's CSV folder, for utility instead of general.jsonl.
        min_members: refuse fewer members or non-members; 0 measures no membership.
        limit: only the first rows of each part, interleaved over the cells (to try out).
        original: name of the model before unlearning, for the utility gate and as reference of
            the collapse check; default: the model called "original", else "memorised".
        resamples: bootstrap resamples for the intervals; 0 for none.
        store: folder of measurements by content; default: ``cache`` in that of the results.
        backend: "vllm" generates by vLLM (`evaluation.in_vllm`); default: transformers.
    """

    device: str | None = None
    dtype: str | None = None
    batch_size: int = 64
    max_gen_toks: int = 256
    join: str = " "
    keep_texts: bool = False
    device_map: str | None = None
    mmlu_dir: str | None = None
    mmlu_shots: int = 0
    min_members: int = MIN_MEMBERS
    limit: int | None = None
    original: str | None = None
    resamples: int = 10_000
    seed: int = 0
    store: str | None = None
    backend: str | None = None

    def placed(self, device: str | None) -> Settings:
        """With device and precision as this machine has them.

        Args:
            device: That of this process, of several.
        """
        import torch

        device = self.device or device or ("cuda" if torch.cuda.is_available() else "cpu")
        device = device.split(":")[0]
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
        return load_sets(
            folder,
            mmlu_dir=self.mmlu_dir,
            mmlu_shots=self.mmlu_shots,
            min_members=self.min_members,
            parts=("tasks", "mia", "mmlu") if self.min_members else ("tasks", "mmlu"),
        ).limited(self.limit)

    @property
    def key(self) -> list[Any]:
        """What can change a score of a model; the data have a digest of their own."""
        # In float32 the batch size changes nothing; in half precision it can.
        batch = None if self.dtype == "float32" else self.batch_size
        return [self.device, self.dtype, batch, self.max_gen_toks, self.join, self.backend]


@dataclass(frozen=True)
class Options(Settings):
    """`Settings`, and what of one evaluation does not go into its results.

    Attributes:
        out_dir: Folder of results.json.
        with_text: Keep generated texts of data that were not made up.
        use_cache: Read and store measurements.
        progress: Show bars.
    """

    out_dir: str | os.PathLike[str] = "out/eval"
    with_text: bool = False
    use_cache: bool = True
    progress: bool = True


@dataclass
class Measured:
    """What one model did: everything that the summary is computed from.

    Attributes:
        values: score of each generated row, by its key ("forget/<id>").
        texts: generations by row key; empty for rows that come from a cache without texts.
        contained: is the answer in the generation, for each question by row key.
        any_script: recall over words of every script, of completion rows that are not ASCII.
        outputs: counts over the generations of each side (`metrics.fluency.reference_figures`).
        options: 1 where the most probable option is the right one, 0 elsewhere.
        extraction, answer_tokens: extraction strength (floor 0) of each forget row, in file order,
            and tokens of its answer.
        text_extraction, text_tokens: strength of the second half of each document, members first,
            and its scored tokens.
        attacks: membership attacks by name, one number a document, members first; low = member.
        features: of each document, members first, for the learned attack (`metrics.learned`).
    """

    values: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    stopped: dict[str, bool] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    contained: dict[str, bool] = field(default_factory=dict)
    any_script: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    member_loss: list[float] = field(default_factory=list)
    nonmember_loss: list[float] = field(default_factory=list)
    options: list[int] = field(default_factory=list)
    extraction: list[float] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    text_extraction: list[float] = field(default_factory=list)
    text_tokens: list[int] = field(default_factory=list)
    attacks: dict[str, list[float]] = field(default_factory=dict)
    features: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0

    def stored(self, keep_texts: bool) -> dict[str, Any]:
        data = dict(vars(self))
        if not keep_texts:
            data["texts"] = {}
        return data


def count_outputs(found: Measured, sets: EvaluationSets) -> None:
    """What is kept of all texts instead of them; an earlier version's cache has it not yet."""
    from axolotl_unlearn.metrics.fluency import reference_figures
    from axolotl_unlearn.metrics.semeval import any_script_recall
    from axolotl_unlearn.metrics.words import contains_answer

    # An interrupted run of real data has no texts of the rows before.
    if found.outputs or len(found.texts) < len(sets.rows):
        return
    found.outputs = {
        side: reference_figures([found.texts[r.key] for r in sets.rows if r.side == side])
        for side in ("retain", "forget")
    }
    found.contained = {
        row.key: contains_answer(found.texts[row.key], row.record.output)
        for row in sets.rows
        if row.record.kind == "question"
    }
    found.any_script = {
        row.key: any_script_recall(found.texts[row.key], row.record.output)
        for row in sets.rows
        if row.record.kind == "completion" and not row.record.output.isascii()
    }
