"""The judgement: what keeps a model from being called good, each limit at its edge."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from report_fixture import make_results
from scipy.stats import norm

from axolotl_unlearn.attacks.results import sentence
from axolotl_unlearn.metrics.verdict import (
    HEADLINES,
    STATUSES,
    THRESHOLDS,
    bars,
    broken,
    judge,
    scores_of,
    side_mean,
    strongest_gain,
    unstopped_answers,
    verdict,
    wrecks,
)


@pytest.fixture
def results():
    return {model["name"]: model for model in make_results()["models"]}


def spread(n: int, shift: float = 0.0) -> list[float]:
    """Losses that follow a normal distribution as evenly as n numbers can."""
    return [2 + shift + 0.5 * float(z) for z in norm.ppf((np.arange(n) + 0.5) / n)]


def entry(shift: float = 0.0, n: int = 200, **changes):
    """A model that every criterion passes; members `shift` above the non-members. A retrained one
    has scores of its own."""
    own = np.random.default_rng(7)
    retrained = changes.get("role") == "retrained"

    def drawn(shift=0.0):
        return [x + retrained * 0.05 * own.normal() for x in spread(n, shift)]

    cells = [f"{s}_task1_{k}" for s in ("forget", "retain") for k in ("regurgitation", "knowledge")]
    return {
        "name": "model",
        "cells": dict.fromkeys(cells, 0.95),
        "intervals": {"forget": [0.93, 0.97], "retain": [0.93, 0.97]},
        "likelihood": {
            "member_loss": drawn(shift),
            "nonmember_loss": [x + 1e-4 for x in drawn()],
            "attacks": {"zlib": {"member": drawn(), "nonmember": [x + 1e-4 for x in drawn()]}},
        },
        "collapse": {
            "collapsed": False,
            "forget": {"n": 300, "broken": 0.01, "nonsense": 0.0, "nonsense_n": 300},
        },
        "gate": {"below_gate": False, "threshold": 0.5},
        "utility": 0.7,
        "utility_chance": 0.25,
        "n": {"utility": 100},
        "answers": {"forget": {"n": 300, "exact": 0.01, "contained": 0.01}},
        "membership": {"meaningful": True, "blind": {"zlib": {"auc": 0.5, "separates": False}}},
        **changes,
    }


def status(model, original=None, retrained=None, attacks=()):
    return judge(model, original, retrained, attacks).status


def test_a_model_without_fault_is_good_and_says_on_what_it_rests():
    found = judge(entry())
    assert found.good and found.worst is None and found.against == "chance"
    assert {f.outcome for f in found.findings} == {"pass"}
    assert "within 0.1 of .5" in found.sentence and "true target stays open" in found.sentence
    assert json.loads(json.dumps(found.to_json()))["status"] == "good"
    # Four tests of 200 against 200: z(1 - .05/8) + z(.8) = 2.498 + .842 times SE .0289.
    assert found.power["smallest_difference"] == pytest.approx(3.339 * 0.02891, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"collapse": {"collapsed": True, "reasons": ["loops"]}}, "collapsed"),
        ({"gate": {"below_gate": True, "threshold": 0.5}}, "below gate"),
        ({"role": "original"}, "before"),
        ({"role": "retrained"}, "target"),
        ({"likelihood": {}}, "no membership"),
        # 26 of 100 where guessing gives 25: p .45; 33: p .045; 32: p .069.
        ({"utility": 0.26}, "utility at chance"),
        ({"utility": 0.32}, "utility at chance"),
        ({"utility": 0.33}, "good"),
        ({"membership": {"blind": {"bag_of_words": {"auc": 0.8, "separates": True}}}},
         "sets differ"),
        ({"membership": {"meaningful": False}}, "sets differ"),
        ({"cells": {"forget_task1_knowledge": 0.3, "retain_task1_knowledge": 1}, "intervals": {}},
         "still knows"),
        ({"cells": {"forget_task1_knowledge": 1, "retain_task1_knowledge": 0.3}, "intervals": {}},
         "lost knowledge"),
        ({"cells": {}}, "still knows"),
        ({"utility": None}, "utility unknown"),
        ({"gate": None}, "utility unknown"),
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
    # AUC .525; the interval's half, .15, must shrink to .1 - .025: (2)^2 times the texts.
    assert 60 < next(f for f in found.findings if f.id == "same").needed < 100


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
    found = judge(entry(likelihood={"member_loss": members, "nonmember_loss": others}))
    assert found.attacks["loss"]["auc"] == pytest.approx(0.5, abs=0.01)
    assert found.status == "recognisable"
    assert "30 % of the members can be picked out" in found.sentence


def test_the_retrained_model_judges():
    """AUC .67 under both: not "under-forgets" but the same. AUC .5 where it has .67: over."""
    target = entry(-0.31, name="retrained", role="retrained")
    again = entry(-0.31)
    rng = np.random.default_rng(0)
    for side in ("member_loss", "nonmember_loss"):
        noise = 0.1 * norm.ppf((rng.permutation(200) + 0.5) / 200)
        again["likelihood"][side] = list(np.array(again["likelihood"][side]) + noise)
    found = judge(again, None, target)
    assert found.attacks["loss"]["low"] > 0.55
    assert found.status == "good" and found.against == "retrained"
    assert "within 0.1 of the retrained model's" in found.sentence
    assert status(again) == "under-forgets"
    assert status(entry(0.0), None, target) == "over-forgets"


def test_the_ratio_to_the_retrained_model_sees_what_aucs_do_not():
    """Hard and easy texts spread the losses over 5 nats; a third of a nat too much hides there."""
    rng = np.random.default_rng(1)
    hard = np.linspace(0, 5, 100)
    target = {"member_loss": list(hard), "nonmember_loss": list(hard + 1e-3)}
    mine = {
        "member_loss": list(hard + 0.3 + rng.normal(0, 0.2, 100)),
        "nonmember_loss": list(hard + rng.normal(0, 0.2, 100)),
    }
    model, retrained = entry(likelihood=mine), entry(likelihood=target, name="retrained")
    assert judge(model).attacks["loss"]["p_corrected"] > 0.05
    found = judge(model, None, retrained)
    assert found.status == "over-forgets"
    assert found.attacks["reference"]["auc"] < 0.3 and found.attacks["reference"]["p"] < 1e-6


def test_bars_follow_the_retrained_model_or_the_original(results):
    """Without both: .8 and .8. The original's retain side sets .8 of itself; a retrained model
    replaces both bars by its own sides minus .1."""
    original, retrained = results["original"], results["retrained"]
    assert bars(None, None) == (0.8, 0.8)
    assert bars(original, None) == (0.8, pytest.approx(0.8 * side_mean(original, "retain")))
    assert bars(original, retrained) == (
        pytest.approx(side_mean(retrained, "forget") - 0.1),
        pytest.approx(side_mean(retrained, "retain") - 0.1),
    )


def test_the_paired_distance_from_the_retrained_model_has_the_narrower_interval():
    """Forgotten .95 against .97: the bar is .87. The model's own interval [.8, .99] straddles it,
    the paired one of -.02 is [-.05, .01], so .92 to .98."""
    target = entry(name="retrained", role="retrained")
    target["cells"] = {**target["cells"], **{c: 0.97 for c in target["cells"] if "forget" in c}}
    model = entry(intervals={"forget": [0.8, 0.99], "retain": [0.93, 0.97]})
    assert status(model, None, target) == "not enough texts"
    model["distance"] = {"forget": {"value": -0.02, "interval": [-0.05, 0.01], "p": 0.2}}
    assert status(model, None, target) == "good"


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
    def answers(value, **more):
        return entry(answers={"forget": {"n": 300, "exact": 0.01, "contained": value}}, **more)

    retrained = target and answers(target, name="retrained", role="retrained")
    assert status(answers(contained), None, retrained) == expected


def test_answers_said_are_read_at_the_limit():
    """.02 exact and .07 contained: .05, the limit; .06 is below it."""

    def answers(exact, contained, side="forget"):
        return {"name": "m", "answers": {side: {"n": 100, "exact": exact, "contained": contained}}}

    assert unstopped_answers(answers(0.0, 0.05), "forget") == 0.05
    assert unstopped_answers(answers(0.02, 0.06), "forget") is None
    assert unstopped_answers({"name": "m"}, "forget") is None


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
    def outputs(value, **more):
        forget = {"n": 300, "nonsense_n": 300, "broken": 0.0, "nonsense": 0.0, kind: value}
        return entry(collapse={"collapsed": False, "forget": forget}, **more)

    retrained = target and outputs(target, name="retrained", role="retrained")
    assert status(outputs(share), None, retrained) == expected
    assert broken(outputs(share), retrained) == (None if share in (0.06, 0.09) or target == 0.14
                                                 else share)  # fmt: skip


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


def test_the_answer_of_the_report_counts_attacks_and_ignores_broken_files():
    from axolotl_unlearn.report.answer import answer_of

    results = {"models": [entry()]}
    assert answer_of(results).best == "model"
    assert answer_of(results, [attack((0.3, 0.2))]).best is None
    for rows in (None, [], [1], [{"gain": None}], [{"gain": {"recalled": {"value": 1}}}]):
        broken_file = {"attack": "relearn", "model": "model", "rows": rows}
        assert answer_of(results, [broken_file]).best == "model"


def test_the_strongest_gain_is_the_one_above_the_control():
    """Gains .3 and .1, above the control .0 and .2: the second, p doubled by Holm."""
    row, gain, p, controlled = strongest_gain(attack((0.3, 0.0), (0.1, 0.2))["rows"])
    assert (row["variant"], gain["value"], controlled) == ("v2", 0.2, True)
    assert p == pytest.approx(2 * gain["p"])


def test_the_models_of_the_fixture(results):
    original, retrained = results["original"], results["retrained"]
    found = {name: status(model, original, retrained) for name, model in results.items()}
    assert found == {
        "original": "before",
        "over": "over-forgets",
        "under": "under-forgets",
        "merged": found["merged"],
        "retrained": "target",
        "ascent": "collapsed",
    }
    assert found["merged"] in ("good", "not enough texts")
    assert verdict(results["over"], original, retrained).startswith("over: Over-forgets")


def test_every_status_has_words_and_every_threshold_a_reason():
    assert set(HEADLINES) == set(STATUSES)
    for name, limit in THRESHOLDS.items():
        assert 0 < limit.value < 1 and len(limit.reason) > 20, name


def test_side_mean_is_harmonic_and_skips_missing_cells():
    """Harmonic mean of 1/2 and 1 is 2 / (2 + 1) = 2/3; a null cell counts neither way."""
    cells = {"forget_task1_regurgitation": 0.5, "forget_task2_knowledge": 1.0}
    model = {"name": "m", "cells": {**cells, "forget_task3_knowledge": None}}
    assert side_mean(model, "forget") == pytest.approx(2 / 3)
    assert side_mean(model, "retain") is None
    assert side_mean({"name": "m", "cells": {**cells, "forget_task3_knowledge": 0}}, "forget") == 0


JUNK = [None, math.nan, "x", [None], -1]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_missing_and_broken_parts_never_stop_the_judgement(junk):
    """Every part, and every part of a part, replaced by junk."""

    def swapped(value):
        if isinstance(value, dict):
            for key in value:
                yield {**value, key: junk}
                yield {k: v for k, v in value.items() if k != key}
                for inner in swapped(value[key]):
                    yield {**value, key: inner}

    target = entry(name="retrained", role="retrained", distance={"forget": {"value": 0.1}})
    small = entry(n=20, distance={"forget": {"value": 0.1, "interval": [0, 1]}})
    for model in swapped(small):
        if isinstance(model.get("name"), str):
            json.dumps(judge(model, None, target).to_json(), allow_nan=False)
    json.dumps(judge(target, model, small).to_json(), allow_nan=False)


def test_scores_that_do_not_fit_are_left_out():
    model = entry(n=20)
    model["likelihood"]["attacks"] |= {
        "short": {"member": [1.0, 2.0], "nonmember": spread(20)},
        "nan": {"member": [math.nan] * 20, "nonmember": spread(20)},
    }
    assert set(scores_of(model)) == {"loss", "zlib"}


def test_what_has_no_valid_test_judges_nothing():
    model = entry()
    model["likelihood"]["attacks"]["learned"] = {
        "member": spread(200, -1),
        "nonmember": spread(200),
    }
    model["likelihood"]["attacks"]["min_k_40"] = {
        "member": spread(200, 2),
        "nonmember": spread(200),
    }
    assert judge(model).good and set(judge(model).attacks) == {"loss", "zlib"}


@pytest.mark.parametrize(("p", "expected"), [(0.009, "under-forgets"), (0.011, "good")])
def test_the_learned_attack_counts_with_the_others(p, expected):
    """Two attacks of two tests and the learned one: five p-values, so it tells below .01."""
    model = entry(learned={"auc": 0.71, "p": p, "against": "chance"})
    found = judge(model)
    assert found.status == expected
    assert found.attacks["learned"]["p_corrected"] == pytest.approx(5 * p)
    assert ("learned attack tells members" in found.sentence) == (expected != "good")
    json.dumps(found.to_json(), allow_nan=False)
    for junk in (None, {}, {"p": math.nan}, {"p": "x"}, {"auc": None, "p": 0.001}):
        judge(entry(learned=junk))


def test_attack_files_of_earlier_versions_have_no_p():
    """A KeyError before; .3 with an interval of +-.04 is 14.7 standard errors."""
    old = attack((0.3, 0.2), (0.1, 0.0))
    for row in old["rows"]:
        for figure in (row["gain"], row["above_control"]):
            del figure["recalled"]["p"]
    assert status(entry(), attacks=[old]) == "comes back"
    assert strongest_gain(old["rows"])[2] < 1e-10
    old["rows"][2]["above_control"]["recalled"] |= {"value": 0.02, "low": -0.02, "high": 0.06}
    old["rows"][1]["above_control"]["recalled"] |= {"value": -0.2}
    assert strongest_gain(old["rows"])[2] == pytest.approx(2 * 0.327, abs=0.001)  # z = .98


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
            return {"name": name, "likelihood": {**sides, "attacks": pairs}}

        found = judge(drawn("model"), None, drawn("retrained")).attacks
        tails += [found[name]["tail"]["p"] for name in names]
    assert np.mean(np.array(tails) < 0.05) < 0.05  # .069 before
