"""The table of an attack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axolotl_unlearn.attacks.probes import MEASURES
from axolotl_unlearn.attacks.results import rows_digest, save, table
from axolotl_unlearn.cli._options import show
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.evaluation.known import shown
from axolotl_unlearn.evaluation.measure import ProgressBars
from axolotl_unlearn.metrics.results import attack_results
from axolotl_unlearn.metrics.verdict import sentence

NAMES = {"attack": "prompt", "model": "m"}


def figure(value: float, half: float = 0.05) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def test_the_sentence_names_an_attack_not_the_model_as_it_is():
    plain, attacked = (
        {"variant": name, "gain": {"recalled": figure(gain) | {"p": 0.7}}}
        for name, gain in (("not quantised", 0.0), ("int8", -0.01))
    )
    result = NAMES | {"title": "Quantisation", "rows": [plain, attacked]}
    assert sentence(result) == (
        "Quantisation (int8) brings back -0.01 [-0.06, +0.04] of the forget texts (no control was "
        "given): not told from chance (p 1.000)."
    )
    attacked["gain"]["recalled"] = figure(0.2) | {"p": 0.001}
    assert "brings back +0.20 [+0.15, +0.25]" in sentence(result)
    assert sentence(result).endswith(": told from chance (p 0.001).")


def test_where_nothing_was_asked_nothing_is_shown():
    """A look at the model as it is passed for an attack that brings nothing back."""
    plain = {"variant": "plain", "gain": {"recalled": figure(0.0) | {"p": 1.0}}}
    said = sentence(NAMES | {"title": "Prompting", "rows": [plain]})
    assert said == "Prompting: nothing was asked."


def test_the_sentence_of_tests_is_of_the_one_that_tells_most():
    """After Holm, as `p_corrected` and `status` of the file."""
    ends = {"low": 0.4, "high": 0.8}
    tests = {"loss": {"auc": 0.55, "p": 0.4, **ends}, "zlib": {"auc": 0.7, "p": 0.02, **ends}}
    file = NAMES | {"title": "Members", "tests": tests, "missing": []}
    assert sentence(file) == (
        "loss per compressed byte tells members from texts it never saw (AUC 0.70 [0.40, 0.80], "
        "p 0.040 after Holm over 2 tests)."
    )
    assert "does not tell members" in sentence(file | {"tests": {"loss": tests["loss"]}})
    assert sentence(file | {"tests": {}, "missing": ["icp"]}) == "icp could not be made."


def rounded(*schemes: str, **more) -> dict:
    rows = [{"variant": name} for name in ("not quantised", *schemes)]
    made = {"attack": "quantise", "title": "Q", "model": "m", "weights": "w", "rows": rows}
    return made | {"max_new_tokens": 128, **more}


@pytest.mark.parametrize("second, files", [
    (rounded("int8"), 2), (rounded("int8", "int4", group=64), 2), (rounded("int8", limit=3), 2),
    (rounded("int8", "int4", max_new_tokens=1), 2),
    (rounded("int8", "int4", model="n"), 2), (rounded("int8", "int4", "nf4"), 2),
    (rounded("int4", "int8"), 1),
    (rounded("int8", "int4", weights="x"), 2), (rounded("int8", "int4", data={"forget": "y"}), 2),
])  # fmt: skip
def test_a_weaker_attack_does_not_take_the_place_of_a_stronger(tmp_path, second, files):
    """After `--schemes int8` what int4 had brought back was nowhere, and the model good; so too
    after an attack on other weights of the name, while results.json is of those before."""
    first = rounded("int8", "int4")
    if second["model"] == "n":  # whose file would have the same name
        first |= {"model": "n/"}
        second |= {"model": "n_"}
    one, other = save(tmp_path, first), save(tmp_path, second)
    assert len(attack_results(tmp_path)) == files and (one == other) == (files == 1)
    assert save(tmp_path, second) == other, "the same again takes its own place"
    assert json.loads(other.read_text())["rows"] == second["rows"]


def test_a_file_that_says_nothing_of_its_tokens_gives_way(tmp_path):
    """It shows nothing, and stayed beside each new one."""
    old = {key: one for key, one in rounded("int8").items() if key != "max_new_tokens"}
    assert save(tmp_path, old) == save(tmp_path, rounded("int8"))
    assert save(tmp_path, old).name != "quantise-m.json", "but takes no other's place"


def test_members_are_the_tests_of_a_file(tmp_path):
    file = {"attack": "membership", "title": "M", "model": "m", "weights": "w", "rows": []}
    save(tmp_path, file | {"tests": {"loss": {}, "zlib": {}}})
    second = file | {"tests": {"zlib": {}}}
    assert save(tmp_path, second) == save(tmp_path, second) != tmp_path / "membership-m.json"


@pytest.mark.parametrize("change", [
    {"id": "a1"}, {"input": "b"}, {"output": "c"}, {"kind": "question"}, {"source": "d"},
])  # fmt: skip
def test_other_rows_have_other_scores(change):
    """After a file had named its documents, intervals were those of the stored scores before."""
    one = {"id": "a0", "input": "a", "output": "b"}
    assert rows_digest([Record(**one)]) != rows_digest([Record(**one | change)])


def test_names_are_no_marks(capsys):
    """`[b]` in the name of a model, or of a document, was not shown, and `[/b]` a traceback."""
    name, measured = ":key:a[b]c[/b]", dict.fromkeys(MEASURES, figure(0.2))
    row = {"variant": "plain", "n": 1, "before": measured, "gain": measured, **measured}
    show(table({"title": "Prompting", "model": name, "rows": [row]}))
    one = {"document": name, "reading": "said", "said": 1, "answers": 1, "words": 0, "of": 9}
    one |= {"tokens": None, "p": None, "not_measured": {}}
    counts = {"said": 1, "nothing found": 0}
    found = {"model": name, "documents": [one], "counts": counts, "held_out": None}
    show(*shown(Path("f"), found))
    bars = ProgressBars(True)
    with bars.progress, bars.bar(name, 1):
        bars.note(f"note: {name}")
    out, err = capsys.readouterr()
    assert out.count(name) == 4 and "[red]" not in out and err.count(name) >= 2
