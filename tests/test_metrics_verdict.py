"""The judgement: what keeps a model from being called good, each fault by the criterion it is made
for, and that no evidence makes a verdict milder."""

from __future__ import annotations

import copy
import json
import math
import re
import runpy
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fault_codes import fails
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from verdict_fixture import ATTACKS, CELLS, entry, put_back, spread, three
from verdict_fixture import results as results_of

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics import verdict
from axolotl_unlearn.metrics.audit import audit
from axolotl_unlearn.metrics.intervals import Scores, harmonic_mean, mean_of
from axolotl_unlearn.metrics.results import Attack, Model, load_results, read
from axolotl_unlearn.metrics.verdict import CRITERIA, GOOD, STATUSES, can_be_good, judged, sentence
from axolotl_unlearn.metrics.verdict.criteria import bars, strongest_gain, wrecks
from axolotl_unlearn.requests.run import ANSWER_TOKENS

#: An original whose members are known, a retrained model, a candidate like it; the first two read.
RAW = three()
ORIGINAL, RETRAINED = (read(Model, one) for one in RAW[:2])


def judge(model, original=ORIGINAL, *args, **more):
    """Beside an original, without which no utility is gated."""
    return verdict.judge(model, original, *args, **more)


#: From the worst: what more evidence may never improve.
RANK = {"refused": 0, "not shown": 1, "shown": 2}


def decided(verdict):
    """Status and the criterion that decided."""
    return verdict.status, verdict.worst and verdict.worst.id


def rows(model, column, values, side=None):
    """Set a column of the forget rows, or of members, from its first place on."""
    place = model["extraction"] if side is None else model["extraction"][side]
    place[column] = [*values, *place[column][len(values) :]]
    if column in ("exact", "contained") and side is None:
        known = [x for x in place[column] if x is not None]
        model["answers"]["forget"][column] = sum(known) / len(known)


def sides(model, name, value):
    """All cells of a side; the retrained model's are .95."""
    model["cells"] |= {cell: value for cell in model["cells"] if cell.startswith(name)}
    model["intervals"][name] = [value - 0.02, value + 0.02]
    if model["distance"]:
        gap = value - 0.95
        model["distance"][name] |= {"value": gap, "interval": [gap - 0.02, gap + 0.02]}


def group(model, original, hits):
    for one, share in ((original, 0.8), (model, hits)):
        rest = (75 - 10 * share) / 90
        one["utility_groups"] = {
            "medicine": {"value": share, "n": 10}, "other": {"value": rest, "n": 90}
        }  # fmt: skip


def knowing(model, original, some=None):
    """A copy of the original in all that is known text by text, with scores of its own."""
    rng = np.random.default_rng(3)
    for part in ("likelihood", "extraction", "answers"):
        model[part] = copy.deepcopy(original[part])
    for name in ("member_loss", "nonmember_loss"):
        model["likelihood"][name] = [x + 0.01 * rng.normal() for x in original["likelihood"][name]]


def fault(part, status, criterion, inner=None, **change):
    """A part of the model that is changed."""

    def spoil(original, retrained, model):
        place = model if part is None else model[part]
        (place if inner is None else place[inner]).update(change)

    return spoil, status, criterion


def text(column, value, side=None):
    """The first forget row, or member, that comes out or is said."""
    return lambda o, r, m: rows(m, column, [value], side), "under-forgets", "documents"


def some(column, count, value, criterion="documents", side=None):
    """The first rows, or members, none of which suffices alone."""
    return lambda o, r, m: rows(m, column, [value] * count, side), "under-forgets", criterion


def known_by_loss(original, retrained, model):
    """The losses of three of 200 documents are those of a text that is known by heart."""
    model["likelihood"]["member_loss"][:3] = [0.01, 0.02, 0.03]


def added_score(original, retrained, model, known=-0.5):
    for one, shift in ((model, known), (retrained, 0.0)):
        n = len(one["likelihood"]["member_loss"])
        scores = {"member": spread(n, shift), "nonmember": [x + 1e-3 for x in spread(n)]}
        one["likelihood"]["attacks"][f"new {len(one['likelihood']['attacks'])}"] = scores


def pushed(original, retrained, model):
    losses = model["likelihood"]["member_loss"]
    model["likelihood"]["member_loss"] = [x + 0.5 for x in losses]


def told(original, retrained, model):
    losses = model["likelihood"]["member_loss"]
    model["likelihood"]["attacks"]["zlib"]["member"] = spread(len(losses), -2)


def guessed(original, retrained, model):
    rows(model, "contained", [True] * 9)
    rows(retrained, "logp", [-3.0] * 9)  # .05 each


UNDER, OVER, BROKEN = "under-forgets", "over-forgets", "broken"
#: What makes a model bad: a change of (original, retrained, model), the status, the criterion.
SPOILS = {
    "collapsed": fault("collapse", BROKEN, "outputs", collapsed=True),
    "repeats, whatever the file calls it": fault("collapse", BROKEN, "outputs", broken=0.6),
    "below the gate": fault(None, BROKEN, "able", utility=0.55),
    "a gate of its own": fault(None, BROKEN, "able", utility=0.55, gate={"threshold": 0.3}),
    "below the retrained model's": (
        lambda o, r, m: r.update(utility=0.9) or m.update(utility=0.65), BROKEN, "able",
    ),
    "guesses": (lambda o, r, m: m.update(utility=0.26) or o.update(utility=0.3), BROKEN, "able"),
    "medicine lost": (lambda o, r, m: group(m, o, 0.0), BROKEN, "able"),
    "medicine lost, beside the retrained model": (
        lambda o, r, m: group(m, r, 0.0) or o.update(utility_groups=m["utility_groups"]),
        BROKEN, "able",
    ),
    "medicine asked once": (
        lambda o, r, m: group(m, o, 0.0) or m["utility_groups"].update(
            medicine={"value": 1.0, "n": 1}, other={"value": 74 / 99, "n": 99}
        ),
        BROKEN, "able",
    ),
    "recited, by strength": text("strength", 1.0, "member"),
    "recited but for the last token": text("run", 59, "member"),
    "recited with gaps": text("greedy", 0.9, "member"),
    "recited answer": text("strength", 0.9),
    "one answer said": text("contained", True),
    "one answer exact": text("exact", True),
    "four answers nearly as likely as not": some("logp", 4, math.log(0.45), "said"),
    "many answers that draws give": some("logp", 60, -1.0, "said"),
    "many answers half out": some("strength", 60, 0.45),
    "many texts half out": some("greedy", 100, 0.75, side="member"),
    "runs of half of many texts": some("run", 100, 33, side="member"),
    "one answer likely": text("logp", -0.1),
    "guessable answers said": (guessed, UNDER, "said"),
    "forget side": (lambda o, r, m: sides(m, "forget", 0.65), UNDER, "said"),
    "an attack tells": (told, UNDER, "documents"),
    "three documents are known by their losses": (known_by_loss, UNDER, "documents"),
    "pushed away": (pushed, OVER, "membership"),
    "learned attack": fault("learned", UNDER, "membership", p=0.0002),
    "a score that was added": (added_score, UNDER, "membership"),
    "kept": (lambda o, r, m: sides(m, "retain", 0.65), OVER, "kept"),
    "broken answers": fault("collapse", BROKEN, "manner", "forget", broken=0.6),
    "broken, and all the same more often": fault(
        "collapse", BROKEN, "manner", "forget", broken=0.5, constant=0.55
    ),
    "nonsense": fault("collapse", BROKEN, "manner", "forget", nonsense=0.6),
    "one answer to all": fault("collapse", OVER, "manner", "forget", constant=1.0),
    "silent": fault("collapse", OVER, "manner", "forget", empty=1.0),
    "refusals in other words": fault("collapse", OVER, "manner", "forget", refusing=0.5),
    "echoes": fault("collapse", OVER, "manner", "forget", echo=0.5),
    "knows all": (lambda o, r, m: knowing(m, o), UNDER, "documents"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (("kept", "one answer said", "nonsense"), BROKEN),
        (("kept", "nonsense"), BROKEN),
        (("kept", "one answer said"), UNDER),
    ],
)
def test_of_several_faults_the_worst_is_given(names, status):
    models = three()
    for name in names:
        SPOILS[name][0](*models)
    assert judge(models[2], *models[:2]).status == status


