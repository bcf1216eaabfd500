"""Prompt attacks: what exactly is asked, how recall is scored, and the whole run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from attack_models import attacked, make_lab, tokenizer
from data_tokenizers import sentencepiece_like
from hypothesis import given
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from axolotl_unlearn.attacks.probes import Probe, Scores, plain_probes, recalled, score_probes
from axolotl_unlearn.attacks.prompt import (
    example_probes,
    prefix_probes,
    read_paraphrases,
)
from axolotl_unlearn.attacks.results import stored
from axolotl_unlearn.attacks.target import AttackTarget, make_subjects, read_side
from axolotl_unlearn.data.records import Record, read_records
from axolotl_unlearn.evaluation.sets import load_sets
from axolotl_unlearn.store import Store


@pytest.fixture(scope="module")
def lab():
    return make_lab()


RECORDS = [
    Record("d0sc1", "Ada Brook was born", "in Bath and kept bees.", "Task2", "completion"),
    Record("d0qa0", "Where was Ada Brook born?", "Bath", "Task2", "question"),
    Record("d0qa1", "What is her phone number?", "47 12 90", "Task2", "question"),
    Record("d1qa0", "What did Ben Cole keep?", "A goat", "Task2", "question"),
]
PROBES = plain_probes(RECORDS)


def test_questions_are_recalled_when_the_answer_is_named():
    assert recalled(PROBES[1], "Bath.") == recalled(PROBES[1], "She was born in BATH, I think") == 1
    assert recalled(PROBES[1], "Bathing") == recalled(PROBES[1], "") == 0
    assert recalled(PROBES[3], "goat") == 1


def test_completions_are_recalled_as_rouge_says():
    """in Bath and kept bees / in Bath and kept a goat: 4 of 5 words."""
    text = "in Bath and kept a goat"
    oracle = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    expected = oracle.score("in Bath and kept bees.", text)["rougeL"].recall
    assert recalled(PROBES[0], text) == pytest.approx(expected) == pytest.approx(4 / 5)


@pytest.mark.parametrize("scheme", ["legacy", "metaspace"])
def test_a_tokenizer_that_drops_the_first_space_gives_prefixes(scheme):
    """Of Llama's and Mistral's no row was asked: what is decoded begins without the space."""
    tok = sentencepiece_like("▁in ▁Bath ▁and ▁kept ▁bees. ▁47 ▁12 ▁90".split(), scheme)
    cut = prefix_probes([PROBES[0], PROBES[2]], tok, 0.5)
    asked = ["Ada Brook was born in Bath", "What is her phone number? 47"]
    assert [(probe.prompt, probe.expected) for probe in cut][0] == (asked[0], "and kept bees.")
    assert cut[1].prompt.startswith(asked[1]) and cut[1].continuation.endswith(" 90")


def test_rows_are_read_as_the_evaluation_reads_them(tmp_path):
    """Those of TOFU were refused, with the cure for a training config."""
    rows = [{"question": f"Who is {n}?", "answer": n, "paraphrased_question": n} for n in "ab"]
    for name, some in (("forget10_perturbed", rows[:1]), ("retain90", rows[1:])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (tmp_path / f"{name}.jsonl").write_text(text, "utf-8")
    sets = load_sets(tmp_path, parts=("tasks",))
    path, records = read_side(tmp_path, "forget")
    assert (records, read_side(tmp_path, "retain")[1]) == (sets.forget, sets.retain)
    assert read_paraphrases(path) == {records[0].id: "a"} and records[0].kind == "question"


def test_prefix_cuts_on_tokens_and_asks_for_the_rest():
    tok = tokenizer()
    for share in (0.25, 0.5):
        for probe in prefix_probes(PROBES, tok, share):
            plain = next(p for p in PROBES if p.id == probe.id)
            assert probe.prompt + probe.continuation == plain.prompt + plain.continuation
            assert probe.expected == probe.continuation.strip()
            given = probe.prompt.removeprefix(plain.prompt)
            total = len(tok(plain.continuation)["input_ids"])
            assert len(tok(given)["input_ids"]) == max(1, int(share * total))


def test_a_single_token_has_no_prefix():
    tok = tokenizer()
    single = next(w for w in (" the", " in", " a", " of", " and") if len(tok(w)["input_ids"]) == 1)
    probe = Probe("x", "x", "Say", single, single.strip(), "question")
    assert prefix_probes([probe], tok, 0.5) == []


def test_examples_are_of_the_same_task_and_kind():
    retain = [
        Record("r0qa0", "Who is X?", "Y", "Task2", "question"),
        Record("r1qa0", "Who is Z?", "W", "Task1", "question"),
        Record("r2sc1", "Once", "upon", "Task2", "completion"),
    ]
    tasks = {record.id: record.task for record in RECORDS}
    made = {p.id: p for p in example_probes(PROBES, tasks, retain, 1)}
    assert made["d0qa0"].prompt == "Who is X? Y\n\nWhere was Ada Brook born?"
    assert made["d0sc1"].prompt == "Once upon\n\nAda Brook was born"
    assert example_probes(PROBES, tasks, retain, 2) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1), st.randoms())
def test_figures_do_not_depend_on_order(values, rng):
    def make(some):
        ids = [f"r{i}" for i, _ in some]
        return Scores(ids, [f"d{d}" for _, (d, _) in some], *([v for _, (_, v) in some],) * 2)

    rows = list(enumerate(values))
    first = make(rows).figures()
    rng.shuffle(rows)
    second = make(rows).figures()
    for end in ("value", "low", "high"):
        assert first["recalled"][end] == pytest.approx(second["recalled"][end], abs=1e-9)


def test_scores_of_a_model(lab):
    """Probability against one plain forward; recall against the model's own generate."""
    from transformers import AutoModelForCausalLM

    tok = tokenizer()
    model = AutoModelForCausalLM.from_pretrained(lab.memorised).eval()
    probes = plain_probes(read_records(lab.data / "forget.jsonl"))[:5]
    scores = score_probes(model, tok, probes, max_new_tokens=16, batch_size=2)
    for i, probe in enumerate(probes):
        head, tail = tok(probe.prompt)["input_ids"], tok(probe.continuation)["input_ids"]
        with torch.inference_mode():
            logp = model(torch.tensor([head + tail])).logits[0].log_softmax(-1)
            output = model.generate(torch.tensor([head]), max_new_tokens=16, do_sample=False)
        mean = np.mean([float(logp[len(head) + j - 1, t]) for j, t in enumerate(tail)])
        assert scores.probability[i] == pytest.approx(np.exp(mean), rel=1e-4)
        text = tok.decode(output[0, len(head) :], skip_special_tokens=True)
        assert scores.recalled[i] == recalled(probe, text)
    cut = score_probes(model, tok, probes, max_new_tokens=16, until=" ")
    assert sum(cut.recalled) < sum(scores.recalled)


