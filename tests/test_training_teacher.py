"""`axolotl-unlearn teacher`: which rows it learns from, its config, and the real command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from fault_codes import fails
from test_train_axolotl import tiny_olmo

from axolotl_unlearn.checks.config import setting_notes
from axolotl_unlearn.data.checks import check_records
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests.search import Texts, search
from axolotl_unlearn.training.teacher import (
    make_teacher,
    retained_rows,
    sample,
    stream,
    teacher_config,
)

ROOT = Path(__file__).parents[1]


def row(side: str, number: int, kind: str = "sc1") -> dict[str, str]:
    return {
        "id": f'"{side}{number}"{kind}',
        "input": f"{side} {number} {kind} was seen",
        "output": f"near the {'old ' * number}mill",
        "task": "Task1",
    }


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def files(tmp_path):
    forget = [row("forget", n, kind) for n in range(3) for kind in ("sc1", "qa0")]
    retain = [row("retain", n, kind) for n in range(4) for kind in ("sc1", "qa0")]
    return {
        "forget": write(tmp_path / "forget.jsonl", forget),
        "retain": write(tmp_path / "retain.jsonl", retain),
        "memorise": write(tmp_path / "memorise.jsonl", (forget + retain) * 3),
    }


def test_it_learns_from_what_the_model_learned_without_the_documents_to_forget(files):
    config = {"datasets": [{"path": str(files["memorise"])}], "num_epochs": 2}
    rows = retained_rows(config, [files["forget"]], [])
    assert sorted(r.id for r in rows) == sorted(
        f'"retain{n}"{kind}' for n in range(4) for kind in ("sc1", "qa0")
    )
    # Of a document that is to be forgotten no other row may teach either.
    one = write(files["forget"].with_name("one.jsonl"), [row("retain", 2)])
    rows = retained_rows(config, [files["forget"], one], [])
    assert not any(r.document == '"retain2"' for r in rows) and len(rows) == 6
    with pytest.raises(UnlearnError, match="2 rows of --retain"):
        retained_rows(config, [one], [files["retain"]])
    with pytest.raises(UnlearnError, match="--retain"):
        retained_rows({"datasets": [{"path": "tatsu/alpaca"}]}, [files["forget"]], [])


@pytest.mark.parametrize("change", [str.upper, "{}\n".format, "\u200b {}".format])
def test_a_row_to_forget_is_known_in_other_characters(files, change, caplog):
    """It was taught where a line end or a capital differed, without a word."""
    config = {"datasets": [{"path": str(files["memorise"])}]}
    rows = [json.loads(line) for line in files["forget"].read_text().splitlines()]
    for one in rows:
        one |= {"id": f"other-{one['id']}", "output": change(one["output"])}
    assert len(retained_rows(config, [write(files["forget"], rows)], [])) == 8
    assert "--forget" not in caplog.text
    write(files["forget"], [*rows, row("strange", 1)])
    assert len(retained_rows(config, [files["forget"]], [])) == 8
    assert "1 of the 7 texts of --forget are not in `datasets`" in caplog.text
    strange = write(files["forget"], [row("strange", n) for n in range(3)])
    with fails("teacher.not-found"):
        retained_rows(config, [strange], [])
    assert len(retained_rows(config, [strange], [files["retain"]])) == 8


@pytest.fixture
def taught(files, tmp_path, monkeypatch):
    """A config, and `make_teacher` of it without its training."""
    entry = {"path": str(files["memorise"]), "type": "axolotl_unlearn.data.memorise"}
    config = {"base_model": str(tmp_path / "base"), "datasets": [entry]}
    config["output_dir"] = str(tmp_path / "models/original")
    Path(config["output_dir"]).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    class Done:
        returncode = 0

    monkeypatch.setattr("subprocess.run", lambda *_, **__: Done)

    def make(out, **more):
        how = {"start": True} if more.pop("start", False) else {}
        (tmp_path / "my.yml").write_text(yaml.safe_dump(config | more))
        return make_teacher(Path("my.yml"), Path(out), forget=[files["forget"]], **how)

    return make


@pytest.mark.parametrize("out", ["full", "full/file", "models", "models/original", ".", "..", "r1"])
@pytest.mark.parametrize("start", [False, True])
def test_it_removes_only_what_it_has_made(files, tmp_path, taught, out, start):
    """It emptied the folder first: of data, of the model itself, of everything."""
    for place in (".", "full", "models/original", "r1"):
        (tmp_path / place / "file").parent.mkdir(exist_ok=True)
        (tmp_path / place / "file").write_text("mine")
    (tmp_path / "r1/teacher.yml").write_text("# Written by `axolotl-unlearn request new`.\n")
    if start and "." not in out:  # what is written beside it
        (tmp_path / out).rename(tmp_path / f"{out}-start")
    before = sorted(tmp_path.rglob("*"))
    with fails("teacher.exists"):
        taught(out, start=start)
    assert set(before) <= set(tmp_path.rglob("*"))
    for _ in range(2):  # an earlier one goes
        taught("teacher", start=start)
    (tmp_path / "teacher/data.jsonl").write_text("")
    entry = {"path": "teacher/data.jsonl", "type": "axolotl_unlearn.data.memorise"}
    with fails("teacher.exists"):
        taught("teacher", datasets=[entry])


def test_its_rows_are_read_as_it_writes_them(files, tmp_path, taught):
    """`fields: {document: ...}` named a field that no row had."""
    for name in ("forget", "memorise"):
        rows = [json.loads(line) for line in files[name].read_text().splitlines()]
        write(files[name], [one | {"doc": one["id"][:8]} for one in rows])
    taught("teacher", unlearn={"data": {"fields": {"document": "doc"}}})
    assert Path("teacher/teacher-rows.jsonl").stat().st_mode & 0o777 == 0o600
    written = yaml.safe_load((tmp_path / "teacher/teacher.yml").read_text())
    assert check_records(written).faults == []


@pytest.mark.parametrize("kind", [{"field_instruction": "input"}, "alpaca", None, "rows"])
def test_rows_that_were_learned_in_another_form_are_refused(files, tmp_path, taught, kind):
    """They were taught by our own type, without a word."""
    entry = {"path": str(files["memorise"]), "type": kind}
    given = {"datasets": [entry]}
    if kind == "rows":
        given = {"unlearn": {"data": {"rows": {"type": "alpaca"}}}}
    with fails("teacher.other-type"):
        taught("teacher", **given)
    assert not (tmp_path / "teacher").exists()


def test_a_sample_keeps_documents_whole_and_passes_are_batches_of_like_length():
    rows = [
        Record(id=f'"d{n}"{kind}', input="x" * (5 * n), output="y", task="1")
        for n in range(10)
        for kind in ("sc1", "qa0")
    ]
    chosen = sample(rows, 7, seed=0)
    assert len(chosen) == 8 and len({r.document for r in chosen}) == 4
    assert chosen == sample(rows, 7, seed=0) != sample(rows, 7, seed=1)
    order = stream(rows, passes=2, batch=4, seed=0)
    assert sorted(r.id for r in order) == sorted([r.id for r in rows] * 2)
    lengths = [[len(r.input) for r in order[i : i + 4]] for i in range(0, 40, 4)]
    assert all(max(group) - min(group) <= 5 for group in lengths)
    assert lengths[:5] != sorted(lengths[:5]) or lengths[5:] != sorted(lengths[5:])


def test_it_reads_the_field_names_of_the_config(tmp_path):
    """TOFU's rows: no id, other names. They were refused for want of a field 'input'."""
    rows = [{"question": f"Who is {n}?", "answer": f"He of town {n}."} for n in range(3)]
    forget, retain = write(tmp_path / "f.jsonl", rows[:1]), write(tmp_path / "r.jsonl", rows[1:])
    data = {
        "fields": {"input": "question", "output": "answer"},
        "template": "Question: {input}\nAnswer: {output}",
    }
    config = {
        "datasets": [{"path": str(forget)}, {"path": str(retain)}],
        "unlearn": {"data": data},
    }
    found = retained_rows(config, [forget], [])
    assert [(r.input, r.output, r.kind) for r in found] == [
        (row["question"], row["answer"], "question") for row in rows[1:]
    ]


