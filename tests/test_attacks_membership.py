"""Membership attacks: each by hand, none tells texts drawn alike, and the whole commands."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attack_models import (
    attacked,
    authored,
    build,
    facts,
    make_members,
    missed_nulls,
    payments,
    target,
    texts,
    tokenizer,
)
from conftest import code_of
from fault_codes import fails
from numpy.testing import assert_allclose
from scipy.stats import ttest_rel

from axolotl_unlearn.attacks.members import (
    _learned,
    _ranked,
    attack_model,
    chosen,
)
from axolotl_unlearn.attacks.membership import dataset_inference as di
from axolotl_unlearn.attacks.membership import inside
from axolotl_unlearn.attacks.membership.likelihoods import binoculars, curvature
from axolotl_unlearn.attacks.registry import Outcome, Target, attack, attacks
from axolotl_unlearn.data.documents import Answer
from axolotl_unlearn.evaluation.sets import cluster_of
from axolotl_unlearn.metrics.learned import learned_attack
from axolotl_unlearn.metrics.results import Attack, read

REGISTRY = attacks()
#: A module that adds an attack, as docs/add-attack.md writes it.
MINE = code_of("add-attack.md").replace("worst_token", "my_worst_token")


@pytest.fixture(scope="module")
def place():
    return make_members()


def said(outcome) -> str:
    return " ".join(outcome.output.split())


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


def test_drift_by_hand():
    """Loss 1 to 1.5; logits (0, 0) to (3, 4): 5; state (1, 0) to (0, 1): sqrt 2, cosine 0, and -1
    along the first axis."""
    old = (torch.zeros(1, 2), [torch.tensor([[1.0, 0.0]])], torch.tensor(1.0))
    new = (torch.tensor([[3.0, 4.0]]), [torch.tensor([[0.0, 1.0]])], torch.tensor(1.5))
    found = inside.drift(old, new, torch.tensor([[1.0, 0.0]]))
    assert_allclose(found, [math.log(0.5), math.log(5), math.log(2) / 2, 1, -1], rtol=1e-5)


def test_a_step_of_gdrift_is_one_of_ascent_and_leaves_the_weights():
    """To first order the loss rises by STEP times the squared norm of its gradient."""
    model, tok = build(payments(8, 4), 20), tokenizer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = inside.g_drift(Target(model, tok), ["Ada of Bath paid 12 to Ben"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ids = torch.tensor([tok("Ada of Bath paid 12 to Ben")["input_ids"]])
    loss = model(input_ids=ids, labels=ids).loss
    norm = sum((g**2).sum() for g in torch.autograd.grad(loss, list(model.parameters())))
    assert_allclose(math.exp(found[0, 0]), inside.STEP * float(norm), rtol=0.2)
    with fails("attack.not-float32"):
        inside.g_drift(Target(model.to(torch.bfloat16), tok), ["Ada of Bath"])


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
    half, _ = di.halves(documents, ["o"], rng)
    assert half.sum() == 20 and all(half[::2] == half[1::2])
    for half in di.halves(documents[:30], documents[10:], rng):  # d5 to d14 are on both sides
        assert half.sum() in (14, 15, 16) and all(half[::2] == half[1::2])
    one, two = di.halves(documents, documents, rng)
    assert (one == two).all() and one.sum() == 20
    apart = [rng.normal(mean, 1, (40, 3)) for mean in (1, 0)]
    found = di.judge(*apart, documents, [f"o{i}" for i in range(40)])
    assert found.p < 0.001 and found.low > 0.5 and len(found.members) == 20
    with fails("attack.few-documents"):
        di.judge(*apart, ["d"] * 40, documents)


@pytest.mark.parametrize("name", REGISTRY)
def test_texts_drawn_alike_are_not_told(name):
    """A model that saw neither side: of four data sets at most one interval misses .5."""
    assert missed_nulls(REGISTRY[name]) <= 1


def test_the_interval_of_the_difference_is_as_wide_as_chance():
    """Two models that never saw either side, 100 data sets: DeLong's excluded 0 in a quarter."""
    rng, missed = np.random.default_rng(0), 0
    few = replace(REGISTRY["g_drift"], judge=_quick)
    for _ in range(100):
        shared = rng.normal(0, 1, (160, 60))
        pairs = [tuple(np.split(shared + rng.normal(0, 1, shared.shape), [40])) for _ in range(2)]
        gap = _learned(few, pairs, (list(range(40)), list(range(120))), 0)["difference"]
        missed += not gap["low"] <= 0 <= gap["high"]
    assert missed <= 11  # 5 expected; more than 11 in 1 of 200