def alike(*names):
    """Models of the same weights, by their digests."""
    places = {"original": 0, "retrained": 1, "model": 2}
    return lambda *models: [models[places[name]].update(weights="a") for name in names]


def reordered(one):
    one["likelihood"]["member_id"] = one["likelihood"]["member_id"][::-1]


def nearly(original, retrained, model):
    """The candidate as retrained model, measured in another precision."""
    rng = np.random.default_rng(4)
    for name in ("member_loss", "nonmember_loss"):
        losses = [x + 1e-3 * rng.normal() for x in model["likelihood"][name]]
        retrained["likelihood"][name] = losses


def hardly_known(original, retrained, model):
    """Most of its members were never trained on, so that a copy of it would pass as well."""
    losses = retrained["likelihood"]["member_loss"]
    original["likelihood"] = copy.deepcopy(retrained["likelihood"])
    losses = [x - 1.5 * (i % 6 == 0) + 0.001 * i for i, x in enumerate(losses)]
    original["likelihood"]["member_loss"] = losses


def cut_texts(*models, questions=True):
    """Texts of 200 tokens, of which a model may say fewer: then it seems to have forgotten them."""
    for one in models:
        one["extraction"]["tokens"] = [20] * 80 + [200] * 60
        one["max_gen_toks"] = 30
        if not questions:
            own = one["extraction"]
            own["exact"] = own["contained"] = [None] * 140
            one["n"] |= dict(zip(CELLS[:6], (50, 0, 50, 0, 40, 0), strict=True))
            one["answers"], one["max_gen_toks"] = {}, 1


def told_by_loss(original, retrained, model):
    """The retrained model knows its members, and recites none: so does its like."""
    for one in (retrained, model):
        losses = one["likelihood"]["member_loss"]
        one["likelihood"]["member_loss"] = [x - 0.5 for x in losses]


def asked_otherwise(original, retrained, model):
    """As many questions, of other rows."""
    for name in ("exact", "contained"):
        column = retrained["extraction"][name]
        column[0], column[-1] = column[-1], column[0]


def mute(original, retrained, model):
    for part in ("extraction", "answers"):
        original[part] = entry()[part]


def exchanged(original, retrained, model):
    """Members stand in the file of non-members: those alone does the original know."""
    own = original["likelihood"]
    for one, (first, second) in [(own, ("member_loss", "nonmember_loss"))] + [
        (sides, ("member", "nonmember")) for sides in own["attacks"].values()
    ]:
        one[first], one[second] = one[second], one[first]


#: What makes the comparison worth nothing.
CONTROLS = {
    "the retrained model knows the texts": lambda o, r, m: knowing(r, o),
    "the retrained model recites one": lambda o, r, m: rows(r, "run", [59], "member"),
    "the retrained model tells its members by loss": told_by_loss,
    "a retrained model that repeats": lambda o, r, m: r["collapse"].update(broken=0.6),
    "a retrained model of little ability": lambda o, r, m: r.update(utility=0.4),
    "a retrained model without a score": lambda o, r, m: r["likelihood"]["attacks"].pop("entropy"),
    "a retrained model of other questions": asked_otherwise,
    "a retrained model without a cell": lambda o, r, m: r["cells"].update(
        forget_task1_regurgitation=None
    ),
    "an interval without a width": lambda o, r, m: m["distance"]["forget"].update(
        interval=[0.0, 0.0]
    ),
    "outputs of some retained rows": lambda o, r, m: m["collapse"].update(n=10),
    "the original as retrained model": alike("original", "retrained"),
    "the candidate as retrained model": alike("retrained", "model"),
    "the original as candidate": alike("original", "model"),
    "the retrained model's losses": lambda o, r, m: m.update(likelihood=r["likelihood"]),
    "other data": lambda o, r, m: m.update(data={"forget": "a"}) or r.update(data={"forget": "b"}),
    "other texts": lambda o, r, m: reordered(r),
    "an original of other texts": lambda o, r, m: reordered(o),
    "an original without ids": lambda o, r, m: o["likelihood"].update(member_id=[]),
    "texts without ids": lambda o, r, m: m["likelihood"].update(member_id=[]),
    "an original of other rows": lambda o, r, m: o["n"].update(retain_task1_knowledge=49),
    "other code": lambda o, r, m: m.update(code="a") or r.update(code="b"),
    "the candidate as retrained model, but for noise": nearly,
    "a retrained model that refuses": lambda o, r, m: r["collapse"]["forget"].update(refusing=0.5),
    "a retrained model that lost what should stay": lambda o, r, m: (
        sides(r, "retain", 0.3)
        or sides(m, "retain", 0.3)
        or m["distance"]["retain"].update(value=0.0, interval=[-0.02, 0.02])
    ),
    "a learned attack against another": lambda o, r, m: m["learned"].update(against="x"),
    "a baseline without an interval": lambda o, r, m: m["membership"]["blind"]["zlib"].pop("low"),
    "a baseline that is called harmless": lambda o, r, m: m["membership"]["blind"]["zlib"].update(
        auc=0.9, low=0.0, high=1.0
    ),
    "an original that hardly knows them": hardly_known,
    "an original that gives no answer": mute,
    "the first rows only": lambda o, r, m: m.update(limit=50),
    "answers cut off": lambda o, r, m: m.update(max_gen_toks=20),
    "answers of the original cut off": lambda o, r, m: o.update(max_gen_toks=1),
    "answers of the retrained model cut off": lambda o, r, m: r.update(max_gen_toks=1),
    "texts cut off": cut_texts,
    "texts cut off, and no questions": partial(cut_texts, questions=False),
    "answers of unknown length": lambda o, r, m: m.pop("max_gen_toks"),
    "other clusters": lambda o, r, m: r["likelihood"].update(member_cluster=["a"] * 200),
    "sets that differ": fault("membership", "", "", "blind", zlib={"auc": 0.8, "separates": True})[
        0
    ],
    "sets that are not known": lambda o, r, m: m["membership"].update(blind={}),
    "members that stand among non-members": exchanged,
    "an original that knows nothing": lambda o, r, m: o.update(likelihood=entry()["likelihood"]),
    "another model's distance": lambda o, r, m: m["distance"]["forget"].update(value=0.02),
}