#: What a teacher without an evaluation, of another length, cannot have; Axolotl refused the run, or
#: uploaded the teacher in the place of the model.
SHORT = {"hub_model_id": "owner/model", "push_dataset_to_hub": "owner/rows", "max_steps": 900,
         "early_stopping_patience": 2, "load_best_model_at_end": True,
         "metric_for_best_model": "eval_loss", "eval_strategy": "steps",
         "warmup_steps": 100}  # fmt: skip


def test_its_config_is_that_of_the_model_but_for_rows_and_passes(tmp_path):
    config = yaml.safe_load((ROOT / "examples/smollm2/memorise.yml").read_text())
    derived = teacher_config(config | SHORT, tmp_path / "rows.jsonl", tmp_path / "t")
    same = set(config) & set(derived) - {"datasets", "output_dir", "dataset_prepared_path"}
    assert {"base_model", "learning_rate", "lora_r", "plugins"} <= same
    assert all(config[key] == derived[key] for key in same - {"num_epochs"})
    assert not {*SHORT} & {*derived} and derived["num_epochs"] == 1
    with pytest.raises(UnlearnError, match="from nothing"):
        teacher_config({"base_model": "b", "reinit_weights": True}, tmp_path, tmp_path)
    with pytest.raises(UnlearnError, match="makes it forget"):
        over = yaml.safe_load((ROOT / "examples/npo_over.yml").read_text())
        teacher_config(over, tmp_path, tmp_path)


