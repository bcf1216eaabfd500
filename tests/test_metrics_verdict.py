"""The judgement: what keeps a model from being called good, each limit at its edge."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_fixture import make_results
from scipy.stats import norm
from verdict_fixture import ATTACKS, BLIND, entry, outputs, spread, three
from verdict_fixture import results as results_of

from axolotl_unlearn.attacks.results import sentence
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.results import Model, load_results, read
from axolotl_unlearn.metrics.verdict import (
    CRITERIA,
    HEADLINES,
    STATUSES,
    THRESHOLDS,
    bars,
    judge,
    judged,
    strongest_gain,
    wrecks,
)


@pytest.fixture
def results():
    return {model["name"]: model for model in make_results()["models"]}


def status(model, original=None, retrained=None, attacks=()):
    return judge(model, original, retrained, attacks).status


def test_a_model_without_fault_is_good_and_says_on_what_it_rests():
    found = judge(entry())
    assert found.good and found.worst is None and found.against == "chance"
    assert {f.outcome for f in found.findings} == {"pass"}
    assert "within 0.1 of 0.5" in found.sentence and "true target stays open" in found.sentence
    assert json.loads(json.dumps(found.to_json()))["status"] == "good"
    assert found.outcome == "shown" and {f.id for f in found.findings} <= set(CRITERIA)
    # Eleven tests of 200 against 200: z(1 - .05/22) + z(.8) = 2.838 + .842 times SE .0289.
    assert found.power["smallest_difference"] == pytest.approx(3.680 * 0.02891, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"collapse": {"collapsed": True, "reasons": ["loops"]}}, "collapsed"),
        ({"gate": {"below_gate": True, "threshold": 0.71}}, "below gate"),
        # .7 of 100 questions, Wilson: .62 to .77 (90 %); of 16 .49 to .85.
        ({"gate": {"threshold": 0.63}}, "not enough texts"),
        ({"gate": {"threshold": 0.61}}, "good"),
        ({"role": "original"}, "before"),
        ({"role": "retrained"}, "target"),
        ({"likelihood": {}}, "no membership"),
        # 26 of 100 where guessing gives 25: p .45; 33: p .045; 32: p .069.
        ({"utility": 0.26, "gate": {"threshold": 0.1}}, "utility at chance"),
        ({"utility": 0.32, "gate": {"threshold": 0.1}}, "utility at chance"),
        ({"utility": 0.33, "gate": {"threshold": 0.1}}, "good"),
        ({"membership": {"blind": {"bag_of_words": {"auc": 0.8, "separates": True}}}},
         "sets differ"),
        ({"membership": {"meaningful": False}}, "sets differ"),
        ({"membership": {"meaningful": True}}, "not measured"),
        ({"intervals": {"forget": [0.6, 0.7], "retain": [0.93, 0.97]}}, "still knows"),
        ({"intervals": {"forget": [0.93, 0.97], "retain": [0.6, 0.7]}}, "lost knowledge"),
        ({"intervals": {}}, "not measured"),
        ({"utility": None}, "utility unknown"),
        ({"gate": None}, "utility unknown"),
        ({"gate": {"below_gate": False}}, "utility unknown"),
        ({"collapse": None}, "not measured"),
        ({"answers": {}}, "not measured"),
        ({"learned": None}, "not measured"),
        ({"extraction": None}, "not measured"),
        ({"collapse": {"collapsed": False}}, "not measured"),
        ({"collapse": {"collapsed": False, "forget": outputs(constant=1.0)}}, "silent"),
        ({"collapse": {"collapsed": False, "forget": outputs(empty=1.0)}}, "silent"),
        # The original has one answer as well: 40 % of its outputs are one and the same text.
        ({"collapse": {"collapsed": False,
                       "forget": outputs(constant=0.4, reference=outputs(constant=0.4))}}, "good"),
    ],
)  # fmt: skip
def test_what_keeps_a_model_from_being_called_good(changes, expected):
    assert status(entry(**changes)) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.8, 0.97, "good"), (0.79, 0.97, "not enough texts"), (0.7, 0.79, "still knows")],
)
def test_a_bar_is_passed_by_an_interval_not_by_a_number(low, high, expected):
    """The bar is .8; the point .95 is above it in all three (in the last the interval is not)."""
    intervals = {"forget": [low, high], "retain": [0.9, 1.0]}
    assert status(entry(intervals=intervals)) == expected


@pytest.mark.parametrize(
    ("shift", "expected"),
    [(0.6, "over-forgets"), (-0.6, "under-forgets"), (0.1, "not enough texts"), (0, "good")],
)
def test_attacks_name_the_side_or_say_that_they_do_not_know(shift, expected):
    """.6 is 1.2 standard deviations, AUC .2 or .8; .1 is AUC .444: neither told nor within .1."""
    found = judge(entry(shift))
    assert found.status == expected
    if shift == 0.1:
        (open_one,) = [f for f in found.findings if f.outcome == "open"]
        assert open_one.id == "same" and open_one.needed > 200
        assert f"about {open_one.needed} of each kind" in found.sentence


def test_few_texts_never_pass_as_balanced():
    """20 against 20 without any difference: nothing tells, and nothing shows that nothing would."""
    found = judge(entry(n=20))
    assert found.status == "not enough texts"
    # AUC .5 to .525; the interval's half, .15, must shrink to .1 - .025: (2)^2 times the texts.
    assert 30 < next(f for f in found.findings if f.id == "same").needed < 100


def test_the_strongest_of_all_attacks_counts():
    """The loss is even; a third attack puts all members above: over or under by its name."""
    model = entry()
    model["likelihood"]["attacks"]["min_k_plus_20"] = {
        "member": spread(200, 1.0), "nonmember": spread(200)
    }  # fmt: skip
    found = judge(model)
    assert (found.status, found.strongest) == ("over-forgets", "min_k_plus_20")
    assert "Min-K%++ 20 tells members" in found.sentence


def test_single_members_are_found_where_the_auc_is_one_half():
    """30 far below and 30 far above leave the AUC at .5, yet a third can be named."""
    others = [1 + i / 100 for i in range(100)]
    members = [0.1 + i / 1e4 for i in range(30)] + [5.0 + i / 1e4 for i in range(30)]
    members += [1.3 + i / 100 + 1e-3 for i in range(40)]
    model = entry()
    model["likelihood"] = {"member_loss": members, "nonmember_loss": others}
    found = judge(model)
    assert found.attacks["loss"]["auc"] == pytest.approx(0.5, abs=0.01)
    assert found.status == "recognisable"
    assert "30 % of the members can be picked out" in found.sentence


def test_the_retrained_model_judges():
    """AUC .67 under both: not "under-forgets" but the same. AUC .5 where it has .67: over."""
    target = entry(-0.31, name="retrained", role="retrained")
    again = three(-0.31)[2]
    rng = np.random.default_rng(0)
    for side in ("member_loss", "nonmember_loss"):
        noise = 0.1 * norm.ppf((rng.permutation(200) + 0.5) / 200)
        again["likelihood"][side] = list(np.array(again["likelihood"][side]) + noise)
    original = three()[0]
    found = judge(again, original, target)
    assert found.attacks["loss"]["low"] > 0.55
    assert found.status == "good" and found.against == "retrained"
    assert "within 0.1 of the retrained model's" in found.sentence
    assert status(again) == "under-forgets"
    assert status(three()[2], original, target) == "over-forgets"


def test_the_ratio_to_the_retrained_model_sees_what_aucs_do_not():
    """Hard and easy texts spread the losses over 5 nats; a third of a nat too much hides there."""
    rng = np.random.default_rng(1)
    hard = np.linspace(0, 5, 100)
    target = {"member_loss": list(hard), "nonmember_loss": list(hard + 1e-3)}
    mine = {
        "member_loss": list(hard + 0.3 + rng.normal(0, 0.2, 100)),
        "nonmember_loss": list(hard + rng.normal(0, 0.2, 100)),
    }
    ids = {f"{side}_{kind}": [f"{side}{i}" for i in range(100)]
           for side in ("member", "nonmember") for kind in ("id", "cluster")}  # fmt: skip
    model = entry(likelihood=mine | ids)
    retrained = entry(likelihood=target | ids, name="retrained", role="retrained")
    assert judge(model).attacks["loss"]["p_corrected"] > 0.05
    found = judge(model, None, retrained)
    assert found.status == "over-forgets"
    assert found.attacks["reference"]["auc"] < 0.3 and found.attacks["reference"]["p"] < 1e-6


def test_bars_follow_the_retrained_model_or_the_original(results):
    """Without both: .8 and .8. The original's retain side sets .8 of itself; a retrained model
    replaces both bars by its own sides minus .1."""
    original, retrained = (read(Model, results[name]) for name in ("original", "retrained"))
    assert bars(None, None) == (0.8, 0.8)
    assert bars(original, None) == (0.8, pytest.approx(0.8 * original.side("retain")))
    assert bars(original, retrained) == (
        pytest.approx(retrained.side("forget") - 0.1),
        pytest.approx(retrained.side("retain") - 0.1),
    )


def test_the_paired_distance_from_the_retrained_model_has_the_narrower_interval():
    """Forgotten .95 against .97: the bar is .87. The model's own interval [.8, .99] straddles it,
    the paired one of -.02 is [-.05, .01], so .92 to .98."""
    original, target, model = three()
    target["cells"] |= {c: 0.97 for c in target["cells"] if "forget" in c}
    model["intervals"]["forget"] = [0.8, 0.99]
    del model["distance"]["forget"]
    assert status(model, original, target) == "not measured"
    model["distance"]["forget"] = {"value": -0.02, "interval": [-0.05, 0.01], "p": 0.2}
    assert status(model, original, target) == "good"
    model["distance"]["forget"]["interval"] = [-0.11, 0.01]
    assert status(model, original, target) == "not enough texts"


@pytest.mark.parametrize(
    ("contained", "target", "expected"),
    [
        (0.03, None, "good"),  # .02 of 300: 90 % up to .038
        (0.05, None, "not enough texts"),  # .04: up to .064
        (0.12, None, "still knows"),  # .11: from .084
        (0.12, 0.12, "good"),  # so does the retrained model
    ],
)
def test_answers_that_exact_match_does_not_see_have_the_retrained_models_floor(
    contained, target, expected
):
    original, retrained, model = three() if target else (None, None, entry())
    model["answers"]["forget"]["contained"] = contained
    if target:
        retrained["answers"]["forget"]["contained"] = target
    assert status(model, original, retrained) == expected


@pytest.mark.parametrize(
    ("kind", "share", "target", "expected"),
    [
        ("broken", 0.06, None, "good"),  # of 300: 90 % up to .087
        ("broken", 0.09, None, "not enough texts"),  # up to .121
        ("broken", 0.14, None, "broken answers"),  # from .111
        ("nonsense", 0.9, None, "broken answers"),
        ("broken", 0.14, 0.14, "good"),
        ("nonsense", 0.3, 0.1, "broken answers"),
    ],
)
def test_broken_or_nonsensical_answers_on_the_forget_set_are_not_good(
    kind, share, target, expected
):
    original, retrained, model = three() if target else (None, None, entry())
    model["collapse"]["forget"] = outputs(**{"broken": 0.0, kind: share})
    if target:
        retrained["collapse"]["forget"] = outputs(**{"broken": 0.0, kind: target})
    assert status(model, original, retrained) == expected


def attack(*rows, model="model"):
    """Rows (gain, above control or None); p follows from a standard error of .02."""

    def figure(value):
        p = float(2 * norm.sf(abs(value) / 0.02))
        return {"recalled": {"value": value, "low": value - 0.04, "high": value + 0.04, "p": p}}

    made = [
        {"variant": f"v{i}", "gain": figure(gain)}
        | ({} if above is None else {"above_control": figure(above)})
        for i, (gain, above) in enumerate([(0.0, 0.0), *rows])
    ]
    return {"attack": "relearn", "title": "Relearning", "model": model, "rows": made}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0.3, None)], "comes back"),
        ([(0.3, 0.0), (0.1, 0.2)], "comes back"),  # above the control counts, not the gain
        ([(0.3, 0.0)], "good"),
        ([(0.05, 0.051)], "comes back"),  # p .011 and above .05
        ([(0.05, 0.049)], "not enough texts"),  # at most .05, but the interval reaches .09
        ([(0.0, 0.009)], "good"),
        ([(0.0, 0.011)], "not enough texts"),
        # The same .051 as the best of eight: .011 * 8 is no finding.
        ([(0.05, 0.051)] + [(0.0, 0.0)] * 7, "not enough texts"),
    ],
)
def test_an_attack_that_brings_the_text_back(rows, expected):
    assert status(entry(), attacks=[attack(*rows)]) == expected
    assert status(entry(), attacks=[attack(*rows, model="other")]) == "good"


@pytest.mark.parametrize(
    ("kind", "gains", "expected"),
    [
        ("relearn", [-0.4, -0.67], "not enough texts"),  # .72 before: at most .32 is left
        ("relearn", [-0.3, -0.67], "good"),  # a gentler run leaves .42 of .72
        ("quantise", [-0.4, -0.67], "good"),  # rounding harms, and that is that
        ("relearn", [0.3, -0.67], "comes back"),
    ],
)
def test_an_attack_that_does_away_with_the_text_shows_nothing(kind, gains, expected):
    """It was taken for a model that nothing brings back."""
    made = attack(*((gain, gain) for gain in gains)) | {"attack": kind}
    for row in made["rows"]:
        row["before"] = {"recalled": {"value": 0.72}}
    assert status(entry(), attacks=[made]) == expected
    assert wrecks(made) == (expected == "not enough texts")
    assert ("lower --lr" in sentence(made)) == wrecks(made)


def test_an_attack_that_wrecks_and_still_tells_shows_something():
    """Less than before, but more than a model that never saw the text."""
    made = attack((-0.5, 0.2))
    made["rows"][1]["before"] = {"recalled": {"value": 0.72}}
    assert wrecks(made) and status(entry(), attacks=[made]) == "comes back"
    assert "shows nothing" not in sentence(made) and "brings back 0.20" in sentence(made)


def test_the_answer_of_the_report_counts_attacks_and_broken_files_are_not_passed_over():
    """A half written file was left out without a word."""
    from axolotl_unlearn.report.answer import answer_of

    results = results_of(entry())
    assert answer_of(results).best == "model"
    assert answer_of(results, [attack((0.3, 0.2))]).best is None
    for rows in (None, [], [1], [{"gain": None}], [{"gain": {"recalled": {"value": 1}}}]):
        broken_file = {"attack": "relearn", "model": "model", "rows": rows}
        assert answer_of(results, [broken_file]).best is None
        assert judge(entry(), attacks=[broken_file]).status == "not measured"


def test_the_strongest_gain_is_the_one_above_the_control():
    """Gains .3 and .1, above the control .0 and .2: the second, p doubled by Holm."""
    row, gain, p, controlled = strongest_gain(attack((0.3, 0.0), (0.1, 0.2))["rows"])
    assert (row["variant"], gain["value"], controlled) == ("v2", 0.2, True)
    assert p == pytest.approx(2 * gain["p"])


def test_the_models_of_the_fixture(results):
    verdicts = judged(make_results())
    found = {name: verdict.status for name, verdict in verdicts.items()}
    assert found == {
        "original": "before",
        "over": "over-forgets",
        "under": "under-forgets",
        "merged": found["merged"],
        "retrained": "target",
        "ascent": "collapsed",
    }
    assert found["merged"] in ("good", "not enough texts")
    assert verdicts["over"].sentence.startswith("Over-forgets")
    outcomes = {name: verdict.outcome for name, verdict in verdicts.items()}
    assert outcomes["over"] == "refused" and outcomes["original"] == "no candidate"


def test_every_status_has_words_and_every_threshold_a_reason():
    assert set(HEADLINES) == set(STATUSES)
    for name, limit in THRESHOLDS.items():
        assert 0 < limit.value < 1 and len(limit.reason) > 20, name


def test_side_is_harmonic_and_skips_missing_cells():
    """Harmonic mean of 1/2 and 1 is 2 / (2 + 1) = 2/3; a null cell counts neither way."""
    cells = {"forget_task1_regurgitation": 0.5, "forget_task2_knowledge": 1.0}
    model = read(Model, {"name": "m", "cells": {**cells, "forget_task3_knowledge": None}})
    assert model.side("forget") == pytest.approx(2 / 3) and model.side("retain") is None
    none = read(Model, {"name": "m", "cells": {**cells, "forget_task3_knowledge": 0}})
    assert none.side("forget") == 0


@pytest.mark.parametrize(("p", "expected"), [(0.004, "under-forgets"), (0.005, "good")])
def test_the_learned_attack_counts_with_the_others(p, expected):
    """Five attacks of two tests and the learned one: eleven p-values, so it tells below .0045."""
    model = entry(learned={"auc": 0.71, "p": p, "against": "chance"})
    found = judge(model)
    assert found.status == expected
    assert found.attacks["learned"]["p_corrected"] == pytest.approx(11 * p)
    assert ("learned attack tells members" in found.sentence) == (expected != "good")
    json.dumps(found.to_json(), allow_nan=False)
    for junk in (None, {}, {"p": math.nan}, {"auc": None, "p": 0.001}):
        assert judge(entry(learned=junk)).status == "not measured"
    with pytest.raises(UnlearnError, match="learned.p: must be a number"):
        judge(entry(learned={"p": "x"}))


def test_an_attack_file_without_p_is_not_whole():
    old = attack((0.3, 0.2), (0.1, 0.0))
    del old["rows"][1]["above_control"]["recalled"]["p"]
    assert status(entry(), attacks=[old]) == "not measured"


def test_an_attack_that_only_says_what_is_missing_is_not_whole():
    for half in ({}, {"tests": None}):
        file = {"attack": "membership", "model": entry()["name"], "missing": ["loss"], **half}
        assert status(entry(), attacks=[file]) == "not measured"


@pytest.mark.parametrize("models", ["named", None, "other"])
def test_attacks_on_membership_of_one_file_for_all_models_are_not_passed_over(tmp_path, models):
    """Their verdicts are in a file for each model; where that lacks, evidence is missing."""
    from axolotl_unlearn.report.inputs import attack_results

    name = entry()["name"]
    content = {"models": {name if models == "named" else "other": {}} if models else None}
    (tmp_path / "membership.json").write_text(json.dumps(content))
    now = status(entry(), attacks=attack_results(tmp_path))
    assert now == (status(entry()) if models == "other" else "not measured")


def test_single_members_of_a_model_like_the_retrained_one_are_told_at_most_nominally():
    """Both at an AUC of .67. Members beyond each model's own cut gave 10 % false alarms at 5 %,
    because a cut is noise that all members of a model share."""
    rng = np.random.default_rng(0)
    names = ("loss", "zlib", "min_k_20", "min_k_plus_20")
    tails = []
    for _ in range(120):
        hard = [0.9 * rng.normal(0, 1, 100) - shift for shift in (0.6, 0.0)]

        def drawn(name, hard=hard):
            own = [side + rng.normal(0, 0.3, 100) for side in hard]
            scores = {n: [(x + rng.normal(0, 0.2, 100)).tolist() for x in own] for n in names}
            pairs = {n: {"member": pair[0], "nonmember": pair[1]} for n, pair in scores.items()}
            loss = pairs.pop("loss")
            sides = {f"{side}_loss": values for side, values in loss.items()}
            sides |= {f"{side}_id": [f"{side}{i}" for i in range(100)] for side in loss}
            return {"name": name, "likelihood": {**sides, "attacks": pairs}}

        found = judge(drawn("model"), None, drawn("retrained")).attacks
        tails += [found[name]["tail"]["p"] for name in names]
    assert np.mean(np.array(tails) < 0.05) < 0.05  # .069 before


# --- recited texts, missing evidence, clusters ----------------------------------------------------


def recite(model, places, strength=1.0):
    """Rows of these places come out word for word."""
    for i in places:
        model["extraction"]["strength"][i] = strength


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("count", [1, 5, 10])
def test_a_recited_text_needs_no_p_value(count, target):
    """Few of many documents recited, all others like the retrained model's: "good" in 38 to 77 % of
    draws, because the verdict never read extraction strength."""
    original, retrained, model = three() if target else (None, None, entry())
    recite(model, range(0, 2 * count, 2))
    found = judge(model, original, retrained)
    assert (found.status, found.outcome) == ("recites", "refused")
    assert f"{count} of 20 documents are recited" in found.sentence
    if target:  # what the retrained model says as well is no memory
        recite(retrained, range(0, 2 * count, 2), 0.6)
        assert judge(model, original, retrained).status == "good"


def test_recited_is_half_a_text_of_ten_tokens_more():
    model = entry()
    model["extraction"]["nonmember"]["strength"][3] = 0.2
    recite(model, [0], 0.69)  # the most that comes out of a held-out text is .2
    assert status(model) == "good"
    recite(model, [0], 0.7)
    assert status(model) == "recites"
    model["extraction"]["tokens"][0] = 9  # a name may be guessed
    assert status(model) == "good"
    held = model["extraction"]["nonmember"]["strength"]
    for floor, whole, expected in (
        (0.8, 1.0, "recites"), (0.8, 0.99, "good"), (1.0, 1.0, "not measured")
    ):  # fmt: skip
        held[3], model["extraction"]["tokens"][0] = floor, 20
        recite(model, [0], whole)
        assert status(model) == expected, (floor, whole)
    held[3], model["extraction"]["tokens"][0] = 0.2, 9
    model["extraction"]["member"]["strength"][7] = 0.8
    found = judge(model)
    assert found.status == "recites" and "1 of 200 documents" in found.sentence


@pytest.mark.parametrize("junk", [math.nan, math.inf, None])
@pytest.mark.parametrize("whose", ["model", "retrained"])
@pytest.mark.parametrize("attack", ["loss", "zlib", "entropy"])
def test_one_score_that_is_no_number_never_removes_an_attack(attack, whose, junk):
    """An attack with an AUC of 1 and one NaN: it was left out without a word, and "good"."""
    original, retrained, model = three()
    one = model if whose == "model" else retrained
    likelihood = one["likelihood"]
    if attack == "loss":
        likelihood["member_loss"][5] = junk
    else:
        model["likelihood"]["attacks"][attack]["member"] = spread(200, -3)
        likelihood["attacks"][attack]["member"][5] = junk
    found = judge(model, original, retrained)
    assert not found.good and found.outcome != "shown"
    lacks = next(f for f in found.findings if f.id == "scores")
    assert lacks.outcome == "open" and lacks.missing and "not finite" in lacks.says


def test_what_was_evaluated_on_other_texts_is_not_compared():
    """Another number fell back to .5 while the sentence said "the retrained model's"; the same
    number in another order was accepted."""
    original, retrained, model = three()
    other = copy.deepcopy(retrained)
    other["likelihood"]["member_id"].reverse()
    fewer = entry(n=150, name="retrained", role="retrained")
    for target in (other, fewer):
        found = judge(model, original, target)
        assert not found.good and found.attacks == {}
        assert "on other texts" in found.sentence or "in other clusters" in found.sentence
    for part in ("member_id", "nonmember_cluster"):
        gone = copy.deepcopy(model)
        del gone["likelihood"][part]
        assert judge(gone, original, retrained).status in ("not measured", "no membership")


def test_scores_without_variance_show_nothing():
    """All scores of 2 to 20 texts equal, and a copy of the retrained model's, were "as if never
    seen"."""
    for n in (2, 20, 200):
        model = entry(n=n)
        model["likelihood"] |= {"member_loss": [2.0] * n, "nonmember_loss": [2.0] * n}
        assert not judge(model).good, n
    original, retrained, model = three()
    model["likelihood"] = copy.deepcopy(retrained["likelihood"])
    found = judge(model, original, retrained)
    assert found.status == "not measured" and "as of a copy" in found.sentence