def test_rows_without_an_input_are_said(lab, tmp_path):
    """Of 16 rows two were asked, nothing said so, and the verdict took them for all."""
    rows = list(map(json.loads, (lab.data / "forget.jsonl").read_text().splitlines()))

    def asked(given: int, *more: str):
        empty = [row | {"input": row["input"] if i < given else " "} for i, row in enumerate(rows)]
        (tmp_path / "forget.jsonl").write_text("\n".join(map(json.dumps, empty)))
        words = ["prompt", lab.memorised, "--data", tmp_path, "--out", tmp_path, *more]
        return attacked(*words, "--variants", "affirmative", "--max-new-tokens", 2)

    said = asked(2)
    assert "Only 2 rows can be asked: the others have no input." in said.output
    report = json.loads((tmp_path / "prompt-memorised.json").read_text())
    assert report["limit"] == report["rows"][0]["n"] == 2
    assert asked(0).exit_code == 2 and asked(2, "--examples", "1,0").exit_code == 2


@pytest.mark.parametrize("words, rows", [
    (("prompt", "--variants", "affirmative"), 16), (("quantise", "--schemes", "int8"), 16),
    (("relearn", "--steps", "1", "--rows", "2"), 16),
    (("relearn", "--steps", "1", "--rows", "6", "--source", "forget"), 10),
])  # fmt: skip
def test_a_limit_that_leaves_nothing_out_is_none(lab, tmp_path, words, rows):
    """All rows were asked, and the verdict said "a part of the rows only"."""
    given = ("--data", lab.data, "--out", tmp_path, "--max-new-tokens", 1)
    for limit, kept in ((rows - 1, rows - 1), (rows, None), (99, None)):
        result = attacked(words[0], lab.unlearned, *words[1:], *given, "--limit", limit)
        assert result.exit_code == 0, result.output
        last = max(tmp_path.glob("*-*.json"), key=lambda path: path.stat().st_mtime_ns)
        file = json.loads(last.read_text())
        assert (file["rows"][0]["n"], file["limit"]) == (min(rows, limit), kept)


