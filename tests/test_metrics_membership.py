"""Membership: rates by hand, scikit-learn as oracle, and baselines that must and must not fire."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from attack_models import authored
from hypothesis import strategies as st
from scipy import stats

from axolotl_unlearn.data.documents import Answer
from axolotl_unlearn.metrics.intervals import auc
from axolotl_unlearn.metrics.membership import (
    ATTACKS,
    attack_scores,
    blind_baselines,
    blind_sentence,
    by_document,
    equivalence,
    gap_of,
    told_documents,
)
from axolotl_unlearn.metrics.memorisation import TokenFacts

numbers = st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=12)
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jun Kai Lea Mia Ned Ola Pia".split()
PLACES = "Bath Cork Dover Ely Fife Hull Kent Leeds Moss Nairn Oban Perth Ryde Stow".split()


def rank_test(members, others, clusters=None) -> float:
    return gap_of((members, others), None, clusters)[2]


def sentences(seed: int, n: int, verb: str = "moved to") -> list[str]:
    rng = random.Random(seed)
    return [
        f"{rng.choice(NAMES)} {rng.choice(NAMES)} {verb} {rng.choice(PLACES)} in "
        f"{rng.randrange(1900, 2000)} and wrote {rng.randrange(2, 30)} books there."
        for _ in range(n)
    ]


def test_baselines_find_other_words_and_lengths():
    found = blind_baselines(sentences(1, 60, "was born in"), sentences(2, 60, "died in"))
    assert found["bag_of_words"]["auc"] > 0.99 and found["words_tfidf"]["separates"]
    longer = [text + " It was a good life." * 2 for text in sentences(3, 60)]
    found = blind_baselines(sentences(4, 60), longer)
    assert found["length"]["separates"] and found["length"]["high"] < 0.5
    assert found["zlib"]["separates"]
    assert "means nothing" in blind_sentence(found)


def test_baselines_stay_silent_on_one_source():
    """20 data sets from one generator. Each interval is wider (98.75 %), so that 1 in 20 is
    suspected on average; 5 or more of 20 would have probability .003."""
    suspected = 0
    for seed in range(20):
        found = blind_baselines(sentences(2 * seed, 50), sentences(2 * seed + 1, 50))
        suspected += blind_sentence(found) is not None
    assert suspected < 5


def test_an_auc_below_half_of_a_trained_baseline_is_no_finding():
    """Held-out scores of a classifier that learnt nothing lie a little below .5 by design."""
    assert (
        blind_sentence({"bag_of_words": {"auc": 0.4, "low": 0.3, "high": 0.49, "separates": False}})
        is None
    )
    twice = sentences(5, 40)
    # Every text once on each side: whoever sees it in training guesses the other side.
    found = blind_baselines(twice, [text + " " for text in twice])
    assert found["bag_of_words"]["auc"] < 0.5 and not found["bag_of_words"]["separates"]


def test_too_few_texts_for_a_trained_baseline():
    assert set(blind_baselines(["a b"] * 5, ["c d"] * 50)) == {"length", "zlib"}
    assert set(blind_baselines(["!!"] * 12, ["??"] * 12)) == {"length", "zlib"}


@pytest.mark.parametrize("worded", [0, 1, 5, 6, 12])
def test_texts_almost_without_words(worded):
    """Where none was left to learn from, scikit-learn's "empty vocabulary" stopped the run."""
    found = blind_baselines(["!!!"] * 10, ["???"] * (12 - worded) + ["a word"] * worded)
    assert {*found} in ({"length", "zlib"}, {"length", "zlib", "bag_of_words", "words_tfidf"})
    assert ("bag_of_words" in found) == (worded > 5), "of five folds one may hold so many"


def test_the_rank_test_is_exact_for_few_texts():
    """Of the C(6, 3) = 20 orders of 3 against 3, one has all members on top: two-sided 2/20. All
    values equal: nothing is told."""
    assert rank_test([7, 8, 9], [1, 2, 3]) == pytest.approx(0.1)
    assert rank_test([1.0] * 20, [1.0] * 20) == 1


def same(first, second=None, clusters=None):
    """Equivalence of a pair of scores with another, or with chance."""
    return equivalence(gap_of(first, second, clusters)[1], min(map(len, first)))