def test_a_model_without_fault_is_good_and_says_on_what_it_rests():
    original, retrained, model = three()
    found = judge(model, original, retrained)
    assert found.good and found.worst is None and found.against == "retrained"
    assert {f.outcome for f in found.findings} == {"pass"}
    assert "the retrained model's" in found.sentence and "No attack" in found.sentence
    assert found.outcome == "shown" and len(CRITERIA) == 9 and len(STATUSES) == 5
    alone = judge(entry())
    assert alone.good and alone.against == "chance" and "stays open" in alone.sentence
    # Seven tests of 200 against 200 at .025: z(1 - .025/14) + z(.8) times SE .0289.
    assert alone.power["smallest_difference"] == pytest.approx((2.914 + 0.842) * 0.02891, abs=1e-3)
    assert judge(original, None, retrained).outcome == "no candidate"
    assert judge(original).status == "under-forgets" and judge(retrained, original).status == "good"


@pytest.mark.parametrize("name", SPOILS)
def test_every_fault_is_found_by_the_criterion_it_is_made_for(name):
    models = three()
    spoil, status, criterion = SPOILS[name]
    spoil(*models)
    found = judge(models[2], *models[:2])
    assert found.status == status and found.outcome == "refused", found.sentence
    failed = {f.id for f in found.findings if f.outcome == "fail"}
    assert criterion in failed, found.sentence


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_is_not_believed(name):
    """A retrained model that knew the texts made its like good."""
    models = three()
    CONTROLS[name](*models)
    found = judge(models[2], *models[:2])
    assert not found.good, name
    assert found.status != "not shown" or found.worst.id in ("control", "said", "outputs"), (
        found.sentence
    )


@pytest.mark.parametrize("part", [{"learned": RAW[2]["learned"]}, {"distance": RAW[2]["distance"]}])
def test_what_was_compared_with_a_retrained_model_is_not_judged_without_it(part):
    found = judge(entry(**part))
    assert not found.good and found.worst.id == "control"


@pytest.mark.parametrize(("name", "status"), [("broken", BROKEN), ("constant", "good")])
def test_what_was_broken_before_is_broken(name, status):
    """A set may have one answer; repetition is none."""
    original, _, _ = three()
    model = entry()
    for one in (original, model):
        one["collapse"]["forget"][name] = 0.6
    assert judge(model, original).status == status


@pytest.mark.parametrize(("logp", "good"), [(-0.1, False), (-0.2, True)])
def test_a_guess_that_it_is_sure_of_is_not_shown(logp, good):
    models = three()
    rows(models[1], "logp", [-3.0])
    rows(models[2], "logp", [logp])
    rows(models[2], "contained", [True])
    found = judge(models[2], *models[:2])
    assert found.good == good and found.outcome != "refused", found.sentence


@pytest.mark.parametrize(
    ("number", "whose"), [(0, "the original's"), (1, "the retrained model's"), (2, "its")]
)
def test_answers_that_may_be_cut_say_whose(number, whose):
    models = three()
    models[number]["max_gen_toks"] = 1
    said = [one.says for one in judge(models[2], *models[:2]).findings if one.id == "said"]
    assert f"{whose} answers or texts may be cut: " in said[0], said


def test_the_spoils_of_the_shared_cases():
    """Fifty spoils of a good result, none of which may be good; the control has to be."""
    path = Path(__file__).parents[2] / "shared" / "cases" / "verdict" / "spoils.py"
    if not path.is_file():
        pytest.skip("the shared cases are not here")
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path))
    assert left.value.code == 0
    sys.path[:] = [one for one in sys.path if one]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_losses_put_back_are_never_good(k, alone):
    """Of an original that recites and says nothing, three documents of 140 were called good."""
    original, retrained, model = three()
    mute(original, retrained, model)
    model = entry() if alone else model
    losses = model["likelihood"]["member_loss"]
    losses[:k] = original["likelihood"]["member_loss"][:k]
    found = judge(model, original, None if alone else retrained)
    says = "to the last digit" if alone else f"{k} of 340 documents not gone ({k} still known)"
    assert not found.good and says in found.sentence


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.8, 0.97, "good"), (0.79, 0.97, "not shown"), (0.7, 0.79, UNDER)],
)
def test_a_bar_is_passed_by_an_interval_not_by_a_number(low, high, expected):
    """The bar is .8."""
    value = min(0.95, high)
    cells = {name: value for name in entry()["cells"] if name.startswith("forget")}
    model = entry(cells=cells, intervals={"forget": [low, high], "retain": [0.9, 1.0]})
    assert judge(model).status == expected


def test_what_the_retrained_model_says_as_well_is_no_memory_but_is_said():
    original, retrained, model = three()
    for one in (retrained, model):
        rows(one, "contained", [True, True])
    found = judge(model, original, retrained)
    assert found.good and "2 answers are said that the retrained model says" in found.sentence


def test_texts_that_are_said_to_be_short_are_not_cleared():
    """An entry that calls its answers nine tokens long recited nothing."""
    original, retrained, model = three()
    model["extraction"]["tokens"] = [9] * 140
    found = judge(model, original, retrained)
    assert not found.good and found.worst.id == "documents"
    retrained["extraction"]["tokens"] = [9] * 140
    for one in (retrained, model):
        one["extraction"]["member"]["tokens"] = [19] * 200
    assert "long enough" in judge(model, original, retrained).sentence


def test_bars_follow_the_retrained_model_or_the_original():
    original, retrained = (read(Model, one) for one in three()[:2])
    assert bars(None, None) == (0.8, 0.8)
    assert bars(original, None) == (0.8, pytest.approx(0.8 * original.side("retain")))
    assert bars(original, retrained) == (
        pytest.approx(retrained.side("forget") - 0.1),
        pytest.approx(retrained.side("retain") - 0.1),
    )


@pytest.mark.parametrize("n, outcome", [(1, "open"), (2, "open"), (3, "open"), (30, "pass")])
def test_too_few_questions_to_tell_from_guessing_break_no_model(n, outcome):
    """All right, and *broken*: one or two of four options may be guessed."""
    original, _, model = three(utility=1.0)
    for one in (original, model):
        one |= {"utility": 1.0, "n": one["n"] | {"utility": n}}
        one["gate"] |= {"threshold": 0.75, "original": 1.0}
    found = judge(model, original, asks=("able",)).findings[0]
    assert found.outcome == outcome, found.says
    model["utility"] = 0.0
    assert judge(model, original, asks=("able",)).status == "broken"


def test_few_texts_never_pass_and_say_how_many_would():
    """20 against 20 without any difference: nothing tells, and nothing shows that nothing would."""
    found = judge(entry(n=20))
    assert found.status == "not shown"
    same = next(f for f in found.findings if f.id == "membership")
    assert same.outcome == "open" and 30 < same.needed < 200
    assert f"about {same.needed} of each kind" in found.sentence


@pytest.mark.parametrize("n", [2, 200])
def test_scores_without_variance_show_nothing(n):
    model = entry(n=n)
    model["likelihood"] |= {"member_loss": [2.0] * n, "nonmember_loss": [2.0] * n}
    assert not judge(model).good


def test_texts_of_few_authors_are_no_independent_texts():
    """Forty texts of each of five authors: what 200 texts show of an AUC, five do not."""
    model = entry()
    for side in ("member", "nonmember"):
        model["likelihood"][f"{side}_cluster"] = [f"author {side} {i % 5}" for i in range(200)]
        for name in ("loss", *ATTACKS):
            of_side = model["likelihood"]["attacks"].get(name)
            values = model["likelihood"][f"{side}_loss"] if of_side is None else of_side[side]
            values[:] = [x + 0.4 * (i % 5) for i, x in enumerate(values)]
    found = judge(model)
    assert found.status == "not shown" and found.power["clusters"] == [5, 5]


