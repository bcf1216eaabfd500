"""Which models have collapsed: their outputs against the original's, and under the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from axolotl_unlearn.engine.token_scoring import context_of
from axolotl_unlearn.evaluation.measure import Local, Session
from axolotl_unlearn.evaluation.measurement import Measured
from axolotl_unlearn.metrics.fluency import EXPECTED, collapse_report, output_figures
from axolotl_unlearn.metrics.memorisation import loss
from axolotl_unlearn.models import ModelSpec


class CollapseChecker:
    """Collapse reports, one model at a time, against the original's outputs where they are known:
    of the retain rows, where a model should still answer, and under ``forget`` of the others."""

    def __init__(self, session: Session, keys: Mapping[str, str], before: ModelSpec | None) -> None:
        self.session, self.keys, self.before = session, keys, before
        self._ordinary: list[float] = []

    def _key(self, spec: ModelSpec) -> str:
        before = self.keys[self.before.name] if self.before else "none"
        copy = self.before and spec.name != self.before.name and self.keys[spec.name] == before
        return f"{self.keys[spec.name]}-collapse6-{before}{'-copy' * bool(copy)}"

    def stored(self, spec: ModelSpec) -> dict[str, Any] | None:
        return self.session.cache.get(self._key(spec))

    def report(
        self, spec: ModelSpec, measured: Measured, original: Measured | None
    ) -> dict[str, Any] | None:
        """Of a model with its texts, or the one that is stored; None where neither is there."""
        stored = self.stored(spec)
        rows = [row for row in self.session.sets.rows if row.key in measured.texts]
        if stored is not None or not rows:
            return stored
        texts = [measured.texts[row.key] for row in rows]
        known, against, nll = None, EXPECTED, None
        if self.before is not None and spec.name != self.before.name:
            if known := original.outputs:
                against = "original's outputs"
            model = self.session.load(self.before)
            if not self._ordinary:
                # An output begins in the middle of a text, where every model is less sure: so does
                # what it is compared with.
                halves = (second_half(text) for _, text in self.session.sets.nonmember)
                some = list(filter(None, halves))
                self._ordinary = self._losses(model, some, "ordinary texts")
            nll = self._losses(model, texts, f"{spec.name}: fluency")
        sides = {}
        for side in dict.fromkeys(row.side for row in rows):
            where = [i for i, row in enumerate(rows) if row.side == side]
            prompts, own = [rows[i].record.input for i in where], [texts[i] for i in where]
            expected = [rows[i].record.output for i in where]
            base = known[side] if known else output_figures(expected, prompts)
            losses = nll and ([nll[i] for i in where], self._ordinary)
            of = "before" if known else f"of the {EXPECTED}"
            sides[side] = collapse_report(own, base, prompts=prompts, losses=losses, of=of)
        report = dict(sides.get("retain") or sides["forget"])
        report |= {"forget": sides.get("forget"), "against": against}
        self.session.cache.put(self._key(spec), report)
        return report

    def _losses(self, model: Local, texts: Sequence[str], bar: str) -> list[float]:
        """Mean loss of each text; 0 for a text of one token or none."""
        tokenizer, limit = model.tokenizer, context_of(model.model)
        texts = [cut(text, tokenizer, limit) for text in texts]
        long = [i for i, text in enumerate(texts) if len(tokenizer(text)["input_ids"]) > 1]
        ask = partial(model.texts, loss_only=True)
        losses = self.session.each(bar, [texts[i] for i in long], ask, lambda one, _: loss(one))
        known = dict(zip(long, losses, strict=True))
        return [known.get(i, 0.0) for i in range(len(texts))]


def cut(text: str, tokenizer: Any, limit: int | None) -> str:
    """The beginning of a text that fits ``limit`` tokens: broken bytes may be read as more tokens
    than were generated."""
    while limit and (length := len(tokenizer(text)["input_ids"])) > limit:
        text = text[: len(text) * limit // length]
    return text


def second_half(text: str) -> str:
    """The later half of its words, or of its characters where it has one word."""
    words = text.split()
    return " ".join(words[len(words) // 2 :]) if len(words) > 1 else text[len(text) // 2 :]
