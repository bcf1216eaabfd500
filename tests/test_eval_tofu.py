"""TOFU and MUSE scores by hand, and the lm-eval tasks against an independent loop."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import eval_model
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fault_codes import fails
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager, get_task_dict
from rouge_score.rouge_scorer import RougeScorer
from scipy.stats import ks_2samp
from transformers import AutoModelForCausalLM, AutoTokenizer

import axolotl_unlearn.evaluation.lm  # noqa: F401 (registers hf-unlearn)
from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.data.strategy import load_strategy
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.tasks import task_folder
from eval_tasks.muse.utils import privleak_documents, read_part
from eval_tasks.tofu import utils as tofu
from eval_tasks.tofu.utils import read_set, tofu_documents

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT.parent / "shared" / "tofu"


def test_truth_ratio_by_hand():
    """Right: p^(1/n) = 1/4. Wrong: 1/2 and 1/8: geometric mean 1/4 (ratio 1), arithmetic 5/16
    (ratio 5/4)."""
    right, wrong = math.log(1 / 4), [math.log(1 / 2), math.log(1 / 8)]
    assert tofu.truth_ratio(right, wrong) == pytest.approx(1.0)
    assert tofu.truth_ratio(right, wrong, "arithmetic") == pytest.approx(5 / 4)
    with pytest.raises(ValueError, match="wrong answer"):
        tofu.truth_ratio(right, [])


def test_truth_ratio_scores():
    """Forget min(r, 1/r): 4 and 1/4 give 1/4. Otherwise max(0, 1 - r): 4 gives 0, 1/4 gives 3/4."""
    assert tofu.truth_ratio_score(4, "forget") == tofu.truth_ratio_score(1 / 4, "forget") == 1 / 4
    assert tofu.truth_ratio_score(4, "retain") == 0
    assert tofu.truth_ratio_score(1 / 4, "retain") == 3 / 4


def test_option_probability_and_utility_by_hand():
    """1/2 of (1/2, 1/4, 1/4); nine values of 1/2 with one of 1/8: 9 / (8 * 2 + 8) = 3/8."""
    assert tofu.option_probability(math.log(0.5), [math.log(0.25)] * 2) == pytest.approx(0.5)
    means = {(s, m): 0.5 for s in tofu.UTILITY_SETS for m in tofu.UTILITY_MEASURES}
    means["retain", "truth_ratio"] = 1 / 8
    assert tofu.model_utility(means) == pytest.approx(3 / 8)
    del means["retain", "truth_ratio"]
    assert tofu.model_utility(means) is None


def test_forget_quality_does_not_depend_on_the_direction_of_the_ratio():
    rng = np.random.default_rng(0)
    ours, theirs = rng.lognormal(0, 1, 40), rng.lognormal(0.5, 1, 40)
    p, log10 = tofu.forget_quality(ours, theirs)
    assert p == pytest.approx(tofu.forget_quality(1 / ours, 1 / theirs)[0])
    assert 10**log10 == pytest.approx(p) and p == ks_2samp(ours, theirs).pvalue


@pytest.mark.parametrize("content", [
    None, "no json", "{}", "[1]", '{"truth_ratios": [0.1, 0.2]}',
    '{"split": "forget05", "truth_ratios": [0.1]}', '{"truth_ratios": [0.5]}',
    '{"asked": "otherwise", "truth_ratios": [0.1]}',
])  # fmt: skip
def test_a_file_without_truth_ratios(tmp_path, content):
    path = tmp_path / "retrained.json"
    if content is not None:
        path.write_text(content)
    task = SimpleNamespace(options={"retrained": str(path)})
    with fails("tasks.no-truth-ratios"):
        tofu.Tofu._forget_quality(task, [("a", 0.5)], 0)


# ---------------------------------------------------------------- the task


def rows(count: int) -> list[dict]:
    """Made-up questions with paraphrase and wrong answers."""
    names = "Ada Bo Cy Di Ed Flo Gus Hal".split()
    return [
        {
            "question": f"Where was {names[i]} born?",
            "answer": f"{names[i]} was born in town {i}.",
            "paraphrased_question": f"In which place did {names[i]} come into the world?",
            "paraphrased_answer": f"The birthplace of {names[i]} is town {i}.",
            "perturbed_answer": [f"The birthplace of {names[i]} is city {j}." for j in (7, 8, 9)],
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("tofu")
    sides = eval_model.made_up_rows(2)
    eval_model.train_model(home / "model", sides["retain"], steps=4)
    data = home / "data"
    data.mkdir()
    if REAL.is_dir():  # real rows where they are there
        for name in ("forget10", "retain", "real_authors", "world_facts"):
            lines = (REAL / f"{name}_perturbed.jsonl").read_text("utf-8").splitlines()
            picked = lines if name == "forget10" else lines[:3]
            (data / f"{name}_perturbed.jsonl").write_text("\n".join(picked) + "\n", "utf-8")
    else:
        tables = {"forget10": rows(8) * 50, "retain": rows(3)}
        short = [{k: r[k] for k in ("question", "answer", "perturbed_answer")} for r in rows(3)]
        for name, table in (tables | {"real_authors": short, "world_facts": short}).items():
            text = "".join(json.dumps(row) + "\n" for row in table)
            (data / f"{name}_perturbed.jsonl").write_text(text, "utf-8")
    held = [{"question": r["question"], "answer": r["answer"]} for r in rows(4)]
    (data / "held.jsonl").write_text("".join(json.dumps(r) + "\n" for r in held), "utf-8")
    return home


def evaluate(
    home: Path, model: str, batch_size: int, weights: str = "model", chat: bool = False, **metadata
) -> dict:
    path = str(home / weights)
    metadata = {"data_dir": str(home / "data"), "split": "forget01", "max_rows": 3, **metadata}
    found = simple_evaluate(
        model,
        model_args={"pretrained": path, "dtype": "float32"},
        tasks=["tofu"],
        task_manager=TaskManager(
            include_path=str(task_folder()), metadata={**metadata, "pretrained": path}
        ),
        device="cpu",
        batch_size=batch_size,
        bootstrap_iters=0,
        gen_kwargs={"max_gen_toks": 12},
        apply_chat_template=chat,
    )["results"]["tofu"]
    return {key.removesuffix(",none"): v for key, v in found.items() if key.endswith(",none")}


@torch.no_grad()
def by_hand(home: Path) -> dict[str, float]:
    """Plain loop: batch 1, Hugging Face's own loss, rouge-score and scipy called directly."""
    model = AutoModelForCausalLM.from_pretrained(home / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    scorer = RougeScorer(["rougeL"], use_stemmer=True)

    def mean_logp(question: str, answer: str) -> float:
        prompt = f"Question: {question}\nAnswer:"
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(f"{prompt} {answer}{tokenizer.eos_token}")["input_ids"]])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < start, -100)
        return -model(input_ids=ids, labels=labels).loss.item()

    def rouge(question: str, answer: str) -> float:
        ids = tokenizer(f"Question: {question}\nAnswer:", return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        return scorer.score(answer, text)["rougeL"].recall

    values: dict[str, list[float]] = {}
    forget_ratios = []
    for name in ("forget", "retain", "real_authors", "world_facts"):
        file = "forget10" if name == "forget" else name
        lines = (home / "data" / f"{file}_perturbed.jsonl").read_text("utf-8").splitlines()
        lines = lines[-40:][:3] if name == "forget" else lines[:3]
        for row in map(json.loads, lines):
            question = row["question"]
            p = math.exp(mean_logp(question, row["answer"]))
            wrong = [math.exp(mean_logp(question, w)) for w in row["perturbed_answer"]]
            right = row.get("paraphrased_answer") or row["answer"]
            right = math.exp(mean_logp(question, right))
            add = lambda key, value, name=name: values.setdefault(f"{name}_{key}", []).append(value)  # noqa: E731
            if name in ("forget", "retain"):
                add("probability", p)
            else:
                add("probability", p / (p + sum(wrong)))
            if name == "forget":
                ratio = math.exp(np.mean(np.log(wrong))) / right
                forget_ratios.append(ratio)
                add("truth_ratio", min(ratio, 1 / ratio))
                add("paraphrased_probability", right)
            else:
                add("truth_ratio", max(0, 1 - np.mean(wrong) / right))
            add("rouge_l_recall", rouge(question, row["answer"]))
    means = {key: float(np.mean(v)) for key, v in values.items()}
    nine = [
        means[f"{s}_{m}"]
        for s in ("retain", "real_authors", "world_facts")
        for m in ("probability", "rouge_l_recall", "truth_ratio")
    ]
    means["model_utility"] = 9 / sum(1 / v for v in nine) if all(nine) else 0.0
    return means | {"ratios": forget_ratios}


@pytest.mark.slow
def test_tofu_equals_a_plain_loop_at_any_batch_size(home):
    """Every figure, both models, batches of 1 and 7; forget quality against scipy."""
    reference = home / "retrained.json"
    expected = by_hand(home)
    ratios = expected.pop("ratios")
    theirs = [0.3 + 0.4 * i for i in range(len(ratios))]
    reference.write_text(json.dumps({"truth_ratios": theirs}), "utf-8")
    out = home / "ratios.json"
    held = str(home / "data" / "held.jsonl")
    first = evaluate(
        home, "hf", 1, retrained=str(reference), truth_ratios_out=str(out), holdout=held
    )
    second = evaluate(home, "hf-unlearn", 7, retrained=str(reference), holdout=held)
    for found in (first, second):
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, abs=1e-6), key
        assert found["forget_quality"] == ks_2samp(ratios, theirs).pvalue
    written = json.loads(out.read_text("utf-8"))
    assert written["truth_ratios"] == pytest.approx(ratios, rel=1e-5)
    # As many rows, asked otherwise: the p-value of two prompts was taken for that of two models.
    reference.write_text(json.dumps(written | {"truth_ratios": theirs}), "utf-8")
    evaluate(home, "hf", 4, retrained=str(reference))
    with fails("tasks.no-truth-ratios"):
        evaluate(home, "hf", 4, retrained=str(reference), template="{question}")
    assert math.isnan(first["forget_extraction_strength"]) and math.isnan(first["auc_min_k_0.4"])
    assert 0 <= second["forget_extraction_strength"] <= 1
    assert first["auc_loss"] == pytest.approx(second["auc_loss"])  # no tokens' facts are needed
    assert first["auc_zlib_ratio"] == pytest.approx(second["auc_zlib_ratio"])
    assert 0 <= second["auc_min_k_plus_0.4"] <= 1 and 0 <= second["auc_min_k_0.4_without_eos"] <= 1
    for side in ("forget", "retain"):
        known = second[f"{side}_extraction_strength_without_eos"]
        assert known <= second[f"{side}_extraction_strength_open_unlearning"]


