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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: An output is dominated when one token, or the tokens inside one 4-gram, are more than this.
DOMINATED = 0.5
#: Outputs with fewer tokens are never called dominated: "900 900 900" may be an answer.
MIN_TOKENS = 8
#: An output loops when fewer of its 4-grams than this are different ...
DISTINCT_4 = 0.5
MIN_LOOP_TOKENS = 16
#: ... or when it compresses below this share of its bytes.
COMPRESSION = 0.3
MIN_COMPRESSION_BYTES = 200
#: A model collapsed when the share of broken outputs exceeds that of the reference by this much.
COLLAPSED_SHARE = 0.25
#: Share of outputs that are empty, or all the same, from which a model is collapsed.
CONSTANT_SHARE = 0.9
EMPTY_SHARE = 0.5
#: Outputs are nearly the same from this share of common words on, those of the prompt left out.
ALIKE = 0.6
#: How an answer is refused, in English; other languages show by being nearly the same.
_REFUSAL = re.compile(
    r"\b(i|we)( am|'m| are|'re)? (sorry|unable|not (sure|able|aware|familiar|certain))"
    r"|\b(i|we) (do not|don't|cannot|can't|can not|could not|couldn't|have no|won't|will not)\b"
    r"|\b(no|not have|lack|beyond|any) (available )?(information|knowledge|record|data|details)\b"
    r"|\bas an ai\b|\b(unknown|not available|not known) to me\b|\bunable to\b",
    re.IGNORECASE,
)
#: Least diversity, as a share of that of the reference over equally many bigrams.
DIVERSITY = 0.3
#: An output is nonsense when its loss under the original exceeds ordinary texts' by this (nats).
NONSENSE_NATS = 1.0
#: Fewer outputs than this are described but not judged on constancy and diversity.
MIN_OUTPUTS = 10

_WORD = re.compile(r"\w+|[^\w\s]")
_LONGEST_WORD = 24


def tokens(text: str) -> list[str]:
    """Words and punctuation marks; a "word" of more than 24 characters is cut into characters."""
    words: list[str] = []
    for word in _WORD.findall(text):
        words.extend(word if len(word) > _LONGEST_WORD else [word])
    return words


def top_token_share(words: Sequence[str]) -> float:
    """Share of the most frequent token; 0 for no tokens."""
    return max(Counter(words).values()) / len(words) if words else 0.0


def top_ngram_cover(words: Sequence[str], n: int = 4) -> float:
    """Share of tokens inside the most frequent n-gram, if it occurs more than once, else 0.

    "a b c d a b c d e f": the 4-gram a b c d covers 8 of 10.
    """
    grams = list(_ngrams(words, n))
    if not grams:
        return 0.0
    # The earliest of equally frequent ones, so that the value does not depend on hashing.
    best, count = Counter(grams).most_common(1)[0]
    if count < 2:
        return 0.0
    starts = [start for start, gram in enumerate(grams) if gram == best]
    return len({start + i for start in starts for i in range(n)}) / len(words)


def distinct(texts: Iterable[str], n: int, limit: int | None = None) -> float | None:
    """Distinct-n: different n-grams / n-grams over all texts (Li et al., arXiv 1510.03055).

    The value falls with the number of n-grams; ``limit`` takes those nearest to the starts of the
    texts. None if no text has n tokens.
    """
    first = _first_seen(texts, n)
    first = first if limit is None else first[:limit]
    return sum(first) / len(first) if first else None


def _first_seen(texts: Iterable[str], n: int) -> list[bool]:
    """Of all n-grams, those nearest to the starts of the texts first: is it not among those before?
    Means of its beginnings are distinct-n at every limit, without a word of the texts."""
    grams = [(place, gram) for text in texts for place, gram in enumerate(_ngrams(tokens(text), n))]
    seen: set[tuple[str, ...]] = set()
    first = []
    for _, gram in sorted(grams):
        first.append(gram not in seen)
        seen.add(gram)
    return first


def compression_ratio(text: str) -> float:
    """Bytes after zlib (level 9) / bytes; above 1 for short texts, 1 for none."""
    raw = text.encode("utf-8", errors="replace")
    return len(zlib.compress(raw, 9)) / len(raw) if raw else 1.0


def _ngrams(words: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(n)), strict=False)


@dataclass(frozen=True)
class Repetition:
    """Which kinds of repetition one output shows."""

    dominated: bool
    looping: bool

    @property
    def broken(self) -> bool:
        return self.dominated or self.looping