def test_equivalence_is_not_the_absence_of_a_difference():
    """20 against 20 at AUC .665: not significantly different from .5 and far from equivalent."""
    rng = np.random.default_rng(21)
    for _ in range(200):
        members, others = rng.normal(0.6, 1, 20), rng.normal(0, 1, 20)
        if rank_test(members, others) > 0.05 and auc(members, others) > 0.6:
            break
    few = same((members, others))
    assert not few["equivalent"] and few["needed"] is None
    members, others = rng.normal(0, 1, 400), rng.normal(0, 1, 400)
    many = same((members, others))
    assert many["equivalent"] and many["p"] < 0.05 and many["needed"] < 400
    half = same((members[:60], others[:60]))
    assert not half["equivalent"] and half["p"] > 0.05 and (half["needed"] or 61) > 60


def test_equivalence_is_paired_with_the_retrained_model():
    """Hard members: AUC .33 under both models, so far from .5 and equal to each other."""
    rng = np.random.default_rng(22)
    members, others = rng.normal(-0.6, 1, 120), rng.normal(0, 1, 120)
    again = members + rng.normal(0, 0.2, 120), others + rng.normal(0, 0.2, 120)
    assert same((members, others), again)["equivalent"]
    assert not same((members, others))["equivalent"]
    shifted = members + 0.5, others
    worse = same(shifted, again)
    assert not worse["equivalent"] and worse["value"] > 0.1 and worse["needed"] is None
    # Both separate the sets: no variance is left, but 20 texts do not exclude a difference of .1.
    apart = np.arange(20) + 100.0, np.arange(20.0)
    assert not same(apart, (apart[0] * 2, apart[1]))["equivalent"]


def test_the_edge_of_the_margin():
    """Two one-sided tests at 5 %: of models that are exactly the margin away at most 5 % pass."""
    rng = np.random.default_rng(23)
    shift = np.sqrt(2) * stats.norm.ppf(0.6)
    passed = sum(
        same((rng.normal(shift, 1, 100), rng.normal(0, 1, 100)))["equivalent"] for _ in range(400)
    )
    assert passed <= 32  # 20 expected; 33 or more has probability .004


def test_documents_by_hand():
    """One attack, held out 1..9. A member at 20 is the strangest of a pool of 10: p 1/10. A
    member at 5.1: median 5.05, 5 is as near, p 1."""
    found = told_documents({"loss": [20.0, 5.1]}, {"loss": np.arange(1.0, 10)})
    assert found.p.tolist() == pytest.approx([0.1, 1.0])
    assert found.side[0] == "under"


def test_a_text_of_a_document_that_comes_again_makes_it_no_less_told():
    """Twice in the member file its p was twice as large."""
    held = {"loss": np.arange(1.0, 10)}
    once, twice, two = ({"loss": [20.0, 5.1, *more]} for more in ([], [20.0 + 1e-9], [20.01]))
    assert by_document(["a", "b"], once, held)["a"] == (0.1, "under")
    assert by_document(["a", "b", "a"], twice, held)["a"] == (0.1, "under")
    assert by_document(["a", "b", "a"], two, held)["a"] == (0.2, "under")


def test_document_p_values_are_uniform_without_a_difference_and_find_one():
    """Five dependent attacks: P(p <= .05) is at most .05 without a correction for their number;
    told documents among which some are known are mostly those."""
    rng = np.random.default_rng(24)
    small = []
    for _ in range(60):
        text = rng.normal(0, 1, 159)
        scores = {name: text + rng.normal(0, 1, 159) for name in ATTACKS}
        found = told_documents(
            {n: s[:60] for n, s in scores.items()}, {n: s[60:] for n, s in scores.items()}
        )
        small.append((found.p <= 0.05).mean())
        assert not found.told.any() or found.p.min() <= 0.05
    assert np.mean(small) < 0.06
    scores = {n: np.r_[s[:20] + 9, s[20:]] for n, s in scores.items()}
    found = told_documents(
        {n: s[:60] for n, s in scores.items()}, {n: s[60:] for n, s in scores.items()}
    )
    assert found.told[:20].all() and found.told[20:].sum() <= 3
    assert set(found.side[:20]) == {"under"}