def _quick(members, nonmembers, *_):
    from axolotl_unlearn.metrics.learned import learned_attack

    one = learned_attack(members, nonmembers, repeats=1, permutations=199, penalty=0.3)
    return Outcome(one.members, one.nonmembers, one.auc, 0.0, 1.0, one.p, one.null)


def test_the_commands_tell_members_of_what_was_trained_on_them(place):
    """Each writes a file that the verdict reads, bound to weights, data and code."""
    shared = ("--control", place / "retrained", "--data", place / "data", "--out", place / "eval")
    files = {}
    for kind in ("membership", "inside"):
        outcome = attacked(kind, place / "original", *shared)
        assert outcome.exit_code == 0, outcome.output
        file = files[kind] = json.loads((place / f"eval/{kind}-original.json").read_text("utf-8"))
        assert read(Attack, file) and file["status"] == "told" and not file["missing"]
        assert file["sentence"] in said(outcome) and file["blind"]["baselines"]
        assert len(file["weights"]) == len(file["control_weights"]) == 64 and file["code"]
        assert set(file["data"]) == {"member", "nonmember"}
    tests = files["membership"]["tests"] | files["inside"]["tests"]
    assert set(tests) >= set(REGISTRY)
    for name in ("loss", "reference", "binoculars", "g_drift"):
        assert tests[name]["auc"] > 0.65 and tests[name]["p_corrected"] < 0.06, (name, tests[name])
    for name in ("loss", "g_drift"):
        assert tests[name]["control"] < 0.65 and tests[name]["difference"]["low"] > 0
    assert "control" not in tests["reference"] and tests["dataset_inference"]["p"] < 0.1
    # Document by document, for the audit: those that were trained on lie on the known side.
    told = files["membership"]["documents"]
    assert len(told) == 30 and min(one["p"] for one in told.values()) < 0.1
    assert sum(one["side"] == "under" for one in told.values()) > len(told) / 2


def test_with_a_control_p_is_of_the_difference():
    """A paired difference of .0 has p 1 however well texts are told; learners see differences."""
    rng = np.random.default_rng(0)
    scores, features = rng.normal(size=80), rng.normal(size=(80, 3))
    scores[:40] += 3
    features[:40] += 3
    ranks = replace(REGISTRY["loss"], name="ranks", look=lambda *_: scores)
    learns = replace(REGISTRY["g_drift"], name="learns", look=lambda *_: features)
    sides = [[(f"{side}{i}", f"text {i}") for i in range(40)] for side in "mn"]
    alone = attack_model(Target(None, None), *sides, [ranks, learns])["tests"]
    both = attack_model(Target(None, None, Target(None, None)), *sides, [ranks, learns])["tests"]
    for name in ("ranks", "learns"):
        assert alone[name]["p"] < 0.01 and both[name]["p"] == 1.0
        assert both[name]["control"] == both[name]["auc"] == alone[name]["auc"]
        gap = both[name]["difference"]
        assert gap["low"] <= gap["value"] == 0 <= gap["high"]


def test_what_is_not_measured_is_no_good_news(place):
    shared = ("--data", place / "data", "--out", place / "alone")
    outcome = attacked("membership", place / "retrained", "--attacks", "loss,binoculars", *shared)
    assert outcome.exit_code == 0, outcome.output
    assert "Not measured: binoculars" in said(outcome)
    assert "this is no evidence of forgetting" in said(outcome)
    one = json.loads((place / "alone/membership-retrained.json").read_text("utf-8"))
    assert one["status"] == "open" and one["missing"] == ["binoculars"]
    assert "--control" in one["reasons"]["binoculars"] and "control_weights" not in one
    assert one["tests"]["loss"]["p_corrected"] == one["tests"]["loss"]["p"]
    outcome = attacked("inside", "--list")
    assert outcome.exit_code == 0 and "2604.00419" in outcome.output
    assert "loss" not in outcome.output


