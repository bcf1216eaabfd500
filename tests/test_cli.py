"""The command line: what a shell does with it, and a config of one's own."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from attack_models import tokenizer
from click.testing import CliRunner
from conftest import tiny_llama
from datasets import Dataset
from requests_folder import finished_request, write_lines

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.cli._options import fitted, show
from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.records import guessed
from axolotl_unlearn.errors import UnlearnError, exit_with_sentence, show_as_sentences
from axolotl_unlearn.evaluation import known
from axolotl_unlearn.evaluation.measure import ProgressBars
from axolotl_unlearn.metrics.results import load_results
from axolotl_unlearn.requests import record
from axolotl_unlearn.requests.new import model_before
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.training.teacher import original_of

ROWS = {
    side: [{"input": f"{side} question {n}?", "output": f"answer {n}"} for n in range(4)]
    for side in ("forget", "retain", "heldout")
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    words = tokenizer()
    for name in ("model", "teacher"):
        tiny_llama(vocabulary=len(words)).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    for side, rows in ROWS.items():
        write_lines(folder / f"{side}.jsonl", rows)
    return folder


def run(*words):
    return CliRunner().invoke(unlearn, list(map(str, words)))


@pytest.mark.parametrize("kind", ["npo", "match"])
def test_an_inited_config_is_ready(home, tmp_path, kind):
    """Whatever characters its paths have, and tables; ": " ended in YAML's own fault."""
    out = tmp_path / "my.yml"
    shutil.copy(home / "forget.jsonl", forget := tmp_path / "f: {3}, #1.jsonl")
    Dataset.from_list(ROWS["retain"]).to_parquet(retain := tmp_path / "retain.parquet")
    more = ["--heldout", home / "heldout.jsonl", "--teacher", home / "teacher"]
    done = run(
        "init", "--kind", kind, "--base-model", home / "model", "--forget", forget,
        "--retain", retain, "--output-dir", tmp_path / "out", "--out", out,
        *(more if kind == "match" else []),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "$" not in out.read_text() and str(out) in out.read_text()
    checked = run("check", out, *(["--full"] if kind == "match" else []))
    assert checked.exit_code == 0 and "ready" in checked.output, checked.output
    assert "\\n" not in checked.output  # what a preset is short for stood in one line
    assert kind == "npo" or "steps: 5" in checked.output  # of all four forget rows
    again = run("init", "--base-model", "m", "--forget", out, "--retain", out, "--out", out)
    assert again.exit_code == 2 and "exists" in again.output


def test_a_terminal_breaks_no_path_and_no_next_command(home, tmp_path):
    """Lines of prose are broken at its width; a path was, too, and then copied in two parts."""
    out, sides = tmp_path / ("x" * 60), ("--forget", "--retain")
    rows = [str(word) for side in sides for word in (side, home / f"{side[2:]}.jsonl")]
    words = ["init", "--base-model", "m", *rows, "--out", str(tmp_path / "my own.yml")]
    said = CliRunner().invoke(unlearn, words, terminal_width=40).output
    assert f"\nNext: axolotl-unlearn check '{tmp_path / 'my own.yml'}'\n" in said, said
    said = CliRunner().invoke(unlearn, ["examples", str(out)], terminal_width=40).output
    assert f"{out}/README.md" in said and said.count("\n") > 2, said
    line = "Results: a/results.json (page: axolotl-unlearn report 'our own evaluations')"
    with click.Context(unlearn, terminal_width=40):
        assert fitted(line) == line and "\n" in fitted(f"Some {line}")


def test_a_command_in_a_sentence_holds_a_path_with_spaces(home, tmp_path):
    """`Next:` quoted it and other sentences did not: what was copied named two files."""
    out = tmp_path / "our own"
    sides = [
        word for side in ("forget", "retain") for word in (f"--{side}", home / f"{side}.jsonl")
    ]
    run("init", "--base-model", home / "model", *sides, "--out", out / "my.yml")
    config = {"base_model": "base", "output_dir": str(out / "gone")}
    (plain := out / "plain.yml").write_text(yaml.safe_dump(config))
    steps = Steps(out / "work", 0)
    said = [(out / "my.yml", run("check", out / "my.yml").output)]
    text = (out / "my.yml").read_text()
    assert f"#   axolotl train '{out / 'my.yml'}'\n" in text, text
    for path, failing in (
        (plain, lambda: model_before(config, plain, out, None)),
        (plain, lambda: original_of(plain)),
        (out / "eval", lambda: load_results(out / "eval")),
        (out / "1", lambda: record.read(finished_request(out))),
        (out / "a", lambda: steps.command("no", [sys.executable, "-c", "1 / 0", str(out / "a")])),
    ):
        with pytest.raises(UnlearnError) as error:
            failing()
        said.append((path, str(error.value)))
    for path, text in said:
        typed = [shlex.split(one) for one in re.findall("`([^`]*)`", text) if "our own" in one]
        assert any(str(path) in words for words in typed), text


def test_init_reads_rows_of_other_formats(home, tmp_path):
    """It wrote a config that `check` refused: the instruction was not read."""
    sides = []
    for side, rows in ROWS.items():
        made = [{"instruction": r["input"], "input": "", "output": r["output"]} for r in rows]
        file = write_lines(tmp_path / f"{side}.jsonl", [row | {"person": "Bo"} for row in made])
        sides += [f"--{side}", file] if side in ("forget", "retain") else []
    out = tmp_path / "my.yml"
    done = run("init", "--base-model", home / "model", *sides, "--out", out)
    assert done.exit_code == 0, done.output
    assert "  data: {rows: {type: alpaca}}\n" in out.read_text()
    assert "instructions, by the prompt of Alpaca" in done.output
    assert "forget row 1, > with labels" in done.output
    lines = [line for line in done.output.splitlines() if line.startswith("    >")]
    assert lines and "answer 0" in lines[0]
    checked = run("check", out)
    assert checked.exit_code == 0 and "ready" in checked.output, checked.output


@pytest.mark.parametrize(
    ("row", "chat", "block"),
    [
        ({"question": "a", "answer": "b"}, True,
         {"fields": {"input": "question", "output": "answer"}, "chat_template": True}),
        ({"prompt": "a", "completion": "b"}, False,
         {"fields": {"input": "prompt", "output": "completion"},
          "labels": {"completion": "answer"}}),
        ({"text": "a"}, True, {"rows": {"type": "completion"}}),
        ({"messages": [{"role": "user", "content": "a"}]}, True,
         {"rows": {"type": "chat_template", "field_messages": "messages"}}),
        ({"id": 1, "talk": [{"from": "human", "value": "a"}]}, False,
         {"rows": {"type": "chat_template", "field_messages": "talk",
                   "message_property_mappings": {"role": "from", "content": "value"}}}),
    ],
)  # fmt: skip
def test_what_init_guesses_of_a_row(tmp_path, row, chat, block):
    """Questions and answers were read by Alpaca's prompt without a word."""
    file = write_lines(tmp_path / "rows.jsonl", [row])
    found, words = guessed(file, chat)
    assert found == block and words
    DataArgs.model_validate(found)


@pytest.mark.parametrize("row", [
    {"instruction": "a", "response": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}, {},
])  # fmt: skip
def test_init_does_not_say_that_it_reads_fields_that_are_not_there(tmp_path, row):
    """Dolly's rows were "instructions, by the prompt of Alpaca", pairs 'input' and 'output'."""
    found, said = guessed(write_lines(tmp_path / "rows.jsonl", [{"id": 1} | row]), True)
    assert found == {} and "which its first row lacks" in said


def test_init_of_a_request_is_a_run_whose_rows_can_be_chosen(home, tmp_path):
    """The config, from which `request new` finds the rows of a person."""
    out = tmp_path / "finetune.yml"
    rows = [
        {"instruction": f"Who is {name}?", "input": "", "output": f"{name} keeps bees.", "id": name}
        for name in ("Ada", "Bo", "Cy")
    ]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    more = ("--data", data, "--output-dir", home / "model", "--out", out)
    done = run("init", "--kind", "request", "--base-model", home / "model", *more)
    assert done.exit_code == 0 and f"axolotl train {out}" in done.output, done.output
    assert "type: alpaca}" in out.read_text() and "$" not in out.read_text()
    out.write_text(out.read_text().replace("adapter: lora ", "# adapter: lora "))
    made = run("request", "new", out, "--where", "id=Ada", "--out", tmp_path / "requests" / "1")
    assert made.exit_code == 0 and "1 row to forget" in made.output, made.output
    missing = run("init", "--kind", "request", "--base-model", "m", "--out", tmp_path / "b.yml")
    assert missing.exit_code == 2 and "--data" in missing.output
    chats = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    write_lines(data, chats)
    more = ("--data", data, "--out", tmp_path / "chats.yml")
    done = run("init", "--kind", "request", "--base-model", home / "model", *more)
    assert done.exit_code == 0 and "set `chat_template:`" in done.output, done.output
    (entry,) = yaml.safe_load((tmp_path / "chats.yml").read_text())["datasets"]
    assert entry["field_messages"] == "conversations"
    assert entry["message_property_mappings"] == {"role": "from", "content": "value"}


@pytest.mark.parametrize(("kind", "more"), [
    ("npo", ["data"]), ("npo", ["heldout"]), ("npo", ["teacher"]), ("match", ["data"]),
    ("request", ["forget"]), ("request", ["retain"]), ("request", ["heldout", "teacher"]),
])  # fmt: skip
def test_init_refuses_what_the_kind_does_not_use(home, tmp_path, kind, more):
    """It did nothing, without a word; `--forget` of a request became its training data."""
    needed = {"npo": ["forget", "retain"], "request": ["data"]}
    needed["match"] = [*needed["npo"], "heldout", "teacher"]
    places = {"data": home / "retain.jsonl", "teacher": home / "teacher"}
    words = [
        word
        for name in [*needed[kind], *more]
        for word in (f"--{name}", places.get(name, home / f"{name}.jsonl"))
    ]
    out = tmp_path / "my.yml"
    done = run("init", "--kind", kind, "--base-model", home / "model", *words, "--out", out)
    assert done.exit_code == 2 and not out.exists(), done.output
    assert " and ".join(f"--{name}" for name in more) in done.output


READ = {"input output": "jsonl", "prompt response": "parquet", "question answer": "jsonl"}


@pytest.mark.parametrize("fields", READ)
def test_an_inited_request_reads_its_rows(home, tmp_path, fields):
    """Two fields were read as `text`, and tables as JSON: it ended with a KeyError at training."""
    (asked, answered), names, suffix = fields.split(), ("Ada", "Bo", "Cy"), READ[fields]
    rows = [{asked: f"Who is {one}?", answered: f"{one} keeps bees.", "id": one} for one in names]
    data, out = tmp_path / f"rows.{suffix}", tmp_path / "my.yml"
    Dataset.from_list(rows).to_parquet(data) if suffix == "parquet" else write_lines(data, rows)
    more = ("--data", data, "--output-dir", home / "model", "--out", out)
    done = run("init", "--kind", "request", "--base-model", home / "model", *more)
    assert done.exit_code == 0, done.output
    config = yaml.safe_load(out.read_text())
    assert config["datasets"][0]["ds_type"] == suffix.removesuffix("l")
    out.write_text(out.read_text().replace("adapter: lora ", "# adapter: lora "))
    made = run("request", "new", out, "--where", "id=Ada", "--out", tmp_path / "requests" / "1")
    assert made.exit_code == 0 and "1 row to forget" in made.output, made.output
    if "plugins" in config:
        out.write_text(out.read_text().replace(str(home / "model") + "\n", "other\n"))
        out.write_text(out.read_text().replace("base_model: other", f"base_model: {home}/model"))
        checked = run("check", out)
        assert checked.exit_code == 0 and "ready" in checked.output, checked.output


def test_init_names_the_chat_template_that_a_model_lacks(home, tmp_path, monkeypatch):
    """Once, with its cure, as `check` does; Axolotl's sentence stood there twice."""
    monkeypatch.chdir(tmp_path)
    for side in ("forget", "retain"):
        turns = [{"role": "user", "content": side}, {"role": "assistant", "content": f"{side}!"}]
        write_lines(tmp_path / f"{side}.jsonl", [{"messages": turns}])
    sides = ("--forget", "forget.jsonl", "--retain", "retain.jsonl")
    done = run("init", "--base-model", home / "model", *sides)
    assert done.output.count("set `chat_template:`") == 1, done.output
    checked = run("check", "unlearn.yml", "--full")
    assert checked.exit_code == 2 and "set `chat_template:`" in checked.output, checked.output


def test_a_shell_completes_commands_and_options(monkeypatch):
    """As docs/own-model.md says."""
    name = "_AXOLOTL_UNLEARN_COMPLETE"
    said = (
        CliRunner().invoke(unlearn, env={name: "bash_source"}, prog_name="axolotl-unlearn").output
    )
    assert "_axolotl_unlearn_completion" in said
    words = {name: "bash_complete", "COMP_WORDS": "axolotl-unlearn chec", "COMP_CWORD": "1"}
    said = CliRunner().invoke(unlearn, env=words, prog_name="axolotl-unlearn").output
    assert said.split() == ["plain,check"]


def test_examples_are_written_with_paths_that_begin_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("examples", "mine/shown").exit_code == 0
    text = (tmp_path / "mine/shown/memorise.yml").read_text()
    assert "mine/shown/demo/world.jsonl" in text and " examples/" not in text
    again = run("examples", "mine/shown")
    assert again.exit_code == 2 and "name another folder" in again.output


COMMAND = [sys.executable, "-m", "axolotl_unlearn.cli"]


@pytest.mark.parametrize(("arguments", "read"), [(["methods"], 1), (["methods", "tofu-npo"], 0)])
def test_a_reader_that_goes_is_no_fault(arguments, read):
    """``| head -1``, and one that reads nothing: no traceback and no "please report it"."""
    run = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    if read:
        run.stdout.read(20)
    run.stdout.close()
    said = run.stderr.read().decode()
    run.wait(60)
    run.stderr.close()
    assert said == "" and run.returncode in (0, 1)


#: A terminal would set its title, and write the rest over the line.
STRANGE = "\x1b]0;title\x07[/b][bold]:smile:\r"


def test_what_a_folder_says_forges_no_line_of_an_error(tmp_path, capsys, monkeypatch):
    """Lines of what was found were shown as text, errors were not: the base that an adapter names,
    faults of `check`, errors of a training."""
    place = json.dumps(f"./{STRANGE}")
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": {place}}}')
    (adapter / "adapter_model.safetensors").touch()
    (recipe := tmp_path / "recipe.yml").write_text(
        f"merge_method: linear\ndtype: float32\nbase_model: {place}\nmodels: [{{model: {place}}}]"
    )
    for words in (["eval", adapter, "--data", "examples/demo"], ["check", recipe]):
        said = run(*words)
        assert said.exit_code == 2 and "title" in said.output, said.output
        assert said.output.replace("\n", "").isprintable(), said.output
    with pytest.raises(SystemExit), exit_with_sentence():
        raise UnlearnError(STRANGE)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    show_as_sentences()
    sys.excepthook(UnlearnError, UnlearnError(STRANGE), None)
    said = capsys.readouterr().err.replace("\n", "")
    assert said.count("title") == 2 and said.isprintable()


def test_a_name_with_brackets_is_no_markup_of_a_table(capsys):
    """It ended what had been measured with a MarkupError, or was not shown."""
    line = dict.fromkeys(("said", "answers", "words", "of", "tokens", "p"), 1)
    line |= {"document": STRANGE, "reading": "said", "not_measured": {}}
    counts = {"said": 1, "nothing found": 0}
    found = {"model": STRANGE, "documents": [line], "counts": counts, "held_out": None}
    show(*known.shown(Path("out"), found))
    bars = ProgressBars(True)
    with bars.progress, bars.bar(STRANGE, 1):
        bars.note(STRANGE)
    said, shown = capsys.readouterr()
    assert said.replace("\n", "").isprintable() and "\x1b]" not in shown and "\r\n" not in shown
    assert said.count("[/b]") == 3 and ":smile:" in said and shown.count("[/b][bold]:smile:") >= 2