def test_command_line_asks_every_way(lab, tmp_path, monkeypatch):
    arguments = ["prompt", lab.unlearned, "--control", lab.control, "--data", lab.data]
    arguments += ["--out", tmp_path, "--max-new-tokens", 16, "--examples", "1,2"]
    ask, asked = AttackTarget.ask, {}

    def remembered(self, model, tokenizer, probes, what, **options):
        asked[what] = {probe.id: probe.prompt for probe in probes}
        return ask(self, model, tokenizer, probes, what, **options)

    monkeypatch.setattr(AttackTarget, "ask", remembered)
    result = attacked(*arguments)
    assert result.exit_code == 0, result.output
    assert asked["affirmative"]["f0sc1"] == "Ada Brook was born Sure, here is the answer:"
    assert asked["paraphrase"]["f0qa0"] == "How can one call Ada Brook?"
    report = json.loads((tmp_path / "prompt-unlearned.json").read_text())
    rows = {row["variant"]: row for row in report["rows"]}
    assert set(rows) == {
        *("plain", "affirmative", "prefix 25%", "prefix 50%"),
        *("paraphrase", "examples 1", "examples 2"),
    }
    assert rows["plain"]["n"] == 16 and rows["paraphrase"]["n"] == 8
    # Half of the answer given, the rest is likelier than the whole was.
    assert rows["prefix 50%"]["gain"]["probability"]["value"] > 0
    for row in rows.values():
        gain = row["gain"]["probability"]
        change = row["probability"]["value"] - row["before"]["probability"]["value"]
        assert gain["value"] == pytest.approx(change) and gain["low"] <= gain["value"] + 1e-12
        above = row["probability"]["value"] - row["control"]["probability"]["value"]
        assert row["above_control"]["probability"]["value"] == pytest.approx(above)

    plain = json.loads((lab.data / "forget.jsonl").read_text().splitlines()[0])
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "forget.jsonl").write_text(json.dumps(plain) + "\n")
    arguments = ["prompt", lab.unlearned, "--data", bare, "--out", tmp_path / "o"]
    arguments += ["--max-new-tokens", 4, "--variants"]
    result = attacked(*arguments, "paraphrase,affirmative")
    assert result.exit_code == 0, result.output
    assert "Not asked: paraphrase" in result.output
    assert attacked(*arguments, "rhyme").exit_code == 2


@pytest.mark.parametrize("kind", ["prompt", "membership"])
def test_a_model_is_no_control_of_itself(lab, tmp_path, kind):
    """It was taken, and the file said "than from a model that never saw them"."""
    words = ("--control", f"same={lab.unlearned}", "--data", lab.data, "--out", tmp_path / "out")
    said = attacked(kind, lab.unlearned, *words)
    assert said.exit_code == 2 and "same has the weights of unlearned" in said.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", [{"batch_size": 1}, {"device": "cuda:1"}, {"dtype": "float16"}])
def test_answers_that_may_differ_are_asked_again(lab, tmp_path, other):
    """After `--dtype bfloat16` a run with `--batch-size 1`, or on another kind of device, took the
    answers of before."""
    model, _ = make_subjects(str(lab.unlearned), [])
    half, first, store, made = replace(model, dtype="bfloat16"), Scores([], [], [], []), None, []
    store = Store(tmp_path)

    def ask(target):
        stored(store, target, [], "plain", lambda: made.append(target) or first)

    ask(half), ask(half), ask(replace(half, **other))
    assert len(made) == 2, "one's own answers are kept"
    ask(model), ask(replace(model, batch_size=1)), ask(replace(model, device="cpu:0"))
    assert len(made) == 3, "in float32 they are the same"


def test_shares_that_look_alike_are_asked_each(lab, tmp_path):
    """Of `--prefixes 0.125,0.12` the first was lost: both were "prefix 12%"."""
    words = ("--prefixes", "0.62,0.625", "--variants", "prefix", "--max-new-tokens", 1)
    done = attacked("prompt", lab.unlearned, "--data", lab.data, "--out", tmp_path, *words)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "prompt-unlearned.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["plain", "prefix 62%", "prefix 62.5%"]
