"""Is the model broken? Repetition, emptiness and nonsense in generated texts.

A model that answers "6 6 6 6" to everything scores about 0.40 on the SemEval aggregate. These
functions look at the texts, so models with different tokenizers compare.

Thresholds were set between real texts and broken ones. Over 2780 outputs, 2780 prompts and 2780
whole documents of LUME and 3600 answers of TOFU, the most frequent token makes up at most 0.40 of
a text of 8 or more tokens, the most frequent 4-gram covers at most 0.35, at least 0.83 of the
4-grams differ, and 200 bytes or more compress to no less than 0.38. A loop of up to 16 tokens
repeated over 72 has 0.23 distinct 4-grams or fewer and compresses below 0.25.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: An output repeats when one token, or the tokens inside one 4-gram, are more than this ...
DOMINATED = 0.5
#: ... of so many tokens at least ("900 900 900" may be an answer), ...
MIN_TOKENS = 8
#: ... when fewer of its 4-grams than this are different, ...
DISTINCT_4, MIN_LOOP_TOKENS = 0.5, 16
#: ... or when it compresses below this share of its bytes.
COMPRESSION, MIN_COMPRESSION_BYTES = 0.3, 200
#: Share of outputs above the reference's from which a model is collapsed, and what they are.
COLLAPSED = {"broken": (0.25, "repetition"), "empty": (0.5, "empty")}
#: Share of outputs that are (nearly) one and the same, of so many at least.
CONSTANT_SHARE, MIN_OUTPUTS = 0.9, 10
#: Outputs are compared with these where there is no original: ``against`` of a report.
EXPECTED = "expected answers"
#: Outputs are nearly the same from this share of common words on, those of the prompt left out.
ALIKE = 0.6
#: An output is nonsense when its loss under the original exceeds ordinary texts' by this (nats).
NONSENSE_NATS, NONSENSE_SHARE = 1.0, 0.25
#: How an answer is refused, in English; other languages show by being nearly the same.
_REFUSAL = re.compile(
    r"\b(i|we)( am|'m| are|'re)? (sorry|unable|not (sure|able|aware|familiar|certain))"
    r"|\b(i|we) (do not|don't|cannot|can't|can not|could not|couldn't|have no|won't|will not)\b"
    r"|\b(no|not have|lack|beyond|any) (available )?(information|knowledge|record|data|details)\b"
    r"|\bas an ai\b|\b(unknown|not available|not known) to me\b|\bunable to\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w+|[^\w\s]")
_LONGEST_WORD = 24


def tokens(text: str) -> list[str]:
    """Words and punctuation marks; a "word" of more than 24 characters is cut into characters."""
    words: list[str] = []
    for word in _WORD.findall(text):
        words.extend(word if len(word) > _LONGEST_WORD else [word])
    return words


def ngram_cover(words: Sequence[str], n: int) -> float:
    """Share of tokens inside the most frequent n-gram; 0 where none occurs twice.

    "a b c d a b c d e f": the 4-gram a b c d covers 8 of 10.
    """
    grams = list(zip(*(words[i:] for i in range(n)), strict=False))
    # The earliest of equally frequent ones, so that the value does not depend on hashing.
    ((best, count),) = Counter(grams).most_common(1) or [((), 0)]
    starts = [start for start, gram in enumerate(grams) if gram == best] if count > 1 else ()
    return len({start + i for start in starts for i in range(n)}) / max(1, len(words))


def repeats(text: str) -> bool:
    """Is one output little but repetition, by the thresholds of this module?"""
    words, raw = tokens(text), text.encode("utf-8", errors="replace")
    grams = list(zip(*(words[i:] for i in range(4)), strict=False))
    return bool(
        (len(words) >= MIN_TOKENS and max(ngram_cover(words, n) for n in (1, 4)) > DOMINATED)
        or (len(words) >= MIN_LOOP_TOKENS and len(set(grams)) < DISTINCT_4 * len(grams))
        or (
            len(raw) >= MIN_COMPRESSION_BYTES
            and len(zlib.compress(raw, 9)) < COMPRESSION * len(raw)
        )
    )


def refuses(text: str) -> bool:
    """Is it an English refusal, in any of the usual words?"""
    return _REFUSAL.search(text.replace("\u2019", "'")) is not None


def _said(text: str, prompt: str) -> frozenset[str]:
    """What it says beyond its prompt: words in lower case."""
    own, asked = ({w for w in tokens(one.casefold()) if w[0].isalnum()} for one in (text, prompt))
    return frozenset(own - asked)


def nearly_constant(texts: Sequence[str], prompts: Sequence[str]) -> int:
    """Size of the largest group of outputs that say nearly the same beyond their prompts: of the
    words of two, `ALIKE` are common. An echo of the prompt says nothing and is in no group."""
    groups: dict[frozenset[str], int] = {}
    for words in sorted(filter(None, map(_said, texts, prompts)), key=sorted):  # not as rows stand
        near = (one for one in groups if len(words & one) >= ALIKE * len(words | one))
        leader = next(near, words)
        groups[leader] = groups.get(leader, 0) + 1
    return max(groups.values(), default=0)


def broken_by(report: Mapping[str, Any], of: str = "before") -> list[str]:
    """Why the shares of a `collapse_report` are those of a broken model, in words; ``of``: what its
    reference is."""
    before = report.get("reference") or {}
    reasons = []
    for name, (more, words) in COLLAPSED.items():
        share, base = report.get(name) or 0.0, before.get(name) or 0.0
        if share > base + more:
            then = f", {base:.0%} {of}" if before else ""
            reasons.append(f"{share:.0%} of outputs are {words}{then}")
    share, count = report.get("constant") or 0.0, report.get("n")
    bar = max(CONSTANT_SHARE, before.get("constant") or 0.0)
    if share > bar and (count is None or count >= MIN_OUTPUTS):
        reasons.append(f"{share:.0%} of outputs are one and the same text")
    if (share := report.get("nonsense") or 0.0) > NONSENSE_SHARE:
        reasons.append(f"{share:.0%} of longer outputs make no sense to the original model")
    return reasons


def collapse_report(
    texts: Sequence[str],
    reference: Mapping[str, Any] | None = None,
    *,
    prompts: Sequence[str] | None = None,
    losses: tuple[Sequence[float], Sequence[float]] | None = None,
    of: str = "before",
) -> dict[str, Any]:
    """Describe the outputs of a model and say whether it collapsed, and why.

    Args:
        reference: `output_figures` of the original model's outputs to the same prompts, or of the
            expected texts: only what was added to these shares counts.
        prompts: Of each output.
        losses: Mean losses under the *original* model, nats a token: of each output, and of
            ordinary unseen texts, e.g. second halves of the non-members.
        of: What the reference is, in words.

    Returns:
        ``collapsed`` and its ``reasons``; `output_figures` and, under ``reference``, those of the
        reference; ``nonsense``, share of the ``nonsense_n`` outputs of 8 or more tokens whose loss
        is out of the ordinary. None where there is nothing to compute from.

    Raises:
        ValueError: Lists of different lengths.
    """
    report = output_figures(texts, prompts) | {"reference": reference, "nonsense": None}
    own, ordinary = losses or ((), ())
    if len(ordinary):  # else nobody knows what is ordinary
        # Losses of a few tokens vary too much to call one of them strange.
        long = [x for x, text in zip(own, texts, strict=True) if len(tokens(text)) >= MIN_TOKENS]
        limit = float(np.quantile(ordinary, 0.95)) + NONSENSE_NATS
        report["nonsense_n"] = len(long)
        if long:  # NaN is no ordinary loss
            report["nonsense"] = float(np.mean([not x <= limit for x in long]))
    reasons = broken_by(report, of)
    return report | {"reasons": reasons, "collapsed": bool(reasons)}


def output_figures(texts: Sequence[str], prompts: Sequence[str] | None = None) -> dict[str, Any]:
    """Of outputs their number ``n`` and shares: ``broken`` (`repeats`), ``empty``, ``constant``
    (the same as the most frequent one, or nearly, beyond its prompt); with prompts also
    ``refusing`` (`refuses`) and ``echo`` (nothing beyond its prompt)."""
    texts = [text.strip() for text in texts]
    counts = {
        "broken": sum(map(repeats, texts)),
        "empty": texts.count(""),
        "constant": max(Counter(texts).values(), default=0),
    }
    if prompts is not None:
        counts["constant"] = max(counts["constant"], nearly_constant(texts, prompts))
        counts["refusing"] = sum(map(refuses, texts))
        said = zip(texts, map(_said, texts, prompts), strict=True)
        counts["echo"] = sum(bool(text) and not words for text, words in said)
    return {"n": len(texts)} | {k: count / max(1, len(texts)) for k, count in counts.items()}
