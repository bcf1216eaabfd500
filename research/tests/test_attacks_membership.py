"""Membership attacks: each by hand, none tells texts drawn alike, and the whole command."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from attack_models import CITIES, FIRST, batch_of, fit, payments, tokenizer
from conftest import tiny_llama
from numpy.testing import assert_allclose

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.memorisation import TokenFacts
from research.attacks import REGISTRY, Target, gdrift, icp, tables, traces, transfer
from research.attacks import dataset_inference as di
from research.attacks.base import attack, by_rank, measure
from research.attacks.detectors import binoculars, curvature
from research.attacks.iam import bounded_gumbel, completeness
from research.attacks.run import (
    FAR,
    NEAR,
    as_tests,
    attack_model,
    blind,
    by_date,
    named,
    sentence,
    status,
)

#: Attacks that a text of a table's row is not needed for.
PLAIN = [name for name in REGISTRY if not name.startswith("table_")]


def texts(rows: list[dict]) -> list[tuple[str, str]]:
    return [(row["id"], f"{row['input']} {row['output']}") for row in rows]


def build(rows: list[dict], steps: int, seed: int = 3):
    tok = tokenizer()
    model = tiny_llama(
        seed=seed, vocabulary=len(tok), hidden_size=64, max_position_embeddings=512,
        eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id,
    )  # fmt: skip
    fit(model, batch_of(tok, rows), steps)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models of the same start, one of which has read the members."""
    folder = tmp_path_factory.mktemp("members")
    known, unseen, kept = payments(30, 1), payments(40, 2), payments(30, 3)
    (folder / "data").mkdir()
    for name, rows in (("member", known), ("nonmember", unseen), ("retain", kept)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / f"{name}.jsonl").write_text(lines, "utf-8")
    for name, rows in (("original", known + kept), ("retrained", kept)):
        build(rows, 60).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return folder


def facts(logp, mean=0.0, sd=1.0) -> TokenFacts:
    logp = np.array(logp, float)
    return TokenFacts(logp, logp > -0.7, np.zeros_like(logp) + mean, np.zeros_like(logp) + sd)


def run(*arguments):
    from click.testing import CliRunner

    from research.__main__ import research

    return CliRunner().invoke(research, ["membership", *map(str, arguments)])


def test_binoculars_by_hand():
    """q = (.8, .2) says y_0: loss -ln .8 = .2231; p = (.5, .5): cross -(ln .8 + ln .2) / 2 = .9163;
    ratio .2435. With q = (.5, .5) both are ln 2, whatever p is."""
    q, p = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert_allclose(binoculars(q, p, torch.tensor([0])), 0.22314 / 0.91629, rtol=1e-4)
    assert_allclose(binoculars(p, q, torch.tensor([1])), 1.0, rtol=1e-6)


def test_curvature_by_hand():
    """(-1 - 2 + 2 + 4) / sqrt(9 + 16) = 3 / 5."""
    assert_allclose(curvature(facts([-1, -2], [-2.0, -4.0], [3.0, 4.0])), 0.6)
    assert curvature(facts([0.0], 0.0, 0.0)) == 0.0


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


def test_drift_by_hand():
    """Loss 1 to 1.5; logits (0, 0) to (3, 4): 5; state (1, 0) to (0, 1): sqrt 2, cosine 0, and -1
    along the first axis."""
    old = (torch.zeros(1, 2), [torch.tensor([[1.0, 0.0]])], torch.tensor(1.0))
    new = (torch.tensor([[3.0, 4.0]]), [torch.tensor([[0.0, 1.0]])], torch.tensor(1.5))
    found = gdrift.drift(old, new, torch.tensor([[1.0, 0.0]]))
    assert_allclose(found, [math.log(0.5), math.log(5), math.log(2) / 2, 1, -1], rtol=1e-5)


