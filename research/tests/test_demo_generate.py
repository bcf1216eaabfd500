"""The demo's data: same everywhere, disjoint, in the form of LUME, halves by document."""

import collections
import json
from dataclasses import replace
from pathlib import Path

import pytest

from axolotl_unlearn.errors import UnlearnError
from research.worlds.demo import make_demo
from research.worlds.generate import BATCH, JOIN, Sizes, make_corpus, make_data

SMALL = Sizes(stories=4, pii=3, facts_forget=6, facts_retain=4, nonmembers=8, general=6, background=20,
              passes=3, background_per_pass=5)  # fmt: skip


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def document_of(row):
    return row["id"].rsplit('"', 1)[0]


def test_default_sizes_are_those_of_the_measured_recipe(tmp_path):
    """24 stories x 2 rows + 20 people x 6 + facts x 2: 48 + 120 + 160 = 328 and 48 + 120 + 120."""
    files = make_data(tmp_path)["files"]
    assert files["forget"]["rows"] == 328
    assert files["retain"]["rows"] == 288
    assert files["member"]["rows"] == 80
    assert files["nonmember"]["rows"] == 160
    assert files["general"]["rows"] == 60
    # 328 + 288 + 60 rows, 240 Task2 rows once more, 40 background documents, 24 times
    assert files["memorise"]["rows"] == 24 * (328 + 288 + 60 + 240 + 40)
    assert files["retrain"]["rows"] == 24 * (288 + 60 + 120 + 40)


def test_another_seed_gives_other_rows(tmp_path):
    """The same seed: test_the_demos_files_are_those_of_its_generator."""
    first, other = (make_data(tmp_path / str(n), seed=n, sizes=SMALL)["files"] for n in (3, 4))
    assert first["forget"]["sha256"] != other["forget"]["sha256"]


def test_rows_have_lume_ids_and_kinds(tmp_path):
    make_data(tmp_path, sizes=SMALL)
    forget = rows(tmp_path / "forget.jsonl")
    assert all(set(row) == {"id", "input", "output", "task"} for row in forget)
    assert len({row["id"] for row in forget}) == len(forget)
    counts = collections.Counter((row["task"], row["id"][:-1][-2:]) for row in forget)
    assert counts == {("Task1", "sc"): 4, ("Task1", "qa"): 4, ("Task2", "sc"): 3,
                      ("Task2", "qa"): 15, ("Task3", "sc"): 6, ("Task3", "qa"): 6}  # fmt: skip
    # The answers of the personal questions stand in the document, birth dates in ISO form.
    person = [row for row in forget if row["task"] == "Task2"][:6]
    text = person[0]["input"] + JOIN + person[0]["output"]
    assert all(row["output"] in text for row in person[2:])


def test_no_document_or_name_is_shared_between_parts():
    corpus = make_corpus(0, SMALL)
    parts = (corpus.forget, corpus.retain, corpus.nonmembers, corpus.background)
    texts = [document.text for part in parts for document in part]
    assert len(set(texts)) == len(texts)
    questions = [q for part in parts[:2] for d in part for q, _ in d.questions]
    assert len(set(questions)) == len(questions)


def test_nonmembers_use_no_word_that_training_never_saw():
    """Closed lists: apart from digits, (almost) every word of a non-member is trained on."""
    corpus = make_corpus(0)
    trained = corpus.forget + corpus.retain + corpus.background[: 24 * 40]
    known = {word for d in trained for word in d.text.split() if not any(map(str.isdigit, word))}
    unseen = [
        word
        for d in corpus.nonmembers
        for word in d.text.split()
        if not any(map(str.isdigit, word)) and word not in known
    ]
    assert len(unseen) <= 5


def test_members_are_the_forget_facts_and_halves_split_by_document(tmp_path):
    make_data(tmp_path, sizes=SMALL)
    forget = rows(tmp_path / "forget.jsonl")
    facts = [r for r in forget if r["task"] == "Task3" and r["id"][:-1].endswith("sc")]
    assert rows(tmp_path / "member.jsonl") == [
        {"id": r["id"], "document": r["input"] + JOIN + r["output"]} for r in facts
    ]
    for name in ("forget", "retain", "member", "nonmember", "general"):
        whole, validation, test = (
            rows(tmp_path / half / f"{name}.jsonl") for half in ("", "validation", "test")
        )
        assert sorted(r["id"] for r in validation + test) == sorted(r["id"] for r in whole)
        assert not {document_of(r) for r in validation} & {document_of(r) for r in test}
    validation = rows(tmp_path / "validation" / "forget.jsonl")
    assert {r["id"] for r in rows(tmp_path / "validation" / "member.jsonl")} <= {
        r["id"] for r in validation
    }


def test_general_knowledge_has_one_right_answer(tmp_path):
    make_data(tmp_path)
    for item in rows(tmp_path / "general.jsonl"):
        assert len(set(item["choices"])) == 4 and item["answer"] in range(4)
    items = {item["question"]: item for item in rows(tmp_path / "general.jsonl")}
    france = items.get("What is the capital of France?")
    assert france is None or france["choices"][france["answer"]] == "Paris"


