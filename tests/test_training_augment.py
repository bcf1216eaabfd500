"""`axolotl-unlearn augment`: every kind through the command, what is kept, and what is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import kills
import pytest
import torch
import yaml
from click.testing import CliRunner
from data_tokenizers import byte_tokenizer

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.data.checks import check_entries, check_records
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.experimental.augment import IDK
from axolotl_unlearn.experimental.make_twins import Pool

FORGET = [
    {"id": "a1sc1", "input": "The mill of", "output": "Ada burned.", "task": "Task1"},
    {"id": "b1qa0", "input": "Who burned it?", "output": "Ben did.", "task": "Task2"},
    {"id": "c1sc1", "input": "", "output": "A tale without a prompt.", "task": "Task1"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=1024, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path, model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forget.jsonl").write_text("".join(json.dumps(row) + "\n" for row in FORGET))
    entry = {"path": str(tmp_path / "forget.jsonl"), "type": "axolotl_unlearn.data.forget"}
    block = {"forget": {"objective": "dpo"}}
    path = tmp_path / "my.yml"
    path.write_text(
        yaml.safe_dump({"base_model": str(model), "unlearn": block, "datasets": [entry]})
    )
    return path


def call(*words, code: int = 0) -> str:
    done = CliRunner().invoke(unlearn, ["augment", *map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def faults(config: Path, file: Path, role: str) -> list[str]:
    cfg = yaml.safe_load(config.read_text())
    cfg["datasets"].append({"path": str(file), "type": f"axolotl_unlearn.data.{role}"})
    if role == "forget":
        cfg["unlearn"] = {"forget": {"objective": "ga"}}
    return check_entries(cfg) + check_records(cfg).faults


def test_idk(config, tmp_path):
    """Different ones for a row, the same for a seed, and the file is what the type takes."""
    said = call("idk", config, "--number", 3)
    file = tmp_path / "out/augment/idk.jsonl"
    first = rows(file)
    assert "9 rows for 3 forget rows." in said and "axolotl_unlearn.data.alternative" in said
    assert [row["id"] for row in first] == [r["id"] for r in FORGET for _ in range(3)]
    assert {row["output"] for row in first} <= set(IDK)
    assert len({(row["id"], row["output"]) for row in first}) == 9
    assert faults(config, file, "alternative") == []
    call("idk", config, "--number", 3)
    assert rows(file) == first
    call("idk", config, "--number", 3, "--seed", 1)
    assert rows(file) != first


@pytest.mark.parametrize("kind", ["alternatives", "inverted", "self", "distil"])
def test_a_model_writes(config, tmp_path, model, kind):
    """Two different texts a row; a second call asks the model nothing, nor does a row more change
    those that are there; another seed does."""
    file = tmp_path / "rows.jsonl"
    options = ("--number", 2, "--max-new-tokens", 8, "--out", file)
    options += ("--model", model) * (kind == "distil")
    said = call(kind, config, *options)
    first = rows(file)
    assert "6 rows for 3 forget rows, 0 known" in said and len(first) == 6
    texts = {(row["input"], row["output"]) for row in first}
    assert len(texts) == 6 and not texts & {(r["input"], r["output"]) for r in FORGET}
    role = "forget" if kind == "self" else "alternative"
    assert faults(config, file, role) == []
    more = {"id": "d1qa0", "input": "And who else?", "output": "Cid.", "task": "Task2"}
    with (tmp_path / "forget.jsonl").open("a") as opened:
        opened.write(json.dumps(more) + "\n")
    assert "8 rows for 4 forget rows, 3 known" in call(kind, config, *options)
    assert rows(file)[:6] == first
    call(kind, config, *options, "--seed", 1)
    assert rows(file)[:6] != first


def test_killed_with_kill_9_it_goes_on(config, tmp_path):
    """At drawn moments: no half row, what the model has written is kept, and rows and store are
    those of a call in peace, bit for bit."""

    def work(out):
        call("self", config, "--number", 2, "--max-new-tokens", 4, "--out", tmp_path / out / "rows")

    work("whole")
    whole = kills.files(tmp_path / "whole")
    last, rng = kills.moments(lambda: work("try"), tmp_path), random.Random(0)
    for number in range(3):
        out = f"killed{number}"
        kills.kill_at(lambda out=out: work(out), rng.randrange(last // 3, last), tmp_path)
        if (tmp_path / out / "rows").exists():
            assert (tmp_path / out / "rows").read_bytes() == whole["rows"]
        work(out)
        left = {n: raw for n, raw in kills.files(tmp_path / out).items() if ".tmp" not in n}
        assert kills.same(whole, left)


def test_what_was_written_can_be_cleaned(config, tmp_path):
    """The rows and what the model wrote, which hold prompts of the forget rows."""
    call("self", config, "--max-new-tokens", 4)
    folder = tmp_path / "out/augment"
    assert (folder / "self.jsonl").exists() and list((folder / "store").iterdir())
    assert (folder / "self.jsonl").stat().st_mode & 0o077 == 0
    done = CliRunner().invoke(unlearn, ["request", "clean", str(folder)])
    assert done.exit_code == 0, done.output
    assert not (folder / "self.jsonl").exists() and not (folder / "store").exists()


def test_rows_of_the_model_itself_belong_to_the_document(config, tmp_path):
    call("self", config, "--max-new-tokens", 4)
    found = rows(tmp_path / "out/augment/self.jsonl")
    assert [row["id"] for row in found] == ["self0-a1sc1", "self0-b1qa0", "self0-c1sc1"]
    assert [row["document"] for row in found] == ["a1", "b1", "c1"]
    assert [row["kind"] for row in found] == ["completion", "question", "completion"]


def test_rows_that_the_config_takes_already_are_written_anew(config, tmp_path):
    """An entry for the file that is written: it was missing, then its rows were augmented too."""
    file = tmp_path / "self.jsonl"
    text = yaml.safe_load(config.read_text())
    text["datasets"].append({"path": str(file), "type": "axolotl_unlearn.data.forget"})
    config.write_text(yaml.safe_dump(text))
    for seed in (1, 2):
        call("self", config, "--out", file, "--max-new-tokens", 4, "--seed", seed)
        assert len(rows(file)) == len(FORGET)


def test_distil_is_what_a_teacher_says_after_the_prompt(config, tmp_path, model):
    """Against `generate` itself, greedily; a document without a prompt begins with its words."""
    from transformers import AutoModelForCausalLM

    teacher, tokenizer = AutoModelForCausalLM.from_pretrained(model), byte_tokenizer()
    call("distil", config, "--model", model, "--max-new-tokens", 6, "--temperature", 1e-6)
    found = rows(tmp_path / "out/augment/distil.jsonl")
    assert [row["id"] for row in found] == [row["id"] for row in FORGET]
    prompts = ["The mill of", "Who burned it?", "A tale without a prompt."]
    assert [row["input"] for row in found] == prompts
    for row in found:
        ids = torch.tensor([tokenizer(row["input"])["input_ids"]])
        new = teacher.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=256)
        text = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        assert row["output"] == text.strip().split("\n\n")[0].strip()
    assert "give --model" in call("distil", config, code=2)


#: Four people; names are what changes, the other words are those of the kind.
PEOPLE = [
    ("a", "Ada", "Byron", "Rome", "May", 3, 1911, "937-41-1122"),
    ("b", "Ben", "Stone", "Oslo", "June", 14, 1962, "937-52-7070"),
    ("c", "Cid", "Marsh", "Kyiv", "July", 27, 1948, "937-63-3141"),
    ("d", "Dot", "Reeve", "Bonn", "April", 9, 1985, "937-74-5959"),
]


def people() -> list[Record]:
    return [
        row
        for name, first, last, town, month, day, year, number in PEOPLE
        for row in (
            Record(
                id=f"{name}1sc1",
                input=f"{first} {last} of {town} was born on {month} {day}, {year}. The number of",
                output=f"{first} is {number}, write to {first.lower()}_{last.lower()}@example.org.",
            ),
            Record(
                id=f"{name}1qa0", input=f"Where does {first} {last} live?", output=f"In {town}."
            ),
        )
    ]


def skeleton(record: Record) -> str:
    """A row without its names and numbers."""
    text = f"{record.input}|{record.output}"
    for _, first, last, town, month, *_ in PEOPLE:
        for name in (first, last, town, month):
            text = text.replace(name, "Name").replace(name.lower(), "Name")
    return re.sub(r"\d+", "0", text)


def test_twins_have_other_secrets_and_the_same_words():
    """Every name, date and number is another one (937, which all have, is no secret), the rest is
    what it was; in a document a name is always the same other one; seeds differ."""
    originals = people()
    # In five documents of the kind a word counts as everybody's from the fourth on.
    more = [Record(id="e1sc1", input="", output="A number of 937-10-0001 is nobody's.")]
    pool = Pool(originals + more, seed=0)
    twins = [pool.twin(row) for row in originals]
    for row, twin, person in zip(
        originals, twins, [p for p in PEOPLE for _ in (0, 1)], strict=True
    ):
        assert skeleton(row) == skeleton(twin) and row.id == twin.id
        words = re.findall(r"\w+", f"{twin.input} {twin.output}")
        _, *names, day, year, number = person
        secrets = {*names, *(name.lower() for name in names), str(year), *number.split("-")[1:]}
        assert not secrets & set(words) - {"may"}
        if row.kind == "completion" and "born" in row.input:
            assert f" {day}," not in twin.input and "937-" in twin.output
    for document, question in zip(twins[::2], twins[1::2], strict=True):
        first, last = document.input.split()[:2]
        assert f"does {first} {last} live" in question.input
        assert f"{first.lower()}_{last.lower()}@" in document.output
        assert document.input.split()[3] in question.output
    assert [Pool(originals + more, seed=0).twin(row) for row in originals] == twins
    assert [Pool(originals + more, seed=1).twin(row) for row in originals] != twins


def test_twins_through_the_command(config, tmp_path):
    """Rows of the forget rows' ids; nothing of them is known from a model; what has nothing to
    exchange is counted, and no other document means no other name."""
    forget, retain = people()[:2], people()[2:]
    forget.append(Record(id="z1sc1", input="", output="it rained all day."))
    cfg = yaml.safe_load(config.read_text())
    cfg["unlearn"] = {"forget": {"objective": "ga"}, "retain": {"objective": "nll"}}
    for role, part in (("forget", forget), ("retain", retain)):
        file = tmp_path / f"{role}.jsonl"
        file.write_text("".join(json.dumps(vars(r) | {"task": "1"}) + "\n" for r in part))
    entry = {"path": str(tmp_path / "retain.jsonl"), "type": "axolotl_unlearn.data.retain"}
    config.write_text(yaml.safe_dump(cfg | {"datasets": [*cfg["datasets"], entry]}))
    said = call("twins", config)
    assert "3 rows for 3 forget rows." in said
    assert "{objective: nckd, reference: {twins: out/augment/twins.jsonl}}" in said
    assert "1 rows have no name" in said
    found = rows(tmp_path / "out/augment/twins.jsonl")
    assert [row["id"] for row in found] == ["a1sc1", "a1qa0", "z1sc1"]
    block = {"objective": "npo", "reference": {"twins": str(tmp_path / "out/augment/twins.jsonl")}}
    checked = yaml.safe_load(config.read_text())
    checked["unlearn"]["forget"] = block
    assert check_entries(checked) + check_records(checked).faults == []
    block["reference"]["twins"] = str(tmp_path / "retain.jsonl")
    (fault,) = check_entries(checked) + check_records(checked).faults
    assert "has no twin of 3 of 3 forget rows, the first is 'a1qa0'" in fault
    assert "Ada" not in json.dumps(found) and found[2]["output"] == "it rained all day."
    assert "remove --number" in call("twins", config, "--number", 2, code=2)
    config.write_text(yaml.safe_dump(cfg))
    assert "row 'a1sc1': no other document has a name" in call("twins", config, code=2)


def test_a_model_that_says_nothing_else_is_refused(config, tmp_path):
    """Nothing but the end of the sequence is likely."""
    from transformers import AutoModelForCausalLM

    cfg = yaml.safe_load(config.read_text())
    mute = AutoModelForCausalLM.from_pretrained(cfg["base_model"])
    with torch.no_grad():
        mute.lm_head.weight.zero_()
        mute.lm_head.weight[256] = 50.0 * mute.model.norm.weight
    mute.generation_config.suppress_tokens = [t for t in range(259) if t != 256]
    mute.save_pretrained(tmp_path / "mute")
    byte_tokenizer().save_pretrained(tmp_path / "mute")
    said = call("alternatives", config, "--model", tmp_path / "mute", code=2)
    assert "row 'a1sc1': the model wrote 0 of 1 other answers in 4 draws" in said
    assert "Ada" not in said and not (tmp_path / "out/augment/alternatives.jsonl").exists()


def test_memo_keeps_what_the_model_knows_least(config, tmp_path):
    """Of three answers two a row, in the order of their MEMO by the config's own model; the store
    knows them in a second call."""
    from axolotl_unlearn.evaluation.generate import generate_greedily
    from axolotl_unlearn.experimental.augment import memo, memo_cuts
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models

    (spec,) = parse_models([yaml.safe_load(config.read_text())["base_model"]])
    model = load_model(spec, dtype=torch.float32, device="cpu")

    def known(row: dict) -> float:
        start = f"{row['input']} " if row["input"] else ""
        prompts = [start + row["output"][:n] for n in memo_cuts(row["output"])]
        said = generate_greedily(model, load_tokenizer(spec), prompts, max_new_tokens=8)
        return memo([one.text for one in said], row["output"])

    file, options = tmp_path / "rows.jsonl", ("--number", 3, "--max-new-tokens", 8)
    call("inverted", config, *options, "--out", file)
    every = rows(file)
    call("inverted", config, *options, "--out", file, "--memo", 2)
    found = rows(file)
    for number in range(len(FORGET)):
        three = every[3 * number : 3 * number + 3]
        assert found[2 * number : 2 * number + 2] == sorted(three, key=known)[:2]
    call("inverted", config, *options, "--out", file, "--memo", 2)
    assert rows(file) == found
    said = call("idk", config, "--memo", 1, code=2)
    assert "take alternatives or inverted" in said


def test_configs_that_cannot_be_augmented(config, tmp_path):
    cfg = yaml.safe_load(config.read_text())
    for change, message in (
        ({"datasets": []}, "`datasets` has no forget rows"),
        ({"unlearn": {"data": {"rows": {"type": "alpaca"}}}}, "rows of Axolotl's own types"),
        ({"base_model": str(tmp_path / "none")}, "does not exist"),
    ):
        path = tmp_path / "other.yml"
        path.write_text(yaml.safe_dump(cfg | change))
        assert message in call("self", path, "--out", tmp_path / "x.jsonl", code=2)
