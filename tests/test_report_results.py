"""Flags, statuses, the best row and bad input; expected values worked out in the docstrings."""

import json

import pytest
from fault_codes import fails
from report_fixture import make_results
from verdict_fixture import entry, three
from verdict_fixture import results as results_of

from axolotl_unlearn.metrics.results import Model, attack_results, load_results, read
from axolotl_unlearn.metrics.verdict import judged, show
from axolotl_unlearn.report import answer_of, write_report
from axolotl_unlearn.report.inputs import find_inputs


@pytest.fixture
def results():
    return make_results()


def by_name(results, name):
    return next(model for model in results["models"] if model["name"] == name)


def test_rows_are_flagged(results):
    under = by_name(results, "under")
    under["gate"]["below_gate"] = True
    assert read(Model, by_name(results, "ascent")).flags == ["collapsed", "below gate"]
    assert read(Model, under).flags == ["below gate"]


def test_membership_sizes_fall_back_to_the_loss_arrays():
    arrays = {"member_loss": [1.0] * 3, "nonmember_loss": [1.0] * 4}
    for part, sizes in (
        ({"n": {"member": 80, "nonmember": 160}}, (80, 160)),
        ({"likelihood": arrays}, (3, 4)),
        ({}, None),
    ):
        assert read(Model, {"name": "m", **part}).sizes == sizes


def test_missing_numbers_are_not_zero():
    model = read(Model, {"name": "m", "utility": float("nan"), "mia_auc": None, "aggregate": 0})
    shown = [show(v) for v in (model.utility, model.mia_auc, model.mia_score, model.aggregate)]
    assert shown == ["n/a"] * 3 + ["0.00"]


def test_reads_a_folder_a_file_and_a_dict(results, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert load_results(tmp_path) == load_results(tmp_path / "results.json")
    found = load_results(results)
    assert found == load_results(tmp_path) and load_results(found) is found
    assert [model.name for model in found.models] == [m["name"] for m in results["models"]]


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        (b"{", "not-json", ""),
        (b"\xff", "not-json", ""),
        (b"[" * 10**5, "not-json", ""),
        (b"[]", "no-models", ""),
        (b'{"schema": 2, "models": []}', "no-models", ""),
        (b'{"schema": 2, "models": [{}]}', "faulty", "models[0].name: field required"),
        (b'{"schema": 1, "models": [{"name": "a"}]}', "version", "schema 1"),
        (b'{"models": [{"name": "a"}]}', "version", "schema None"),
        (b'{"schema": 1%s, "models": [{"name": "a"}]}' % (b"0" * 400), "version", "schema 1000"),
        (b'{"schema": 2, "models": [{"name": "a"}, {"name": "a"}]}', "faulty", "named 'a'"),
        (
            b'{"schema": 2, "models": [{"name": "a", "cells": {"forget_task9_x": 1}}]}',
            *("faulty", "forget_task9_x"),
        ),
        (
            b'{"schema": 2, "models": [{"name": "a", "utility": "high"}]}',
            *("faulty", "models[0].utility: must be a number"),
        ),
        (
            b'{"schema": 2, "models": [{"name": "a", "likelihood": {"member_loss": [1, "x"]}}]}',
            *("faulty", "models[0].likelihood.member_loss[1]: must be a number"),
        ),
        (
            b'{"schema": 2, "models": [{"name": "a", "extraction": {"strength": [1.5]}}]}',
            *("faulty", "models[0].extraction.strength[0]: must be between 0 and 1"),
        ),
    ],
)
def test_bad_results_get_a_sentence(tmp_path, text, code, names):
    path = tmp_path / "results.json"
    path.write_bytes(text)
    with fails(f"results.{code}") as fault:
        load_results(path)
    assert str(path) in str(fault.value) and names in str(fault.value)
    assert len(str(fault.value)) < 400 + len(str(path))


def test_a_missing_file_names_the_command_that_makes_it(tmp_path):
    with fails("results.missing") as fault:
        load_results(tmp_path / "nowhere")
    assert "axolotl-unlearn eval" in str(fault.value)


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 10**5, None])
def test_an_attacks_file_that_cannot_be_read_is_no_absent_one(tmp_path, text):
    """Half a file, other bytes, a folder of its name: nothing passes over it."""
    path = tmp_path / "relearn-a.json"
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text)
    with fails("report.not-json") as fault:
        attack_results(tmp_path)
    assert str(path) in str(fault.value)


