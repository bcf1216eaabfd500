"""Which models have collapsed: their outputs against the original's, and under the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axolotl_unlearn.evaluation.cache import Cache
from axolotl_unlearn.evaluation.measure import counting, in_parts, load
from axolotl_unlearn.evaluation.models import ModelSpec, load_tokenizer


def collapse_key(keys: Mapping[str, str], spec: ModelSpec, before: ModelSpec | None) -> str:
    return f"{keys[spec.name]}-collapse3-{keys[before.name] if before else 'none'}"


def collapse_reports(
    specs, before, measured, sets, settings, cache, keys, bars
) -> dict[str, dict[str, Any] | None]:
    """The collapse report of each model, against the original's outputs where they are known.

    A model has collapsed if it breaks where it should still answer: on the retain rows. What it
    says to forgotten prompts is reported beside it (``forget``): repetition there is a flaw of
    the method (arXiv 2503.21088, 6.1), not of the whole model.
    """
    from axolotl_unlearn.evaluation.scorer import score_texts
    from axolotl_unlearn.metrics.fluency import collapse_report
    from axolotl_unlearn.metrics.memorisation import loss

    reports: dict[str, dict[str, Any] | None] = {}
    todo = []
    for spec in specs:
        key = collapse_key(keys, spec, before)
        reports[spec.name] = cache.get(key)
        if reports[spec.name] is None:
            todo.append((spec, key))
    if not todo:
        return reports
    judge = ordinary = None

    def losses(texts: Sequence[str], bar: str) -> list[float]:
        """Mean loss of each text under the original; 0 for a text of one token or none."""
        long = [i for i, text in enumerate(texts) if len(tokenizer(text)["input_ids"]) > 1]
        with bars.bar(bar, len(long)) as advance:
            count = counting(advance, cache.workers)

            def score(some: Sequence[str]) -> list[float]:
                facts = cache.workers.map(
                    lambda part: score_texts(
                        judge, tokenizer, part, loss_only=True, on_batch=count
                    ),
                    some,
                )
                return [loss(one) for one in facts]

            kept = in_parts([texts[i] for i in long], score, Cache(None, cache.workers), "")
        found = [0.0] * len(texts)
        for i, one in zip(long, kept, strict=True):
            found[i] = one
        return found

    for spec, key in todo:
        found = measured[spec.name]
        rows = [row for row in sets.rows if row.key in found.texts]
        if not rows:
            continue
        texts = [found.texts[row.key] for row in rows]
        known, against = None, "expected answers"
        nll = None
        if before is not None and spec.name != before.name:
            if known := measured[before.name].outputs:
                against = "original's outputs"
            if judge is None:
                tokenizer = load_tokenizer(before)
                judge = load(before, settings, cache.workers)
                # An output begins in the middle of a text, where every model is less sure: so
                # does what it is compared with.
                halves = [second_half(text) for _, text in sets.nonmember]
                ordinary = losses([half for half in halves if half], "ordinary texts")
            nll = losses(texts, f"{spec.name}: fluency")
        sides = {
            side: collapse_report(
                [texts[i] for i in where],
                known[side] if known else [rows[i].record.output for i in where],
                nll=None if nll is None else [nll[i] for i in where],
                ordinary_nll=None if nll is None else ordinary,
            )
            for side in ("retain", "forget")
            if (where := [i for i, row in enumerate(rows) if row.side == side])
        }
        report = dict(sides.get("retain") or sides["forget"])
        report["forget"] = sides.get("forget")
        report["against"] = against
        reports[spec.name] = report
        cache.put(key, report)
    return reports


def second_half(text: str) -> str:
    """The later half of its words, or of its characters where it has one word."""
    words = text.split()
    return " ".join(words[len(words) // 2 :]) if len(words) > 1 else text[len(text) // 2 :]
