"""White-box membership: features by hand, members told, unseen ones not, and the whole command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from attack_models import batch_of, fit, payments, tokenizer
from conftest import tiny_llama

from axolotl_unlearn.attacks.inside import _difference, inside_features, sentence
from axolotl_unlearn.engine.token_scoring import Query
from axolotl_unlearn.metrics.learned import learned_attack
from axolotl_unlearn.metrics.results import whole
from axolotl_unlearn.metrics.verdict import judge


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models of the same start, one of which has read the members."""
    folder = tmp_path_factory.mktemp("inside")
    tok = tokenizer()
    known, unseen, other = payments(30, 1), payments(40, 2), payments(30, 3)
    (folder / "data").mkdir()
    for name, rows in (("member", known), ("nonmember", unseen)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / f"{name}.jsonl").write_text(lines, "utf-8")
    for name, rows in (("original", known + other), ("retrained", other)):
        model = tiny_llama(
            seed=3, vocabulary=len(tok), hidden_size=64,
            eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id,
        )  # fmt: skip
        fit(model, batch_of(tok, rows), 60)
        model.save_pretrained(folder / name)
        tok.save_pretrained(folder / name)
    return folder


def run(*arguments):
    from click.testing import CliRunner

    from axolotl_unlearn.cli import unlearn

    return CliRunner().invoke(unlearn, ["attack", *map(str, arguments)])


def test_features_by_hand():
    """Rows of other lengths in one batch, against one forward and backward of each alone."""
    model = tiny_llama(seed=5, hidden_size=32).eval()
    texts = [[5, 6, 7, 8, 9], [11, 12, 3], [3, 9, 4, 7]]
    seen: list[int] = []
    asked = [Query.of(ids) for ids in texts]
    found = inside_features(model, asked, batch_size=2, on_batch=seen.append)
    assert seen == [2, 1]
    names = [
        name for name, w in model.named_parameters() if w.dim() == 2 and name.startswith("model.l")
    ]
    weights = dict(model.named_parameters())
    for number, ids in enumerate(texts):
        given = torch.tensor([ids])
        output = model(input_ids=given, labels=given, output_hidden_states=True)
        layers = [layer[0, :-1].detach() for layer in output.hidden_states[1:]]
        mean = torch.cat([v for s in layers for v in (s.mean(0), s.std(0, correction=0))])
        assert found["states"][number] == pytest.approx(mean.numpy(), abs=2e-6)
        gradients = torch.autograd.grad(output.loss, [weights[name] for name in names])
        norms = [gradient.norm().log().item() for gradient in gradients]
        assert found["gradients"][number] == pytest.approx(norms, abs=1e-4)


def test_of_an_answer_its_own_tokens_count():
    model = tiny_llama(seed=5, hidden_size=32).eval()
    found = inside_features(model, [Query.of([5, 6, 7, 8, 9], 3)])  # 8 and 9
    given = torch.tensor([[5, 6, 7, 8, 9]])
    output = model(input_ids=given, output_hidden_states=True)
    last = output.hidden_states[-1][0, 2:4].detach()
    assert found["states"][0][-64:-32] == pytest.approx(last.mean(0).numpy(), abs=2e-6)
    logp = output.logits[0].log_softmax(-1)
    loss = -(logp[2, 8] + logp[3, 9]) / 2
    weight = model.model.layers[0].self_attn.q_proj.weight
    norm = torch.autograd.grad(loss, weight)[0].norm().log().item()
    assert found["gradients"][0][0] == pytest.approx(norm, abs=1e-4)


def test_experts_that_get_rows_end_to_end():
    """The shared expert of Qwen2-MoE: a RuntimeError before. Fused experts are no linear layers."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config).eval()
    texts = [[5, 6, 7, 8, 9], [11, 12, 3]]
    found = inside_features(model, [Query.of(ids) for ids in texts])["gradients"]
    place = model.model.layers[0].mlp.shared_expert.up_proj
    names = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    for number, ids in enumerate(texts):
        given = torch.tensor([ids])
        loss = model(input_ids=given, labels=given).loss
        norm = torch.autograd.grad(loss, place.weight)[0].norm().log().item()
        assert found[number][names.index(place)] == pytest.approx(norm, abs=1e-4)


def test_the_interval_of_the_difference_is_as_wide_as_chance():
    """Two models that never saw either side, 100 data sets: DeLong's excluded 0 in a quarter."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(100):
        texts = rng.normal(0, 1, (160, 60))
        pair = [
            learned_attack(*np.split(texts + rng.normal(0, 1, texts.shape), [40]), repeats=1,
                           permutations=199, penalty=0.3)
            for _ in range(2)
        ]  # fmt: skip
        gap = _difference(*pair)
        missed += not gap["low"] <= 0 <= gap["high"]
    assert missed <= 17  # 10 expected; more than 17 in 1 of 100