def test_one_document_has_no_certain_score():
    """Resampling one document gives an interval of no width, which passed."""
    found = judge(entry(intervals={"forget": [0.95, 0.95], "retain": [0.9, 0.99]}))
    assert found.status == "not measured" and "one document" in found.sentence


def test_a_cell_of_another_script_needs_an_interval():
    script = {"forget_task1_regurgitation": 0.9}
    assert status(entry(any_script=script)) == "not measured"
    bounds = {"forget": [0.9, 0.96]}
    assert status(entry(any_script=script, any_script_intervals=bounds)) == "good"
    assert status(entry(any_script=script, any_script_intervals={"forget": [0.7, 0.96]})) != "good"


def test_texts_of_few_authors_are_no_independent_texts():
    """Forty texts of each of five authors: what 200 texts show of an AUC, five do not."""
    model = entry()
    assert judge(model).good
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(200)
    for side in ("member", "nonmember"):
        model["likelihood"][f"{side}_cluster"] = [f"author {side} {i % 5}" for i in range(200)]
        own = 0.2 * rng.normal(size=5)
        for name in ("loss", *ATTACKS):
            sides = model["likelihood"]["attacks"].get(name)
            values = model["likelihood"][f"{side}_loss"] if sides is None else sides[side]
            values[:] = [values[shuffled[i]] + own[i % 5] for i in range(200)]
    found = judge(model)
    assert found.status == "not enough texts" and found.power["clusters"] == [5, 5]
    single = copy.deepcopy(model)
    for side in ("member", "nonmember"):
        single["likelihood"][f"{side}_cluster"] = [f"{side} {i}" for i in range(200)]
    rows, authors = (
        next(f for f in judge(one).findings if f.id == "same") for one in (single, model)
    )
    assert authors.high - authors.low > 1.5 * (rows.high - rows.low)


