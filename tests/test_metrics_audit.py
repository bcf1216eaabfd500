"""The audit list: one document at a time, by hand."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from axolotl_unlearn.metrics.audit import READINGS, audit, summary_of, unlikely
from axolotl_unlearn.metrics.results import Model, Row, read


def model(*shifts, **facts):
    return read(Model, facts_of(*shifts, **facts))


def facts_of(a=0.0, b=0.0, c=0.0, said=(False, False), **extraction):
    """Non-members around 2 nats; a, b, c that much below; rows of a, b and d, which is in no member
    file."""
    others = np.random.default_rng(0).normal(2, 0.1, 99).tolist()
    rows = {
        "id": ["a1sc1", "a1qa0", "b1sc1", "b1qa0", "d1sc1"],
        "document": list("aabbd"),
        "tokens": [20, 5, 20, 5, 9],
        "strength": [0.1, 0.4, 0.0, 0.0, 1.0],
        "run": [2, 2, 2, 1, 9],
        "greedy": [0.2, 0.4, 0.1, 0.2, 1.0],
        "logp": [-40.0, -20.0, -40.0, -20.0, -9.0],
        "exact": [None, False, None, False, None],
        "contained": [None, said[0], None, said[1], None],
        "member": texts(3),
        "nonmember": texts(99),
    }
    likelihood = {
        "member_loss": [2 - a, 2 - b, 2 - c],
        "nonmember_loss": others,
        "member_id": list("abc"),
        "nonmember_id": [f"n{i}" for i in range(99)],
    }
    return {"name": "model", "likelihood": likelihood, "extraction": rows | extraction}


def texts(n, **columns):
    return {
        "tokens": [60] * n,
        "strength": [0.1] * n,
        "run": [4] * n,
        "greedy": [0.3] * n,
    } | columns


def by_name(lines):
    return {line["document"]: line for line in lines}


def test_readings_worst_first():
    lines = audit(model(b=1.0, c=-1.0, said=(True, False)))
    assert [line["document"] for line in lines] == ["a", "b", "c", "d"]
    assert [line["reading"] for line in lines] == [*READINGS[1:4], "not measured"]
    found = by_name(lines)
    # 1 nat is 10 standard deviations: the strangest of a pool of 100.
    assert found["b"]["p"] == found["c"]["p"] == 0.01 and found["b"]["told"]
    assert found["b"]["loss"] == 1.0 and found["b"]["rank"] == 0.0 and found["c"]["rank"] == 1.0
    assert (found["a"]["extraction_strength"], found["a"]["answers_said"]) == (0.4, 1)
    assert found["c"]["extraction_strength"] == 0.1, "of its text; the list said n/a"
    assert found["d"]["p"] is None and found["d"]["extraction_strength"] == 1.0
    # p .01, .01 and that of a, the largest: Benjamini-Hochberg gives .01 * 3 / 2.
    assert found["b"]["q"] == 0.015
    json.dumps(lines, allow_nan=False)


def test_the_retrained_model_is_the_floor():
    """What it says, too, is no leak; and a text that is easy for it, too, is not told."""
    target = model(b=1.0, said=(True, False))
    lines = by_name(audit(model(b=1.01, said=(True, False)), retrained=target))
    assert {lines[name]["reading"] for name in "abc"} == {"not told"}
    assert lines["a"]["retrained"]["answers_said"] == 1
    alone = by_name(audit(model(b=1.0, c=-1.0, said=(True, False)), model(b=1.0)))
    assert alone["a"]["reading"] == "still said" and alone["b"]["reading"] == "still known"
    assert alone["b"]["before"]["loss"] == 1.0


def test_what_both_say_is_not_called_unsaid():
    """In no member file it read "not said" beside "Answer said: yes"."""
    rows = {"document": list("ddddd"), "member": texts(3)}
    for mine, its, reading in (
        (True, True, "said alike"), (True, False, "still said"), (False, True, "not said"),
    ):  # fmt: skip
        pair = (model(said=(one, False), **rows) for one in (mine, its))
        line = by_name(audit(next(pair), retrained=next(pair)))["d"]
        assert (line["reading"], line["answer_said"]) == (reading, mine)


@pytest.mark.parametrize(
    ("logp", "reading"),
    [(-20.0, "still said"), (-4.0, "still said"), (-3.0, "may be guessed"), (None, "still said")],
)
def test_an_answer_that_can_be_guessed_is_no_memory(logp, reading):
    """Answers of .018 (-4 nats) and less come with a chance of .025 together, one of .05 does
    not."""
    target = model(logp=[-40.0, logp, -40.0, -20.0, -9.0])
    lines = by_name(audit(model(a=0.01, said=(True, False)), retrained=target))
    assert lines["a"]["reading"] == reading


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("derived", [None, False, True])
def test_an_answer_that_follows_from_its_question_is_no_memory(derived, alone):
    """It may be guessed, however unlikely its tokens, and is not recited; the other answer is."""
    mine = {"tokens": [20, 12, 20, 12, 9], "strength": [0.1, 1.0, 0.0, 1.0, 1.0]}
    if derived is not None:
        mine["derived"] = [None, derived, None, False, None]
    target = model(tokens=[20, 12, 20, 12, 9], strength=[0.1, 0.0, 0.0, 0.0, 1.0])
    found = by_name(audit(model(said=(True, True), **mine), retrained=None if alone else target))
    expected = "recited" if not derived else "still said" if alone else "may be guessed"
    assert found["a"]["reading"] == expected and found["b"]["reading"] == "recited"


def test_unlikely_answers_are_counted_together():
    rows = [
        Row(str(i), "d", logp=math.log(q), exact=False) for i, q in enumerate((0.01, 0.014, 0.1))
    ]
    assert unlikely(rows) == pytest.approx(0.014)  # .024 together, with .1 more than .025
    assert unlikely([*rows, Row("x", "d", logp=-0.1, exact=True)]) == pytest.approx(0.014)
    assert unlikely([]) == 0 and unlikely(rows[2:]) == 0


def test_an_answer_that_is_likely_counts_as_said():
    """One greedy output of five tokens may miss what the model knows."""
    found = by_name(audit(model(logp=[-40.0, -0.6, -40.0, -0.8, -9.0])))
    assert found["a"]["reading"] == "still said" and found["b"]["answers_said"] == 0


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("own", [0.0, 0.49, 0.5, 1.0])
@pytest.mark.parametrize("its", [None, 0.0, 1.0])
def test_draws_accuse_and_excuse_nobody(greedy, own, its):
    """What the greedy output says stays said, whatever is drawn; and what the retrained model draws
    shields no answer that it does not give."""
    drawn = [0.0, own, 0.0, 0.0, 0.0]
    theirs = {} if its is None else {"drawn": [0.0, its, 0.0, 0.0, 0.0]}
    found = by_name(audit(model(said=(greedy, False), drawn=drawn), retrained=model(**theirs)))
    expected = "still said" if greedy or own >= 0.5 else "not told"
    assert found["a"]["reading"] == expected and found["b"]["reading"] == "not told"


def test_of_several_texts_of_a_document_the_worst_counts():
    facts = facts_of(a=1.0, c=-1.0)
    facts["likelihood"]["member_document"] = ["a", "b", "a"]
    facts["extraction"]["member"] = texts(3, run=[4, 4, 30], strength=[0.1, 0.1, 0.3])
    found = by_name(audit(read(Model, facts)))
    assert (found["a"]["loss"], found["a"]["rank"], found["a"]["longest_run"]) == (1.0, 0.0, 30)
    facts["extraction"] |= {"exact": [None] * 5, "contained": [None, True, None, None, None]}
    facts["extraction"] |= {"document": list("aabbd"), "exact": [False, True, None, None, None]}
    found = by_name(audit(read(Model, facts)))
    assert found["a"]["answer_said"] and found["a"]["answers_said"] == 1


@pytest.mark.parametrize(("p", "expected"), [(0.001, 0.002), (0.4, 0.02), (None, 0.02)])
def test_of_the_learned_attack_and_the_others_the_smaller_p_counts_twice(p, expected):
    facts = facts_of(b=1.0)
    facts["learned"] = {"auc": 0.5, "p": 0.5, "documents": {"b": p, "a": 0.9}}
    assert by_name(audit(read(Model, facts)))["b"]["p"] == pytest.approx(expected)


def test_the_summary_counts():
    counts = summary_of(audit(model(b=1.0, said=(True, False))), 99)
    assert (counts["documents"], counts["tested"], counts["told"]) == (4, 3, 0)  # q .03
    assert sum(counts["readings"].values()) == 4


def test_nothing_to_test_is_no_error():
    (line,) = audit(read(Model, {"name": "m", "extraction": {"id": ["a1"], "document": ["a"]}}))
    assert line["reading"] == "not measured" and line["rows"][0]["answer_said"] is None


def test_attacks_on_membership_tell_documents_that_the_list_did_not(tmp_path):
    """Of p .001, .01 and .9 Benjamini-Hochberg keeps .01 * 3 / 2 = .015; who stands in the list
    with a worse reading stays there. The audit did not read the file."""
    from axolotl_unlearn.report import find_inputs

    facts = facts_of(said=(True, False))
    made = {"schema": 2, "models": [facts | {"name": name} for name in ("one", "two")]}
    told = {"a": 0.001, "b": 0.01, "c": 0.9}
    documents = {name: {"p": p, "side": "under"} for name, p in told.items()}
    tests = {"loss": {"auc": 0.5, "low": 0.4, "high": 0.6, "p": 0.5}}
    file = {"attack": "membership", "title": "m", "model": "one", "tests": tests}
    file |= {"documents": documents, "sentence": "None told."}
    (tmp_path / "membership-one.json").write_text(json.dumps(file), "utf-8")
    found = find_inputs(made, tmp_path)["audit"]
    one, two = ([line for line in found if line["model"] == m] for m in ("one", "two"))
    assert [line | {"model": ""} for line in two] == [
        {"model": "", **line} for line in audit(model(said=(True, False)))
    ]
    assert len(one) == 4
    assert by_name(one)["b"]["attacks_q"] == pytest.approx(0.015)
    readings = {line["document"]: line["reading"] for line in one}
    assert readings == {"a": "still said", "b": "still known", "c": "not told", "d": "not measured"}
    documents["a"]["p"] = "no"
    (tmp_path / "membership-one.json").write_text(json.dumps(file), "utf-8")
    spoiled = find_inputs(made, tmp_path)["audit"]
    assert "attacks_p" not in spoiled[0]


def test_the_list_has_the_files_that_the_verdict_counts(tmp_path):
    """A file of other weights accused documents, and of two files of one model the last was all."""
    from axolotl_unlearn.report import find_inputs

    made = {
        "schema": 2,
        "models": [facts_of(said=(False, False)) | {"name": "one", "weights": "w"}],
    }
    tests = {"loss": {"auc": 0.5, "low": 0.4, "high": 0.6, "p": 0.5}}
    file = {"title": "m", "model": "one", "tests": tests}

    def put(attack: str, weights: str, **told: float) -> None:
        documents = {name: {"p": p, "side": "under"} for name, p in told.items()}
        content = file | {"attack": attack, "weights": weights, "documents": documents}
        (tmp_path / f"{attack}-one.json").write_text(json.dumps(content), "utf-8")

    def listed() -> dict[str, float]:
        lines = find_inputs(made, tmp_path)["audit"]
        return {line["document"]: line["attacks_p"] for line in lines if "attacks_p" in line}

    put("inside", "older", a=0.001)
    assert listed() == {}
    put("inside", "w", a=0.001, b=0.5)
    put("membership", "w", a=0.8, b=0.9)
    assert listed() == {"a": 0.001, "b": 0.5}
    # Each file tells by itself, as in the verdict: another one cleared a document on the page.
    put("inside", "w", a=0.012, b=0.5)
    readings = {one["document"]: one["reading"] for one in find_inputs(made, tmp_path)["audit"]}
    assert readings["a"] == "still known"
    other = {"zlib": tests["loss"] | {"auc": 0.55}}
    again = file | {"attack": "inside", "documents": {}, "tests": other}
    (tmp_path / "inside-one-2.json").write_text(json.dumps(again), "utf-8")
    said = find_inputs(made, tmp_path)["attack_sentences"]
    said = re.findall(r"AUC ([\d.]+)", said["inside on one"])
    assert said == ["0.55", "0.50"], "the page said the last alone"


#: Column of the member texts, value of c, of the retrained model, of one held-out text; recited?
RECITALS = {
    "strength": ("strength", 0.7, 0.3, 0.1, (True, False)),
    "all but the last token": ("run", 59, 4, 4, (True, True)),
    "fifty in a row of many": ("run", 52, 26, 4, (True, True)),
    "with gaps": ("greedy", 0.95, 0.4, 0.3, (True, True)),
    "a form that the retrained model fills in": ("greedy", 0.95, 0.9, 0.3, (True, False)),
    "one recited text is no shield": ("strength", 0.7, 0.1, 1.0, (True, True)),
    "nine recited texts are no shield": ("strength", 1.0, 0.1, [1.0] * 9, (True, True)),
    "half of it": ("run", 30, 4, 4, (False, False)),
}


@pytest.mark.parametrize("name", RECITALS)
def test_a_recited_text(name):
    """Alone against what 19 of 20 held-out texts stay below, with a retrained model against it."""
    column, own, base, held, recited = RECITALS[name]
    plain = texts(3)[column][:2]
    few = held if isinstance(held, list) else [held]
    others = [*texts(99 - len(few))[column], *few]
    made = {"member": texts(3, **{column: [*plain, own]})}
    made |= {"nonmember": texts(99, **{column: others})}
    target = {"member": texts(3, **{column: [*plain, base]})}
    for retrained, expected in zip((None, model(**target)), recited, strict=True):
        found = by_name(audit(model(**made), retrained=retrained))
        assert found["c"]["recited"] is expected and not found["a"]["recited"]
        assert (found["c"]["reading"] == "recited") is expected
        assert found["d"]["reading"] == "not measured"  # a name of nine tokens


def test_a_row_with_the_id_of_a_member_is_read_against_its_own():
    """Row "text a" was read against member "a" of the retrained model: recited, it passed."""
    ids = ["text a", "a1qa0", "b1sc1", "b1qa0", "d1sc1"]
    made = {"id": ids, "strength": [0.9, 0.4, 0.0, 0.0, 1.0]}
    target = {"id": ids, "member": texts(3, strength=[0.9, 0.1, 0.1])}
    for alike in ("text a", "a"):
        made["id"][0] = alike
        found = by_name(audit(model(**made), retrained=model(**target)))
        assert found["a"]["recited"]


def test_without_held_out_texts_a_whole_text_is_recited():
    """No text was, whatever came out: a retrained model that recites deleted rows was *exact*."""
    whole = {"tokens": [20, 5, 19, 5, 9], "run": [20, 2, 19, 1, 9], "nonmember": texts(0)}
    lines = by_name(audit(model(strength=[1.0, 0.4, 1.0, 0.0, 1.0], **whole)))
    assert [lines[name]["recited"] for name in "abd"] == [True, False, False]
    part = {"strength": [0.9, 0.4, 0.9, 0.0, 0.9], "greedy": [0.9] * 5}
    lines = audit(model(**whole | part | {"run": [9, 2, 9, 1, 9]}))
    assert not any(line["recited"] for line in lines)


@pytest.mark.parametrize(
    ("nonmembers", "kinds", "fewest"), [(160, 1, 20), (160, 2, 40), (3199, 1, 1), (10, 2, None)]
)
def test_the_resolution_is_said(nonmembers, kinds, fewest):
    """80 documents: with 160 non-members p is 1 / 161 at least, and 20 * .025 / 80 = .00625 is the
    first step that it reaches; with ten, p is 2 / 11 and no step does."""
    line = {"p": 0.5, "told": False, "reading": "not told"}
    found = summary_of([line] * 80, nonmembers, kinds)
    word = "not even all 80" if fewest is None else f"at least {fewest} must"
    assert word in found["resolution"]
    beside = summary_of([line | {"retrained": {"loss": 2.0}}] * 80, nonmembers, kinds)
    outer = max(3, math.ceil(nonmembers / 50))
    times = max(1.0, (2 * outer * kinds / (nonmembers + 1) * 80 / 0.025) ** 0.25)
    assert f"told alone when it is {times:.1f} times as far" in beside["resolution"]