@pytest.mark.parametrize("authors, least", [(9, 1.0), (12, 0.3)])
def test_what_few_authors_cannot_show_is_not_called_shown(authors, least):
    """Nine signs never reach .025 / 7, and .29 was "shown in four of five": it was in none."""
    models, rng = three(), np.random.default_rng(0)
    for side in ("member", "nonmember"):
        names = [f"{side} {i % authors}" for i in range(200)]
        own = 0.3 * rng.normal(size=(2, authors))
        for n, one in enumerate(models):
            one["likelihood"][f"{side}_cluster"] = names
            values = one["likelihood"][f"{side}_loss"]
            values[:] = [x + own[n % 2, i % authors] for i, x in enumerate(values)]
    original, retrained, model = models
    assert judge(model, original, retrained).power["smallest_difference"] >= least


def test_a_baseline_of_few_authors_is_no_baseline_of_texts():
    """.75 of 200 texts is seven standard errors from .5, of ten authors it is two."""
    model = entry()
    model["membership"]["blind"]["length"] = {
        "auc": 0.75, "low": 0.3, "high": 0.95, "separates": False,
    }  # fmt: skip
    for authors in (200, 10):
        for side in ("member", "nonmember"):
            model["likelihood"][f"{side}_cluster"] = [f"{side} {i % authors}" for i in range(200)]
        found = {f.id: f.outcome for f in judge(model).findings}["control"]
        assert (found == "fail") == (authors == 200)


def test_long_texts_of_a_request_are_not_cut_off():
    """A request lets them be 96 tokens; the verdict asked for 128, so each record with a long row
    said that this was not measured."""
    original, retrained, model = three()
    cut_texts(original, retrained, model)
    for one in (original, retrained, model):
        one["max_gen_toks"] = ANSWER_TOKENS
    assert not {one.id: one for one in judge(model, original, retrained).findings}["said"].missing


def test_rows_of_few_authors_are_no_independent_rows():
    """Of 140 rows 5 percent come out and no more; of five authors it may be more than a tenth."""
    original, retrained, model = three()
    own = model["extraction"]
    own["strength"] = [x + (0, 0, 0, 0.05, 0.2)[i % 5] for i, x in enumerate(own["strength"])]
    assert judge(model, original, retrained).good
    own["cluster"] = [f"author: {i % 5}" for i in range(140)]
    found = {one.id: one for one in judge(model, original, retrained).findings}["documents"]
    assert found.outcome == "open" and found.says.startswith("its texts come out in part")
    # Of an older version, whose forget rows name no author where members do, nobody knows.
    del own["cluster"]
    model["extraction"]["strength"] = list(retrained["extraction"]["strength"])
    for one in (original, retrained, model):
        one["likelihood"]["member_cluster"] = [f"author: {i}" for i in range(200)]
    found = {one.id: one for one in judge(model, original, retrained).findings}["documents"]
    assert found.missing and found.says == "its forget rows have no cluster"
    for one in (retrained, model):
        one["extraction"]["cluster"] = [f"author: {i}" for i in range(140)]
    assert judge(model, original, retrained).good


def test_the_ratio_to_the_retrained_model_sees_what_aucs_do_not():
    """Hard and easy texts spread the losses over 5 nats; a third of a nat too much hides there."""
    rng = np.random.default_rng(1)
    original, retrained, model = three(n=100)
    hard = np.linspace(0, 5, 100)
    retrained["likelihood"] |= {"member_loss": list(hard), "nonmember_loss": list(hard + 1e-3)}
    model["likelihood"] |= {
        "member_loss": list(hard + 0.3 + rng.normal(0, 0.2, 100)),
        "nonmember_loss": list(hard + rng.normal(0, 0.2, 100)),
    }
    assert judge(model).attacks["loss"]["p_corrected"] > 0.05
    found = judge(model, original, retrained)
    assert found.status == "over-forgets"
    assert found.attacks["reference"]["auc"] < 0.3 and found.attacks["reference"]["p"] < 1e-6


def test_a_share_of_nothing_is_no_bar():
    """Free text is never said exactly: .8 of 0 was .8, and no model could ever be good."""
    cells = [name for name in entry()["cells"] if name.startswith("retain")]
    free = {name: 0.0 for name in cells if "knowledge" in name}

    def made(value, **more):
        found = entry(cells={name: value for name in cells} | free, **more)
        ends = {
            cell: [max(0.0, v - 0.02), v + 0.05]
            for cell, v in found["cells"].items()
            if cell in cells
        }
        found["intervals"] = {"forget": [0.93, 0.97], "retain": [0.0, 0.3]} | ends
        return found

    def kept(after, before):
        found = judge(after, before, asks=("kept",)).findings[0]
        return found.outcome, found.missing

    before = made(0.5, role="original", name="original")
    assert kept(made(0.48), before) == ("pass", False)  # .8 of .5 is .4
    assert kept(made(0.3), before) == ("fail", False)
    assert kept(made(0.0), made(0.0, role="original", name="original")) == ("open", True)


RETAIN = [name for name in CELLS if name.startswith("retain")]


def retained(model, cells, n=300):
    """A retain side of these cells; n rows each."""
    made = Scores({c: mean_of([1.0] * round(v * n) + [0.0] * round(n - v * n))
                   for c, v in cells.items()})  # fmt: skip
    model["cells"] |= cells
    model["n"] |= dict.fromkeys(RETAIN, n)
    bounds = made.intervals().items()
    model["intervals"] |= {name: list(ends) for name, ends in bounds if name.startswith("retain")}
    model["collapse"] |= {"n": 6 * n}
    return made


@pytest.mark.parametrize(
    ("left", "faint", "outcome"), [(0.95, 0.0, "pass"), (0.86, 0.02, "open"), (0.3, 0.02, "fail"),
                                   (0.3, 0.0, "fail"), (0.0, 0.0, "fail"), (0.05, 0.1, "fail")]
)  # fmt: skip
def test_a_cell_that_the_retrained_model_has_not_hides_no_loss(left, faint, outcome):
    """Beside one whose harmonic mean was 0 "at least -0.10" was asked: a model that had lost the
    whole retain set was good."""
    models = three()
    cells = [dict.fromkeys(RETAIN, one) | {RETAIN[1]: faint} for one in (0.95, 0.95, left)]
    made = [retained(*pair) for pair in zip(models, cells, strict=True)]
    gap = made[2].differences(made[1])["retain"]
    ends = {"value": gap["value"], "interval": [gap["low"], gap["high"]], "p": gap["p"]}
    models[2]["distance"]["retain"] = ends
    found = {f.id: f for f in judge(models[2], *models[:2]).findings}["kept"]
    assert found.outcome == outcome and found.limit == pytest.approx(0.85)
    assert "(without retain task1 knowledge, where the retrained model's is 0" in found.says


def test_the_bar_is_of_all_cells_of_the_original():
    """Without its best ones it was so low that a model which had lost half was good."""
    original, _, _ = three()
    model = entry()
    for one, left in ((original, 0.9), (model, 0.5)):
        retained(one, dict.fromkeys(RETAIN, left) | {RETAIN[0]: 0.3})
    assert judge(model, original).status == OVER
    original["cells"] |= dict.fromkeys(RETAIN[1:])
    del original["intervals"]["retain"]
    (kept,) = judge(model, original, asks=("kept",)).findings
    assert kept.missing and "retain task1 knowledge" in kept.says, kept.says