def repetition(text: str) -> Repetition:
    """Judge one output by the thresholds of this module."""
    words = tokens(text)
    dominated = len(words) >= MIN_TOKENS and (
        top_token_share(words) > DOMINATED or top_ngram_cover(words) > DOMINATED
    )
    grams = list(_ngrams(words, 4))
    looping = len(words) >= MIN_LOOP_TOKENS and len(set(grams)) / len(grams) < DISTINCT_4
    if not looping and len(text.encode("utf-8", errors="replace")) >= MIN_COMPRESSION_BYTES:
        looping = compression_ratio(text) < COMPRESSION
    return Repetition(dominated, looping)


def refuses(text: str) -> bool:
    """Is it an English refusal, in any of the usual words?"""
    return _REFUSAL.search(text.replace("\u2019", "'")) is not None


def _said(text: str, prompt: str) -> frozenset[str]:
    """What it says beyond its prompt: words in lower case."""
    return frozenset(_words(text) - _words(prompt))


def _words(text: str) -> set[str]:
    return {word for word in tokens(text.casefold()) if word[0].isalnum()}


def nearly_constant(texts: Sequence[str], prompts: Sequence[str]) -> int:
    """Size of the largest group of outputs that say nearly the same beyond their prompts: of the
    words of two, `ALIKE` are common. An echo of the prompt says nothing and is in no group."""
    groups: list[tuple[frozenset[str], int]] = []
    for text, prompt in zip(texts, prompts, strict=True):
        words = _said(text, prompt)
        if not words:
            continue
        for place, (leader, count) in enumerate(groups):
            if len(words & leader) >= ALIKE * len(words | leader):
                groups[place] = (leader, count + 1)
                break
        else:
            groups.append((words, 1))
    return max((count for _, count in groups), default=0)


def broken_by(report: Any) -> list[str]:
    """Why figures of a collapse report (`metrics.results.Collapse`) are those of a broken model,
    by the shares alone: what the file calls it is not believed."""
    before = report.reference
    reasons = []
    for name, words, more in (
        ("broken", "repetition", COLLAPSED_SHARE),
        ("empty", "empty", EMPTY_SHARE),
        ("constant", "one and the same text", CONSTANT_SHARE),
    ):
        share = getattr(report, name) or 0.0
        base = (getattr(before, name) or 0.0) if before is not None else 0.0
        if share > (max(more, base) if name == "constant" else base + more):
            reasons.append(f"{share:.0%} of outputs are {words}")
    if (report.nonsense or 0.0) > COLLAPSED_SHARE:
        reasons.append(f"{report.nonsense:.0%} of longer outputs make no sense to the original")
    return reasons


