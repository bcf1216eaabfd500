"""Generic knowledge: the list itself, how answers are judged, a model that learnt some."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.continuations import continuation_logps
from research.probes.generic import (
    Item,
    builtin_items,
    drop,
    fold,
    is_correct,
    outside,
    read_items,
    score_generic,
    summary,
)

ROOT = Path(__file__).parents[2]
TOFU = ROOT.parent / "shared" / "tofu"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-olmo")


@pytest.fixture(scope="module")
def blank(tokenizer):
    from conftest import tiny_llama

    return tiny_llama(vocabulary=len(tokenizer), eos_token_id=tokenizer.eos_token_id)


@pytest.fixture(scope="module")
def items():
    return builtin_items()[:12]


@pytest.fixture(scope="module")
def taught(tokenizer, items):
    """A tiny model that memorised the first six questions with their answers, and to stop."""
    from conftest import tiny_llama

    model = tiny_llama(
        seed=1, vocabulary=len(tokenizer), hidden_size=64, eos_token_id=tokenizer.eos_token_id
    ).train()
    rows = []
    for item in items[:6]:
        prompt = tokenizer(item.question)["input_ids"]
        answer = tokenizer(" " + item.answers[0])["input_ids"] + [tokenizer.eos_token_id]
        rows.append((prompt + answer, len(prompt)))
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([[-100] * n + ids[n:] + [-100] * (width - len(ids)) for ids, n in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.05
    return model.eval()


def test_the_list_is_what_it_promises():
    items = builtin_items()
    assert len(items) >= 150
    assert len({item.id for item in items}) == len({item.question for item in items}) == len(items)
    counts = Counter(item.category for item in items)
    assert {"capital", "birthplace", "date", "author", "award", "currency", "founder"} <= set(
        counts
    )
    assert min(counts.values()) >= 6
    for item in items:
        assert item.question.endswith("?")
        assert len(item.distractors) == 3 and len(set(map(fold, item.options))) == 4
        assert is_correct(item.answers[0], item) and not is_correct(item.distractors[0], item)
        assert not {fold(a) for a in item.answers} & {fold(d) for d in item.distractors}


@pytest.mark.skipif(not TOFU.is_dir(), reason="TOFU is not beside the repository")
@pytest.mark.parametrize(("name", "n"), [("real_authors", 100), ("world_facts", 117)])
def test_tofu_files_are_read_and_not_repeated(name, n):
    items = read_items(TOFU / f"{name}_perturbed.jsonl")
    assert len(items) == n and all(len(item.options) == 4 for item in items)
    assert not {i.question for i in items} & {i.question for i in builtin_items()}


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("The Thames,", "thames"),
        ("MÁLAGA", "malaga"),
        ("Stratford-upon-Avon", "stratford upon avon"),
        ("złoty", "zloty"),
        ("the", "the"),
        ("+44", "44"),
    ],
)
def test_fold(text, folded):
    assert fold(text) == folded


ITEM = Item("x", "Who wrote it?", ("Emily Brontë", "Bell"), ("Charlotte Brontë", "Anne", "Jane"))


@pytest.mark.parametrize(
    ("generated", "right"),
    [
        (" Emily Bronte.", True),
        ("\n\n It was Emily Brontë, not Jane.", True),
        (" Jane, no, Emily Brontë", False),
        (" Emily", False),
        (" Bellamy", False),
        (" by bell", True),
        (" I do not know\nEmily Brontë", False),
        ("", False),
    ],
)
def test_answers_as_models_write_them(generated, right):
    assert is_correct(generated, ITEM) is right


@given(st.text(max_size=20))
def test_any_text_is_judged(text):
    assert is_correct(text, ITEM) in (True, False)
    assert fold(fold(text)) == fold(fold(fold(text)))


def test_continuations_equal_one_forward_each(blank, tokenizer):
    """Batched and padded against one pair at a time on full logits."""
    pairs = [("What is", " the capital of Peru"), ("A", " b"), ("Who was born in Rome", ", then?")]
    got = continuation_logps(blank, tokenizer, pairs, options=DataArgs(join=""))
    for (prompt, answer), logps in zip(pairs, got, strict=True):
        head, tail = tokenizer(prompt)["input_ids"], tokenizer(answer)["input_ids"]
        logits = blank(torch.tensor([head + tail])).logits[0].detach().double().log_softmax(-1)
        expected = [float(logits[len(head) + i - 1, t]) for i, t in enumerate(tail)]
        np.testing.assert_allclose(logps, expected, atol=1e-5)
    for size in (1, 16):
        other = continuation_logps(
            blank, tokenizer, pairs, options=DataArgs(join=""), batch_tokens=size
        )
        for a, b in zip(got, other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_probability_is_normalised_over_options(blank, tokenizer):
    """p_i = exp(mean log-prob of option i); share = p_0 / sum p."""
    item = Item("x", "Where is it?", ("Rome",), ("Paris in France", "Oslo"))
    (row,) = score_generic(blank, tokenizer, [item])
    p = []
    for option in item.options:
        head = tokenizer("Where is it?")["input_ids"]
        tail = tokenizer(" " + option)["input_ids"]
        logits = blank(torch.tensor([head + tail])).logits[0].detach().double().log_softmax(-1)
        logps = [float(logits[len(head) + i - 1, t]) for i, t in enumerate(tail)]
        p.append(np.exp(np.mean(logps)))
    assert row["probability"] == pytest.approx(p[0] / sum(p), abs=1e-5)
    assert row["option"] == float(p[0] > max(p[1:]))


def test_a_model_knows_what_it_was_taught(taught, blank, tokenizer, items):
    result = summary(score_generic(taught, tokenizer, items, batch_size=5))
    known = result["items"][:6]
    assert all(row["generation"] == row["option"] == 1 for row in known)
    assert all(row["probability"] > 0.8 for row in known)
    assert result["by_category"]["capital"]["n"] == 12
    low, high = result["intervals"]["generation"]
    assert low <= result["generation"] <= high
    json.dumps(result)

    lost = drop(result, summary(score_generic(blank, tokenizer, items, batch_size=5)))
    assert lost["generation"]["value"] >= 0.5 and lost["generation"]["low"] > 0
    assert set(lost) == {"generation", "option", "probability"}


def test_drop_by_hand():
    """Four common questions, one lost: 4/4 - 3/4 = .25. The fifth was asked once only."""

    def result(values):
        return summary(
            [
                {"id": f"q{i}", "category": "", "generation": v, "option": v, "probability": v}
                for i, v in enumerate(values)
            ]
        )

    lost = drop(result([1.0, 1.0, 1.0, 1.0]), result([1.0, 0.0, 1.0, 1.0, 0.0]))
    assert lost["option"]["value"] == 0.25
    assert lost["option"]["low"] == 0 and not lost["option"]["p"] < 0.05
    with pytest.raises(UnlearnError, match="no common question"):
        drop(result([1.0]), {"items": []})


def test_questions_that_the_forget_set_answers_are_left_out():
    items = [
        Item("a", "In which city was Marie Curie born?", ("Warsaw",), ("Paris",)),
        Item("b", "In which city was Karl Marx born?", ("Trier",), ("Bonn",)),
        Item("c", "Who composed the Messiah?", ("Handel",), ("Bach",)),
    ]
    texts = ["Marie Curie, born in Warsaw, went to Paris.", "Karl Marx lived in London."]
    assert [item.id for item in outside(items, texts)] == ["b", "c"]
    assert outside(builtin_items(), ["Nothing of interest."]) == builtin_items()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"answer": "a", "distractors": ["b"]}], "'question' must be a text"),
        ([{"question": "q?", "distractors": ["b"]}], "'answers' .or 'answer'. must be a list"),
        ([{"question": "q?", "answer": "a"}], "perturbed_answer"),
        ([{"question": "q?", "answer": "The a", "distractors": ["a"]}], "among the accepted"),
        (
            [{"id": 1, "question": "q?", "answer": "a", "distractors": ["b"]}] * 2,
            "the same id",
        ),
    ],
)
def test_faults_are_named(tmp_path, rows, message):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UnlearnError, match=message):
        read_items(path)
