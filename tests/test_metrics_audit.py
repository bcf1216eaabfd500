"""The audit list: one document at a time, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from verdict_fixture import entry, results

from axolotl_unlearn.metrics.audit import READINGS, Evidence, audit, summary_of

DOCUMENTS = {"a": ["a1sc1", "a1qa0"], "b": ["b1sc1", "b1qa0"], "c": [], "d": ["d1sc1"]}


def evidence(a=0.0, b=0.0, c=0.0, said=(False, False), seed=0) -> Evidence:
    """Non-members around -2; a, b, c that much above; d is in no member file."""
    others = np.random.default_rng(seed).normal(-2, 0.1, 99)
    members = {"loss": {"a": -2 + a, "b": -2 + b, "c": -2 + c}}
    return Evidence(
        members,
        {"loss": others.tolist()},
        {"a1sc1": 0.1, "a1qa0": 0.4, "b1sc1": 0.0, "d1sc1": 1.0},
        dict(zip(("a1qa0", "b1qa0"), said, strict=True)),
    )


def by_name(lines):
    return {line["document"]: line for line in lines}


def test_readings_worst_first():
    lines = audit(evidence(a=0.0, b=1.0, c=-1.0, said=(True, False)), DOCUMENTS)
    assert [line["document"] for line in lines] == ["a", "b", "c", "d"]
    assert [line["reading"] for line in lines] == list(READINGS[1:4]) + ["not measured"]
    found = by_name(lines)
    # 1 nat is 10 standard deviations: the strangest of a pool of 100.
    assert found["b"]["p"] == found["c"]["p"] == 0.01 and found["b"]["told"]
    assert found["b"]["loss"] == 1.0 and found["b"]["rank"] == 0.0 and found["c"]["rank"] == 1.0
    assert (found["a"]["extraction_strength"], found["a"]["answers_said"]) == (0.4, 1)
    assert found["d"]["p"] is None and found["d"]["extraction_strength"] == 1.0
    # p .01, .01 and that of a, the largest: Benjamini-Hochberg gives .01 * 3 / 2.
    assert found["b"]["q"] == 0.015
    json.dumps(lines, allow_nan=False)


def test_the_retrained_model_is_the_floor():
    """What it says, too, is no leak; and a text that is easy for it, too, is not told."""
    target = evidence(b=1.0, said=(True, False))
    lines = by_name(audit(evidence(b=1.0, said=(True, False)), DOCUMENTS, retrained=target))
    assert {lines[name]["reading"] for name in "abc"} == {"not told"}
    assert lines["a"]["retrained"]["answers_said"] == 1
    alone = by_name(audit(evidence(b=1.0, said=(True, False)), DOCUMENTS, original=target))
    assert alone["a"]["reading"] == "still said" and alone["b"]["reading"] == "still known"
    assert alone["b"]["before"]["loss"] == 1.0


def test_the_summary_counts():
    lines = audit(evidence(b=1.0, said=(True, False)), DOCUMENTS)
    counts = summary_of(lines, 99)
    assert (counts["documents"], counts["tested"], counts["told"]) == (4, 3, 1)
    assert counts["smallest_p"] == 0.01 and sum(counts["readings"].values()) == 4


def test_nothing_to_test_is_no_error():
    empty = Evidence({}, {})
    (line,) = audit(empty, {"a": ["a1sc1"]})
    assert line["reading"] == "not measured" and line["rows"][0]["answer_said"] is None


def test_attacks_on_membership_tell_documents_that_the_list_did_not(tmp_path):
    """Of p .01, .03 and .9 Benjamini-Hochberg keeps .03 * 3 / 2 = .045; who stands in the list
    with a worse reading stays there. The audit did not read the file."""
    from axolotl_unlearn.report import find_inputs

    lines = [
        {"model": model, **line}
        for model in ("one", "two")
        for line in audit(evidence(said=(True, False)), DOCUMENTS)
    ]
    told = {"a": 0.01, "b": 0.03, "c": 0.9}
    documents = {name: {"p": p, "side": "under"} for name, p in told.items()}
    tests = {"loss": {"auc": 0.5, "low": 0.4, "high": 0.6, "p": 0.5}}
    file = {"attack": "membership", "title": "m", "model": "one", "tests": tests}
    file |= {"documents": documents, "sentence": "None told."}
    (tmp_path / "membership-one.json").write_text(json.dumps(file), "utf-8")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "audit.jsonl").write_text(text, "utf-8")
    found = find_inputs(results(entry()), tmp_path)["audit"]
    one, two = ([line for line in found if line["model"] == m] for m in ("one", "two"))
    assert two == lines[4:] and len(one) == 4
    assert by_name(one)["b"]["attacks_q"] == pytest.approx(0.045)
    readings = {line["document"]: line["reading"] for line in one}
    assert readings == {"a": "still said", "b": "still known", "c": "not told", "d": "not measured"}
    documents["a"]["p"] = "no"
    (tmp_path / "membership-one.json").write_text(json.dumps(file), "utf-8")
    spoiled = find_inputs(results(entry()), tmp_path)["audit"]
    assert "attacks_p" not in spoiled[0]


@pytest.mark.parametrize("retrained", [False, True])
def test_a_recited_text_is_not_read_as_not_told(retrained):
    """A completion that came out word for word while nothing else gave the document away: the list
    read "not told" in every case, and only sorted by it."""
    scores = {"loss": {"a": -2.0, "b": -2.0, "c": -2.0}}
    held = {"loss": [-2.0 - i / 100 for i in range(40)]}
    more = {"tokens": {"a1": 20, "b1": 9, "c1": 20}, "held": [0.1] * 40}
    more |= {"halves": {"a": (0.0, 60), "b": (0.0, 60), "c": (0.7, 60)}}
    model = Evidence(scores, held, {"a1": 1.0, "b1": 1.0, "c1": 0.5}, **more)
    other = Evidence(scores, held, {"a1": 0.1, "b1": 0.1, "c1": 0.1}, **more)
    lines = audit(
        model,
        {name: [f"{name}1"] for name in "abc"},
        retrained=replace(other, halves={"c": (0.3, 60)}) if retrained else None,
    )
    found = {line["document"]: line["reading"] for line in lines}
    # b is a name of nine tokens; c's second half is .6 above any held-out text's, and .4 above the
    # retrained model's.
    assert found["a"] == "recited" and found["b"] == "not told"
    assert found["c"] == ("not told" if retrained else "recited")
    assert lines[0]["recited"] is True and READINGS[0] == "recited"
    nothing = replace(model, held=[])
    assert audit(nothing, {"a": ["a1"]})[0]["recited"] is None


@pytest.mark.parametrize(
    ("nonmembers", "kinds", "fewest"), [(160, 1, 10), (160, 2, 20), (1599, 1, 1), (10, 2, None)]
)
def test_the_resolution_is_said(nonmembers, kinds, fewest):
    """80 documents: with 160 non-members p is 1 / 161 at least, and 10 * .05 / 80 = .00625 is the
    first step that it reaches; with ten, p is 2 / 11 and no step does."""
    line = {"p": 0.5, "told": False, "reading": "not told"}
    found = summary_of([line] * 80, nonmembers, kinds)
    assert found["fewest_told"] == fewest
    word = "not even all 80" if fewest is None else f"at least {fewest} must"
    assert word in found["resolution"]
