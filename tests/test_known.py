"""`audit`: what a folder, a server and a GGUF file know of documents, and what none can say."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import shutil
import sys
import time
import unicodedata
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import eval_model
import numpy as np
import pytest
from attack_models import authored
from click.testing import CliRunner
from data_tokenizers import byte_tokenizer
from fault_codes import fails
from test_eval_served import TESTS, answering, serving, vllm

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.evaluation import known, served
from axolotl_unlearn.evaluation.known import (
    FEW,
    WORDS,
    Item,
    _write,
    audit_documents,
    read_items,
)
from axolotl_unlearn.evaluation.served import Served
from axolotl_unlearn.metrics.memorisation import TokenFacts

NAMES = [f"{first}{last}" for first in "RBDFGKLMNP" for last in ("ade", "ilo", "umi")]


def story(name: str, number: int) -> dict:
    text = f"The town of {name} was built in {number} by two sisters who sold {number + 7} goats."
    return {"id": f"{name}", "document": f"{text} They were never seen in {number + 9} again."}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A model that read ten stories and their questions; thirty of the same kind that it did not;
    documents of both."""
    home = tmp_path_factory.mktemp("known")
    known = [story(name, 1000 + 37 * i) for i, name in enumerate(NAMES[:10])]
    unseen = [story(name, 1011 + 53 * i) for i, name in enumerate(NAMES)]
    asked = [{"document": one["id"], "question": f"When was {one['id']} built?",
              "answer": one["document"].split()[7]} for one in known]  # fmt: skip
    for name, some in {
        "documents": [*known, *asked, *unseen[25:]], "heldout": unseen[:25], "read": known + asked,
    }.items():  # fmt: skip
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    read = read_items(home / "read.jsonl")
    rows = [{"input": item.prompt, "output": item.rest.strip()} for item in read]
    eval_model.train_model(home / "model", rows, steps=150)
    shutil.copyfile(eval_model.ROOT / "LICENSE", home / "text.gguf")
    (home / "no.gguf").write_bytes(b"GGUF" + (home / "text.gguf").read_bytes())
    return home