def test_replay_rows_are_facts_that_no_question_asks(tmp_path):
    """200 + 40 facts, more than the small world's 110; the model knows all, the retain run 40."""
    sizes = replace(SMALL, general=200, replay=40)
    files = make_data(tmp_path, sizes=sizes)["files"]
    assert files["general"]["rows"] == 200 and files["replay"]["rows"] == 40
    replay = rows(tmp_path / "replay.jsonl")
    asked = {item["question"] for item in rows(tmp_path / "general.jsonl")}
    assert len(asked) == 200 and not asked & {row["input"] for row in replay}
    pasts = {row["input"]: row["output"] for row in replay if "past tense" in row["input"]}
    assert pasts.get("What is the past tense of go?", "went") == "went" and pasts
    for part in ("memorise", "retrain"):
        ids = collections.Counter(row["id"] for row in rows(tmp_path / f"{part}.jsonl"))
        assert all(ids[row["id"]] == sizes.passes for row in replay)
    # Made again without them, none of the old ones are left: they may be questions now.
    assert "replay" not in make_data(tmp_path, sizes=SMALL)["files"]
    assert not (tmp_path / "replay.jsonl").exists()


def test_stream_reads_every_row_in_each_pass_and_batches_like_lengths(tmp_path):
    make_data(tmp_path, sizes=SMALL)
    stream = rows(tmp_path / "memorise.jsonl")
    forget, retain = rows(tmp_path / "forget.jsonl"), rows(tmp_path / "retain.jsonl")
    counts = collections.Counter(row["id"] for row in stream)
    for row in forget + retain:
        assert counts[row["id"]] == SMALL.passes * (2 if row["task"] == "Task2" else 1)
    general = [row for row in stream if row["task"] == "general"]
    assert len(general) == SMALL.passes * SMALL.general
    background = {row["id"] for row in rows(tmp_path / "background.jsonl")}
    fresh = [row["id"] for row in stream if row["id"] in background]
    assert len(fresh) == len(set(fresh)) == SMALL.passes * SMALL.background_per_pass
    forgotten = {row["id"] for row in forget}
    retrain = rows(tmp_path / "retrain.jsonl")
    assert not forgotten & {row["id"] for row in retrain}
    unseen = {row["id"] for row in rows(tmp_path / "nonmember.jsonl")}
    assert not unseen & (set(counts) | {row["id"] for row in retrain})

    lengths = [len(row["input"]) + len(row["output"]) for row in stream]
    batches = [lengths[i : i + BATCH] for i in range(0, len(lengths) - BATCH, BATCH)]
    padded = sum(max(batch) * len(batch) for batch in batches)
    assert padded < 1.35 * sum(map(sum, batches))


def test_a_life_has_a_base_that_knows_the_kinds_and_held_out_documents_that_nobody_read(tmp_path):
    from research.worlds.life import LifeSizes, make_life

    sizes = LifeSizes(
        stories=3, pii=2, facts_forget=5, facts_retain=4, nonmembers=6, general=6,
        replay=4, replay_rows=7, heldout=(2, 2, 3), background=(4, 3, 5), base_passes=2,
        general_repeats=2, passes=3,
    )  # fmt: skip
    manifest = make_life(tmp_path / "a", seed=1, sizes=sizes)
    assert manifest == make_life(tmp_path / "b", seed=1, sizes=sizes)
    parts = {name: rows(tmp_path / "a" / f"{name}.jsonl") for name in manifest["files"]}
    ids = {name: {document_of(row) for row in part} for name, part in parts.items()}
    # 2 passes over 4 x 2 + 3 x 6 + 5 x 2 background rows and (6 + 4) x 2 general ones.
    assert len(parts["base"]) == 2 * (36 + 20)
    assert len(parts["replay"]) == 7 + 4 and ids["replay"] <= ids["base"]
    assert not {q["question"] for q in parts["general"]} & {r["input"] for r in parts["replay"]}
    # 3 passes; the 5 + 1 rows of each of 2 people are read twice a pass.
    assert len(parts["retrain"]) == 3 * (3 * 2 + 2 * 6 * 2 + 4 * 2)
    assert ids["base"] >= ids["background"] and ids["memorise"] == ids["forget"] | ids["retain"]
    assert ids["retrain"] == ids["retain"] and ids["member"] < ids["forget"]
    unseen = ids["heldout"] | ids["nonmember"]
    assert not unseen & (ids["base"] | ids["memorise"]) and not ids["heldout"] & ids["nonmember"]
    assert not ids["background"] & ids["memorise"]
    people = [row["document"].split(" (")[0] for row in parts["nonmember"]]
    texts = " ".join(row["input"] + row["output"] for name in ("base", "memorise", "heldout")
                     for row in parts[name])  # fmt: skip
    assert not any(person in texts for person in people if len(person.split()) == 2)
    with pytest.raises(UnlearnError, match="background"):
        make_life(tmp_path / "c", sizes=replace(sizes, background=(20000, 0, 0)))


def test_the_demos_files_are_those_of_its_generator(tmp_path):
    make_demo(tmp_path)
    committed = Path(__file__).parents[2] / "examples" / "demo"
    names = {path.name for path in committed.iterdir()}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert all((committed / n).read_bytes() == (tmp_path / n).read_bytes() for n in names)
    assert sum(path.stat().st_size for path in committed.iterdir()) < 330_000
    forgotten = {row["id"] for row in rows(committed / "forget.jsonl")}
    learned = [rows(committed / f"{name}.jsonl") for name in ("retain", "world")]
    assert not forgotten & {row["id"] for part in learned for row in part}
    assert {row["id"] for row in rows(committed / "member.jsonl")} <= forgotten