@pytest.mark.slow
def test_in_a_chat_template_the_answer_follows_without_a_space(home):
    """The question as it stands is the user's turn; the template's own line break is not scored."""
    model = AutoModelForCausalLM.from_pretrained(home / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    tokenizer.chat_template = (
        "{% for m in messages %}User: {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}\nReply:\n{% endif %}"
    )
    model.save_pretrained(home / "chat")
    tokenizer.save_pretrained(home / "chat")
    found = evaluate(home, "hf-unlearn", 3, weights="chat", chat=True)
    lines = (home / "data" / "forget10_perturbed.jsonl").read_text("utf-8").split("\n")
    values = []
    for row in map(json.loads, [line for line in lines if line][-40:][:3]):
        prompt = f"User: {row['question']}\nReply:\n"
        start = len(tokenizer(prompt)["input_ids"])
        ids = tokenizer(f"{prompt}{row['answer']}{tokenizer.eos_token}", return_tensors="pt")
        ids = ids["input_ids"]
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < start, -100)
        with torch.no_grad():
            values.append(math.exp(-model(input_ids=ids, labels=labels).loss.item()))
    assert found["forget_probability"] == pytest.approx(np.mean(values), abs=1e-6)


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({"split": "forget20"}, "tasks.unknown-split"),
        ({"data_dir": "nowhere"}, "tasks.no-file"),
        ({"template": "no place"}, "tasks.template"),
    ],
)
def test_bad_input_is_one_sentence(home, metadata, code):
    with fails(code):
        tofu_documents(**{"data_dir": str(home / "data"), **metadata})