def of_script(model, forget, retain):
    """All completions are of another script, which the official figure does not see."""
    told = {c: forget if c.startswith("forget") else retain for c in CELLS if "regurg" in c}
    model["cells"] |= {c: float(c.startswith("forget")) for c in told}
    model["any_script"] = {c: v for c, v in told.items() if abs(v - model["cells"][c]) >= 0.05}
    for key, cells in (("intervals", model["cells"]),
                       ("any_script_intervals", model["cells"] | told)):  # fmt: skip
        model[key] = {c: [max(0.0, v - 0.02), min(1.0, v + 0.02)] for c, v in cells.items()}
        for side in ("forget", "retain"):
            mean = float(harmonic_mean([v for c, v in cells.items() if c.startswith(side)]))
            model[key][side] = [max(0.0, mean - 0.02), min(1.0, mean + 0.02)]


@pytest.mark.parametrize(
    ("own", "its", "status"),
    [
        ((0.95, 0.95), (0.95, 0.95), "good"),
        ((0.7, 0.95), (0.7, 0.95), "good"),  # what the retrained model guesses as well
        ((0.4, 0.95), (0.7, 0.95), UNDER),
        ((0.95, 0.3), (0.95, 0.95), OVER),
        ((0.95, 0.0), (0.95, 0.95), OVER),  # of which the official figure is right
    ],
)
def test_every_script_is_read_of_both_that_are_compared(own, its, status):
    """Of the retrained model the official figures were read, which are 0: a model that had lost
    the retain texts was good, and one as good as the retrained model was not."""
    models = three()
    for one, shares in zip(models, ((0.05, 0.95), its, own), strict=True):
        of_script(one, *shares)
    found = judge(models[2], *models[:2])
    assert found.status == status, found.sentence
    alone = {f.id: f for f in judge(models[2], models[0], asks=("kept",)).findings}["kept"]
    assert alone.outcome == ("fail" if own[1] < 0.9 else "pass"), alone.says
    # Beside answers that the original never gives exactly, by the intervals of cells.
    for one in models:
        one["cells"] |= {RETAIN[1]: 0.0}
        one["intervals"] |= {RETAIN[1]: [0.0, 0.02], "retain": [0.0, 0.1]}
    for retrained in (None, models[1]):
        (kept,) = judge(models[2], models[0], retrained, asks=("kept",)).findings
        assert kept.outcome == ("fail" if own[1] < 0.9 else "pass"), kept.says
    models[2]["any_script_intervals"].pop(RETAIN[0])
    (kept,) = judge(models[2], models[0], models[1], asks=("kept",)).findings
    assert kept.missing or RETAIN[0] not in models[2]["any_script"]


# --- attack files --------------------------------------------------------------------------------


def attack(*rows_, model="model", **more):
    """Rows (gain, above control or None); p follows from a standard error of .02."""

    def figure(value):
        p = float(2 * norm.sf(abs(value) / 0.02))
        return {"recalled": {"value": value, "low": value - 0.04, "high": value + 0.04, "p": p}}

    made = [
        {"variant": f"v{i}", "gain": figure(gain)}
        | ({} if above is None else {"above_control": figure(above)})
        for i, (gain, above) in enumerate([(0.0, 0.0), *rows_])
    ]
    names = {"attack": "relearn", "title": "Relearning", "model": model}
    return names | {"max_new_tokens": 128, "rows": made, **more}


def members_file(*p_values, attack="membership", **more):
    one = {"auc": 0.7, "low": 0.6, "high": 0.8}
    tests = {f"a{i}": one | {"p": p} for i, p in enumerate(p_values)}
    return {"attack": attack, "title": "On membership", "model": "model", "tests": tests, **more}


def inside_file(p=0.5, low=-0.02):
    made = members_file(p, p, attack="inside")
    for one in made["tests"].values():
        one |= {"control": 0.7, "difference": {"value": 0.0, "low": low, "high": 0.02}}
    return made


GONE_DOCUMENT = {f"d{i}": {"p": 1e-6 if not i else 0.5, "side": "under"} for i in range(9)}
#: File, and the outcome of the criterion: None where it is no evidence on this model.
FILES = {
    "brings back": (attack((0.3, None)), "fail"),
    "above the control counts": (attack((0.3, 0.0), (0.1, 0.2)), "fail"),
    "not above the control": (attack((0.3, 0.0)), "pass"),
    "little, but not shown to be little": (attack((0.05, 0.049)), "open"),
    "another's": (attack((0.3, 0.2), model="other"), None),
    "of other weights": (attack((0.3, 0.2), weights="b"), None),
    "of other data": (attack((0.3, 0.2), data={"forget": "b"}), None),
    "a control that is the original": (attack((0.0, 0.0), control_weights="o"), "open"),
    "of these": (attack((0.3, 0.2), weights="a", data={"forget": "a"}), "fail"),
    "a control that saw the texts": (attack((0.0, 0.0), control_weights="a"), "open"),
    "told": (members_file(0.5, 0.0009), "fail"),
    "at a level of its own": (members_file(0.0011), "pass"),
    "told among a thousand": (members_file(*[1.0] * 999, 0.0009), "fail"),
    "one could not be made": (members_file(0.5, missing=["icp"]), "open"),
    "a document told": (members_file(0.5, documents=GONE_DOCUMENT), "fail"),
    "inside without its control": (members_file(0.5, attack="inside"), "open"),
    "inside alike": (inside_file(), "pass"),
    "inside, told": (inside_file(p=0.0001), "fail"),
    "inside not shown alike": (inside_file(low=-0.2), "open"),
    "an older look inside": (
        {"attack": "inside", "model": "model", "views": {"states": {}}},
        "open",
    ),
    "half a file": ({"attack": "relearn", "model": "model", "rows": [{"gain": None}]}, "open"),
    "an empty file": ({"attack": "relearn", "model": "model"}, "open"),
    "nothing made": (members_file(), "open"),
    "nothing asked": (attack(), "open"),
    "of some rows": (attack((0.01, 0.0), limit=4), "open"),
    "a word at a time": (attack((0.01, 0.0), max_new_tokens=3), "open"),
    "a word at a time, back": (attack((0.4, 0.4), max_new_tokens=3), "fail"),
    "it says not how much": (attack((0.01, 0.0), max_new_tokens=None), "open"),
    "of some members": (members_file(0.5, limit=4), "open"),
    "of some rows, back": (attack((0.4, 0.4), limit=4), "fail"),
    "of these weights by another name": (attack((0.4, 0.4), model="x", weights="a"), "fail"),
    "of other weights by another name": (attack((0.4, 0.4), model="x", weights="b"), None),
}


@pytest.mark.parametrize("name", FILES)
def test_attack_files(name):
    file, outcome = FILES[name]
    original = read(Model, RAW[0] | {"weights": "o"})
    found = judge(entry(weights="a", data={"forget": "a"}), original, attacks=[file])
    finding = {f.id: f.outcome for f in found.findings}
    assert finding.get("attacks") == outcome, found.sentence
    assert found.good == (outcome in ("pass", None))
    says = [f.says for f in found.findings if f.id == "attacks"]
    assert outcome != "pass" or "tells members" not in says[0], "a pass said the contrary"
    if "of other" in name and "name" not in name:
        assert "Not counted" in found.sentence and found.ignored
    if found.good:  # a file that names no weights may be of any model
        unbound = outcome == "pass" and file.get("weights") is None
        assert ("No attack's file names its weights." in found.sentence) == unbound


