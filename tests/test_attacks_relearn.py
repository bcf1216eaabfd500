"""Relearning: clean splits, training that equals a plain loop, recovery against a control."""

from __future__ import annotations

import json

import pytest
import torch
from attack_models import batch_of, make_lab, tokenizer
from conftest import tiny_llama

from axolotl_unlearn.attacks.relearn import (
    RATES,
    Training,
    halves,
    neighbours,
    relearn_attack,
    split_forget,
    train,
)
from axolotl_unlearn.attacks.target import make_subjects
from axolotl_unlearn.data.records import Record, read_records
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.store import Store


@pytest.fixture(scope="module")
def lab():
    return make_lab()


def record(number: int, document: str) -> Record:
    return Record(
        f'"{document}"qa{number}',
        f"Who is {document}{number}?",
        f"Nobody {number}",
        "1",
        "question",
    )


def test_split_takes_whole_documents():
    records = [record(i, d) for d in "abcdef" for i in range(3)]
    trained, asked = split_forget(records, 7)
    assert len(trained) == 9 and len(asked) == 9
    assert {r.document for r in trained}.isdisjoint(r.document for r in asked)
    assert split_forget(records[::-1], 7)[0] == [r for r in records[::-1] if r in trained]
    with pytest.raises(UnlearnError, match="takes all 6 documents"):
        split_forget(records, 18)


def test_halves_share_no_document_and_neighbours_are_the_likest():
    records = [record(i, d) for d in "abcde" for i in range(2)]
    first, second = halves(records)
    assert len(first) == 4 and len(second) == 6
    assert {r.document for r in first}.isdisjoint(r.document for r in second)
    with pytest.raises(UnlearnError, match="one alone can be asked"):
        halves(records[:2])
    texts = ["a lamp in Rome", "the dog of Ada Brook", "dogs", "Ada Brook was born in Bath"]
    pool = [Record(f"r{n}", text, "", "1") for n, text in enumerate(texts)]
    asked = [Record("f0", "Ada Brook was born", "in Kent", "1")]
    assert [r.id for r in neighbours(asked, pool, 2)] == ["r3", "r1"]


def test_training_equals_a_plain_loop():
    """Two steps of two question rows: the loss is on answer and EOS alone, averaged over their
    tokens; AdamW without decay, gradients clipped at 1."""
    tok = tokenizer()
    records = [record(0, "a"), record(1, "b")]
    ours, plain = (tiny_llama(vocabulary=len(tok)) for _ in range(2))
    ours.requires_grad_(False)  # as PEFT leaves a model whose adapter is merged
    how = Training(rate=1e-2, batch=2)
    stops = [stop for stop, _ in train(ours, tok, records, [0, 2], how, ": ")]
    assert stops == [0, 2]

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        losses = []
        for row in records:
            prompt = tok(row.input)["input_ids"]
            answer = tok(": " + row.output)["input_ids"] + [tok.eos_token_id]
            logp = plain(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            losses += [-logp[len(prompt) + i - 1, t] for i, t in enumerate(answer)]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    # AdamW turns gradients of about 0 into steps of noise, so compare what the models say.
    batch = batch_of(tok, [{"input": row.input, "output": row.output} for row in records])
    untrained = tiny_llama(vocabulary=len(tok))
    said = [m(**batch).logits.log_softmax(-1).detach() for m in (ours, plain, untrained)]
    gap, change = (float((said[0] - other).abs().mean()) for other in said[1:])
    assert gap < 0.01 * change and change > 0.3, (gap, change)


def test_lora_leaves_the_weights_alone():
    tok = tokenizer()
    model = tiny_llama(vocabulary=len(tok))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ((_, trained),) = train(model, tok, [record(0, "a")], [3], Training(rate=1e-2, rank=2))
    state = trained.state_dict()
    base = {n.replace(".base_layer", ""): t for n, t in state.items() if "lora_" not in n}
    assert all(torch.equal(base[name], before[name]) for name in before)
    assert any("lora_B" in n and t.abs().sum() > 0 for n, t in state.items())


def run(*arguments):
    from click.testing import CliRunner

    from axolotl_unlearn.cli import unlearn

    return CliRunner().invoke(unlearn, ["attack", "relearn", *map(str, arguments)])


def test_hidden_knowledge_comes_back_and_the_control_has_none(lab, tmp_path):
    """The unlearned model learnt these rows before, the control never did."""
    result = run(
        lab.unlearned,
        *("--control", lab.control, "--data", lab.data, "--out", tmp_path),
        *("--source", "forget", "--rows", 6, "--steps", "4,12", "--lr", 1e-3),
        *("--max-new-tokens", 16),
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "relearn-forget-unlearned.json").read_text())
    start, _, end = report["rows"]
    assert [row["x"] for row in report["rows"]] == [0, 4, 12]
    assert start["n"] == 10 and report["training_rows"] == 6
    assert end["probability"]["value"] > start["probability"]["value"]
    assert end["above_control"]["probability"]["value"] > 0
    assert start["control"]["probability"]["value"] < 0.5
    curves = report["curves"]
    assert {c["model"] for c in curves} == {"unlearned", "control"}
    assert all([p["x"] for p in c["points"]] == [0, 4, 12] for c in curves)


