"""The lm-eval tasks without a model: documents, keys, aggregation, registration."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from eval_model import TOKENIZER, documents_of, made_up_rows, write_folder
from fault_codes import fails
from transformers import AutoTokenizer

from axolotl_unlearn.data.documents import Answer
from axolotl_unlearn.engine.token_scoring import text_queries
from axolotl_unlearn.evaluation import lm_tasks, tasks
from axolotl_unlearn.evaluation.sets import load_sets
from axolotl_unlearn.metrics.semeval import CELLS
from eval_tasks.muse import utils as muse
from eval_tasks.semeval_unlearn import utils as semeval
from eval_tasks.unlearn_likelihood import utils as likelihood


class _Names(yaml.SafeLoader):
    """Reads ``!function utils.x`` as its text."""


_Names.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def configs() -> dict[str, dict]:
    found = {}
    for path in tasks.task_folder().glob("*/*.yaml"):
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_Names)
        found[config.get("task") if "group" not in config else config["group"]] = config
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sides = made_up_rows(7)
    return write_folder(tmp_path / "data", sides, documents_of(sides), general=8)


LEAVES = {
    "semeval_unlearn_tasks": (semeval.tasks_documents, semeval.score_task_row, ["in 1003."]),
    "semeval_unlearn_mia": (semeval.mia_documents, semeval.score_document, [(-3.0, False)]),
    "semeval_unlearn_mmlu": (semeval.mmlu_documents, semeval.score_option, [(-1.0, False)] * 4),
}


@pytest.mark.parametrize("name", LEAVES)
def test_every_document_returns_every_metric(folder, name):
    """Sparse keys are mixed by lm-eval when several processes are gathered."""
    documents, score, results = LEAVES[name]
    rows = documents(data_dir=str(folder), pretrained=str(TOKENIZER), dtype="float32")["test"]
    if name == "semeval_unlearn_tasks":  # so that `--limit` leaves some of each
        assert {*rows["cell"][:12]} == {*CELLS}
    expected = {metric["metric"] for metric in configs()[name]["metric_list"]}
    for row in rows:
        assert set(score(row, results)) == expected


@pytest.mark.parametrize("name", ["semeval_unlearn", *LEAVES, "unlearn_likelihood"])
def test_yaml_and_package_agree(name):
    config = configs()[name]
    assert str(config["metadata"]["version"]) == tasks.TASK_VERSION
    if name == "semeval_unlearn":
        assert config["task"] == list(LEAVES)


def test_generation_settings_are_the_official_ones():
    settings = configs()["semeval_unlearn_tasks"]["generation_kwargs"]
    assert settings == {"until": [], "do_sample": False, "max_gen_toks": 256}


def test_aggregation_by_hand():
    """Rows of two cells: forget 1, 0 (mean .5, cell .5) and retain 1 (cell 1): harmonic 2/3.
    AUC of members 1, 3 and non-members 2: one of two pairs right: .5; score 1."""
    pairs = [(CELLS[0], 1.0), (CELLS[6], 1.0), (CELLS[0], 0.0)]
    assert semeval.harmonic_mean_of_cells(pairs) == pytest.approx(2 / 3)
    assert semeval.cells_with_rows(pairs) == 2
    assert lm_tasks.forget_cell([None, 1.0, None, 0.0]) == 0.5
    assert math.isnan(lm_tasks.forget_cell([None])) and math.isnan(lm_tasks.mean_of_present([]))
    losses = [(True, 1.0), (False, 2.0), (True, 3.0)]
    assert semeval.auc_of_pairs(losses) == 0.5 and semeval.mia_score_of_pairs(losses) == 1.0
    assert math.isnan(semeval.auc_of_pairs([(True, 1.0)]))


def test_documents_are_split_after_their_first_token(folder):
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    rows = semeval.mia_documents(data_dir=str(folder), tokenizer=str(TOKENIZER))["test"]
    assert [row["member"] for row in rows][:4] == [True, False, True, False]
    for row in rows:
        ids = tokenizer(row["context"] + row["rest"])["input_ids"]
        assert tokenizer(row["context"])["input_ids"] == ids[:1]
        assert row["tokens"] == len(ids) - 1


def test_a_document_is_read_after_its_prompt_and_whole(folder):
    """The prompt was no part of what was scored, though `eval` reads the document after it; of a
    document longer than the context a part was scored and divided by all its tokens."""
    given = {"data_dir": str(folder), "tokenizer": str(TOKENIZER)}
    path, tokenizer = folder / "member.jsonl", AutoTokenizer.from_pretrained(TOKENIZER)
    first, *others = map(json.loads, path.read_text().splitlines())

    def asked(**change: str) -> dict:
        path.write_text("\n".join(map(json.dumps, [first | change, *others])))
        return semeval.mia_documents(**given)["test"][0]

    for prompt in ("Who was it?\n", "Who was it? "):  # the space and the first word are one token
        row = asked(prompt=prompt)
        assert row["context"].startswith(prompt)
        assert row["context"] + row["rest"] == prompt + first["document"]
        (scored,) = text_queries(tokenizer, [Answer(first["document"], prompt)])  # as `eval` does
        assert row["tokens"] == len(scored.targets)
    given["max_length"] = max(len(scored.ids) - 1, 60)
    assert asked(prompt=prompt) == row
    with fails("tasks.too-long"):
        asked(document="a long text " * 100)
    del given["max_length"]
    with fails("tasks.too-long"):  # as the folder says
        asked(document="a long text " * 3000)


def test_a_first_character_of_several_tokens():
    """Byte-level tokens cannot end within a character: the split moves to where it can."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    text = "漢字 are written here"
    ids = tokenizer(text)["input_ids"]
    context, rest, tokens = lm_tasks.first_token_splitter(tokenizer)(text, "d")
    first = tokenizer(context)["input_ids"]
    assert context + rest == text and len(first) > 1
    assert first == ids[: len(first)] and tokens == len(ids) - len(first)