def test_a_row_without_a_field_is_named(home, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"question": "q", "answer": "a"}\n{"question": "q"}\n')
    with fails("data.field-missing") as fault:
        read_set("x", tmp_path, ("question", "answer"))
    assert "x.jsonl, line 2: field 'answer'" in str(fault.value)
    (tmp_path / "x.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    with fails("tasks.few-rows"):
        read_set("x", tmp_path, ("question", "answer"), 2)


ODD_FILES = {
    "byte order mark": (lambda text: "\ufeff" + text, None),
    "raw U+2028": (lambda text: text.replace("Ada", "Ada\u2028Bo"), None),
    "one wrong answer without a list": (lambda text: re.sub(r"\[(.*?)\]", '"x y"', text), None),
    "a number as answer": (
        lambda text: text.replace('"Ada was born in town 0."', "7"),
        "line 1: field 'answer' is of type int but must be a text",
    ),
    "null among the wrong answers": (
        lambda text: text.replace('"The birthplace of Bo is city 8."', "null"),
        "line 2: field 'perturbed_answer' is of type NoneType but must be a text",
    ),
    "no wrong answers": (
        lambda text: re.sub(r"\[(.*?)\]", "[]", text),
        "line 1: field 'perturbed_answer' must be a list of texts, at least one",
    ),
    "a broken line": (
        lambda text: text.replace("\n", "\n{\n", 1),
        "line 2: not valid JSON",
    ),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_files_as_they_come(tmp_path, name):
    """TOFU's and MUSE's files are read, or refused by file and line, as every other file."""
    change, refusal = ODD_FILES[name]
    fields = ("question", "answer", "paraphrased_answer", "perturbed_answer")
    text = change("".join(json.dumps(row) + "\n" for row in rows(3)))
    (tmp_path / "knowmem").mkdir()
    for path in (tmp_path / "x.jsonl", tmp_path / "knowmem" / "x.jsonl"):
        path.write_text(text, "utf-8")
    if refusal is None:
        found = read_set("x", tmp_path, fields)
        assert len(found) == 3 and all(type(r["perturbed_answer"]) is list for r in found)
        assert len(read_part("knowmem", "x", fields[:2], data_dir=str(tmp_path))) == 3
        assert found[0]["perturbed_answer"] == ["x y"] or len(found[0]["perturbed_answer"]) == 3
        return
    with pytest.raises(UnlearnError, match=f"x.jsonl, {refusal}"):
        read_set("x", tmp_path, fields)
    if "perturbed" not in refusal:
        with pytest.raises(UnlearnError, match=f"x.jsonl, {refusal}"):
            read_part("knowmem", "x", fields[:2], data_dir=str(tmp_path))


# ---------------------------------------------------------------- axolotl-unlearn tasks run


def run_tasks(*words):
    given = ["--model", "hf-unlearn", "--device", "cpu", "--gen_kwargs", "max_gen_toks=4", *words]
    return CliRunner().invoke(unlearn, ["tasks", "run", *given])


@pytest.mark.slow
def test_a_data_folder_may_be_named_like_the_task(home, tmp_path, monkeypatch):
    """lm-eval takes ./tofu for a folder of tasks and finds none in it."""
    shutil.copytree(home / "data", tmp_path / "tofu")
    monkeypatch.chdir(tmp_path)
    metadata = {"data_dir": "tofu", "split": "forget01", "max_rows": 1}
    model = f"pretrained={home / 'model'},dtype=float32"
    given = ["--tasks", "tofu", "--model_args", model, "--metadata", json.dumps(metadata)]
    done = run_tasks(*given)
    assert done.exit_code == 0, done.output
    assert "|forget_probability" in done.output.replace(" ", "")


@pytest.mark.slow
def test_the_folder_of_an_adapter_is_measured_as_its_merged_model(home, tmp_path):
    """It is no model to lm-eval, which wants base and `peft=`; with `--json` what `-o` named stayed
    empty, and then the answer was."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = get_peft_model(
        AutoModelForCausalLM.from_pretrained(home / "model"),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    lora.save_pretrained(tmp_path / "adapter")
    lora.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(home / "model" / name, tmp_path / "merged")
    metadata = {"data_dir": str(home / "data"), "split": "forget01", "max_rows": 2}
    found = {}
    for name in ("adapter", "merged"):
        words = ["--tasks", "tofu", "--metadata", json.dumps(metadata), "--json"]
        done = run_tasks(*words, "--model_args", f"pretrained={tmp_path / name},dtype=float32",
                         "-o", str(tmp_path / f"out-{name}"))  # fmt: skip
        assert done.exit_code == 0, done.output
        (file,) = (tmp_path / f"out-{name}").rglob("results_*.json")
        found[name] = json.loads(file.read_text())["results"]["tofu"]
        (said,) = json.loads(done.stdout)["results"]
        there = {k: v for k, v in found[name].items() if v == v}  # JSON has no NaN
        assert there.items() <= said["results"]["tofu"].items()
    numbers = {k: v for k, v in found["merged"].items() if isinstance(v, float)}
    assert len(numbers) > 20
    ours = {key: found["adapter"][key] for key in numbers}
    assert ours == pytest.approx(numbers, abs=1e-4, nan_ok=True)


def test_eval_takes_tofus_files_as_they_are_published(home, tmp_path):
    """forget10.json and retain90.json of questions and answers, without ids, kinds or tasks."""
    from axolotl_unlearn.evaluation.sets import load_sets

    data = tmp_path / "tofu"
    data.mkdir()
    for name, some in (("forget10", rows(4)), ("retain90", rows(8)[4:])):
        lines = [{"question": row["question"], "answer": row["answer"]} for row in some]
        (data / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in lines))
    words = [
        "eval",
        f"original={home / 'model'}",
        "--data",
        str(data),
        "--out",
        str(tmp_path / "o"),
    ]
    done = CliRunner().invoke(unlearn, [*words, "--min-members", "0", "--max-gen-toks", "4"])
    assert done.exit_code == 0, done.output
    (model,) = json.loads((tmp_path / "o/results.json").read_text())["models"]
    assert model["n"]["forget_task1_knowledge"] == model["n"]["retain_task1_knowledge"] == 4
    assert model["data"].keys() == {"forget", "retain"}
    first = load_sets(data, parts=("tasks",)).forget[0]
    assert (first.input, first.output) == (rows(1)[0]["question"], rows(1)[0]["answer"])
    (data / "real_authors_perturbed.json").write_text(json.dumps(rows(1)[0]) + "\n")
    assert tofu.read_set("real_authors_perturbed", data, ("question",))[0]["question"]
    shutil.copy(data / "forget10.json", data / "member10.json")
    texts = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(20)]
    (data / "nonmember.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    assert load_sets(data, min_members=4).nonmember[0][1] == "q0 a0"
    shutil.copy(data / "forget10.json", data / "forget05.json")
    with fails("eval.two-files"):
        load_sets(data)


def test_what_may_quote_a_row_is_not_shown(home, monkeypatch):
    """Errors of lm-eval are one sentence without its words."""
    from axolotl_unlearn.metrics import memorisation

    def fail(answer):
        raise ValueError(answer)

    monkeypatch.setattr(memorisation, "compressed_bytes", fail)
    metadata = {"data_dir": str(home / "data"), "split": "forget01", "max_rows": 1}
    model = f"pretrained={home / 'model'},dtype=float32"
    given = ["--tasks", "tofu", "--model_args", model, "--metadata", json.dumps(metadata)]
    done = run_tasks(*given)
    assert done.exit_code == 2 and "ended with ValueError" in done.output
    lines = (home / "data" / "retain_perturbed.jsonl").read_text("utf-8").split("\n")
    assert all(json.loads(line)["answer"] not in done.output for line in lines if line)


@pytest.mark.parametrize(
    "option", [["--tasks", "tofu,tofuu"], ["--tasks=tofuu"], ["-t", "tofu", "tofuu"]]
)
def test_a_task_that_nobody_knows_is_named(option):
    """It is what was mistyped, of lm-eval's tasks and ours; a second word was not looked at."""
    done = run_tasks(*option, "--model_args", "pretrained=examples/tiny-olmo")
    assert done.exit_code == 2
    assert "Tasks not found: tofuu; ours are muse, rwku, semeval_unlearn, tofu" in done.output


# ---------------------------------------------------------------- as training data

ROWS_AS_THEY_COME = {
    "fields": {"input": "question", "output": "answer"},
    "template": "Question: {input}\nAnswer: {output}",
    "labels": {"question": "answer"},
}


@pytest.mark.parametrize("role", ["forget", "retain", "memorise"])
def test_tofu_rows_train_on_the_tokens_that_the_task_scores(home, role):
    """No conversion: the labels of a row are the tokens of ` ANSWER<eos>` after its prompt."""
    path = home / "data" / "retain_perturbed.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    cfg = {"sequence_len": 900, "unlearn": {"preset": "tofu-npo", "data": ROWS_AS_THEY_COME}}
    found = load_strategy(role, tokenizer, cfg, {"path": str(path)}).wrap_dataset(None)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len(found) == len(lines) == 3
    for got, row in zip(found, lines, strict=True):
        prompt = f"Question: {row['question']}\nAnswer:"
        whole = tokenizer(f"{prompt} {row['answer']}{tokenizer.eos_token}")["input_ids"]
        start = len(tokenizer(prompt)["input_ids"])
        assert got["input_ids"] == whole
        assert got["labels"] == [-100] * start + whole[start:]


def test_tofu_rows_in_a_chat_template(home):
    from data_tokenizers import byte_tokenizer

    data = {"fields": ROWS_AS_THEY_COME["fields"], "chat_template": True}
    cfg = {"sequence_len": 3000, "unlearn": {"preset": "tofu-npo", "data": data}}
    path = home / "data" / "retain_perturbed.jsonl"
    row = json.loads(path.read_text("utf-8").splitlines()[0])
    for role in ("forget", "retain", "memorise"):
        strategy = load_strategy(role, byte_tokenizer(chat=True), cfg, {"path": str(path)})
        got = strategy.wrap_dataset(None)[0]
        labels = [label for label in got["labels"] if label != -100]
        assert bytes(labels[:-1]).decode() == row["answer"] and labels[-1] == 256  # </s>
        whole = bytes(token for token in got["input_ids"] if token < 256).decode()
        assert whole == f"<u>{row['question']}<a>{row['answer']}\n"


# ---------------------------------------------------------------- MUSE


@pytest.fixture(scope="module")
def muse(home):
    folder = home / "muse"
    qa = [{"question": r["question"], "answer": r["answer"]} for r in rows(6)]
    parts = {
        "verbmem/forget": [{"prompt": "Ada was born", "gt": "in town 1, by a river. " * 40}],
        "knowmem/forget_qa": qa[:2],
        "knowmem/retain_qa": qa[2:4],
        "knowmem/forget_qa_icl": qa[4:5],
        "knowmem/retain_qa_icl": qa[5:],
        "privleak/forget": [{"text": r["answer"]} for r in rows(4)],
        "privleak/holdout": [{"text": r["paraphrased_answer"]} for r in rows(3)],
    }
    for name, table in parts.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table), "utf-8")
    return folder