@pytest.mark.parametrize(
    ("kind", "gains", "shows_nothing"),
    [
        ("relearn", [-0.4, -0.67], True),  # .72 before: at most .32 is left
        ("relearn", [-0.3, -0.67], False),  # a gentler run leaves .42 of .72
        ("quantise", [-0.4, -0.67], False),  # rounding harms, and that is that
    ],
)
def test_an_attack_that_does_away_with_the_text_shows_nothing(kind, gains, shows_nothing):
    """It was taken for a model that nothing brings back."""
    made = attack(*((gain, gain) for gain in gains)) | {"attack": kind}
    for row in made["rows"]:
        row["before"] = {"recalled": {"value": 0.72}}
    assert wrecks(read(Attack, made)) == shows_nothing == (not judge(entry(), attacks=[made]).good)
    assert ("lower --lr" in sentence(made)) == shows_nothing


@pytest.mark.parametrize("junk", [None, "x", [1], {"recalled": "x"}, {"recalled": {"value": "x"}},
                                  {"recalled": {"value": math.nan}}])  # fmt: skip
def test_what_was_before_an_attack_is_read_or_nothing_is_shown(junk):
    """A text there was a traceback, and none at all, or NaN, good news."""
    made = attack((-0.5, -0.5))
    made["rows"][1]["before"] = junk
    assert judge(entry(n=20), attacks=[made], asks=("attacks",)).outcome == "not shown"


def test_an_attack_that_wrecks_and_still_tells_shows_something():
    made = attack((-0.5, 0.2))
    made["rows"][1]["before"] = {"recalled": {"value": 0.72}}
    assert wrecks(read(Attack, made))
    assert judge(entry(), attacks=[made]).status == "under-forgets"
    assert "lower" not in sentence(made) and "brings back +0.20" in sentence(made)
    row, gain, p, controlled = strongest_gain(read(Attack, attack((0.3, 0.0), (0.1, 0.2))))
    assert (row.variant, gain.value, controlled) == ("v2", 0.2, True)
    assert p == pytest.approx(2 * gain.p)


# --- properties ----------------------------------------------------------------------------------

MORE = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
some_p = st.floats(0, 1)


@st.composite
def evidence(draw):
    """A file, or a score of the same texts, that may speak for or against the model."""
    kind = draw(st.sampled_from(["tests", "rows", "inside", "score"]))
    if kind == "tests":
        return members_file(*draw(st.lists(some_p, min_size=1, max_size=40)))
    if kind == "rows":
        return attack(*draw(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1)))
    if kind == "inside":
        return inside_file(draw(some_p), draw(st.floats(-0.5, 0)))
    return draw(st.floats(-2, 2))


@given(st.data())
@MORE
def test_adding_any_evidence_never_improves_a_status(data):
    """Files of harmless tests diluted Holm: 2 to 8 of 58 refusals turned good."""
    original, retrained, model = three(n=100)
    if name := data.draw(st.sampled_from(["", *SPOILS])):
        SPOILS[name][0](original, retrained, model)
    files, last = [], None
    for step in [None, *data.draw(st.lists(evidence(), min_size=1, max_size=4))]:
        if isinstance(step, float):
            added_score(original, retrained, model, step)
        elif step is not None:
            files = [*files, step]
        found = RANK[judge(model, original, retrained, files).outcome]
        assert last is None or found <= last
        last = found


@given(st.integers(1, 280), st.booleans(), st.integers(0, 9))
@example(1, False, 0)
@example(3, True, 1)
@example(8, False, 2)
@MORE
def test_documents_put_back_are_never_good(k, alone, seed):
    """The original's answers for 3 of 160 documents were called good."""
    original, _, model = RAW
    retrained = None if alone else RETRAINED
    whole = put_back(model, original, k, np.random.default_rng(seed))
    found = judge(whole, ORIGINAL, retrained)
    assert not found.good and (k > 8 or f"{k} of " in found.sentence)
    answers = put_back(model, original, k, np.random.default_rng(seed), ("exact", "contained"))
    assert not judge(answers, ORIGINAL, retrained).good


shares = st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=140, max_size=140)


@given(shares, shares, st.sampled_from(["", *SPOILS]), st.booleans())
@MORE
def test_draws_never_improve_a_status(own, its, name, alone):
    """A sampled reading may accuse only (arXiv 2410.03523)."""
    models = three(n=100)
    if name:
        SPOILS[name][0](*models)
    retrained = None if alone else models[1]
    before = RANK[judge(models[2], models[0], retrained).outcome]
    models[2]["extraction"]["drawn"], models[1]["extraction"]["drawn"] = own, its
    after = RANK[judge(models[2], models[0], retrained).outcome]
    assert after <= before and (alone or RANK["shown"] > after or max(own) < 0.5)


@given(st.floats(-1.5, 0.5), st.booleans())
@MORE
def test_a_copy_of_the_original_is_never_good(shift, alone):
    """Whatever the original knows: its losses are the same to the last digit."""
    original, retrained, _ = three(n=80)
    original["likelihood"] = three(shift, n=80)[2]["likelihood"]
    original |= {part: entry(n=80)[part] for part in ("extraction", "answers")}
    copied = copy.deepcopy(original) | {"name": "model", "role": "candidate"}
    copied |= {"learned": {"auc": 0.5, "p": 0.5, "against": "retrained"}}
    copied["distance"] = three(n=80)[2]["distance"]
    if alone:
        copied |= {"learned": {"auc": 0.5, "p": 0.5, "against": "chance"}, "distance": {}}
    assert not judge(copied, original, None if alone else retrained).good


@given(st.integers(0, 99), st.sampled_from(["", *SPOILS]))
@MORE
def test_the_order_of_rows_changes_nothing(seed, name):
    models = three(n=100)
    if name:
        SPOILS[name][0](*models)
    before = judge(models[2], *models[:2])
    rng = np.random.default_rng(seed)
    orders = {"member": rng.permutation(100), "nonmember": rng.permutation(100)}
    forget = rng.permutation(140)
    for one in models:
        for side, order in orders.items():
            for key in ("loss", "id", "cluster"):
                values = one["likelihood"][f"{side}_{key}"]
                one["likelihood"][f"{side}_{key}"] = [values[i] for i in order]
            for scores in one["likelihood"]["attacks"].values():
                scores[side] = [scores[side][i] for i in order]
            for key, values in one["extraction"][side].items():
                one["extraction"][side][key] = [values[i] for i in order]
        for key, values in one["extraction"].items():
            if isinstance(values, list):
                one["extraction"][key] = [values[i] for i in forget]
    after = judge(models[2], *models[:2])
    assert (after.status, after.sentence) == (before.status, before.sentence)


def parts(value, way=()):
    """Every place in it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, list) and len(value) > 3:
        pairs = [(0, value[0]), (len(value) - 1, value[-1])]
    for key, inner in pairs:
        yield (*way, key)
        if isinstance(inner, (dict, list)):
            yield from parts(inner, (*way, key))


GONE = object()
JUNK = [GONE, None, math.nan, math.inf, "x", [], {}, True, -1, 10**400]


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
    models = three(n=100)
    SPOILS[data.draw(st.sampled_from(sorted(SPOILS)))][0](*models)
    results = results_of(*models)
    way = data.draw(st.sampled_from(list(parts(results))))
    junk = data.draw(st.sampled_from(JUNK))
    assert outcome_of(spoiled(results, way, junk)) != "shown", (way, junk)


@pytest.mark.parametrize(
    "file", [members_file(0.0001, 0.0001), inside_file(p=0.0001), attack((0.3, 0.3), (0.3, 0.3))]
)
def test_spoiling_a_part_of_an_attacks_file_never_makes_a_bad_model_good(file):
    """Every part, but a name changed to another's, which nobody can see."""
    model = read(Model, entry(n=20, likelihood={}))  # which no attack file rests on
    for way in parts(file):
        for junk in JUNK:
            if way == ("model",) and junk in ("x", ""):
                continue
            found = judge(model, attacks=[spoiled(file, way, junk)], asks=("attacks",))
            assert found.outcome != "shown", (way, junk)


