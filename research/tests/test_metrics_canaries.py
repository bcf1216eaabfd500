"""Certificate by planted pairs: level, power, numbers by hand, and the commands on a tiny model."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from axolotl_unlearn.errors import UnlearnError
from research.probes.canaries import KEY, plant, sentence
from research.probes.canaries_metrics import certify


def pairs(wins):
    return {"loss": np.asarray(wins, float)}, {"loss": np.full(len(wins), 0.5)}


def test_a_certificate_by_hand():
    """Wins and losses in turn. A win is worth ln(.5/.6) at the upper end and ln(.5/.4) at the
    lower; two pairs ln(.25/.24) = .0408. ln 20 = 2.996 takes 146.8 pairs; 147 end on a win, which
    the upper end pays for, 148 on a loss."""
    found = certify(*pairs([1, 0] * 200))
    assert (found.answer, found.needed, found.pairs) == ("certified", 148, 400)
    assert found.shares == {"loss": 0.5}
    # Ties are worth half of both ends: ln(1 + .1 * .1 / .24) a pair, 74 of them.
    assert certify(*pairs([0.5] * 100)).needed == math.ceil(math.log(20) / math.log(1 + 1 / 24))
    assert certify(*pairs([1, 0] * 50)).answer == "open"
    assert certify(*pairs([1, 0] * 50), margin=0.2).answer == "certified"


@pytest.mark.parametrize(("win", "word"), [(1, "still known"), (0, "pushed away")])
def test_documents_that_are_always_told(win, word):
    """The bet of 1.9 gains ln 1.95 a pair, a 76th of the money: before ln(76 * 20) / ln 1.95 = 11
    pairs; no bet can need less than ln 20 / ln 2 = 4.3."""
    found = certify(*pairs([win] * 30))
    assert found.answer == "told" and 5 <= found.needed <= 11
    assert word in sentence("m", found)


def test_one_attack_that_tells_is_enough_and_all_must_pass():
    rng = np.random.default_rng(0)
    twins = {"loss": np.full(500, 0.5), "zlib": np.full(500, 0.5)}
    fair = rng.permutation([0, 1] * 250)
    assert certify({"loss": fair, "zlib": fair}, twins).answer == "certified"
    assert certify({"loss": fair, "zlib": np.ones(500)}, twins).answer == "told"
    slightly = (rng.random(500) < 0.58) * 1.0
    assert certify({"loss": fair, "zlib": slightly}, twins).answer != "certified"


@pytest.mark.parametrize(
    ("share", "wrong", "most"),
    [(0.5, "told", 0.05), (0.6, "certified", 0.05), (0.4, "certified", 0.05)],
)
def test_error_rates_hold_however_often_one_looks(share, wrong, most):
    rng = np.random.default_rng(1)
    answers = [certify(*pairs(rng.random(600) < share)).answer for _ in range(300)]
    assert answers.count(wrong) / 300 <= most + 0.02
    right = {"told": "certified", "certified": "told"}[wrong]
    assert answers.count(right) / 300 > 0.8


def test_no_pairs_and_margins_outside_are_refused():
    for planted, twins in (({}, {}), pairs([])):
        with pytest.raises(ValueError, match="no pairs"):
            certify(planted, twins)
    with pytest.raises(ValueError, match="margin"):
        certify(*pairs([1]), margin=0.5)


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "data"
    home.mkdir()
    rows = {
        "forget": [{"id": '"a"sc1', "input": "One", "output": "two.", "task": "Task3"}],
        "retain": [{"id": '"b"sc1', "input": "Three", "output": "four.", "task": "Task3"}],
        "member": [{"id": '"a"sc1', "document": "One two."}],
        "nonmember": [{"id": '"c"sc1', "document": "Five six."}],
    }
    for name, lines in rows.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    return home


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_planting_puts_one_of_each_pair_everywhere_it_belongs(folder, tmp_path):
    key = plant(folder, tmp_path / "out", pairs=40, seed=3)
    out = tmp_path / "out"
    forget, member, other = (lines(out / f"{n}.jsonl") for n in ("forget", "member", "nonmember"))
    assert [len(x) for x in (forget, member, other)] == [41, 41, 41]
    planted, twins = zip(*json.loads(key.read_text()), strict=True)
    assert [row["id"] for row in forget[1:]] == list(planted) == [r["id"] for r in member[1:]]
    assert [row["id"] for row in other[1:]] == list(twins)
    assert all(row["task"] == "Task3" for row in forget)
    joined = [f"{row['input']} {row['output']}" for row in forget[1:]]
    assert joined == [row["document"] for row in member[1:]]
    assert not set(joined) & {row["document"] for row in other}
    assert (out / "retain.jsonl").read_bytes() == (folder / "retain.jsonl").read_bytes()
    again = plant(folder, tmp_path / "again", pairs=40, seed=3).parent
    assert (again / "forget.jsonl").read_bytes() == (out / "forget.jsonl").read_bytes()
    drawn = plant(folder, tmp_path / "drawn", pairs=40).parent
    assert (drawn / "forget.jsonl").read_bytes() != (out / "forget.jsonl").read_bytes()


def test_own_texts_are_planted_and_faults_named(folder, tmp_path):
    texts = tmp_path / "mine.jsonl"
    texts.write_text("".join(json.dumps({"text": f"letter {i} to you"}) + "\n" for i in range(4)))
    out = plant(folder, tmp_path / "out", pairs=2, texts=texts).parent
    rows = lines(out / "forget.jsonl")[1:] + lines(out / "nonmember.jsonl")[1:]
    said = {r.get("document") or f"{r['input']} {r['output']}" for r in rows}
    assert said == {f"letter {i} to you" for i in range(4)}
    for options, fault in (
        ({"pairs": 3, "texts": texts}, "4 documents"),
        ({"pairs": 0}, "--pairs is 0"),
    ):
        with pytest.raises(UnlearnError, match=fault):
            plant(folder, tmp_path / "other", **options)
    with pytest.raises(UnlearnError, match="not empty"):
        plant(folder, out)
    (folder / "member.jsonl").unlink()
    with pytest.raises(UnlearnError, match="no member.jsonl"):
        plant(folder, tmp_path / "third")
    assert (out / KEY).is_file()