def test_beside_a_retrained_model_one_document_can_be_told_alone():
    """By hand: median of the pool 6, so 20 is 14 away, the third of the others 4; a null with the
    very tail that is taken for granted has no more false alarms than it should."""
    sides = {"loss": [20.0, 5.1]}, {"loss": np.arange(1.0, 11)}
    found, wide = told_documents(*sides, paired=True), told_documents(*sides)
    assert found.p[0] == pytest.approx(2 * 3 / 11 * (4 / 14) ** 4) and found.p[1] == wide.p[1]
    rng = np.random.default_rng(8)
    alarms = [
        told_documents(*({"loss": rng.standard_t(4, 100)} for _ in "ab"), paired=True).told.any()
        for _ in range(300)
    ]
    assert np.mean(alarms) <= 0.05 + 2 * (0.05 * 0.95 / 300) ** 0.5
    far = np.r_[12.0, rng.normal(size=99)], rng.normal(size=100)
    single = told_documents(*({"loss": side} for side in far), paired=True).told
    assert single[0] and not told_documents(*({"loss": side} for side in far)).told.any()
    assert not single[1:].any()


def test_documents_take_memory_of_some_at_a_time(monkeypatch):
    """1200 members against 1200 others are 11.5 MB of float64, of which there were six copies."""
    import tracemalloc

    from axolotl_unlearn.metrics import membership

    rng = np.random.default_rng(0)
    sides = [{name: rng.normal(size=1200) for name in ("loss", "zlib")} for _ in range(2)]
    whole = told_documents(*sides)
    monkeypatch.setattr(membership, "_PLACES", 50_000)
    tracemalloc.start()
    parts = told_documents(*sides)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6
    np.testing.assert_array_equal(parts.p, whole.p)
    np.testing.assert_array_equal(parts.told, whole.told)
    assert parts.side == whole.side


def test_attack_scores_are_the_metrics_with_high_for_members():
    rng = np.random.default_rng(25)
    facts, reference = (
        [TokenFacts(-rng.random(9), rng.random(9) > 0.5, -rng.random(9), rng.random(9))] * 2
        for _ in range(2)
    )
    found = attack_scores(facts, ["a text", "other"], reference)
    assert tuple(found) == ATTACKS
    assert found["loss"][0] == pytest.approx(facts[0].logp.mean())
    assert found["reference"][0] == pytest.approx(facts[0].logp.mean() - reference[0].logp.mean())
    assert found["entropy"][0] == pytest.approx(facts[0].mean.mean())
    assert "reference" not in attack_scores(facts, ["a text", "other"])


def clustered(rng, groups, rows, correlation, shift=0.0):
    own = np.sqrt(correlation) * rng.normal(0, 1, groups)
    each = np.sqrt(1 - correlation) * rng.normal(0, 1, (groups, rows))
    return (own[:, None] + each).ravel() + shift


def test_rows_of_few_authors_are_judged_by_authors():
    """Ten authors of twenty rows at an intraclass correlation of .1: as rows of their own a quarter
    of innocent models were told, and a sixth of those at the margin called equivalent."""
    rng = np.random.default_rng(0)
    names = np.repeat(np.arange(10), 20)
    clusters = (names.tolist(), (names + 100).tolist())
    off = np.sqrt(2) * 0.2533  # AUC .6
    alarms, passed = Counter(), Counter()
    for _ in range(80):
        innocent, other = (tuple(clustered(rng, 10, 20, 0.1) for _ in range(2)) for _ in range(2))
        apart = clustered(rng, 10, 20, 0.1, off), clustered(rng, 10, 20, 0.1)
        for kind, by in (("rows", None), ("clusters", clusters)):
            alarms[kind, "rank"] += rank_test(*innocent, clusters=by) < 0.05
            alarms[kind, "gap"] += gap_of(innocent, other, by)[2] < 0.05
            passed[kind] += same(apart, other, by)["equivalent"]
            passed[kind, "alone"] += same(apart, None, by)["equivalent"]
    assert min(alarms["rows", "rank"], alarms["rows", "gap"]) > 12
    assert passed["rows"] + passed["rows", "alone"] > 16
    assert max(alarms["clusters", kind] for kind in ("rank", "gap")) <= 8
    assert passed["clusters"] <= 8 and passed["clusters", "alone"] <= 8