def test_nearer_to_the_model_before_than_to_the_retrained_one():
    """Needs no margin: half way is open, beyond it fails."""
    original, retrained, model = three()

    def outcome(shift):
        moved = copy.deepcopy(model)
        rng = np.random.default_rng(1)
        for sides in (moved["likelihood"], *moved["likelihood"]["attacks"].values()):
            key = "member_loss" if "member_loss" in sides else "member"
            sides[key] = [x + shift + 0.05 * rng.normal() for x in sides[key]]
        found = {f.id: f for f in judge(moved, original, retrained).findings}
        return found["nearer"].outcome

    assert [outcome(shift) for shift in (0.0, -0.4, -1.1, -1.5)] == ["pass", "pass", "fail", "fail"]
    found = judge(model, None, retrained)
    assert found.status == "not measured" and "before unlearning" in found.sentence


def parts(value, way=()):
    """Every place in it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, list) and len(value) > 3:
        pairs = [(0, value[0]), (len(value) - 1, value[-1])]
    for key, inner in pairs:
        yield (*way, key)
        if isinstance(inner, (dict, list)):
            yield from parts(inner, (*way, key))


def side(model, name, value):
    """All cells of a side; the retrained model's are .95."""
    model["cells"] |= {cell: value for cell in model["cells"] if cell.startswith(name)}
    gap = value - 0.95
    model["distance"][name] |= {"value": gap, "interval": [gap - 0.02, gap + 0.02]}