def test_an_attack_of_ones_own_is_a_module(place, tmp_path, monkeypatch):
    """It stands in the file beside the others, and the verdict reads it there."""
    (tmp_path / "my_attack.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("membership", place / "original", "--extension", "my_attack", "--attacks",
             "my_worst_token,loss", "--data", place / "data", "--out", tmp_path)  # fmt: skip
    outcome = attacked(*words)
    assert outcome.exit_code == 0, outcome.output
    file = json.loads((tmp_path / "membership-original.json").read_text("utf-8"))
    assert set(file["tests"]) == {"my_worst_token", "loss"} and read(Attack, file)
    assert file["tests"]["my_worst_token"]["auc"] > 0.7


@pytest.mark.parametrize("code, cure, words", [
    ("attack.no-model", "", ["membership"]),
    ("attack.unknown", "", ["membership", "retrained", "--attacks", "loss,los"]),
    # The verdict asks more of a look inside, which it knows by the command.
    ("attack.other-command", "attack inside",
     ["membership", "retrained", "--attacks", "loss,g_drift"]),
    ("attack.other-command", "attack membership", ["inside", "retrained", "--attacks", "loss"]),
    ("attack.none", "", ["membership", "retrained", "--attacks", ","]),
    # A console script does not look into the working folder.
    ("attack.no-extension", "PYTHONPATH", ["membership", "retrained", "--extension", "no.such"]),
    ("attack.limit", "", ["inside", "retrained", "--limit", "0"]),
])  # fmt: skip
def test_faults(place, code, cure, words):
    from axolotl_unlearn.cli.attack import command

    words = [str(place / w) if w == "retrained" else w for w in words]
    with fails(code) as caught:
        command.main([*words, "--data", str(place / "data")], standalone_mode=False)
    assert cure in str(caught.value)


@pytest.mark.parametrize("reason, made", [
    ("one row a document", lambda data: (data / "member.jsonl").write_text("".join(
        json.dumps(row | {"id": f"d{i // 2}sc{1 + i % 2}"}) + "\n"
        for i, row in enumerate(payments(30, 1))), "utf-8")),
    ("fewer than 20 texts", lambda data: None),
])  # fmt: skip
def test_what_cannot_be_learned_is_missing(place, tmp_path, reason, made):
    data = tmp_path / "data"
    data.mkdir()
    for path in (place / "data").iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    made(data)
    words = ("inside", place / "retrained", "--attacks", "g_drift", "--data", data)
    limit = ("--limit", 15) if "20" in reason else ()
    outcome = attacked(*words, "--out", tmp_path / "eval", *limit)
    assert reason in said(outcome)
    file = json.loads((tmp_path / "eval/inside-retrained.json").read_text("utf-8"))
    assert file["missing"] == ["g_drift"] and read(Attack, file)


@pytest.mark.parametrize("limit, stored", [(40, None), (39, 39)])
def test_a_limit_that_leaves_nothing_out_is_none(place, tmp_path, limit, stored):
    words = ("membership", place / "retrained", "--attacks", "loss", "--data", place / "data")
    outcome = attacked(*words, "--out", tmp_path, "--limit", limit)
    assert outcome.exit_code == 0, outcome.output
    file = json.loads((tmp_path / "membership-retrained.json").read_text("utf-8"))
    assert (file["limit"], file["nonmembers"]) == (stored, limit)