@pytest.mark.slow
def test_muse_equals_a_plain_loop(home, muse):
    from sklearn.metrics import roc_auc_score

    path = str(home / "model")
    metadata = {"data_dir": str(muse), "retrained_auc": 0.4, "pretrained": path}
    found = simple_evaluate(
        "hf-unlearn",
        model_args={"pretrained": path, "dtype": "float32"},
        tasks=["muse"],
        task_manager=TaskManager(include_path=str(task_folder()), metadata=metadata),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )["results"]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    scorer = RougeScorer(["rougeL"], use_stemmer=False)

    def f1(prompt: str, answer: str, tokens: int, stop: tuple[str, ...] = ()) -> float:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
        said = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        for word in stop:
            said = said.split(word)[0]
        return scorer.score(answer, said)["rougeL"].fmeasure

    def read(name: str) -> list[dict]:
        return json.loads((muse / f"{name}.json").read_text("utf-8"))

    (row,) = read("verbmem/forget")
    short = tokenizer.decode(tokenizer(row["gt"])["input_ids"][:128])
    assert len(short) < len(row["gt"])
    assert found["muse_verbmem"]["verbmem,none"] == pytest.approx(
        f1(row["prompt"], short, 128), abs=1e-9
    )
    for side in ("forget", "retain"):
        (shot,) = read(f"knowmem/{side}_qa_icl")
        start = f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n"
        values = [
            f1(
                f"{start}Question: {r['question']}\nAnswer: ",
                r["answer"],
                32,
                ("\n\n", "\nQuestion", "Question:"),
            )
            for r in read(f"knowmem/{side}_qa")
        ]
        got = found[f"muse_knowmem_{side}"]["knowmem,none"]
        assert got == pytest.approx(np.mean(values), abs=1e-9)
    scores, members = [], []
    for side in ("forget", "holdout"):
        for r in read(f"privleak/{side}"):
            ids = tokenizer(r["text"], return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logp = model(ids).logits[0, :-1].log_softmax(-1)
            logp = logp.gather(1, ids[0, 1:, None])[:, 0].sort().values
            scores.append(logp[: max(1, int(0.4 * len(logp)))].mean().item())
            members.append(side == "forget")
    auc = roc_auc_score(members, scores)
    assert found["muse_privleak"]["auc_members,none"] == pytest.approx(auc)
    expected = 100 * ((1 - auc) - 0.4) / 0.4
    assert found["muse_privleak"]["privleak,none"] == pytest.approx(expected)


def test_requests_are_built_without_a_model(home, muse):
    """As lm-evaluation-harness's own task tests do, which know none; scoring asks for one."""
    for data, names in (
        (home / "data", ["tofu"]),
        (muse, ["muse_verbmem", "muse_knowmem_forget", "muse_privleak"]),
    ):
        metadata = {"data_dir": str(data), "split": "forget01", "max_rows": 2}
        manager = TaskManager(include_path=str(task_folder()), metadata=metadata)
        for task in get_task_dict(names, manager).values():
            task.build_all_requests(rank=0, limit=3, world_size=1)
            docs = list(task.test_docs())
            assert task.instances and all(isinstance(task.doc_to_text(d), str) for d in docs)
            if task.config.task == "tofu":
                with fails("tasks.no-tokenizer"):
                    task.process_results(docs[0], [])


def test_muse_bad_input_is_one_sentence(muse, tmp_path):
    known = {"data_dir": str(muse), "tokenizer": str(eval_model.TOKENIZER), "max_length": 6}
    with fails("tasks.too-long") as fault:  # of it only the end was scored
        privleak_documents(**known)
    assert "'forget 0'" in str(fault.value)
    with fails("tasks.no-file"):
        read_part("verbmem", "retain", ("prompt",), data_dir=str(muse))
    with fails("data.field-missing") as fault:
        read_part("verbmem", "forget", ("nothing",), data_dir=str(muse))
    assert "forget.json, record 1: field 'nothing'" in str(fault.value)
    with fails("tasks.no-corpus"):
        read_part("verbmem", "forget", ("prompt",), corpus="Songs")
    (tmp_path / "verbmem").mkdir()
    (tmp_path / "verbmem" / "forget.json").write_text("[{", "utf-8")
    with fails("data.not-json") as fault:
        read_part("verbmem", "forget", ("prompt",), data_dir=str(tmp_path))
    assert "forget.json, line 1" in str(fault.value)