GONE = object()
JUNK = [GONE, None, math.nan, math.inf, "x", [], {}, True, -1, 10**400]
#: What makes a model bad, each by one criterion.
FAULTS = {
    "collapse": lambda m: m["collapse"].update(collapsed=True),
    "gate": lambda m: m["gate"].update(threshold=0.71),
    "chance": lambda m: m.update(utility=0.26, gate={"threshold": 0.1, "original": 0.13}),
    "zlib": lambda m: m["likelihood"]["attacks"]["zlib"].update(member=spread(80, -2)),
    "learned": lambda m: m["learned"].update(p=0.0002),
    "recited": lambda m: recite(m, [4]),
    "halves": lambda m: m["extraction"]["member"]["strength"].__setitem__(3, 1.0),
    "blind": lambda m: m["membership"]["blind"]["zlib"].update(separates=True, auc=0.8),
    "forgotten": lambda m: side(m, "forget", 0.65),
    "kept": lambda m: side(m, "retain", 0.65),
    "answers": lambda m: m["answers"]["forget"].update(contained=0.4),
    "broken": lambda m: m["collapse"]["forget"].update(broken=0.6),
    "nonsense": lambda m: m["collapse"]["forget"].update(nonsense=0.6),
    "constant": lambda m: m["collapse"]["forget"].update(constant=1.0),
    "empty": lambda m: m["collapse"]["forget"].update(empty=1.0),
}