def test_clusters_of_one_text_change_nothing():
    rng = np.random.default_rng(1)
    pair = rng.normal(0.3, 1, 40), rng.normal(0, 1, 60)
    single = (list(range(40)), list(range(100, 160)))
    assert rank_test(*pair, clusters=single) == rank_test(*pair)
    assert same(pair, None, single) == same(pair)


def test_one_large_cluster_among_small_ones_leaves_power():
    """60 texts of one author beside 60 of others, AUC .8: by texts alone 2 % were found at this
    level: the error of the large cluster has one degree of freedom. A null of 5 % stays so."""
    rng = np.random.default_rng(2)
    names = np.array([0] * 60 + list(range(1, 61)))
    clusters = (names.tolist(), (names + 100).tolist())

    def drawn(shift=0.0):
        own = rng.normal(size=61)[names]
        return np.sqrt(0.3) * own + np.sqrt(0.7) * rng.normal(size=120) + shift

    found = sum(rank_test(drawn(1.19), drawn(), clusters) < 0.025 / 7 for _ in range(40))
    alarms = sum(rank_test(drawn(), drawn(), clusters) < 0.05 for _ in range(200))
    assert found >= 36 and alarms <= 18  # 10 expected; 19 or more has probability .006


def of_authors(seed: int, mark: str, verb: str = "paid", **more):
    rows = authored(24, mark, seed, verb=verb, **more)
    return [row["document"] for row in rows], [row["author"] for row in rows]


def test_names_of_authors_tell_nobody():
    """Exchangeable texts, a name of its own to each author: AUC .98, separating, in every set."""
    suspected = 0
    for seed in range(6):
        (members, own), (others, theirs) = (of_authors(seed, mark) for mark in "mn")
        found = last = blind_baselines(members, others, (own, theirs))
        suspected += blind_sentence(found) is not None
        assert 0.3 < found["bag_of_words"]["auc"] < 0.65
    assert suspected < 2
    order = random.Random(0).sample(range(len(members)), len(members))  # of rows tells nothing
    again = blind_baselines([members[i] for i in order], others, ([own[i] for i in order], theirs))
    assert all(one["auc"] == pytest.approx(last[name]["auc"]) for name, one in again.items())
    others, theirs = of_authors(0, "n", verb="owed")
    found = blind_baselines(members, others, (own, theirs))
    assert found["bag_of_words"]["separates"] and found["words_tfidf"]["separates"]


def test_few_authors_train_no_baseline():
    """What is missing shows nothing: the verdict says so."""
    (members, own), (others, theirs) = (of_authors(1, mark) for mark in "mn")
    found = blind_baselines(members[:45], others, (own[:45], theirs))
    assert set(found) == {"length", "zlib"}


@pytest.mark.parametrize("long", [True, False])
def test_a_large_author_hides_no_difference(long):
    """Of 60 texts beside 24 of others its own leave no error to estimate; a vote each does."""
    members, own = of_authors(2, "m", per=1)
    others, theirs = of_authors(
        2, "n", per=1, verb="paid and later on also paid" if long else "paid"
    )
    members, own = members + members[:1] * 60, own + own[:1] * 60
    assert blind_baselines(members, others, (own, theirs))["length"]["separates"] == long


def test_baselines_read_the_prompt_as_the_model_does():
    """Answers drawn alike to prompts that are not: .50, "not separating"."""
    for asked, apart in ((("Tell the old tale of", "Recite the new one of"), True),
                         (("Tell it", "Tell it"), False)):  # fmt: skip
        sides = ([Answer(text, f"{before} {text[0]} ") for text in sentences(seed, 40)]
                 for seed, before in enumerate(asked))  # fmt: skip
        assert (blind_sentence(blind_baselines(*sides)) is not None) == apart
    # Nor does a prompt hide what the answers alone show.
    rng = random.Random(0)
    sides = ([Answer(one, "x" * rng.randrange(3000)) for one in side] for side in
             (sentences(1, 60), [text + " So it is." for text in sentences(2, 60)]))  # fmt: skip
    assert blind_baselines(*sides)["length"]["separates"]