def test_a_tokenizer_with_bos_scores_all_of_the_text():
    class Bos:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}

    assert lm_tasks.first_token_splitter(Bos())("abc", "d") == ("", "abc", 3)


def test_a_document_of_one_token_is_refused():
    class Whole:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [5]}

    with fails("tasks.no-split"):
        lm_tasks.first_token_splitter(Whole())("abc", "d")


def test_without_a_tokenizer_the_cure_is_said(folder):
    with fails("tasks.no-tokenizer"):
        semeval.mia_documents(data_dir=str(folder))


def test_without_utility_the_leaf_is_nan_not_zero(folder, caplog):
    (folder / "general.jsonl").unlink()
    (row,) = semeval.mmlu_documents(data_dir=str(folder))["test"]
    scores = semeval.score_option(row, [(-1.0, True)])
    assert scores["mmlu"] is None and scores["aggregate"] is None
    assert math.isnan(lm_tasks.mean_of_present([scores["mmlu"]]))
    assert math.isnan(semeval.above_gate([scores["above_gate"]]))
    assert "general.jsonl" in caplog.text


def test_figures_of_single_tokens_are_nan_with_other_models(caplog):
    """Said once; what other tasks measured in the same run is kept."""
    lm_tasks.warn_once.cache_clear()
    for _ in range(2):
        row = likelihood.score_likelihood({"side": "forget", "answer": "x"}, [(-1.0, True)])
        doc = {"forget": True, "retrained_auc": 0.5}
        leak = muse.score_privleak(doc, [(-1.0, True)])["privleak"]
    assert set(row.values()) == {None} and len(row) == 16
    assert math.isnan(muse.auc_members([leak])) and math.isnan(muse.privleak([leak]))
    said = [record.message[:13] for record in caplog.records]
    assert said == ["unlearn_likel", "muse_privleak"]
    assert "--model hf-unlearn" in caplog.text


def test_an_option_that_is_no_number_is_no_answer():
    """Option 0 was taken, which is right in a quarter of the questions."""
    for place in range(3):
        values = [-1.0, -2.0, -3.0]
        values[place] = math.nan
        with fails("tasks.not-finite"):
            semeval.best_option(values)
    assert semeval.best_option([-math.inf, -2.0, -2.0]) == 1


def test_questions_of_every_group_come_before_a_limit(folder):
    """`--limit` took the first rows of the file, all of one subject."""
    path = folder / "general.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | {"group": "ab"[place // 4]} for place, row in enumerate(rows[:8])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [row["question"] for row in rows]
    expected = [texts[place] for place in (0, 4, 1, 5)]
    sets = load_sets(folder)
    assert [one.context for one in sets.utility] == texts
    assert [one.context for one in sets.limited(4).utility] == expected
    asked = semeval.mmlu_documents(data_dir=str(folder))["test"]
    assert asked["context"][:4] == expected