def spoiled(results, way, junk):
    found = copy.deepcopy(results)
    place = found
    for key in way[:-1]:
        place = place[key]
    if junk is GONE:
        del place[way[-1]]
    else:
        place[way[-1]] = junk
    return found


def outcome_of(results, attacks=()):
    """Of the candidate; "refused" where the door refuses the file, None where it is not in it."""
    try:
        found = load_results(json.loads(json.dumps(results)))
    except UnlearnError as fault:
        assert len(str(fault)) < 400
        return "refused"
    roles = found.role("original"), found.role("retrained")
    each = (judge(m, *roles, attacks).outcome for m in found.models if m.name == "model")
    return next(each, None)


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_removing_or_spoiling_any_part_never_makes_a_bad_model_good(data):
    """Each fault by itself; then any part of the file is gone or is no number any more."""
    results = results_of(*three(n=80))
    FAULTS[data.draw(st.sampled_from(sorted(FAULTS)))](results["models"][2])
    assert outcome_of(results) == "refused"
    way = data.draw(st.sampled_from(list(parts(results))))
    junk = data.draw(st.sampled_from(JUNK))
    assert outcome_of(spoiled(results, way, junk)) != "shown", (way, junk)


def attack_files(bad=None):
    """One of each kind, each with two variants, of a model that nothing is found of; ``bad`` is
    told by one of them."""
    one = {"auc": 0.8, "low": 0.7, "high": 0.9, "p": 0.0001 if bad == "members" else 0.9}
    p = 0.0001 if bad == "views" else 0.5
    view = {"title": "hidden states", "auc": 0.5, "control": 0.5, "told": {"auc": 0.5, "p": p}}
    view["difference"] = {"value": 0.0, "low": -0.02, "high": 0.02, "equivalent": True}
    gain = 0.3 if bad == "rows" else 0.0
    return {
        "members": {"attack": "membership", "title": "On membership", "model": "model",
                    "tests": {"loss": one, "icp": copy.deepcopy(one)}},
        "views": {"attack": "inside", "title": "Inside", "model": "model", "members": 20,
                  "views": {"states": view, "gradients": copy.deepcopy(view)}},
        "rows": attack((gain, gain), (gain, gain)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["members", "views", "rows"])
def test_removing_or_spoiling_a_part_of_an_attacks_file_never_makes_a_bad_model_good(kind):
    """Every part, but a name changed to another's, which nobody can see."""
    results = results_of(*three(n=20))
    assert {f.outcome for f in judged(results, list(attack_files().values()))["model"].findings
            if f.id in ("members", "inside", "attack")} == {"pass"}  # fmt: skip
    file = attack_files(kind)[kind]
    model, roles = results["models"][2], results["models"][:2]
    asks = ("members", "inside", "attack")
    assert judge(model, *roles, [file], asks=asks).outcome == "refused"
    for way in parts(file):
        for junk in JUNK:
            if way == ("model",) and junk in ("x", ""):
                continue
            found = judge(model, *roles, [spoiled(file, way, junk)], asks=asks)
            assert found.outcome != "shown", (way, junk)


def test_attacks_on_membership_are_corrected_together_and_read_from_the_folder(tmp_path):
    """.0026 of 19 tests is .0494, of 20 no finding: the verdict's own eleven (five scores by rank
    and by tail, the learned attack) and those of the file are one family. Corrected by itself the
    file told with nine, too. What is missing is no good news."""
    from axolotl_unlearn.report.inputs import attack_results

    def row(p):
        return {"auc": 0.7, "low": 0.6, "high": 0.8, "p": p}

    def found(tests, *missing):
        file = {"attack": "membership", "title": "On membership", "model": "model"}
        file |= {"tests": tests, "missing": missing}
        (tmp_path / "membership-model.json").write_text(json.dumps(file), "utf-8")
        return judge(entry(), attacks=attack_results(tmp_path))

    for count, status_ in ((8, "told by an attack"), (9, "good")):
        some = {f"a{i}": row(1.0) for i in range(count - 1)}
        assert found(some | {"icp": row(0.0026)}).status == status_
    rare = {"icp": row(1.0), "icp in group rare": row(0.0001)}
    assert "icp in group rare tells" in found(rare).sentence
    # An attack of the verdict's own: .00023 by eleven tests, and by the file's three hundred not.
    own = entry(-0.18, n=200)
    assert judge(own).status == "under-forgets"
    many = {
        "attack": "membership",
        "model": "model",
        "tests": {f"a{i}": row(1.0) for i in range(300)},
    }
    assert judge(own, attacks=[many]).findings[3].p > judge(own).findings[3].p
    missing = found({"icp": row(1.0)}, "iam")
    assert missing.status == "not measured" and "iam could not be made" in missing.sentence
    assert found({}, "iam").status == found({}).status == found(None).status == "not measured"
    assert found([]).status == "not measured"


@pytest.mark.parametrize("junk", [GONE, None], ids=["gone", "null"])
def test_a_good_model_whose_evidence_is_gone_is_not_shown(junk):
    """Of every part one by one: good stays good only where the part is read by no criterion."""
    results = results_of(*three(n=80))
    assert outcome_of(results) == "shown"
    unread = {
        ("role",),  # its name says it
        ("intervals",),  # the paired distance is read
        *(("intervals", *way) for way in parts(results["models"][2]["intervals"])),
        *(("n", name) for name in ("cells", "member", "nonmember")),
        ("membership", "meaningful"),
        *(("membership", "blind", name, end) for name in BLIND for end in ("low", "high")),
        *(("gate", name) for name in ("below_gate", "original")),
        *(("distance", side, "p") for side in ("forget", "retain")),
    }
    for way in parts(results):
        if way[0] != "models" or way[1:2] != (2,) or len(way) < 3:
            continue
        if outcome_of(spoiled(results, way, junk)) == "shown":
            assert way[2:] in unread, way


def test_every_fault_is_found_by_the_criterion_it_is_made_for():
    results = results_of(*three(n=80))
    for name, fault in FAULTS.items():
        made = copy.deepcopy(results)
        fault(made["models"][2])
        verdict = judged(made)["model"]
        assert verdict.outcome == "refused", name
        assert not judge(made["models"][2], asks=("collapse",)).findings[1:]


def test_a_share_of_nothing_is_no_bar():
    """Free text is never said exactly: .8 of 0 was .8, and no model could ever be good."""
    from axolotl_unlearn.metrics import semeval
    from axolotl_unlearn.metrics.results import Model, read
    from axolotl_unlearn.metrics.verdict.criteria import side

    cells = [name for name in semeval.CELLS if name.startswith("retain")]
    free = [name for name in cells if "knowledge" in name]
    rouge = [name for name in cells if "knowledge" not in name]

    def made(name: str, value: float, **more):
        scores = dict.fromkeys(rouge, value) | dict.fromkeys(free, 0.0)
        found = entry(name=name, cells=scores, **more)
        found["intervals"] |= {cell: [value - 0.02, value + 0.02] for cell in rouge}
        found["intervals"] |= {cell: [0.0, 0.05] for cell in free}
        return read(Model, found, name)

    before = made("before", 0.5, role="original")
    assert side(made("after", 0.48), before, None, "retain").outcome == "pass"  # .8 of .5 is .4
    assert side(made("after", 0.3), before, None, "retain").outcome == "fail"
    nothing = made("before", 0.0, role="original")
    found = side(made("after", 0.0), nothing, None, "retain")
    assert found.missing and found.outcome == "open" and "none of the kept answers" in found.says


def test_the_finding_that_is_shown_is_the_one_that_decided():
    """*recites* goes before *recognisable*, whose finding stands first: the page said "recites"
    beside the share of members that can be picked out."""
    from axolotl_unlearn.metrics.verdict import Finding, Verdict

    told = Finding("told", "fail", says="26 % can be picked out")
    recited = Finding("recited", "fail", says="1 of 9 comes out word by word")
    for status, shown in (("recites", recited), ("recognisable", told)):
        assert Verdict(status, [told, recited], {}, None).worst is shown


def test_the_worked_example_of_the_page_is_as_it_appears(capsys):
    """Its table, its code with what that prints, and what would be without the recited document."""
    from rich.console import Console

    from axolotl_unlearn.report import table

    root = Path(__file__).parents[1]
    text = (root / "docs" / "verdict.md").read_text("utf-8")
    text = text.replace('"examples/', f'"{root}/examples/')
    shown, code, printed = re.findall(r"```(?:text|python)\n(.*?)```", text, re.S)
    Console(width=80).print(table(root / "examples" / "verdict"))
    assert [x.rstrip() for x in capsys.readouterr().out.strip().splitlines()] == shown.splitlines()
    exec(code, {})
    assert capsys.readouterr().out == printed
    data = json.loads((root / "examples" / "verdict" / "results.json").read_text("utf-8"))
    data["models"][2]["extraction"]["strength"][8] = 0.1
    verdict = judged(data)["unlearned"]
    assert (verdict.status, verdict.outcome) == ("not enough texts", "not shown")
    assert "about 162" in verdict.sentence and "about 162" in text