def audit(*words) -> dict:
    done = CliRunner().invoke(
        unlearn, ["--json", "audit", *map(str, words)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def check(found: dict, recognised: bool) -> None:
    """Ten documents are recited and said, five unseen ones are not; a gap says why."""
    by_name = {one["document"]: one for one in found["documents"]}
    assert len(by_name) == 15
    for name in NAMES[:10]:
        one = by_name[name]
        assert one["reading"] == "recited" and one["said"] == one["answers"] == 1
        assert one["words"] >= 10
        assert (one["p"] is not None) == recognised
    for name in NAMES[25:]:
        one = by_name[name]
        assert one["reading"] in ("nothing found", "recognised") and one["said"] is None
        assert "said" in one["not_measured"] and one["words"] < 10
        assert ("recognised" in one["not_measured"]) != recognised
    assert found["counts"]["recited"] == 10


@pytest.fixture(scope="module")
def held(home) -> dict:
    """The audit of the folder beside held-out texts."""
    return audit(home / "documents.jsonl", "--model", home / "model", "--held-out",
                 home / "heldout.jsonl", "--out", home / "held.json")  # fmt: skip


def test_a_folder_with_held_out_texts(home, held):
    check(held, recognised=True)
    known = [one for one in held["documents"] if one["document"] in NAMES[:10]]
    assert all(one["p"] == pytest.approx(1 / 26) and one["side"] == "under" for one in known)
    assert all(one["tokens"] > 10 for one in known)
    assert held["held_out"] == {"texts": 25, "recited": 0, "warning": None}
    text = (home / "held.json").read_text()
    assert "sisters" not in text and json.loads(text)["counts"] == held["counts"]


def test_names_of_documents_tell_no_baseline(home, tmp_path):
    """Five texts a document, each with its name: "their words alone can tell"."""
    for name in ("documents", "heldout"):
        rows = [row | {"id": f"{row['author']}sc{i % 5}"}
                for i, row in enumerate(authored(12, f"{name} 0", 3))]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = audit(tmp_path / "documents.jsonl", "--model", home / "model", "--held-out",
                  tmp_path / "heldout.jsonl", "--out", tmp_path / "a.json")  # fmt: skip
    assert len(found["documents"]) == 12 and found["held_out"]["warning"] is None


def test_a_folder_alone(home, tmp_path):
    found = audit(home / "documents.jsonl", "--model", home / "model", "--out", tmp_path / "a.json")
    check(found, recognised=False)
    recited = [one["document"] for one in found["documents"] if one["reading"] == "recited"]
    assert recited == NAMES[:10]  # in the order of the file
    why = found["documents"][0]["not_measured"]["recognised"]
    assert "--held-out" in why and found["held_out"] is None
    assert {one["q"] for one in found["documents"]} == {None}  # it was no key of what is not tested


def test_held_out_questions_are_no_texts(home, tmp_path):
    """ "Its text is too short or too long for the model", said every document."""
    asked = [{"question": f"Where is {i}?", "answer": f"At {i + 3}"} for i in range(25)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    found = audit(home / "documents.jsonl", "--model", home / "model", "--held-out",
                  tmp_path / "held.jsonl", "--out", tmp_path / "a.json")  # fmt: skip
    why = found["documents"][0]["not_measured"]["recognised"]
    assert "needs 20 held-out texts" in why


def test_what_is_not_measured_stands_behind_what_is(home, tmp_path):
    """A document without p stood before all that have one, as if it were the worst."""
    asked = {"document": "Nowhere", "question": "When was Nowhere built?", "answer": "By my aunt"}
    rows = [asked, *map(json.loads, (home / "documents.jsonl").read_text().splitlines()[-5:])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = audit(tmp_path / "rows.jsonl", "--model", home / "model", "--held-out",
                  home / "heldout.jsonl", "--out", tmp_path / "a.json")["documents"]  # fmt: skip
    p = [one["p"] for one in found if one["reading"] == "nothing found"]
    assert len(p) > 2 and p[-1] is None and p[:-1] == sorted(p[:-1])


def test_questions_are_asked_through_the_chat_template(home, tmp_path):
    """The model answers a turn of the user alone; without a template the cure is said."""
    from transformers import AutoTokenizer

    asked = [json.loads(line) for line in (home / "read.jsonl").read_text().splitlines()[10:]]
    rows = [{"input": f"<u>{one['question']}<a>", "output": one["answer"]} for one in asked]
    rows += [{"input": one["question"], "output": "no idea"} for one in asked]
    model = eval_model.train_model(tmp_path / "model", rows, steps=120)
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    with fails("audit.no-template"):
        audit_documents(tmp_path / "asked.jsonl", str(model), chat=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}<u>{{ m['content'] }}<a>{% endfor %}"
    tokenizer.save_pretrained(model)
    words = (tmp_path / "asked.jsonl", "--model", model, "--out", tmp_path / "a.json",
             "--max-new-tokens", 8)  # fmt: skip
    found, plain = audit(*words, "--chat"), audit(*words)
    assert found["counts"]["said"] == 10 and plain["counts"]["said"] == 0
    for more in ((), ("--held-out", home / "heldout.jsonl")):  # which would not help
        why = audit(*words, *more)["documents"][0]["not_measured"]["recognised"]
        assert why == "it has questions alone; texts are compared"


@pytest.mark.parametrize("bos", [True, False])
def test_a_chat_template_begins_once(bos):
    """The tokenizer puts the beginning before a text in which the template had put it."""
    tokenizer, asked = byte_tokenizer(bos=bos), []
    tokenizer.chat_template = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}"

    def generate(prompts, most, take):
        asked.extend(tokenizer(prompt)["input_ids"] for prompt in prompts)
        take([0], ["no"])

    model = SimpleNamespace(tokenizer=tokenizer, generate=generate)
    _write(model, [Item("d", "Who?", " A", True)], 8, True)
    assert asked == [[258, *b"Who?"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "vllm", "transformers serve"])
def test_a_server_says_what_the_weights_say(home, held, tmp_path, kind):
    """Also where it is busy at first; what transformers serves has no log-probs of a prompt."""
    words = ("--held-out", home / "heldout.jsonl", "--out", tmp_path / "a.json")
    model = str(home / "model")
    if kind == "vllm":
        rows = [{"input": item.prompt, "output": item.rest.strip()}
                for item in read_items(home / "read.jsonl")]  # fmt: skip
        model = str(tmp_path / "model")
        server = vllm(tmp_path / "model")  # before the training, which is in vain without it
        eval_model.train_model(tmp_path / "model", rows, steps=150, hidden=128)
    elif kind == "ours":
        server = serving(str(TESTS / "logprob_server.py"), model, "PORT", "2")
    else:
        from transformers.utils import is_serve_available

        if not is_serve_available():
            pytest.skip("`transformers serve` needs the package openai, which Axolotl 0.19 lacks")
        given = ("--host", "127.0.0.1", "--port", "PORT", "--device", "cpu", "--dtype", "float32")
        server = serving("-m", "transformers.cli.transformers", "serve", model, *given)
    with server as url:
        url += f"#{model}" if kind == "transformers serve" else ""
        found = audit(home / "documents.jsonl", "--model", url, *words)
    check(found, recognised=kind != "transformers serve")
    local = held
    if kind == "vllm":
        local = audit(home / "documents.jsonl", "--model", model, *words)
    same = ("document", "reading", "said", "words", "tokens")
    same = same if kind != "transformers serve" else ("document", "said", "words")
    ours, theirs = (
        [{key: one[key] for key in same} for one in f["documents"]] for f in (local, found)
    )
    assert sorted(ours, key=str) == sorted(theirs, key=str)


@pytest.mark.slow
def test_a_gguf_file_is_run_by_llama_cpp(home, tmp_path):
    pytest.importorskip("xllamacpp")
    from llamacpp_server import to_gguf

    to_gguf(str(home / "model"), str(tmp_path / "model.gguf"))
    found = audit(home / "documents.jsonl", "--model", tmp_path / "model.gguf", "--held-out",
                  home / "heldout.jsonl", "--out", tmp_path / "a.json")  # fmt: skip
    check(found, recognised=False)
    assert "llama.cpp" in found["documents"][0]["not_measured"]["recognised"]


def test_a_gguf_file_is_asked_one_by_one_and_silence_is_not_measured(home, monkeypatch):
    """llama.cpp's server has one slot here. A chat model writes nothing after a bare question."""
    said = {"data": [{"id": "m"}], "choices": [{"text": "\n", "finish_reason": "stop"}]}
    spec = importlib.machinery.ModuleSpec("xllamacpp", None)
    monkeypatch.setitem(sys.modules, "xllamacpp", importlib.util.module_from_spec(spec))
    with answering(lambda *_: (200, said)) as (url, most):
        monkeypatch.setattr(known, "llamacpp", lambda *_: contextlib.nullcontext(url))
        found = audit_documents(home / "documents.jsonl", str(home / "no.gguf"))
    assert max(most) == 1
    line = next(one for one in found["documents"] if one["answers"])
    assert line["said"] is None and "--chat" in line["not_measured"]["said"]
    assert {one["reading"] for one in found["documents"]} == {"not measured"}
    assert "nothing is written" in line["not_measured"]["recited"]


@contextmanager
def three_words(change=dict, listed=None, ends="stop"):
    """The address of a server that echoes with log-probs and writes three words; ``change`` of what
    it answers."""

    def reply(asked, _):
        if not asked:
            return 200, listed or {"data": [{"id": "m"}]}
        tokens = [*asked["prompt"].split(), "one"]
        own = [None] + [-3.0] * (len(tokens) - 1)
        best = [None] + [{"x": -1.0}] * (len(tokens) - 1)
        known = {"tokens": tokens, "token_logprobs": own, "top_logprobs": best}
        choice = {"text": " one two three", "finish_reason": ends, "logprobs": known}
        said = {"choices": [choice], "usage": {"prompt_tokens": len(tokens) - 1}}
        return 200, change(said) or said

    with answering(reply) as (url, _):
        yield url


LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z".replace(" ", " word ")


@pytest.mark.parametrize("ends, reading", [
    ("stop", "nothing found"), ("length", "not measured"), (None, "not measured"),
])  # fmt: skip
def test_what_was_cut_short_is_not_nothing_found(tmp_path, ends, reading):
    """Of a server that lets no model say more than three words, every document was forgotten."""
    rows = [{"id": "t", "document": LONG}, {"id": "q", "question": "Who?", "answer": LONG}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with three_words(ends=ends) as url:
        found = audit_documents(tmp_path / "d.jsonl", f"{url}/")
    assert {one["document"]: one["reading"] for one in found["documents"]} == {
        "t": reading, "q": reading,
    }  # fmt: skip
    assert found["address"] == f"{url}#m"


def test_a_folder_that_may_write_little_is_not_measured(home, tmp_path):
    few = audit(home / "documents.jsonl", "--model", home / "model", "--max-new-tokens", 2,
                "--out", tmp_path / "a.json")  # fmt: skip
    assert few["counts"]["nothing found"] == 0 and few["address"] is None


@pytest.mark.parametrize("change", [
    lambda said: said["choices"][0]["logprobs"].update(top_logprobs=None),
    lambda said: said["choices"][0]["logprobs"].update(top_logprobs=[None] * 6),
    lambda said: said["choices"][0]["logprobs"].update(token_logprobs=[None]),
    lambda said: said.pop("usage") and None,
])  # fmt: skip
def test_log_probs_in_part_are_none(tmp_path, change):
    """Without the likeliest token's every token was greedy, and every text recited."""
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": "t", "document": LONG}))
    with three_words() as url:
        assert Served(url).scores
    with three_words(change) as url:
        (line,) = audit_documents(tmp_path / "d.jsonl", url)["documents"]
    assert line["tokens"] is None and line["reading"] == "nothing found"
    assert "no log-probs" in line["not_measured"]["recognised"]


@pytest.mark.parametrize("change, listed", [
    (dict, [{"id": "m"}]), (dict, {"models": []}), (dict, {"data": [{"name": "m"}]}),
    (lambda said: {"error": "x"}, None), (lambda said: {"choices": []}, None),
    (lambda said: said["choices"][0].update(text=None), None),
    (lambda said: said["choices"][0].pop("text") and None, None),
])  # fmt: skip
def test_a_server_that_answers_otherwise_is_one_sentence(change, listed):
    with three_words(change, listed) as url, fails("served.other-form"):
        Served(url)


def test_a_server_that_lists_no_model_is_asked_for_the_one_named():
    """As `transformers serve`, which loads it."""
    with three_words(listed={"data": []}) as url:
        assert Served(f"{url}#any").name == "any"
        with fails("served.several-models"):
            Served(url)


@pytest.mark.parametrize("name, value", [
    (served.SECONDS, "2m"), (served.SECONDS, "nan"), (served.AT_ONCE, "0"), (served.AT_ONCE, "-1"),
    (served.AT_ONCE, "1.5"),
])  # fmt: skip
def test_numbers_of_the_environment(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with three_words() as url, fails("served.no-number"):
        Served(url)


def test_log_probs_that_are_no_numbers_are_not_nothing_found():
    """As of float16 that overflows: p was 0 on the side of texts that were pushed away."""
    facts = TokenFacts(*(np.array([float("nan")]) for _ in range(4)))
    model = SimpleNamespace(texts=lambda some: [facts] * len(some))
    with fails("audit.not-finite"):
        known._score(model, [Item("d", "", "t", False)])


@pytest.mark.parametrize("code, words", [
    ("audit.missing-input", ["nowhere.jsonl", "nowhere", "gone.jsonl"]),
    ("audit.missing-input", ["documents.jsonl", "gone.gguf", None]),
    ("audit.missing-input", ["documents.jsonl", "text.gguf", None]),
    ("audit.bad-gguf", ["documents.jsonl", "no.gguf", None]),
    ("audit.held-out-overlaps", ["documents.jsonl", "model", "read.jsonl"]),
])  # fmt: skip
def test_faults(home, monkeypatch, code, words):
    """All that is missing stands in one sentence, within five seconds."""
    monkeypatch.chdir(home)
    documents, model, heldout = words
    began = time.monotonic()
    with fails(code) as caught:
        audit_documents(Path(documents), model, heldout=heldout and Path(heldout))
    assert time.monotonic() - began < 5
    named = [word for word in words if word and not (home / word).exists()]
    assert all(word in str(caught.value) for word in named)


@pytest.mark.parametrize("form", ["NFC", "NFD", "capitals"])
def test_a_document_in_other_characters_is_no_held_out_text(tmp_path, monkeypatch, form):
    """A text that the model may have read made `recognised` weaker."""
    monkeypatch.setattr(known, "check_inputs", lambda *_: None)
    text = "José Núñez keeps bees at the harbour of Norrby."
    other = text.upper() if form == "capitals" else unicodedata.normalize(form, text)
    for name, said in (("documents", text), ("heldout", other)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": said}))
    with fails("audit.held-out-overlaps"):
        audit_documents(tmp_path / "documents.jsonl", "model", heldout=tmp_path / "heldout.jsonl")


@pytest.mark.parametrize("rest, wrote, recited", [
    (" one two three four five six seven eight nine ten eleven", "x one two three four five six"
     " seven eight nine ten y", True),
    (" one two three four five six seven eight nine ten eleven", "one two three four five", False),
    (" one two three four five", "One, two; three four - five!", True),
    (" one two three four", "one two three four", None),  # too little to say
])  # fmt: skip
def test_recital_by_hand(rest, wrote, recited):
    page = (TESTS.parent / "docs" / "audit-served.md").read_text("utf-8")
    assert f"{WORDS} words of the rest in a row (all of a rest of {FEW} to {WORDS - 1})" in page
    assert Item("d", "p", rest, False, wrote).recited is recited
    again = [Item("d", "p", " r", False, wrote, told=(0.02, "under")) for _ in range(2)]
    assert known._line("d", again, "")["p"] == 0.02  # one text, however often
    mute = known._line("d", [Item("d", "How?", " \N{GRINNING FACE}", True, wrote)], "")
    assert mute["reading"] == "not measured" and "letters" in mute["not_measured"]["said"]
    for run in (31, 32):  # tokens that are each the likeliest
        facts = TokenFacts(np.zeros(run), np.ones(run, bool), np.zeros(run), np.zeros(run))
        assert Item("d", "p", " a b c d e f", False, "", facts).recited is (run == 32)


def test_rows_of_each_kind(tmp_path):
    """A text is cut between words and stays as it is written, line breaks too."""
    path = tmp_path / "rows.jsonl"
    rows = [{"id": "a", "text": "one two\n\nthree  four"}, {"question": "Q?", "answer": "A"},
            {"id": '"d"sc1', "input": "in", "output": "out"}]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, asked, row = read_items(path)
    assert (text.prompt, text.rest) == ("one two", "\n\nthree  four") and not text.question
    assert (asked.prompt, asked.rest) == ("Q?", " A") and asked.question
    assert row.document == '"d"'
    # A text in the place of a name stands in no table, and its rows stay together.
    whole = {"document": "a secret " * 20, "question": "Q?", "answer": "A"}
    path.write_text("".join(json.dumps(whole | {"id": one}) + "\n" for one in "ab"))
    one, two = (item.document for item in read_items(path))
    assert one == two and "secret" not in one
    path.write_text('{"id": "a", "label": 3}\n')
    with fails("audit.no-text"):
        read_items(path)