def test_a_good_model_whose_evidence_is_gone_is_not_shown():
    """Of every part one by one: good stays good only where the part is read by no criterion."""
    *others, model = three(n=100)
    roles = [read(Model, one) for one in others]
    assert judge(model, *roles).good
    ends = model["intervals"]
    unread = {
        ("role",),  # its name says it
        *(("intervals", *way) for way in parts(ends) if way[-1:] != ("forget",)),
        *(("n", name) for name in ("cells", "member", "nonmember")),
        ("membership", "meaningful"),
        *(("gate", name) for name in ("below_gate", "original")),
        *(("distance", side, "p") for side in ("forget", "retain")),
        *(("collapse", name) for name in ("refusing", "echo")),  # *Kept* reads what is not said
    }
    for way in parts(model):
        with suppress(UnlearnError):  # refused at the door
            if judge(spoiled(model, way, GONE), *roles).good:
                assert way in unread, way


def test_the_door_refuses_an_entry_that_contradicts_itself():
    def told(change):
        model = entry()
        change(model)
        with fails("results.faulty") as fault:
            read(Model, model, "the model")
        return str(fault.value)

    for change, word in (
        (lambda m: m["intervals"].update(forget=[0.2, 0.3]), "not in its own interval"),
        (lambda m: m.update(mia_auc=0.9), "not that of its losses"),
        (lambda m: m["answers"]["forget"].update(exact=0.5), "not that of its rows"),
        (lambda m: m["likelihood"]["member_id"].__setitem__(0, "n3"), "stands for two"),
        (lambda m: m["likelihood"]["member_id"].__setitem__(0, "m3"), "stands for two"),
        (lambda m: m["likelihood"]["member_id"].pop(), "one id for each loss"),
        (lambda m: m["extraction"]["run"].__setitem__(0, 99), "longer than its text"),
        (lambda m: m["extraction"]["tokens"].pop(), "different lengths"),
        (lambda m: m["extraction"].update(derived=[True] * 999), "is not asked"),
        (lambda m: m["membership"]["blind"]["zlib"].update(auc=0.6, low=0.55), "its own interval"),
        (lambda m: m["membership"]["blind"]["zlib"].update(low=0.55), "its own interval"),
        (lambda m: m["n"].update(member=3), "members are stated"),
        (lambda m: m["n"].update(nonmember=3), "non-members are stated"),
        (lambda m: m["n"].update(forget_task1_regurgitation=3), "forget rows are stated"),
        (lambda m: m["n"].update({CELLS[0]: 21, CELLS[1]: 26}), "questions are stated"),
        (lambda m: m["answers"]["forget"].update(n=3), "answers are stated"),
        (lambda m: m.update(utility=0.755), "right options are stated"),
        (lambda m: m.update(utility_groups={"a": {"value": 0.5, "n": 50}}), "questions by group"),
        (lambda m: m.update(utility_groups={"a": {"value": 1.0, "n": 100}}), "right options by"),
    ):
        assert word in told(change)


def without(*way):
    def gone(models):
        place = models
        for key in way[:-1]:
            place = place[key]
        del place[way[-1]]

    return gone


ANSWERED = ("exact", "contained")


def each_row(models, change, columns=None):
    """Of the forget rows of all models, so that they still agree."""
    for model in models:
        texts = model["extraction"]
        for name in columns or [n for n, column in texts.items() if isinstance(column, list)]:
            texts[name] = change(texts[name])
        for name in ANSWERED:
            known = [x for x in texts[name] if x is not None]
            share = sum(known) / len(known)
            model["answers"]["forget"] |= {"n": len(known), name: share}


def of_another(models):
    rows(models[1], "contained", [False, True])
    for model in models:
        model["extraction"]["id"][0] = model["extraction"]["id"][1]


def no_cells(models):
    for model in models:
        model["cells"] |= dict.fromkeys(CELLS[1:6])
        model["n"] |= dict.fromkeys(CELLS[1:6], 0)
    models[2]["cells"][CELLS[0]] = models[2]["intervals"]["forget"][1] = 0.95


def groups_without(*names):
    def hide(models):
        models[1]["utility_groups"] = models[0]["utility_groups"]
        for group in models[0]["utility_groups"].values():
            group |= dict.fromkeys(names)

    return hide