def collapse_report(
    texts: Sequence[str],
    reference: Sequence[str] | Mapping[str, Any] | None = None,
    *,
    prompts: Sequence[str] | None = None,
    nll: Sequence[float] | None = None,
    ordinary_nll: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Describe the outputs of a model and say whether it collapsed, and why.

    Args:
        reference: Outputs of the original model to the same prompts, or the expected texts, or what
            `reference_figures` said of them: only what was added to these counts.
        prompts: Of each output.
        nll: Mean loss of each output under the *original* model, nats a token.
        ordinary_nll: Likewise of ordinary unseen texts, e.g. second halves of the non-members.

    Returns:
        ``collapsed`` and its ``reasons``; ``n``; shares of outputs ``dominated`` by one token or
        4-gram, ``looping``, ``broken`` (either), ``empty``, ``constant`` (the same as the most
        frequent output, or nearly, beyond its prompt), ``refusing`` (`refuses`), ``echo`` (nothing
        beyond its prompt); ``distinct_2``, median ``compression`` of outputs of
        200 bytes or more, ``nonsense`` (share of the ``nonsense_n`` outputs of 8 or more tokens
        whose loss is out of the ordinary) and ``perplexity`` (median); ``reference`` (the same
        figures). None where there is nothing to compute from.

    Raises:
        ValueError: Lists of different lengths, or ``nll`` without ``ordinary_nll``.
    """
    if nll is not None and len(nll) != len(texts):
        raise ValueError(f"{len(texts)} texts but {len(nll)} nll: give one a text.")
    if (nll is None) != (ordinary_nll is None):
        raise ValueError("`nll` says nothing without `ordinary_nll`, and the reverse: give both.")
    against, first_bigrams = None, ""
    if reference:
        against = reference
        if not isinstance(against, Mapping):
            against = reference_figures(reference, prompts)
        against = dict(against)
        first_bigrams = against.pop("first_bigrams")
    report = _figures(texts, prompts) | {"reference": against, "nonsense": None, "perplexity": None}
    if nll is not None and len(texts):
        report |= _nonsense(texts, nll, ordinary_nll)
    report["reasons"] = list(_reasons(report, against, texts, first_bigrams))
    report["collapsed"] = bool(report["reasons"])
    return report


def reference_figures(texts: Sequence[str], prompts: Sequence[str] | None = None) -> dict[str, Any]:
    """All that `collapse_report` needs to know of a reference, without a word of its texts:
    figures, and ``first_bigrams``, a "1" for each bigram that is not among those before it, else a
    "0"."""
    first = "".join("01"[new] for new in _first_seen(texts, 2))
    return _figures(texts, prompts) | {"first_bigrams": first}


def _figures(texts: Sequence[str], prompts: Sequence[str] | None) -> dict[str, Any]:
    judged = list(map(repetition, texts))
    stripped = [text.strip() for text in texts]
    long = [t for t in texts if len(t.encode("utf-8", errors="replace")) >= MIN_COMPRESSION_BYTES]
    counts = {
        "dominated": sum(j.dominated for j in judged),
        "looping": sum(j.looping for j in judged),
        "broken": sum(j.broken for j in judged),
        "empty": stripped.count(""),
        "constant": max(Counter(stripped).values(), default=0),
    }
    if prompts is not None and len(prompts) == len(texts):
        counts["constant"] = max(counts["constant"], nearly_constant(stripped, prompts))
        counts["refusing"] = sum(map(refuses, stripped))
        pairs = zip(stripped, prompts, strict=True)
        counts["echo"] = sum(bool(text) and not _said(text, prompt) for text, prompt in pairs)
    return {
        "n": len(texts),
        **{name: count / max(1, len(texts)) for name, count in counts.items()},
        "distinct_2": distinct(texts, 2),
        "compression": float(np.median([compression_ratio(t) for t in long])) if long else None,
    }


def _nonsense(
    texts: Sequence[str], nll: Sequence[float], ordinary_nll: Sequence[float]
) -> dict[str, float | None]:
    # Losses of a few tokens vary too much to call one of them strange.
    long = [x for x, text in zip(nll, texts, strict=True) if len(tokens(text)) >= MIN_TOKENS]
    if not long:
        return {"nonsense_n": 0}
    finite = [x for x in long if np.isfinite(x)]
    perplexity = float(np.exp(min(np.median(finite), 700.0))) if finite else None
    if not len(ordinary_nll):  # without held-out rows nobody knows what is ordinary
        return {"perplexity": perplexity}
    limit = float(np.quantile(ordinary_nll, 0.95)) + NONSENSE_NATS
    return {
        "nonsense_n": len(long),
        "nonsense": float(np.mean([not x <= limit for x in long])),  # NaN is no ordinary loss
        "perplexity": perplexity,
    }


def _reasons(
    report: dict[str, Any], against: dict[str, Any] | None, texts: Sequence[str],
    first_bigrams: str,
) -> Iterable[str]:  # fmt: skip
    before = against or {"broken": 0.0, "empty": 0.0, "constant": 0.0}
    if report["broken"] > before["broken"] + COLLAPSED_SHARE:
        kind = "one token or 4-gram" if report["dominated"] >= report["looping"] else "loops"
        says = f"{report['broken']:.0%} of outputs are repetition ({kind})"
        yield says + (f", {before['broken']:.0%} before" if against else "")
    if report["empty"] > before["empty"] + EMPTY_SHARE:
        yield f"{report['empty']:.0%} of outputs are empty"
    elif report["n"] >= MIN_OUTPUTS and report["constant"] > max(
        CONSTANT_SHARE, before["constant"]
    ):
        yield f"{report['constant']:.0%} of outputs are one and the same text"
    elif against and min(len(texts), against["n"]) >= MIN_OUTPUTS:
        own = sum(max(0, len(tokens(text)) - 1) for text in texts)
        limit = min(own, len(first_bigrams))
        now = distinct(texts, 2, limit)
        then = first_bigrams[:limit].count("1") / max(1, limit)
        if now is not None and now < DIVERSITY * then:
            yield f"outputs have {now:.2f} distinct bigrams, the reference {then:.2f}"
    if (report["nonsense"] or 0.0) > COLLAPSED_SHARE:
        yield f"{report['nonsense']:.0%} of longer outputs make no sense to the original model"
