"""Research's attacks: each by hand, none tells texts drawn alike, and the commands."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from attack_models import (
    CITIES,
    FIRST,
    build,
    facts,
    make_members,
    missed_nulls,
    payments,
    tokenizer,
)
from click.testing import CliRunner
from numpy.testing import assert_allclose

from axolotl_unlearn.attacks.members import attack_model
from axolotl_unlearn.attacks.registry import Target
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_lines
from axolotl_unlearn.metrics.intervals import holm
from research.__main__ import research
from research.attacks import REGISTRY, groups, icp, tables, traces, transfer
from research.attacks.iam import bounded_gumbel, completeness


@pytest.fixture(scope="module")
def place():
    return make_members()


def test_iam_by_hand():
    """r of the fitted and of text 1 is 0; of text 2 it is 1, unseen 2. Three steps: a = 0, .5, 1.
    a = 0: means (0, 0), no spread: F(0) at the mean exp(-exp(-.5772)) = .57037, F(1) = 1.
    a = .5: means (0, 1), both at their mean: .57037. Weights .5 and 1:
    scores 1 - .57037 = .42963 and 1 - (.5 + .57037) / 1.5 = .28642."""
    nll = {r: -math.log(1 - (math.exp(0.1 - math.exp(-r)) - 1e-5)) for r in (0, 1, 2)}
    assert_allclose(bounded_gumbel([nll[0], nll[2]]), [0, 2], atol=1e-12)
    found = completeness([nll[0], nll[1]], nll[0], [nll[0], nll[2]], steps=3)
    assert_allclose(found, [0.42963, 0.28642], atol=1e-4)


def test_icp_by_hand():
    """Two of four words hidden, white space kept; loss 3 alone, 1 and 2 after contexts: gap 1.5."""
    hidden = icp.masked("a bc  def\ng", 0.5, random.Random(0))
    assert hidden.count(icp.MASK) == 2 and len(hidden.split()) == 4 and "  " in hidden
    assert icp.masked("word", 0.5, random.Random(0)) == icp.MASK
    assert_allclose(icp.gaps([3.0], [[1.0, 2.0]]), [1.5])


ROW = {"Name": "Ada", "Age": "30"}


@pytest.mark.parametrize(
    "name, text",
    [
        ("json", '[\n    {\n        "Name": "Ada",\n        "Age": "30"\n    }\n]'),
        ("html", "<table>\n  <tr>\n    <td>Name</td>\n    <td>Age</td>\n  </tr>\n  <tr>\n"
                 "    <td>Ada</td>\n    <td>30</td>\n  </tr>\n</table>"),
        ("markdown", "| Name | Age |\n| ---- | --- |\n| Ada  | 30  |"),
        ("key_value", "Name: Ada | Age: 30"),
        ("key_is_value", "Name is Ada, Age is 30."),
        ("line", "Name,Age\nAda,30"),
    ],
)  # fmt: skip
def test_a_row_in_each_encoding(name, text):
    assert tables.ENCODINGS[name](ROW) == text
    assert tables.read_row(text) == ROW
    with pytest.raises(UnlearnError, match="not one row"):
        tables.read_row("Ada of Bath paid 12")


def test_rows_of_a_table_are_told_in_the_encoding_they_were_learned_in():
    rng = random.Random(0)
    rows = [
        {"Name": rng.choice(FIRST), "Town": rng.choice(CITIES), "Pay": str(rng.randrange(10000))}
        for _ in range(40)
    ]
    lines = [tables.ENCODINGS["key_value"](row) for row in rows]
    learned = [{"input": line[:4], "output": line[5:]} for line in lines[:20]]
    asked = Target(build(learned, 60), tokenizer())
    sides = [[(f"{side}{i}", line) for i, line in enumerate(some)]
             for side, some in (("m", lines[:20]), ("n", lines[20:]))]  # fmt: skip
    some = [REGISTRY[f"table_{name}"] for name in ("key_value", "html")]
    told = attack_model(asked, *sides, some)["tests"]
    assert told["table_key_value"]["auc"] > max(0.9, told["table_html"]["auc"])


@pytest.mark.parametrize("name", ["iam", "icp", "transfer"])
def test_texts_drawn_alike_are_not_told(name):
    """A model that saw neither side: of four data sets at most one interval misses .5."""
    assert missed_nulls(REGISTRY[name]) <= 1


def test_members_are_told_by_the_command(place):
    """By research's attacks beside the product's, in the same file."""
    words = ["membership", place / "original", "--control", place / "retrained", "--data",
             place / "data", "--out", place / "r", "--attacks", "iam,icp,transfer,loss,table_json"]  # fmt: skip
    outcome = CliRunner().invoke(research, list(map(str, words)))
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((place / "r" / "membership-original.json").read_text("utf-8"))
    for name in ("iam", "icp", "transfer", "loss"):
        assert found["tests"][name]["auc"] > 0.7, name
    assert found["missing"] == ["table_json"] and "not one row" in found["reasons"]["table_json"]


def test_traces_by_hand():
    """The same two words whose side is always, or never, the same; equal answers; 20 prompts."""
    same = traces.tell_apart(["a"] * 20, ["b"] * 20)
    assert same["share"] == 1 and same["p"] < 0.01 and same["low"] > 0.5
    alike = traces.tell_apart(["a"] * 20, ["a"] * 20)
    assert alike["share"] == 0.5 and alike["p"] == 1 and alike["alike"] == 1
    # Two prompts with opposite sides, each learned from the other: both wrong.
    assert traces.tell_apart(["a", "b"], ["b", "a"], folds=2)["share"] == 0
    with pytest.raises(UnlearnError, match="need 20"):
        traces.traces(["a"], ["b"])


def test_answers_drawn_alike_leave_no_trace():
    rng, missed = random.Random(0), 0
    for seed in range(20):
        first, second = ([" ".join(rng.choices(FIRST, k=6)) for _ in range(40)] for _ in range(2))
        found = traces.tell_apart(first, second, seed=seed)
        missed += not found["low"] <= 0.5 <= found["high"]
    assert missed <= 3  # 1 expected


def test_the_command_of_traces(place):
    words = ["traces", place / "original", "--original", place / "retrained",
             "--data", place / "data", "--out", place / "t", "--max-new-tokens", 8]  # fmt: skip
    outcome = CliRunner().invoke(research, list(map(str, words)))
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((place / "t" / "traces.json").read_text("utf-8"))
    assert found["model"]["n"] == 28 and 0 <= found["model"]["low"] <= found["model"]["high"] <= 1
    assert "told right in" in " ".join(outcome.output.split())


def test_texts_next_to_the_cut_off():
    """The later half of the older side, the earlier half of the newer; either side may be older."""
    old, new = ["2020", "2022", "2021"], ["2026-05", "2023", "2025", "2024"]
    far, near = groups.FAR, groups.NEAR
    told = [far, near, near], [far, near, far, near]
    assert groups.by_date(old, new) == told and groups.by_date(new, old) == told[::-1]


@pytest.mark.parametrize("field", ["group", "date"])
def test_the_command_of_groups(place, tmp_path, field):
    """p is Holm's over all that was measured; the figures are those of an attack on the rows of that
    group alone; a group of two is named."""
    named = {"group": lambda side, i: "few" if i < 2 else "ab"[i % 2],
             "date": lambda side, i: f"{2019 + (side == 'nonmember')}-{10 + i}"}[field]  # fmt: skip
    kept = {"member": payments(30, 1) + payments(30, 3), "nonmember": payments(80, 2)}
    for side, rows in kept.items():
        write_lines(tmp_path / f"{side}.jsonl",
                    [row | {field: named(side, i)} for i, row in enumerate(rows)])  # fmt: skip
    words = ["groups", place / "original", "--data", tmp_path, "--out", tmp_path]
    outcome = CliRunner().invoke(research, list(map(str, words)))
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((tmp_path / "groups.json").read_text("utf-8"))
    names = {"group": ["a", "b"], "date": [groups.FAR, groups.NEAR]}[field]
    assert [*found["groups"]] == names
    assert found["missing"] == ["few"] * (field == "group")
    tests = [row for file in found["groups"].values() for row in file["tests"].values()]
    expected = holm([row["p"] for row in tests])
    assert [row["p_corrected"] for row in tests] == pytest.approx(list(expected))
    if field == "group":
        assert "few: not measured" in outcome.output
        some = tmp_path / "some"
        some.mkdir()
        for side, rows in kept.items():
            chosen = [row for i, row in enumerate(rows) if named(side, i) == "a"]
            write_lines(some / f"{side}.jsonl", chosen)
        words = ["membership", place / "original", "--data", some, "--out", some,
                 "--attacks", "loss"]  # fmt: skip
        assert CliRunner().invoke(research, list(map(str, words))).exit_code == 0
        alone = json.loads((some / "membership-original.json").read_text("utf-8"))["tests"]["loss"]
        for key in ("auc", "low", "high", "p"):
            assert found["groups"]["a"]["tests"]["loss"][key] == alone[key]


def test_rows_without_groups_are_no_groups(place):
    outcome = CliRunner().invoke(
        research, ["groups", str(place / "original"), "--data", str(place / "data")]
    )
    assert outcome.exit_code == 2 and "field `group`, or `date`" in " ".join(outcome.output.split())


def test_transfer_by_hand():
    """Of two texts each feature that differs is +1 and -1 after standardising; one that does not
    is 0. The control knows neither, so the differences go the same way: their signs add up."""
    some = [facts([-1, -1], -2.0, 1.0), facts([-3, -3], -2.0, 1.0)]
    found = transfer.features(some, [facts([-3, -3], -2.0, 1.0)] * 2)
    assert_allclose(found[0], -found[1])
    assert set(np.abs(found).round(6).ravel()) == {0.0, 1.0}
    assert_allclose(found[:, :62], found[:, 62:])
    assert transfer.weights().shape == (124,)
    # Mean log-probability is the third feature: the better known text has +1 there.
    assert found[0, 2] == 1.0


def test_the_list_of_attacks_is_printed():
    """Its group prints what a command of the plugin answers."""
    said = CliRunner().invoke(research, ["membership", "--list"]).output
    assert "\niam: sees " in said, said