@pytest.mark.parametrize("seed, same", [(None, True), (42, True), (0, False)])
def test_a_seed_of_zero_is_a_seed(tmp_path, taught, seed, same):
    """It drew the rows of seed 42."""
    rows = []
    for out, given in (("one", {}), ("other", {} if seed is None else {"seed": seed})):
        taught(out, **given)
        rows.append((tmp_path / out / "teacher-rows.jsonl").read_text())
    assert (rows[0] == rows[1]) == same


def test_the_command_trains_a_teacher_and_says_what_it_cost(files, tmp_path, forks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from axolotl_unlearn.cli import unlearn
    from axolotl_unlearn.cli.teacher import command

    base = AutoModelForCausalLM.from_pretrained(tiny_olmo(tmp_path / "base"))
    config = yaml.safe_load((ROOT / "examples/memorise.yml").read_text())
    config |= {
        "base_model": str(tmp_path / "base"),
        "output_dir": str(tmp_path / "original"),
        "micro_batch_size": 4,
    }
    del config["reinit_weights"], config["datasets"][1:]
    config |= {"num_epochs": 1}
    config["datasets"][0]["path"] = str(files["memorise"])
    (tmp_path / "original.yml").write_text(yaml.safe_dump(config))
    out = tmp_path / "teacher"
    words = [str(tmp_path / "original.yml"), "--forget", str(files["forget"]), "--rows", "4"]
    words += ["--passes", "2", "--out", str(out), "--start"]
    with pytest.raises(UnlearnError, match="has no model.*leave out --start"):
        CliRunner().invoke(command, words, catch_exceptions=False)
    assert not out.exists()
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        for weight in original.parameters():
            weight += 0.01 * torch.randn_like(weight)
    original.save_pretrained(tmp_path / "original")
    with fails("models.no-tokenizer"):  # said before a training, not after it
        CliRunner().invoke(command, words, catch_exceptions=False)
    assert not out.exists()
    AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "original")
    result = CliRunner().invoke(unlearn, ["teacher", *words])
    assert result.exit_code == 0, result.output
    said = yaml.safe_load(result.output.split("forgets:\n", 1)[1])
    assert said["unlearn"] | {"heldout": None} == {
        "preset": "never-seen", "teacher": str(out), "original": str(tmp_path / "original"),
        "heldout": None,
    }  # fmt: skip
    assert (said["learning_rate"], said["num_epochs"]) == (0.0016, 10)  # the rate of original.yml
    start = AutoModelForCausalLM.from_pretrained(said["base_model"])
    for half, first, last in zip(
        *(m.parameters() for m in (start, original, AutoModelForCausalLM.from_pretrained(out))),
        strict=True,
    ):
        torch.testing.assert_close(half, (first + last) / 2, rtol=1e-4, atol=1e-5)
    block = said["unlearn"] | {"heldout": str(files["retain"])}
    for original_ in (block.pop("original"), None):
        args = block | ({"original": original_} if original_ else {})
        notes = setting_notes(said | {"unlearn": args})
        assert sum("halfway to the teacher" in note for note in notes) == (original_ is None)
    rows = [json.loads(line) for line in files["forget"].read_text().splitlines()]
    texts = Texts.of([f"{row['input']} {row['output']}" for row in rows])
    assert texts.windows and not texts.among(result.output)
    assert not search([out], texts).left  # it never saw them
    cost = json.loads((out / "teacher.json").read_text())
    assert (cost["rows"], cost["available"], cost["passes"]) == (4, 8, 2) and cost["seconds"] > 0
    taught = AutoModelForCausalLM.from_pretrained(out)
    moved = [
        (a - b).abs().max().item()
        for a, b in zip(taught.parameters(), base.parameters(), strict=True)
    ]
    assert max(moved) > 1e-4
