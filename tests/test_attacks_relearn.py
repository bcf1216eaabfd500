"""Relearning: clean splits, training that equals a plain loop, recovery against a control."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from attack_models import attacked, batch_of, make_lab, tokenizer
from conftest import tiny_llama
from fault_codes import fails

from axolotl_unlearn.attacks.probes import plain_probes
from axolotl_unlearn.attacks.relearn import (
    Training,
    relearn_attack,
    split_forget,
    train,
)
from axolotl_unlearn.attacks.target import make_subjects
from axolotl_unlearn.data.records import Record, read_records
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
    with fails("attack.none-to-ask"):
        split_forget(records, 18)


def test_a_row_of_two_documents_is_not_trained_on_and_asked_about():
    """One text in two documents ended the attack, by the draw."""
    rows = [record(i, d) for d in "abcdef" for i in range(3)]
    rows += [replace(record(9, d), input="Who?", output="Ada") for d in "abcdef"]
    trained, asked = split_forget(rows, 7)
    assert len(trained) == 8 and len(asked) == 12
    assert "Ada" in {r.output for r in trained} and "Ada" not in {r.output for r in asked}


def test_rows_of_an_author_are_no_independent_rows():
    """Rows of an author were trained on and others of theirs asked about, with intervals over
    documents, as if they were independent."""
    rows = [replace(record(i, d), author="AB"[d > "c"]) for d in "abcdef" for i in range(3)]
    trained, asked = split_forget(rows, 2)
    assert {r.author for r in trained}.isdisjoint(r.author for r in asked) and len(asked) == 9
    assert {probe.document for probe in plain_probes(rows)} == {"author: A", "author: B"}
    assert plain_probes([record(0, "a")])[0].document == '"a"'
    again = [replace(record(0, name), input="Who?", output="Ada") for name in "abc"]
    assert len({probe.document for probe in plain_probes(again)}) == 1  # the same row three times


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


@pytest.mark.parametrize("rank", [0, 4])
def test_in_half_precision_as_much_is_trained(lab, rank):
    """At small rates bfloat16 weights stood still, so nothing came back."""
    from transformers import AutoModelForCausalLM

    records, moved = read_records(lab.data / "forget.jsonl"), []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(lab.unlearned, dtype=dtype)
        steps = train(model, tokenizer(), records, [0, 10], Training(rate=1e-5, rank=rank))
        assert next(steps)[1].dtype == dtype  # asked as it is
        trained = [p for p in model.parameters() if p.requires_grad]
        before = [p.detach().float().clone() for p in trained]
        next(steps)
        gaps = [(p - old).norm() for p, old in zip(trained, before, strict=True)]
        moved.append(float(torch.stack(gaps).norm()))
    assert moved[1] == pytest.approx(moved[0], rel=0.1)


def test_lora_leaves_the_weights_alone():
    tok = tokenizer()
    model = tiny_llama(vocabulary=len(tok))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ((_, trained),) = train(model, tok, [record(0, "a")], [3], Training(rate=1e-2, rank=2))
    state = trained.state_dict()
    base = {n.replace(".base_layer", ""): t for n, t in state.items() if "lora_" not in n}
    assert all(torch.equal(base[name], before[name]) for name in before)
    assert any("lora_B" in n and t.abs().sum() > 0 for n, t in state.items())


def test_hidden_knowledge_comes_back_and_the_control_has_none(lab, tmp_path):
    """The unlearned model learnt these rows before, the control never did."""
    result = attacked(
        *("relearn", lab.unlearned),
        *("--control", lab.control, "--data", lab.data, "--out", tmp_path),
        *("--source", "forget", "--rows", 6, "--steps", "1,12", "--lr", 1e-3),
        *("--max-new-tokens", 16),
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "relearn-forget-unlearned.json").read_text())
    start, _, end = report["rows"]
    assert [row["variant"] for row in report["rows"]] == ["0 steps", "1 step", "12 steps"]
    assert start["n"] == 10 and report["training_rows"] == 6
    assert end["probability"]["value"] > start["probability"]["value"]
    assert end["above_control"]["probability"]["value"] > 0
    assert start["control"]["probability"]["value"] < 0.5


def test_each_source_has_a_file_of_its_own(lab, tmp_path):
    """An attack on rows of a file overwrote that on retained ones, also where the file is called
    after those, and that on other rows of the file."""
    rows, out = (lab.data / "retain.jsonl").read_text().splitlines(), tmp_path / "out"
    own, called = tmp_path / "own.jsonl", tmp_path / "retain.jsonl"
    own.write_text("\n".join(rows))
    for source, some in (("retain", []), (own, []), (called, rows[:2]), (called, rows[2:4])):
        called.write_text("\n".join(some))
        given = "--data", lab.data, "--out", out, "--source", source, "--rows", 2, "--steps", 1
        result = attacked("relearn", lab.unlearned, *given, "--max-new-tokens", 2, "--limit", 2)
        assert result.exit_code == 0, result.output
    found = {path.stem: json.loads(path.read_text())["source"] for path in out.glob("r*-*.json")}
    assert (
        found.pop("relearn-unlearned") == "retain" and found.pop("relearn-own-unlearned") == "own"
    )
    assert found.pop("relearn-retain.jsonl-unlearned") == "retain.jsonl"
    ((name, source),) = found.items()
    assert re.fullmatch(r"relearn-retain\.jsonl-unlearned-\w{8}", name) and source == "retain.jsonl"


def test_resumed_run_equals_a_whole_one(lab, tmp_path):
    """First 0 and 2 steps, then 0, 2 and 4: the later scores are those of one run."""
    forget = read_records(lab.data / "forget.jsonl")
    retain = read_records(lab.data / "retain.jsonl")[:4]
    subject, _ = make_subjects(str(lab.unlearned), forget, max_new_tokens=8, quiet=True)
    how = Training(rate=1e-3, batch=2)

    def attack(path, steps):
        return relearn_attack(
            subject, Store(path), retain, forget, source="retain", steps=steps, how=how
        )["rows"]

    whole = attack(tmp_path / "whole", [2, 4])
    first = attack(tmp_path / "parts", [2])
    assert first == whole[:2]
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    assert attack(tmp_path / "parts", [2, 4]) == whole
    later = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    assert set(stored) < set(later) and stored.items() <= later.items()


@pytest.mark.parametrize("code, trained", [
    ("attack.trained-and-asked", 2), ("attack.nothing-to-train-on", 0),
])  # fmt: skip
def test_faults(lab, tmp_path, code, trained):
    forget = read_records(lab.data / "forget.jsonl")
    subject, _ = make_subjects(str(lab.unlearned), forget, quiet=True)
    with fails(code):
        relearn_attack(subject, Store(tmp_path), forget[:trained], forget, source="forget")


@pytest.mark.parametrize("option", [
    ("--lr", 0), ("--steps", "1,x"), ("--steps", "5,0"), ("--train-batch", 0), ("--lora-rank", -1),
    ("--max-new-tokens", 0), ("--batch-size", 0), ("--rows", 0),
    ("--lr", "inf", "--steps", 1, "--limit", 1, "--max-new-tokens", 1),
])  # fmt: skip
def test_options_that_are_no_numbers(lab, option):
    assert attacked("relearn", lab.unlearned, "--data", lab.data, *option).exit_code == 2