def test_an_answer_without_a_prompt_begins_without_a_space(folder):
    """As it is trained and as `eval` reads it."""
    path = folder / "forget.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["input"] = ""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    docs = likelihood.likelihood_documents(data_dir=str(folder))["test"]
    answers = {(doc["context"], doc["answer"]) for doc in docs if doc["side"] == "forget"}
    assert answers == {
        (row["input"], (" " if row["input"] else "") + row["output"]) for row in rows
    }


def test_an_auc_of_too_few_is_nan(caplog):
    """`--limit` leaves two of either side where 20 are needed."""
    pairs = [(True, 1.0, 20), (False, 2.0, 20)] * 2
    assert math.isnan(semeval.auc_of_pairs(pairs)) and math.isnan(semeval.mia_score_of_pairs(pairs))
    assert "needs 20 of each; raise --limit" in caplog.text
    assert semeval.auc_of_pairs([(m, v, 2) for m, v, _ in pairs]) == 1.0


def test_gate_and_standard_error_by_hand():
    """.75 of .4 is .3: .5 passes, .25 does not. Values 0, 1: sd .707, over sqrt(2): .5."""
    assert semeval.above_gate([(1.0, 0.4), (0.0, 0.4)]) == 1.0
    assert semeval.above_gate([(1.0, 0.4), *[(0.0, 0.4)] * 3]) == 0.0
    assert lm_tasks.standard_error([0.0, None, 1.0]) == pytest.approx(0.5)
    assert math.isnan(lm_tasks.standard_error([1.0, None]))


def test_task_folder_is_where_the_entry_point_says():
    from importlib.metadata import entry_points

    (entry,) = [e for e in entry_points(group="lm_eval.tasks") if e.name == "axolotl_unlearn"]
    assert entry.load()() == tasks.task_folder()
    assert (tasks.task_folder() / "semeval_unlearn" / "utils.py").is_file()


# ---------------------------------------------------------------- --apply_chat_template


def test_what_the_chat_template_does_to_each_task(folder, tmp_path, caplog):
    """Membership and verbatim texts stand as they are; answers follow a turn without a space."""
    from lm_eval.tasks import TaskManager, get_task_dict

    corpus = tmp_path / "muse"
    for name, row in {
        "verbmem/forget": {"prompt": "Ada was", "gt": "born"},
        "privleak/forget": {"text": "Ada was born"},
        "privleak/holdout": {"text": "Bo was born"},
        "knowmem/forget_qa": {"question": "Who?", "answer": "Ada"},
        "knowmem/forget_qa_icl": {"question": "Where?", "answer": "Here"},
    }.items():
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        (corpus / f"{name}.json").write_text(json.dumps([row]))
    lm_tasks.warn_once.cache_clear()
    asked = {}
    for data, names in (
        (folder, ["semeval_unlearn", "unlearn_likelihood"]),
        (corpus, ["muse_verbmem", "muse_knowmem_forget", "muse_privleak"]),
    ):
        manager = TaskManager(
            include_path=str(tasks.task_folder()),
            metadata={"data_dir": str(data), "tokenizer": str(TOKENIZER), "min_members": 1},
        )
        loaded = get_task_dict(names, manager)
        for task in loaded.values():
            for leaf in task.values() if isinstance(task, dict) else [task]:
                leaf.build_all_requests(
                    rank=0,
                    world_size=1,
                    limit=1,
                    apply_chat_template=True,
                    chat_template=lambda turns, **_: f"<u>{turns[0]['content']}<a>",
                    tokenizer_name="none",
                )
                asked[leaf.config.task] = [one.args for one in leaf.instances]
    for name, requests in asked.items():
        plain = name in ("semeval_unlearn_mia", "muse_verbmem", "muse_privleak")
        for context, answer in requests:
            assert context.startswith("<u>") is context.endswith("<a>") is not plain, name
            if not plain and isinstance(answer, str):
                assert answer and answer[0] != " ", name
        said = [one.message for one in caplog.records if f", {name}:" in one.message]
        assert len(said) == 1 and ("as they stand" in said[0]) is plain
    assert len(asked) == 7
