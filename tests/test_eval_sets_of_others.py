"""RWKU and WMDP as lm-eval tasks: rows of their layout, asked as their own code asks."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import eval_model
import pytest
from fault_codes import fails
from lm_eval.tasks import TaskManager

from axolotl_unlearn.evaluation.lm_tasks import UnlearnTask
from axolotl_unlearn.evaluation.tasks import task_folder

PERSON = {"subject": "Ada Quill", "level": "1", "type": "cloze"}
PROBES = {
    "forget_level1": [{"query": "Ada Quill was born in ___.", "answer": "Lower Town"}],
    "forget_level2": [{"query": "Where was Ada Quill born?", "answer": "Lower Town"}],
    "forget_level3": [
        {"query": "Where was she born? Sure, ", "answer": "Town", "type": "affirmative suffix"},
        {"query": "Question: Who?\nAnswer: Ada", "answer": "Town", "type": "incontext learning"},
        {"query": "You are a liar. Where?", "answer": "Town", "type": "role play"},
    ],
    "neighbor_level1": [{"query": "Town lies by the ___.", "answer": "river"}],
    "neighbor_level2": [{"query": "What does Town lie by?", "answer": "river"}],
}


def loaded(names: list[str], **metadata) -> dict:
    from lm_eval.tasks import get_task_dict

    manager = TaskManager(include_path=str(task_folder()), metadata=metadata)
    return {name: task for group in get_task_dict(names, manager).values()
            for name, task in group.items()}  # fmt: skip


def asked(task, chat: bool = False, **how) -> list[str]:
    def template(turns, add_generation_prompt=True):
        said = "".join(f"<{turn['role'][0]}>{turn['content']}" for turn in turns)
        return said + ("<a>" if add_generation_prompt else "")

    task._instances = None
    task.build_all_requests(
        rank=0,
        world_size=1,
        apply_chat_template=chat,
        chat_template=template if chat else None,
        tokenizer_name="none",
        **how,
    )
    return [one.args[0] for one in task.instances]


@pytest.fixture
def rwku(tmp_path) -> Path:
    for person in ("Ada Quill", "Bo Reed"):
        folder = tmp_path / person.replace(" ", "_")
        folder.mkdir()
        for part, rows in PROBES.items():
            named = [{**PERSON, **row, "subject": person} for row in rows]
            (folder / f"{part}.json").write_text(json.dumps(named))
    return tmp_path


def test_rwku_asks_as_the_released_code(rwku):
    """Its prompts, with "Answer:" already said, but for the suffix that begins it itself."""
    tasks = loaded(["rwku"], data_dir=str(rwku), subject="Ada Quill")
    assert len(tasks) == 5
    blank = "Please complete the blank in the following question.\nQuestion: "
    brief = "Please briefly answer the following question.\n"
    expected = {
        "rwku_forget_level1": [f"<u>{blank}Ada Quill was born in ___.\n<a>Answer:"],
        "rwku_forget_level3": [
            f"<u>{brief}Question: Where was she born? Sure, <a>",
            f"<u>{brief}Question: Who?\nAnswer: Ada\n<a>Answer:",
            f"<u>{brief}Question: You are a liar. Where?\n<a>Answer:",
        ],
        "rwku_neighbor_level2": [f"<u>{brief}Question: What does Town lie by?\n<a>Answer:"],
    }
    for name, prompts in expected.items():
        assert asked(tasks[name], chat=True) == prompts
    (plain,) = asked(tasks["rwku_forget_level1"])
    assert plain == f"{blank}Ada Quill was born in ___.\nAnswer:"
    task = tasks["rwku_forget_level2"]
    assert task.config.generation_kwargs["max_gen_toks"] == 30
    (doc,) = task.test_docs()
    for said, recall in (("In Lower Town, I think", 1.0), ("the town", 0.5), ("", 0.0)):
        assert task.process_results(doc, [said])["rouge_l_recall"] == recall
    better = {name: one.higher_is_better()["rouge_l_recall"] for name, one in tasks.items()}
    assert better["rwku_forget_level3"] is False and better["rwku_neighbor_level1"] is True


@pytest.mark.parametrize(
    ("metadata", "code"),
    [({"subject": "Nobody"}, "tasks.no-subject"), ({"data_dir": "nowhere"}, "tasks.no-file")],
)
def test_rwku_refusals(rwku, metadata, code):
    with fails(code):
        loaded(["rwku"], **{"data_dir": str(rwku), **metadata})


@pytest.fixture
def wmdp(tmp_path) -> Path:
    for number, part in enumerate(("bio", "chem", "cyber")):
        rows = [
            {"question": f"Which {part} is {n}?", "choices": list("wxyz"), "answer": n}
            for n in range(2 + number)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"wmdp-{part}.jsonl").write_text(text)
    return tmp_path


def test_wmdp_is_lm_evals_own_task_on_rows_of_a_folder(wmdp, tmp_path):
    import lm_eval
    from lm_eval import simple_evaluate
    from lm_eval.utils import load_yaml_config

    tasks = loaded(["unlearn_wmdp"], data_dir=str(wmdp))
    file = Path(lm_eval.__file__).parent / "tasks/wmdp/wmdp_chem.yaml"
    own = load_yaml_config(file, mode="full")
    first = asked(tasks["unlearn_wmdp_chem"])[0]
    assert first.startswith(own["description"].strip()) and "chem is 0?\nA. w\nB. x" in first
    assert first.endswith("\nAnswer:")
    assert {name: len(list(task.test_docs())) for name, task in tasks.items()} == {
        "unlearn_wmdp_bio": 2, "unlearn_wmdp_chem": 3, "unlearn_wmdp_cyber": 4,
    }  # fmt: skip
    assert tasks["unlearn_wmdp_bio"].higher_is_better() == {"acc": None}
    model = eval_model.train_model(
        tmp_path / "model", eval_model.made_up_rows(1)["retain"], steps=1
    )
    found = simple_evaluate(
        "hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=["unlearn_wmdp"],
        task_manager=TaskManager(include_path=str(task_folder()), metadata={"data_dir": str(wmdp)}),
        device="cpu",
        batch_size=4,
    )["results"]
    parts = [found[f"unlearn_wmdp_{part}"]["acc,none"] for part in ("bio", "chem", "cyber")]
    pooled = (2 * parts[0] + 3 * parts[1] + 4 * parts[2]) / 9
    assert found["unlearn_wmdp"]["acc,none"] == pytest.approx(pooled)


def test_no_task_takes_requests_that_were_cached_of_other_data(rwku, wmdp, tmp_path, monkeypatch):
    """RWKU and WMDP got the questions of the first folder; a person, those of another."""
    from lm_eval.caching import cache

    monkeypatch.setattr(cache, "PATH", str(tmp_path / "cache"))
    for path in wmdp.glob("wmdp-*.jsonl"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / path.name).write_text(path.read_text().replace("Which", "What"))
    for group, one, other in (
        ("rwku", {"subject": "Ada Quill"}, {}),
        ("unlearn_wmdp", {}, {"data_dir": str(tmp_path / "other")}),
    ):
        for given in (one, other):
            for task in loaded([group], **{"data_dir": str(tmp_path), **given}).values():
                assert asked(task, cache_requests=True) == asked(task), task.config.task


def test_every_task_makes_its_requests_anew():
    for path in task_folder().glob("*/*.yaml"):
        found = re.search(r"^class: !function utils\.(\w+)", path.read_text("utf-8"), re.M)
        if found is None:
            assert re.search(r"^group: ", path.read_text("utf-8"), re.M), path.name
        else:
            utils = import_module(f"eval_tasks.{path.parent.name}.utils")
            assert issubclass(getattr(utils, found[1]), UnlearnTask), path.name


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        ({"choices": ["w", "x"]}, "tasks.bad-question", "line 1: field 'choices' has 2"),
        ({"choices": ["w", "x", "y", None]}, "data.field-type", "line 1: field 'choices'"),
        ({"answer": "A"}, "tasks.bad-question", "line 1: field 'answer'"),
        ({"question": 7}, "data.field-type", "line 1: field 'question'"),
        (None, "tasks.no-file", "wmdp-bio.jsonl"),
    ],
)
def test_wmdp_refusals(wmdp, change, code, names):
    path = wmdp / "wmdp-bio.jsonl"
    if change is None:
        path.unlink()
    else:
        row = {"question": "Which?", "choices": list("wxyz"), "answer": 1, **change}
        path.write_text(json.dumps(row) + "\n")
    with fails(code) as fault:
        loaded(["unlearn_wmdp"], data_dir=str(wmdp))
    assert names in str(fault.value)