def test_a_step_of_gdrift_is_one_of_ascent_and_leaves_the_weights():
    """To first order the loss rises by STEP times the squared norm of its gradient."""
    model, tok = build(payments(8, 4), 20), tokenizer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = gdrift.g_drift(Target(model, tok), ["Ada of Bath paid 12 to Ben"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ids = torch.tensor([tok("Ada of Bath paid 12 to Ben")["input_ids"]])
    loss = model(input_ids=ids, labels=ids).loss
    norm = sum((g**2).sum() for g in torch.autograd.grad(loss, list(model.parameters())))
    assert_allclose(math.exp(found[0, 0]), gdrift.STEP * float(norm), rtol=0.2)
    with pytest.raises(UnlearnError, match="float32"):
        gdrift.g_drift(Target(model.to(torch.bfloat16), tok), ["Ada of Bath"])


def test_features_of_dataset_inference_by_hand():
    """Losses 1, 2, 3, 4: mean 2.5; lowest 1, and (1 + 2) / 2 from half of them on; highest 4, 3.5.
    A changed text of loss 5: ratio .5, difference -2.5."""
    found = di.features(facts([-1, -3, -4, -2]), "abc", facts([-5]), facts([-5]))
    assert_allclose(found[0], math.exp(2.5))
    assert_allclose(found[2:16], [1, 4] * 5 + [1.5, 3.5] * 2)
    assert_allclose(found[16:], [0.5, -2.5] * 2)


def test_dataset_inference_learns_from_one_half_and_keeps_documents_whole():
    rng = np.random.default_rng(0)
    documents = [f"d{i // 2}" for i in range(40)]
    half = di.halves(documents, rng)
    assert half.sum() == 20 and all(half[::2] == half[1::2])
    apart = [rng.normal(mean, 1, (40, 3)) for mean in (1, 0)]
    found = di.judge(*apart, documents, [f"o{i}" for i in range(40)])
    assert found.p < 0.001 and found.low > 0.5 and len(found.members) == 20
    with pytest.raises(UnlearnError, match="10 documents"):
        di.judge(*apart, ["d"] * 40, documents)


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
    target = Target(build(learned, 60), tokenizer())
    names = [str(i) for i in range(20)]
    told = {
        name: measure(REGISTRY[f"table_{name}"], target, lines[:20], lines[20:], names, names)
        for name in ("key_value", "html")
    }
    assert told["key_value"].auc > 0.9 and told["key_value"].auc > told["html"].auc


@pytest.mark.parametrize("name", PLAIN)
def test_texts_drawn_alike_are_not_told(name, place):
    """A model that saw neither side: of four data sets at most one interval misses .5."""
    target = _target(place, "retrained", control=build(payments(30, 9), 30, seed=5))
    missed = 0
    for seed in range(20, 28, 2):
        sides = payments(25, seed), payments(25, seed + 1)
        found = attack_model(target, *map(texts, sides), [name])[name]
        missed += not found["low"] <= 0.5 <= found["high"]
    assert missed <= 1


def _target(place, name: str, control=None) -> Target:
    from transformers import AutoModelForCausalLM

    kept = [text for _, text in texts(payments(30, 3))]
    model = AutoModelForCausalLM.from_pretrained(place / name).eval()
    other = Target(control, tokenizer(), None, kept) if control is not None else None
    return Target(model, tokenizer(), other, kept)


def test_the_command_tells_members_of_what_was_trained_on_them(place):
    outcome = run(
        place / "original", "--control", place / "retrained", "--data", place / "data",
        "--out", place / "eval",
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((place / "eval" / "membership.json").read_text("utf-8"))
    rows = found["models"]["original"]["attacks"]
    assert set(rows) == set(PLAIN) and found["models"]["original"]["status"] == "told"
    assert not [name for name, row in rows.items() if "missing" in row]
    for name in ("loss", "reference", "g_drift", "iam", "icp", "binoculars", "transfer"):
        assert rows[name]["auc"] > 0.7 and rows[name]["p_corrected"] < 0.05, (name, rows[name])
    assert rows["loss"]["control"] < 0.65 and rows["loss"]["difference"]["low"] > 0
    # Document by document, for the audit: those that were trained on lie on the known side.
    told = found["models"]["original"]["documents"]
    assert len(told) == found["members"] and min(one["p"] for one in told.values()) < 0.1
    assert sum(one["side"] == "under" for one in told.values()) > len(told) / 2
    assert "control" not in rows["reference"] and rows["dataset_inference"]["p"] < 0.1
    assert found["blind"]["baselines"] and found["models"]["original"]["sentence"] in " ".join(
        outcome.output.split()
    )


def test_what_is_not_measured_is_no_good_news(place):
    shared = ("--data", place / "data", "--out", place / "alone")
    outcome = run(place / "retrained", "--attacks", "loss,binoculars,table_json", *shared)
    assert outcome.exit_code == 0, outcome.output
    said = " ".join(outcome.output.split())
    assert "Not measured: binoculars" in said and "this is no evidence of forgetting" in said
    found = json.loads((place / "alone" / "membership.json").read_text("utf-8"))
    one = found["models"]["retrained"]
    assert one["status"] == "open" and "--control" in one["attacks"]["binoculars"]["missing"]
    assert "not one row" in one["attacks"]["table_json"]["missing"]
    assert one["attacks"]["loss"]["p_corrected"] == one["attacks"]["loss"]["p"]
    outcome = run(place / "retrained", "--attacks", "loss,los", *shared)
    assert outcome.exit_code == 2 and "there is no attack 'los'" in " ".join(outcome.output.split())
    outcome = run("--list")
    assert outcome.exit_code == 0 and "2604.00419" in outcome.output
    assert run(*shared).exit_code == 2


def test_scores_that_are_no_numbers_are_missing(place):
    broken = replace(
        REGISTRY["loss"], name="broken", look=lambda _, some: np.full(len(some), np.nan)
    )
    sides = texts(payments(12, 1)), texts(payments(12, 2))
    REGISTRY["broken"] = broken
    try:
        found = attack_model(_target(place, "retrained"), *sides, ["broken"])
    finally:
        del REGISTRY["broken"]
    assert "NaN" in found["broken"]["missing"] and status(found) == "open"
    assert "no attack was made" in sentence("m", found)


def test_clusters_count_as_one():
    """Ten texts of one author are one: the interval is wide, p is large."""
    members, others = np.repeat([1.0, 0.2], 10), np.repeat([0.0, 0.1, 0.3], 10)
    alone = by_rank(members, others)
    found = by_rank(members, others, ([i // 10 for i in range(20)], [i // 10 for i in range(30)]))
    assert found.auc == alone.auc and alone.p < 0.01 < 0.1 < found.p and found.low < alone.low


def test_the_registry():
    assert named(None) == [name for name in named("all") if name in PLAIN]
    with pytest.raises(ValueError, match="already"):
        attack("loss", "text", "none", "none")(lambda *_: None)
    assert all(one.source and one.cost for one in REGISTRY.values())


def test_a_minority_that_leaks_is_judged_by_itself():
    """A group of 12 among 40 is told, the others not; a group of 2 is not measured."""
    rng = np.random.default_rng(1)
    groups = ["rare"] * 12 + ["few"] * 2 + ["most"] * 26
    scores = rng.normal(size=80)
    scores[:12] += 3
    sides = [[(f"{side}{i}", f"text {i}") for i in range(40)] for side in "mn"]
    REGISTRY["made_up"] = replace(REGISTRY["loss"], name="made_up", look=lambda *_: scores)
    try:
        found = attack_model(Target(None, None), *sides, ["made_up"], (groups, groups))
    finally:
        del REGISTRY["made_up"]
    rows = found["made_up"]["groups"]
    assert (
        rows["rare"]["p_corrected"] < 0.01
        and rows["rare"]["auc"] > 0.9
        and "missing" in rows["few"]
    )
    assert rows["most"]["low"] <= 0.5 <= rows["most"]["high"]
    assert rows["rare"]["p_corrected"] == pytest.approx(3 * rows["rare"]["p"])  # Holm, three tests
    assert status(found) == "told" and "made_up in group rare" in sentence("m", found)
    assert "not measured: group few" in sentence("m", found)
    del rows["rare"]
    found["made_up"]["p_corrected"] = 1.0
    assert status(found) == "open"  # a group is missing


def test_texts_next_to_the_cut_off():
    """The later half of the older side, the earlier half of the newer; either side may be older."""
    old, new = ["2020", "2022", "2021"], ["2026-05", "2023", "2025", "2024"]
    told = [FAR, NEAR, NEAR], [FAR, NEAR, FAR, NEAR]
    assert by_date(old, new) == told and by_date(new, old) == told[::-1]


def test_baselines_next_to_the_cut_off_see_less_of_the_time():
    """Texts grow with the years, members are older: far from the cut-off length tells all."""
    rng = np.random.default_rng(0)
    years = [list(range(1900, 1960)), list(range(1960, 2020))]
    sides = [
        [(f"{y}", "word " * int(y - 1890 + rng.normal(0, 30) + 60)) for y in side] for side in years
    ]
    found = blind(*sides, by_date(*([str(y) for y in side] for side in years)))
    far, near = (abs(found["groups"][name]["length"]["auc"] - 0.5) for name in (FAR, NEAR))
    assert far > 0.4 > near + 0.1 and found["baselines"]["length"]["separates"]


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
    from click.testing import CliRunner

    from research.__main__ import research

    words = ["traces", place / "original", "--original", place / "retrained",
             "--data", place / "data", "--out", place / "t", "--max-new-tokens", 8]  # fmt: skip
    outcome = CliRunner().invoke(research, list(map(str, words)))
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((place / "t" / "traces.json").read_text("utf-8"))
    assert found["model"]["n"] == 28 and 0 <= found["model"]["low"] <= found["model"]["high"] <= 1
    assert "told right in" in " ".join(outcome.output.split())


@pytest.mark.parametrize("field", ["group", "date"])
def test_groups_are_read_from_the_rows(place, tmp_path, field):
    for side in ("member", "nonmember"):
        rows = map(json.loads, (place / "data" / f"{side}.jsonl").read_text("utf-8").splitlines())
        value = {"group": "ab", "date": ["2019"] * 2 if side == "member" else ["2020"] * 2}[field]
        lines = [json.dumps(row | {field: value[i % 2]}) + "\n" for i, row in enumerate(rows)]
        (tmp_path / f"{side}.jsonl").write_text("".join(lines), "utf-8")
    outcome = run(place / "original", "--attacks", "loss", "--data", tmp_path, "--out", tmp_path)
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((tmp_path / "membership.json").read_text("utf-8"))
    groups = found["models"]["original"]["attacks"]["loss"]["groups"]
    names = "ab" if field == "group" else (NEAR, FAR)
    assert [groups[name]["n"] for name in names] == [[15, 20], [15, 20]]
    assert set(found["blind"]["groups"]) == set(names)


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


def test_tests_for_the_verdict_by_hand():
    """A paired difference of .1 with an interval of .1 +- 1.96 * .05: z = 2, two-sided .0455. An
    attack that learns counts where the control is told less; what is missing is named."""
    own = {"auc": 0.8, "low": 0.7, "high": 0.9, "p": 0.01}
    half = 1.959964 * 0.05
    gap = {"value": 0.1, "low": 0.1 - half, "high": 0.1 + half}
    groups = {"a": own, "b": {"missing": "few"}}
    attacks = {
        "loss": own | {"control": 0.5, "difference": gap},
        "g_drift": own | {"control": 0.9},
        "icp": own | {"groups": groups},
        "iam": {"missing": "give --control"},
    }
    found = as_tests(attacks)
    assert found["missing"] == ["icp in group b", "iam"]
    p = {name: round(one["p"], 4) for name, one in found["tests"].items()}
    assert p == {"loss": 0.0455, "g_drift": 1.0, "icp": 0.01, "icp in group a": 0.01}