@pytest.mark.parametrize("lost", ["title", "variant"])
def test_an_attacks_file_without_names_is_not_whole(tmp_path, results, lost):
    """Its figures were read, and its sentence ended the report with a KeyError."""
    gain = {"recalled": {"value": 0.0, "low": -0.1, "high": 0.1, "p": 1.0}}
    rows = [{"variant": name, "gain": gain} for name in ("plain", "affirmative")]
    file = {"attack": "prompt", "title": "Prompting", "model": "merged", "rows": rows}
    for part in (file, rows[1]):
        part.pop(lost, None)
    (tmp_path / "prompt-merged.json").write_text(json.dumps(file))
    found = find_inputs(results, tmp_path)
    assert not found["attack_sentences"]
    merged = judged(results, found["attack_results"])["merged"]
    assert any(one.id == "attacks" and "is not whole" in one.says for one in merged.findings)


@pytest.mark.parametrize("says", [None, "", "m: not told.", 5, ["x"]])
def test_an_attack_on_members_needs_no_sentence(tmp_path, results, says):
    """A file without one, or with a number, ended the report with a traceback; what one says of
    itself is not believed."""
    test = {"auc": 0.9, "low": 0.8, "high": 1.0, "p": 1e-6}
    file = {"attack": "membership", "title": "On membership", "model": "merged", "sentence": says}
    file |= {"tests": {"loss": test}}
    (tmp_path / "membership-merged.json").write_text(json.dumps(file))
    found = find_inputs(results, tmp_path)
    assert "loss tells members" in found["attack_sentences"]["membership on merged"]
    merged = judged(results, found["attack_results"])["merged"]
    assert any(one.id == "attacks" and one.outcome != "pass" for one in merged.findings)


def test_a_folder_without_attacks_is_said(tmp_path, results):
    with fails("report.no-attacks"):
        find_inputs(results, tmp_path, attacks=tmp_path)


def test_what_was_not_looked_at_is_said_where_a_model_is_called_good():
    """The verdict's sentence had it, and no command and no page printed that sentence."""
    original, retrained, model = three()
    said = answer_of(results_of(original, retrained, model)).sentence
    assert said.startswith("Use model: ") and said.endswith(
        ". No attack on its text or weights was run. "
        "Whether the retrained model is a copy was not checked by digests."
    )
    for one, weights in ((original, "a"), (retrained, "b"), (model, "c")):
        one["weights"] = weights
    for one in (retrained, model):
        one["extraction"]["contained"][0] = True
        one["answers"]["forget"]["contained"] = 1 / 80
    test = {"auc": 0.5, "low": 0.4, "high": 0.6, "p": 0.5}
    file = {"attack": "membership", "title": "On membership", "model": "model", "weights": "c"}
    found = results_of(original, retrained, model)
    said = answer_of(found, [file | {"tests": {"loss": test}}]).sentence
    assert said.endswith("). 1 answers are said that the retrained model says as well.")
    said = answer_of(found, [file | {"weights": "d", "tests": {"loss": test}}]).sentence
    assert said.endswith(" Not counted: On membership is of other weights.")
    alone = entry() | {"likelihood": three()[2]["likelihood"]}
    assert "stays open" in answer_of(results_of(original, alone)).sentence


def test_files_of_attacks_count_however_the_folder_is_read(tmp_path):
    """`judged` and `write_report` of a folder called a model good that a file there refuses."""
    (tmp_path / "results.json").write_text(json.dumps(results_of(*three())))
    ways = (
        lambda path: judged(path)["model"].good,
        lambda path: answer_of(path).verdicts["model"].good,
        lambda path: "Use model" in write_report(path, tmp_path / "page.html").read_text("utf-8"),
    )
    places = (tmp_path, str(tmp_path), tmp_path / "results.json")
    assert all(way(place) for way in ways for place in places)
    test = {"auc": 0.9, "low": 0.8, "high": 1.0, "p": 1e-6}
    file = {"attack": "membership", "title": "On membership", "model": "model"}
    told = json.dumps(file | {"tests": {"loss": test}})
    (tmp_path / "membership-model.json").write_text(told)
    assert not any(way(place) for way in ways for place in places)