def test_members_are_told_in_what_was_trained_on_them_alone(place):
    shared = ("--data", place / "data", "--out", place / "eval")
    known = ("inside", place / "original", "--control", place / "retrained", *shared)
    outcome = run(*known)
    assert outcome.exit_code == 0, outcome.output
    assert "hidden states" in outcome.output and "30 members, 40 others" in outcome.output
    found = json.loads((place / "eval" / "inside-original.json").read_text("utf-8"))
    for view in found["views"].values():
        assert view["auc"] > 0.65 > view["control"] and view["told"]["p"] < 0.06
        assert view["difference"]["low"] > 0 and not view["difference"]["equivalent"]
    gradients = found["views"]["gradients"]
    assert gradients["auc"] > 0.95 and gradients["told"]["p"] < 0.001 and gradients["picked"] > 25
    assert sentence(found) in " ".join(outcome.output.split())
    # The verdict of results beside it reads the file.
    entry = {"name": "original", "role": "candidate"}
    (told,) = [f for f in judge(entry, attacks=[found]).findings if f.id == "inside"]
    assert told.outcome == "fail" and "gradient norms tell" in told.says and told.p < 0.001
    assert told.value == found["views"]["gradients"]["told"]["auc"]  # p is of this attack

    outcome = run("inside", place / "retrained", *shared)
    assert outcome.exit_code == 0, outcome.output
    found = json.loads((place / "eval" / "inside-retrained.json").read_text("utf-8"))
    for view in found["views"].values():
        assert "control" not in view and 0.3 < view["auc"] < 0.7 and view["told"]["p"] > 0.05
    entry = {"name": "retrained", "role": "candidate"}
    (open_,) = [f for f in judge(entry, attacks=[found]).findings if f.id == "inside"]
    assert open_.outcome == "open" and "no control was given" in open_.says
    assert open_.p > 0.05


def test_the_page_says_it(place):
    """A file without ``rows`` is read for the report; so is half a file, which shows nothing."""
    from axolotl_unlearn.report.inputs import attack_results

    folder = place / "read"
    folder.mkdir()
    view = {"title": "hidden states", "auc": 0.9, "told": {"auc": 0.9, "p": 0.001}, "picked": 1}
    views = {"states": view, "gradients": view}
    made = {"attack": "inside", "title": "Looking inside", "model": "m", "views": views}
    (folder / "inside-m.json").write_text(json.dumps(made), "utf-8")
    half = made | {"model": "n", "views": {"states": {"auc": 0.9}}}
    (folder / "inside-n.json").write_text(json.dumps(half), "utf-8")
    assert [one["model"] for one in attack_results(folder)] == ["m", "n"]
    found = judge({"name": "n"}, attacks=[half]).findings
    assert next(f for f in found if f.id == "inside").missing
    assert whole(made) and not whole(half) and not whole(made | {"views": {"states": view}})
    gap = {"value": 0.1, "low": 0.0}  # without its upper end
    assert not whole(made | {"views": views | {"states": view | {"difference": gap}}})


@pytest.mark.parametrize("said, made", [
    ("needs 20 of each kind", lambda data: (data / "member.jsonl").write_text(
        '{"id": "a", "document": "one text of some words"}\n', "utf-8")),
    ("has no nonmember.jsonl", lambda data: (data / "nonmember.jsonl").unlink()),
    ("one row a document", lambda data: (data / "member.jsonl").write_text("".join(
        json.dumps(row | {"id": f"d{i // 2}sc{1 + i % 2}"}) + "\n"
        for i, row in enumerate(payments(30, 1))), "utf-8")),
])  # fmt: skip
def test_what_is_missing_is_said(place, tmp_path, said, made):
    data = tmp_path / "data"
    data.mkdir()
    for path in (place / "data").iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    made(data)
    outcome = run("inside", place / "retrained", "--data", data, "--out", tmp_path / "eval")
    assert outcome.exit_code != 0 and said in " ".join(outcome.output.split())


def test_a_model_that_overflows_is_one_sentence(place, tmp_path):
    """It said that the model changes its logits in a way that is not known."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place / "retrained")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(1e38)  # overflows at the first product
    model.save_pretrained(tmp_path / "broken")
    tokenizer().save_pretrained(tmp_path / "broken")
    outcome = run("inside", tmp_path / "broken", "--data", place / "data", "--out", tmp_path / "e")
    assert outcome.exit_code != 0 and "gives NaN" in " ".join(outcome.output.split())


def test_a_control_of_another_shape_is_refused(place, tmp_path):
    tok = tokenizer()
    model = tiny_llama(seed=3, vocabulary=len(tok), hidden_size=32)
    model.save_pretrained(tmp_path / "small")
    tok.save_pretrained(tmp_path / "small")
    outcome = run("inside", place / "retrained", "--control", tmp_path / "small",
                  "--data", place / "data", "--out", tmp_path / "eval")  # fmt: skip
    assert outcome.exit_code != 0
    assert "of different architectures" in " ".join(outcome.output.split())


def test_equal_models_pass():
    """Both views equivalent to the control and nothing told: the only way to pass."""
    same = {"value": 0.0, "low": -0.05, "high": 0.05, "equivalent": True}
    view = {"title": "hidden states", "auc": 0.5, "control": 0.5, "difference": same,
            "told": {"auc": 0.5, "p": 0.5}, "picked": 0}  # fmt: skip
    file = {"attack": "inside", "title": "t", "model": "m", "views": {"a": view, "b": view}}
    entry = {"name": "m", "role": "candidate"}

    def finding(file):
        return next(f for f in judge(entry, attacks=[file]).findings if f.id == "inside")

    assert finding(file).outcome == "pass" and finding(file).p == 1.0
    apart = view | {"difference": same | {"equivalent": False}}
    assert finding(file | {"views": {"a": view, "b": apart}}).outcome == "open"
    assert np.isfinite(finding(file).value)
    assert not [f for f in judge({"name": "x"}, attacks=[file]).findings if f.id == "inside"]
