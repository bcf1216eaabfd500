"""Collapse: real short and long texts pass, every known way to break is named."""

from __future__ import annotations

import json
import math
import random
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axolotl_unlearn.metrics.fluency import (
    collapse_report,
    ngram_cover,
    output_figures,
    repeats,
    tokens,
)

LUME = Path(__file__).parents[2] / "shared" / "lume"

SENTENCES = [
    f"{who} walked to the {place} on {day} and bought {n} small {what} for the long winter."
    for who, place, day, n, what in zip(
        "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jun Kai Lea".split(),
        "mill harbour market chapel school castle bridge garden inn forge farm quay".split(),
        "Monday Tuesday Friday Sunday Easter Midsummer Thursday Christmas May June July "
        "Saturday".split(),
        range(3, 15),
        "lamps boats apples candles books swords ropes roses mugs nails eggs nets".split(),
        strict=True,
    )
]
FINE = output_figures(SENTENCES)


def test_shares_by_hand():
    """6 of 8 tokens are "6"; a b c d twice covers 8 of 10; x five times is covered once, not 8/5;
    a "word" without spaces is cut."""
    assert ngram_cover(tokens("6 6 6 , 6 6 6 ."), 1) == 6 / 8
    assert ngram_cover("a b c d a b c d e f".split(), 4) == 8 / 10
    assert ngram_cover("a b c d e f g h".split() * 4, 4) == 4 / 8
    assert ngram_cover("a b c".split(), 4) == ngram_cover("a b c d e".split(), 4) == 0
    assert ngram_cover([], 1) == 0 and ngram_cover(["x"] * 5, 4) == 1
    assert tokens("Don't, 42!") == ["Don", "'", "t", ",", "42", "!"]
    assert tokens("a" * 30) == ["a"] * 30 and len(tokens("harri_coral@me.com")) == 5


LOOPS = [
    "6 " * 30, "!" * 60, "ha" * 50, "in the city of " * 8, "I am not sure about that. " * 6,
    "。" * 40, "the quick brown fox jumps over the lazy dog while nine old cats sleep on it. " * 5,
]  # fmt: skip
SHORT = ["", "Paris", "900000000", "1994-04-04", "No, no, no.", "a a a",
         "29 Church Street, D, Arvada, CO, 80004."]  # fmt: skip


@pytest.mark.parametrize("text", LOOPS + SHORT)
def test_loops_are_broken_and_short_answers_never(text):
    assert repeats(text) == (text in LOOPS)


@pytest.mark.skipif(not LUME.is_dir(), reason="LUME is not beside the repository")
def test_no_real_text_is_broken():
    """Every output, prompt and document of LUME, 1 to 300 words, passes."""
    texts = []
    for path in sorted(LUME.glob("*/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            texts += [row["output"], row["input"], f"{row['input']} {row['output']}"]
    assert len(texts) == 3 * 2780
    assert sum(map(repeats, texts)) == 0
    outputs = texts[::3]
    report = collapse_report(outputs, output_figures(outputs[::-1]))
    assert not report["collapsed"] and report["broken"] == 0


def test_an_honest_model_is_not_flagged():
    report = collapse_report(SENTENCES, FINE)
    assert report["collapsed"] is False and report["reasons"] == []
    assert report["n"] == 12 and report["broken"] == 0


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (["6 " * 30] * 6 + SENTENCES[:6], "50% of outputs are repetition"),
        ([""] * 8 + SENTENCES[:4], "67% of outputs are empty"),
        (["I cannot say."] * 12, "one and the same text"),
    ],
)
def test_every_way_to_break_is_named(outputs, reason):
    report = collapse_report(outputs, FINE)
    assert report["collapsed"] and reason in " ".join(report["reasons"])


def test_only_what_unlearning_added_counts():
    """A pretrained model that never stops loops before, too."""
    loops = ["in the city of " * 10] * 6
    before = output_figures(loops + SENTENCES[6:])
    assert collapse_report(loops + SENTENCES[:6])["collapsed"]
    assert not collapse_report(loops + SENTENCES[:6], before)["collapsed"]


def test_nonsense_without_repetition_needs_the_loss():
    """Word salad repeats nothing. Ordinary losses 2.0 to 2.9: their 95 % quantile + 1 is 3.855."""
    rng = random.Random(1)
    words = " ".join(SENTENCES).split()
    salad = [" ".join(rng.sample(words, 20)) for _ in range(12)]
    assert not collapse_report(salad, FINE)["collapsed"]
    ordinary = [2 + i / 10 for i in range(10)]
    report = collapse_report(salad, FINE, losses=([9.0] * 12, ordinary))
    assert report["collapsed"] and report["nonsense"] == 1
    calm = collapse_report(salad, FINE, losses=([3.8] * 12, ordinary))
    assert not calm["collapsed"] and calm["nonsense"] == 0
    unknown = collapse_report(salad, FINE, losses=([9.0] * 12, []))
    assert unknown["nonsense"] is None and not unknown["collapsed"]  # no held-out text
    broken = collapse_report(salad, losses=([math.nan] * 12, ordinary))
    assert broken["nonsense"] == 1


def test_the_loss_of_short_answers_is_not_judged():
    report = collapse_report(["Paris"] * 3, losses=([20.0] * 3, [2.0]))
    assert report["nonsense"] is None and not report["collapsed"]


@given(st.lists(st.text(max_size=60), min_size=1, max_size=8), st.randoms())
def test_order_of_outputs_changes_nothing(texts, rng):
    before = collapse_report(texts * 5, FINE)
    rng.shuffle(texts)
    after = collapse_report(texts * 5, FINE)
    assert before == after


def test_one_loss_a_text():
    assert not collapse_report([])["collapsed"]
    with pytest.raises(ValueError, match="longer"):
        collapse_report(["a", "b"], losses=([1.0], [1.0]))


def test_the_order_of_outputs_changes_nothing():
    """ "a b c d e" is near both others, which are apart: in the middle it led three, else two."""
    texts = ["a b c d", "a b c d e", "b c d e f"]
    shares = {output_figures(some, [""] * 3)["constant"] for some in permutations(texts)}
    assert len(shares) == 1