def test_a_model_that_overflows_or_has_another_shape_is_missing(place):
    model = target("retrained").model
    small = build(payments(4, 1), 1, num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(1e38)  # overflows at the first product
    few, sides = ([texts(payments(n, seed)) for seed in (1, 2)] for n in (2, 25))
    tok, some = tokenizer(), [REGISTRY["g_drift"]]
    found = attack_model(Target(model, tok), *few, some)
    assert "NaN" in found["reasons"]["g_drift"] and found["status"] == "open"
    found = attack_model(Target(target("retrained").model, tok, Target(small, tok)), *sides, some)
    assert "different architectures" in found["reasons"]["g_drift"]
    other, some = Target(target("retrained").model, tok, Target(small, tok)), "dataset_inference"
    assert not attack_model(other, *sides, [REGISTRY[some]])["missing"], "it takes any control"
    found = attack_model(other, sides[0], sides[1][:9], [REGISTRY[some]])
    assert "10 documents of each kind" in found["reasons"][some]


def test_clusters_count_as_one():
    """Ten texts of one author are one: the interval is wide, p is large."""
    members, others = np.repeat([1.0, 0.2], 10), np.repeat([0.0, 0.1, 0.3], 10)
    clusters = [i // 10 for i in range(20)], [i // 10 for i in range(30)]
    alone, found = (_ranked(None, [(members, others)], by, 0) for by in (None, clusters))
    assert found["auc"] == alone["auc"] and found["low"] < alone["low"]
    assert alone["p"] < 0.01 < 0.1 < found["p"]


def test_rows_without_ids_are_no_documents_of_both_sides():
    """`row0` of either file was one document: an interval half as wide, and in one of a hundred
    data sets that differ in nothing p < .001. An author is one on both sides."""
    scores = np.r_[0:80:2, 79:0:-2]  # a member that is high, beside a non-member that is low
    one = replace(REGISTRY["loss"], look=lambda *_: scores)

    def test(name, author=""):
        sides = [[(name.format(s, i), Answer(f"{s}{i}", "", author.format(i))) for i in range(40)]
                 for s in "mn"]  # fmt: skip
        return attack_model(Target(None, None), *sides, [one])["tests"]["loss"]

    assert test("row{1}") == test("{0}{1}")
    assert test("{0}{1}", "Author {0}")["high"] > test("{0}{1}")["high"] + 0.05


def test_the_registry():
    assert [one.name for one in chosen(REGISTRY, None)] == [
        name for name, one in REGISTRY.items() if not one.inside
    ]
    with fails("attack.twice"):
        attack("loss", "text", "none", "none")(lambda *_: None)
    assert all(one.source and one.cost for one in REGISTRY.values())


def test_the_difference_from_a_control_lies_in_its_interval_below_zero_too():
    """The interval was that of a share: of a difference of -.4 it was [0, 0]."""
    rng = np.random.default_rng(0)
    low, high, others = rng.normal(-1, 1, 40), rng.normal(1, 1, 40), rng.normal(0, 1, 40)
    clusters = list(range(40)), list(range(40, 80))
    gap = _ranked(None, [(low, others), (high, others)], clusters, 0)["difference"]
    assert -1 < gap["low"] < gap["value"] < gap["high"] < 0


def test_beside_a_control_one_document_is_told_alone():
    """Scores are differences from the control's then, as in the verdict."""
    from axolotl_unlearn.metrics.membership import by_document

    rng, names = np.random.default_rng(3), [f"d{i}" for i in range(60)]
    sides = {"loss": np.r_[15.0, rng.normal(size=59)]}, {"loss": rng.normal(size=60)}
    alone, beside = (by_document(names, *sides, paired) for paired in (False, True))
    assert alone["d0"][0] == 1 / 61 and beside["d0"][0] < 0.025 / 60
    assert beside["d0"][1] == "under"
    assert min(p for name, (p, _) in beside.items() if name != "d0") > 0.001


def by_authors(rng, layout: str, shift: float):
    """Features of the texts of 20 authors a side, whose effect is twice the noise, and clusters;
    "documents": three texts each, which have an effect as well."""
    effect = rng.normal(0, 1, (40, 6))
    sizes = rng.integers(1, 12, (2, 20)) if layout == "unlike" else np.full((2, 20), 6)
    first = np.arange(20), np.arange(20) + (10 if layout == "some" else 0)
    sides = []
    for mark, authors, size in zip("mn", first, sizes, strict=True):
        own = np.repeat(authors, size)
        names = [f"{mark}{i}" for i in range(len(own))]
        x = effect[own] + rng.normal(0, 0.5, (len(own), 6)) + shift * (mark == "m")
        if layout == "documents":
            names = [f"{mark}{i // 3}sc{i % 3}" for i in range(len(own))]
            x += np.repeat(rng.normal(0, 1, (len(own) // 3, 6)), 3, 0)
        made = zip(names, own, strict=True)
        sides.append((x, [cluster_of(mark, one, Answer("", author=f"{a}")) for one, a in made]))
    (members, own), (others, theirs) = sides
    return members, others, own, theirs


@pytest.mark.parametrize("layout", ["same", "some", "unlike", "documents"])
def test_authors_on_both_sides_are_no_tell_and_hide_none(layout):
    """They were learned from on one side and told on the other: without a leak AUC .1, with one of
    half an author's effect dataset inference found a third. 40 data sets: 7 of p < .05 or more
    have a chance of .003."""
    found = {}
    for shift in (0.0, 0.6):
        rows = []
        for seed in range(40):
            given = by_authors(np.random.default_rng(seed), layout, shift)
            one = learned_attack(*given, repeats=1, permutations=99, seed=seed)
            two = di.judge(*given, seed)
            rows.append([one.auc, one.p <= 0.05, two.auc, two.p <= 0.05, np.mean(one.each <= 0.05)])
        found[shift] = np.mean(rows, 0)
    assert_allclose(found[0.0][[0, 2]], 0.5, atol=0.04)
    assert max(found[0.0][[1, 3]]) < 7 / 40 and found[0.0][4] < 0.08
    assert found[0.6][[0, 2]].min() > 0.65 and found[0.6][[1, 3]].min() > 0.8


def test_beside_a_control_one_large_author_hides_no_others():
    """Of such members none were told (0 of 100 draws), and without a control nearly all."""
    rng, sizes, told = np.random.default_rng(0), [60] + [2] * 19, []
    clusters = tuple(np.repeat([f"{side}{i}" for i in range(20)], sizes) for side in "mn")
    for shift in (0.0, 1.5):
        for _ in range(20):
            hard = rng.normal(size=(2, 20)).repeat(sizes, 1)
            own, its = (hard + 0.5 * rng.normal(size=hard.shape) for _ in range(2))
            own[0] += shift
            found = _ranked(None, [tuple(own), tuple(its)], clusters, 0)
            told.append(found["p"] < 0.001)
            assert found["difference"]["value"] == pytest.approx(found["auc"] - found["control"])
    assert sum(told[:20]) == 0 and sum(told[20:]) > 15


def test_of_pairs_alone_the_test_is_of_pairs():
    """Authors that are all on both sides: Student's paired test of their held-out means."""
    rng = np.random.default_rng(3)
    members, others, own, theirs = by_authors(rng, "same", 0.2)
    found = di.judge(members, others, own, theirs)
    half, _ = di.halves(own, theirs, np.random.default_rng(0))
    names = np.array(own)[~half]
    means = [[side[names == name].mean() for name in dict.fromkeys(names.tolist())]
             for side in (found.members, found.nonmembers)]  # fmt: skip
    assert_allclose(found.p, ttest_rel(*means, alternative="greater").pvalue)


def test_baselines_beside_attacks_go_by_author(place, tmp_path):
    """Names of authors made exchangeable texts "tell members without any model"."""
    data = tmp_path / "data"
    data.mkdir()
    for side in ("member", "nonmember"):
        lines = (json.dumps(row) + "\n" for row in authored(12, side, 1))
        (data / f"{side}.jsonl").write_text("".join(lines))
    words = ("membership", place / "retrained", "--attacks", "loss", "--data", data)
    assert attacked(*words, "--out", tmp_path / "eval").exit_code == 0
    file = json.loads((tmp_path / "eval/membership-retrained.json").read_text("utf-8"))
    assert len(file["blind"]["baselines"]) == 4 and file["blind"]["warning"] is None