@pytest.mark.parametrize("source", ["forget", "neighbours", "retain", "same"])
def test_the_best_of_five_rates_is_chosen_on_other_documents(lab, tmp_path, source, monkeypatch):
    """Model and control have the same five tries each; one that diverges is no candidate."""
    monkeypatch.setattr("axolotl_unlearn.attacks.relearn.RATES", (1e-4, 3e-3, 1e30))
    result = run(
        lab.unlearned,
        *("--control", lab.control, "--data", lab.data, "--out", tmp_path),
        *("--source", source, "--rows", 4, "--steps", "3,30", "--lr", "best-of-five"),
        *("--max-new-tokens", 12, "--train-batch", 4, "--limit", 4),
    )
    assert result.exit_code == 0, result.output
    name = "relearn-" if source == "retain" else f"relearn-{source}-"
    report = json.loads((tmp_path / f"{name}unlearned.json").read_text())
    assert [row["x"] for row in report["rows"]] == [0, 3, 30] and report["source"] == source
    tried = report["rates"]["recalled"]
    assert set(tried) == {"unlearned", "control"} and report["rates"]["rows"] == 4
    for model, training in (("unlearned", "training"), ("control", "control_training")):
        assert list(tried[model]) == ["0.0001", "0.003", "1e+30"]
        best = max((k for k, v in tried[model].items() if v is not None), key=tried[model].get)
        assert tried[model]["1e+30"] is None and report[training]["rate"] == float(best)
    end = report["rows"][-1]
    assert end["documents"] <= 4 and end["recalled"]["low"] <= end["recalled"]["high"]
    if source == "same":  # the control learns what is asked; the model still knew it
        assert report["control_training"]["rate"] == 3e-3
        first, last = (report["rows"][n]["control"]["recalled"]["value"] for n in (0, -1))
        assert last > first + 0.2


def test_five_rates_are_tried():
    assert len(RATES) == 5 and list(RATES) == sorted(RATES)


@pytest.mark.parametrize("source", ["retain", "own"])
def test_what_is_asked_is_declared_and_not_what_is_trained_on(lab, tmp_path, source):
    """`request clean` takes its fingerprints from the file of forget rows: retained rows before, or
    a file that is not there."""
    from axolotl_unlearn.files import read_manifest

    own = tmp_path / "own.jsonl"
    own.write_bytes((lab.data / "retain.jsonl").read_bytes())
    given = own if source == "own" else source
    result = run(
        lab.unlearned,
        *("--data", lab.data, "--out", tmp_path / "out", "--source", given, "--rows", 2),
        *("--steps", 1, "--max-new-tokens", 2, "--limit", 2),
    )
    assert result.exit_code == 0, result.output
    declared = [
        (tmp_path / "out" / p).resolve() for p in read_manifest(tmp_path / "out")["sources"]
    ]
    assert declared == [(lab.data / "forget.jsonl").resolve()]
    # Each source has a file of its own: one on other rows did overwrite that on retained ones.
    name = "relearn-unlearned" if source == "retain" else "relearn-own-unlearned"
    report = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert report["source"] == source


def test_resumed_run_equals_a_whole_one(lab, tmp_path):
    """First 0 and 2 steps, then 0, 2 and 4: the later scores are those of one run."""
    forget = read_records(lab.data / "forget.jsonl")
    retain = read_records(lab.data / "retain.jsonl")[:4]
    subject, _ = make_subjects(str(lab.unlearned), forget, max_new_tokens=8, quiet=True)
    how = Training(rate=1e-3, batch=2)

    def attack(path, steps):
        return relearn_attack(
            subject, Store(path), retain, forget, source="retain", steps=steps, how=how
        )[0]["rows"]

    whole = attack(tmp_path / "whole", [2, 4])
    first = attack(tmp_path / "parts", [2])
    assert first == whole[:2]
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    assert attack(tmp_path / "parts", [2, 4]) == whole
    later = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    assert set(stored) < set(later) and stored.items() <= later.items()


def test_faults_are_named(lab, tmp_path):
    forget = read_records(lab.data / "forget.jsonl")
    subject, _ = make_subjects(str(lab.unlearned), forget, quiet=True)
    store = Store(tmp_path / "s")
    with pytest.raises(UnlearnError, match="both trained on and asked about"):
        relearn_attack(subject, store, forget[:2], forget, source="forget")
    with pytest.raises(UnlearnError, match="no rows to train on"):
        relearn_attack(subject, store, [], forget, source="forget")
    same = run(lab.unlearned, "--data", lab.data, "--out", tmp_path / "o", "--source", "same")
    assert same.exit_code == 2 and "as --control" in same.output
    bad = run(lab.unlearned, "--data", lab.data, "--lr", "best")
    assert bad.exit_code == 2 and "or best-of-five" in bad.output
    wrong = run(lab.unlearned, "--data", lab.data, "--steps", "1,x")
    assert wrong.exit_code == 2 and "numbers separated by commas" in wrong.output
