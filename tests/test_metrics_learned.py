"""The learned attack: it finds a pattern that no mean shows, and nothing where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from axolotl_unlearn.evaluation.measurement import Measured
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.metrics.intervals import auc
from axolotl_unlearn.metrics.learned import PENALTY, _predictor, learned_attack, text_features
from axolotl_unlearn.metrics.memorisation import TokenFacts
from eval_tasks.muse.utils import priv_leak


def text(rng, known: bool) -> TokenFacts:
    """Tokens of mean log-probability -2; of a known text very likely or very unlikely ones."""
    n = int(rng.integers(30, 60))
    spread = 1.5 if known else 0.5
    logp = np.minimum(-2 + spread * rng.normal(0, 1, n), -0.01)
    logp += -2 - logp.mean()
    return TokenFacts(logp, rng.random(n) < 0.3, np.full(n, -3.0), np.full(n, 1.0))


@pytest.fixture(scope="module")
def features():
    rng = np.random.default_rng(0)
    return [
        np.array([text_features(text(rng, k)) for _ in range(60)]) for k in (True, False, False)
    ]


def test_a_pattern_that_the_loss_does_not_show(features):
    known, unseen, _ = features
    loss = 2  # first figure of the log-probabilities: their mean
    assert auc(known[:, loss], unseen[:, loss]) == pytest.approx(0.5, abs=0.12)
    found = learned_attack(known, unseen, permutations=999)
    assert found.auc > 0.95 and found.p == 0.001
    assert found.auc == pytest.approx(auc(found.members, found.nonmembers))


def test_nothing_is_learnt_from_two_sets_of_one_kind(features):
    _, first, second = features
    found = learned_attack(first, second, permutations=999)
    assert found.auc < 0.62 and found.p > 0.05


def test_false_alarms_are_at_most_nominal():
    """A rank test of cross-validated scores gave 13 % at 50 texts."""
    rng = np.random.default_rng(0)
    p_values = [
        learned_attack(*rng.normal(0, 1, (2, 30, 12)), repeats=1, permutations=199).p
        for _ in range(200)
    ]
    assert np.mean(np.array(p_values) <= 0.05) < 0.09  # .05 and two standard errors
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("more_features_than_texts, penalty", [(False, PENALTY), (True, 2.0)])
def test_scores_are_those_of_the_plain_cross_validation(
    features, more_features_than_texts, penalty
):
    """One product with the labels, solved by features or by texts, equals ridge regression fitted
    fold by fold (scikit-learn)."""
    x = np.concatenate(features[:2])[:, 3:9]
    if more_features_than_texts:
        x = np.random.default_rng(0).normal(0, 1, (40, 90))
    labels = np.repeat([1.0, 0.0], len(x) // 2)
    got = _predictor(x, np.arange(len(x)), 4, 1, np.random.default_rng(5), penalty) @ labels
    fold = np.random.default_rng(5).permutation(len(x)) % 4
    scaled = (x - x.mean(0)) / x.std(0)
    for number in range(4):
        train, test = fold != number, fold == number
        model = Ridge(alpha=penalty * train.sum()).fit(scaled[train], labels[train])
        assert got[test] + labels[train].mean() == pytest.approx(model.predict(scaled[test]))


def test_rows_of_one_document_stay_in_one_fold():
    """Noise, three copies of each member: with copies in the training folds it would be learnt."""
    rng = np.random.default_rng(1)
    few = rng.normal(0, 1, (20, 40))
    members, others = np.repeat(few, 3, 0), rng.normal(0, 1, (60, 40))
    options = {"repeats": 1, "permutations": 99}
    together = learned_attack(members, others, np.repeat(np.arange(20), 3).tolist(), **options)
    apart = learned_attack(members, others, **options)
    assert apart.auc > max(0.6, together.auc + 0.1)
    # No document of the other side has three texts: nothing can be permuted.
    assert together.p is None  # it was 1: "tells nothing"
    assert apart.p is not None
    # Three texts of each of the others too: documents can be exchanged again.
    threes = [[f"{side}{i // 3}" for i in range(60)] for side in "mn"]
    assert learned_attack(members, others, *threes, **options).p > 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_is_learnt_from_numbers_that_are_not_finite(value):
    """They gave p = 1 / (B + 1): all members told."""
    first, second = np.random.default_rng(0).normal(0, 1, (2, 30, 5))
    first[3, 2] = value
    assert learned_attack(first, second, permutations=9) is None


def test_features_by_hand():
    """Two of four tokens greedy, the longest run 2 of 4; mean -2.5 of -1 .. -4."""
    facts = TokenFacts(
        np.array([-1.0, -2, -3, -4]), np.array([False, True, True, False]),
        np.full(4, -3.0), np.full(4, 2.0),
    )  # fmt: skip
    found = text_features(facts)
    assert found[:3] == [0.5, 0.5, -2.5]
    assert found[4] == -4 and found[11] == -1  # lowest and highest
    assert np.isfinite(found).all()
    short = TokenFacts(np.array([-1.0]), np.array([True]), np.array([-2.0]), np.array([0.0]))
    assert np.isfinite(text_features(short)).all()


def test_too_few_texts_train_nothing():
    assert learned_attack(np.zeros((19, 3)), np.zeros((40, 3))) is None


def test_priv_leak_is_that_of_muse():
    """MUSE News: retrained .4772 in its own sense (ours .5228). All recognised, ours 1: -100."""
    assert priv_leak(1.0, 1 - 0.4772) == -100
    assert priv_leak(0.5228, 0.5228) == 0
    assert priv_leak(0.0, 1 - 0.4772) == pytest.approx(100 * (1 / 0.4772 - 1))


def sets_of_sixty(folder):
    member, nonmember = ([(f"{side}{i}", f"text {i}") for i in range(60)] for side in "mn")
    return EvaluationSets(folder, [], [], member, nonmember)


@pytest.mark.parametrize("against", ["retrained", "chance"])
def test_the_evaluation_asks_it_of_candidates_alone(features, against, tmp_path):
    """Known texts have another pattern; with a model that never saw them by the differences."""
    from axolotl_unlearn.evaluation.summary import add_learned

    known, first, second = ([{"features": one} for one in side.tolist()] for side in features)
    sets = sets_of_sixty(tmp_path)
    measured = {
        "kept": Measured(member=known, nonmember=first),
        "original": Measured(member=known, nonmember=first),
        "clean": Measured(member=second, nonmember=first),
        "other": Measured(member=second, nonmember=first),
    }
    role = "candidate" if against == "chance" else against
    results = [
        {"name": "kept", "role": "candidate"},
        {"name": "original", "role": "original"},
        {"name": "clean", "role": "candidate"},
        {"name": "other", "role": role},
    ]
    add_learned(results, measured, sets)
    by_name = {one["name"]: one.get("learned") for one in results}
    assert by_name["kept"]["p"] < 0.001 and by_name["original"] is None
    assert by_name["kept"]["against"] == ("chance" if against == "chance" else "other")
    assert by_name["clean"]["p"] > 0.05
    assert (by_name["other"] is None) == (against != "chance")
    measured["kept"].member = []
    del results[0]["learned"]
    add_learned(results[:1], measured, sets)
    assert "learned" not in results[0]


def test_of_many_texts_it_sees_some(features, monkeypatch, tmp_path):
    """Its memory grows with the square of the texts: 60 and 60 of which 25 at most become every
    third; the p-values are those of these, and an audit takes 1 for the others."""
    from axolotl_unlearn import metrics
    from axolotl_unlearn.evaluation import summary

    monkeypatch.setattr(metrics.learned, "MOST_TEXTS", 25)
    known, first, _ = (side.tolist() for side in features)
    each = ([{"features": one} for one in side] for side in (known, first))
    measured = Measured(member=next(each), nonmember=next(each))
    (result,) = results = [{"name": "a", "role": "candidate"}]
    summary.add_learned(results, {"a": measured}, sets_of_sixty(tmp_path))
    by_hand = learned_attack(known[::3], first[::3], [f"m{i}" for i in range(0, 60, 3)])
    assert (result["learned"]["auc"], result["learned"]["p"]) == (by_hand.auc, by_hand.p)
    expected = {f"m{3 * i}": p for i, p in enumerate(by_hand.each.tolist())}
    assert result["learned"]["documents"] == expected


def test_single_members_are_told_and_innocent_ones_at_most_nominally():
    """Half of the members are known, half are like the non-members: p-values of these are
    uniform, those of the known are the smallest there are."""
    rng = np.random.default_rng(2)
    innocent, known = [], []
    for seed in range(20):
        members, others = rng.normal(0, 1, (2, 60, 8))
        members[:30, 0] += 5
        found = learned_attack(members, others, permutations=1, seed=seed)
        known += found.each[:30].tolist()
        innocent += found.each[30:].tolist()
    assert np.median(known) == pytest.approx(1 / 61)
    assert np.mean(np.array(innocent) <= 0.05) < 0.07
    assert np.mean(innocent) == pytest.approx(0.5, abs=0.06)


def test_a_member_is_relabelled_for_its_own_p_value():
    rng = np.random.default_rng(4)
    members, others = rng.normal(0.3, 1, (25, 5)), rng.normal(0, 1, (30, 5))
    found = learned_attack(members, others, permutations=1, seed=9, repeats=2)
    predictor = _predictor(
        np.concatenate([members, others]), np.arange(55), 5, 2, np.random.default_rng(9)
    )
    for i in (0, 7):
        labels = np.repeat([1.0, 0.0], [25, 30])
        labels[i] = 0
        scores = predictor @ labels
        assert found.each[i] == pytest.approx((1 + (scores[25:] >= scores[i]).sum()) / 31)


def test_a_document_of_several_texts_is_told_by_the_surest(monkeypatch):
    """The last one's p was the document's."""
    from types import SimpleNamespace

    from axolotl_unlearn.evaluation import summary

    texts = [("d", "x"), ("d", "y"), ("e", "z")]
    sets = SimpleNamespace(member=texts, nonmember=texts)
    one = SimpleNamespace(**dict.fromkeys(("member", "nonmember"), [{"features": [0.0]}] * 3))
    found = SimpleNamespace(each=np.array([0.016, 0.279, 0.4]), auc=0.6, p=0.2)
    monkeypatch.setattr(summary, "learned_attack", lambda *_: found)
    results = [{"name": "m", "role": "candidate"}]
    summary.add_learned(results, {"m": one}, sets)
    assert results[0]["learned"]["documents"] == {"d": 0.032, "e": 0.4}


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3)])
def test_documents_of_one_side_are_exchanged_as_wholes(features, sizes):
    """Written out: folds by document, labels of documents of one size permuted."""
    members, others = features[0][:48, 3:8], features[1][:36, 3:8]
    names = [[f"{m}{i // n}" for i in range(len(side))]
             for m, n, side in zip("mn", sizes, (members, others), strict=True)]  # fmt: skip
    found = learned_attack(members, others, *names, permutations=20, seed=3)
    count = 48 // sizes[0]
    groups = np.concatenate([np.arange(48) // sizes[0], count + np.arange(36) // sizes[1]])
    rng = np.random.default_rng(3)
    predictor = _predictor(np.concatenate([members, others]), groups, 5, 4, rng)
    labels = np.repeat((np.arange(groups.max() + 1) < count)[:, None], 21, 1)
    for size in np.unique(np.bincount(groups)):
        alike = np.flatnonzero(np.bincount(groups) == size)
        labels[alike, 1:] = rng.permuted(labels[alike, 1:], axis=0)
    each = [predictor @ column for column in labels[groups].T.astype(float)]
    areas = [auc(s[c], s[~c]) for s, c in zip(each, labels[groups].T, strict=True)]
    assert (found.auc, found.null) == (pytest.approx(areas[0]), pytest.approx(areas[1:]))
    assert found.p == (
        None if sizes == (2, 3) else (1 + sum(a > areas[0] - 1e-9 for a in areas[1:])) / 21
    )