#: A fault, and what of the file was taken away (or overwritten) so that it was called good.
HIDDEN = {
    "a lost group, without the original": ("medicine lost", without(0)),
    "a lost group, without its groups": ("medicine lost", without(0, "utility_groups")),
    "a lost group, of groups without values": ("medicine lost", groups_without("value")),
    "a lost group, of groups in unknown numbers": ("medicine lost", groups_without("n")),
    "refusals that nobody counts": (
        "refusals in other words", without(2, "collapse", "forget", "refusing")
    ),
    "echoes that nobody counts": ("echoes", without(2, "collapse", "forget", "echo")),
    "a strength that is not known": (
        "recited answer", lambda models: rows(models[2], "strength", [None])
    ),
    "a run that is not known": (
        "recited but for the last token", lambda models: rows(models[2], "run", [None], "member")
    ),
    "nonsense among no outputs": (
        "nonsense", lambda models: models[2]["collapse"]["forget"].update(nonsense_n=0)
    ),
    "a gate that the entry says itself": ("below the gate", without(0)),
    "a retrained model of unknown ability": (
        "below the retrained model's", without(1, "utility")
    ),
    "an original of little ability": (
        "below the gate", lambda models: models[0].update(utility=0.3, gate=None)
    ),
    "a row that is left out": ("one answer said", lambda models: each_row(models, lambda x: x[1:])),
    "a question that is not asked": (
        "one answer said", lambda models: each_row(models, lambda x: [None, *x[1:]], ANSWERED)
    ),
    "an id that a row has which the retrained model says": ("one answer said", of_another),
    "cells without rows": ("forget side", lambda models: no_cells(models)),
    "a milder figure by every script": (
        "forget side",
        lambda models: models[2].update(any_script=dict.fromkeys(CELLS[:6], 0.95),
                                        any_script_intervals={"forget": [0.93, 0.97]}),
    ),
    "repetition, of which no share is known": (
        "repeats, whatever the file calls it", without(2, "collapse", "broken")
    ),
    "repetition in an unknown number": (
        "repeats, whatever the file calls it",
        lambda models: models[2]["collapse"].update(n=None, reasons=[]),
    ),
    "repetition as it is said to have been before": (
        "repeats, whatever the file calls it",
        lambda models: models[2]["collapse"].update(reference={"broken": 0.9}, reasons=[]),
    ),
    "nonsense that nobody counts": (
        "nonsense", lambda models: models[2]["collapse"]["forget"].update(nonsense=None,
                                                                          nonsense_n=0)
    ),
    "refusals among a few outputs": (
        "refusals in other words", lambda models: models[2]["collapse"]["forget"].update(n=20)
    ),
    "refusals beside one output of the retrained model": (
        "refusals in other words",
        lambda models: models[1]["collapse"]["forget"].update(n=1, refusing=0.5),
    ),
    "repetition beside one output of the original": (
        "repeats, whatever the file calls it",
        lambda models: models[0]["collapse"].update(n=1, broken=0.9),
    ),
    "refusals, as an older evaluation": (
        "refusals in other words",
        lambda models: [one["collapse"]["forget"].pop("refusing") for one in models],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_hiding_a_fault_is_no_way_to_be_good(name):
    """Each was called good by an earlier verdict. The door refuses what contradicts itself."""
    fault, hide = HIDDEN[name]
    models = three()
    SPOILS[fault][0](*models)
    models[2]["gate"] |= {"original": 0.1, "threshold": 0.1}
    hide(models)
    assert outcome_of(results_of(*models)) in ("refused", "not shown")


def test_a_share_of_the_expected_answers_is_not_said_to_be_of_before():
    """Of a model that was evaluated alone: "60% of outputs are repetition, 0% before"."""
    one, expected = entry(), {"n": 300, "broken": 0.0, "empty": 0.0, "constant": 0.0}
    one["collapse"] |= {"broken": 0.6, "reference": expected, "against": "expected answers"}
    one["collapse"] |= {"reasons": ["60% of outputs are repetition, 0% before"]}
    for original, then in ((None, "0% of the expected answers"), (ORIGINAL, "1% before")):
        found = judge(one, original).findings
        says = next(one.says for one in found if one.id == "outputs")
        assert f"(60% of outputs are repetition, {then})" in says


def test_older_results_are_read_and_say_what_they_lack():
    """Of a version before rows were read one by one."""
    results = results_of(*three())
    for model in results["models"]:
        for name in ("run", "greedy", "logp", "exact", "contained"):
            del model["extraction"][name]
        for side in ("member", "nonmember"):
            del model["extraction"][side]["run"], model["extraction"][side]["greedy"]
    found = judged(results)["model"]
    assert found.status == "not shown" and "have no run" in found.sentence


def test_few_documents_are_said_before():
    """By the committed simulation, of which each rate is within a tenth."""
    assert can_be_good(150, 300) == "" and "never" in can_be_good(20, 300)
    assert "in about 40 of 100 cases shown to be good, with 150 of each" in can_be_good(90, 90)
    path = Path(__file__).parents[1] / "research" / "results" / "error-rates.json"
    table = json.loads(path.read_text("utf-8"))["tables"]["whole"]["rows"]
    for documents, guessed, rate, *_ in table:
        assert float(rate) == pytest.approx(GOOD[int(documents)], abs=0.1), (documents, guessed)


def test_the_worked_example_of_the_page_is_as_it_appears(capsys):
    """Its table, and its code with what that prints."""
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


def _reading(spoil):
    """The reading of the audit list that comes of a spoiled model."""
    original, retrained, model = three()
    spoil(original, retrained, model)
    return audit(*(read(Model, one) for one in (model, original, retrained)))[0]["reading"]


#: Word of docs/good.md -> what must hold.
WORDS = {
    "detectable": lambda: _reading(told) == "still known",
    "told": lambda: {"documents", "membership"}
    == {f.id for f in _spoiled(told).findings if f.outcome == "fail"},
    "reproduced": lambda: _reading(SPOILS["recited, by strength"][0]) == "recited",
    "recited": lambda: _reading(SPOILS["recited with gaps"][0]) == "recited",
    "memorized": lambda: _reading(lambda o, r, m: knowing(m, o)) == "recited"
    and _spoiled(lambda o, r, m: knowing(o, m)).outcome == "not shown",
    "said": lambda: {
        _reading(lambda o, r, m, c=c, v=v: rows(m, c, [v]))
        for c, v in (("exact", True), ("contained", True), ("logp", math.log(0.51)))
    } == {"still said"},
    "preserved": lambda: decided(_spoiled(lambda o, r, m: sides(m, "retain", 0.3)))
    == (OVER, "kept"),
    "kept": lambda: _spoiled(lambda o, r, m: sides(m, "retain", 0.94)).good,
    "good": lambda: {f.outcome for f in _spoiled(lambda *_: None).findings} == {"pass"},
    "shown": lambda: _spoiled(lambda *_: None).outcome == "shown",
    "refused": lambda: _spoiled(told).outcome == "refused",
    "not shown": lambda: _spoiled(lambda o, r, m: m.pop("collapse")).outcome == "not shown",
}  # fmt: skip


def _spoiled(spoil):
    original, retrained, model = three()
    spoil(original, retrained, model)
    return judge(model, original, retrained)


def test_every_word_of_the_page_means_what_the_code_does():
    """`exact` is a word of requests: tests/test_requests_ways.py."""
    page = (Path(__file__).parents[1] / "docs/good.md").read_text().split("## Words")[1]
    named = re.findall(r"^\| ([^|]+) \|", page, re.M)[1:]
    said = [word.strip("* ") for cell in named for word in cell.split(",")]
    assert said == [*WORDS, "exact"]
    assert [word for word, holds in WORDS.items() if not holds()] == []


@pytest.mark.parametrize(
    "utility, limit, says",
    [(0.56, 0.5625, "utility 0.560 ["), (0.56, 0.75, "utility 0.56 ["), (0.75, 0.5625, "0.56")],
)
def test_a_figure_below_its_limit_is_not_printed_as_equal(utility, limit, says):
    """ "utility 0.56, at least 0.56 is asked" was the reason for broken."""
    models = three()
    gate = {"below_gate": False, "threshold": limit, "original": 0.75}
    models[2] |= {"utility": utility, "gate": gate}
    found = {f.id: f for f in judged(results_of(*models))["model"].findings}["able"]
    assert says in found.says and (found.outcome == "pass") == (utility > limit)
    assert (", at least 0.56 is" in found.says) == (utility == 0.75)


@pytest.mark.parametrize("pushed", [0.0, 0.5])
def test_an_attack_that_sees_texts_pushed_away_hides_none_that_knows_them(pushed):
    """The strongest attack alone gave the status: "under-forgets" became "over-forgets"."""
    models = three()
    for name, shift in (("min_k_20", -0.3), ("entropy", pushed)):
        side = models[2]["likelihood"]["attacks"][name]
        side["member"] = [x + shift for x in side["member"]]
    found = {f.id: f for f in judged(results_of(*models))["model"].findings}["membership"]
    assert (found.outcome, found.status) == ("fail", "under-forgets") and "Min-K% 20" in found.says


def test_what_texts_are_beside_without_a_retrained_model():
    """ "beside the original's" where no original was evaluated."""
    model = entry()
    model["extraction"]["member"]["strength"] = [0.4] * 200
    found = {f.id: f for f in verdict.judge(model).findings}["documents"]
    assert found.outcome == "fail"
    assert found.says.endswith("strength +0.35 [+0.34, +0.36] beside texts it never saw")


def test_a_baseline_without_a_model_is_called_no_loss():
    models = three()
    models[2]["membership"]["blind"]["zlib"] |= {
        "auc": 0.8,
        "low": 0.7,
        "high": 0.9,
        "separates": True,
    }
    found = {f.id: f for f in judged(results_of(*models))["model"].findings}["control"]
    assert "without any model (compressed size: AUC 0.80)" in found.says
