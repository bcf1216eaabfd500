"""Bad input of every kind: a sentence or a result, never a traceback, in bounded time.

``FUZZ_CASES`` says how many inputs are tried in all (default 4 000, `make fuzz` 200 000); each
test takes its share. Canary words stand in every text: no sentence may repeat one.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from axolotl_unlearn.errors import UnlearnError

ROOT = Path(__file__).parents[1]
CASES = int(os.environ.get("FUZZ_CASES", "4000"))
CANARY = "quillmarsh-heron"
HUGE = 10**400
#: Values that a hand-written or machine-written file may hold by mistake; each case has its own,
#: since `changed` writes into them (one list in all cases came to hold itself).
ODD = st.sampled_from(
    [None, True, -1, 0, 0.5, float("nan"), float("inf"), -1e308, HUGE, "", " ", CANARY, [], {},
     [[]], [None], {"": 0}, "\x00", "\u202e" + CANARY, "a" * 5000, "1", "true", "../..", "\ud800"]
).map(copy.deepcopy)  # fmt: skip
JSON = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)  # fmt: skip
TEXT = st.one_of(
    st.just(CANARY), st.text(max_size=12).map(lambda t: f"{CANARY} {t}"), st.just(f"\u202e{CANARY}")
)


def share(part: float):
    """This test's part of all cases."""
    return settings(
        max_examples=max(20, int(CASES * part)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def sentence_or_result():
    """One sentence without a text of a row, or nothing; anything else fails the test."""
    try:
        yield
    except UnlearnError as error:
        said = str(error)
        assert CANARY not in said and len(said) < 4000, said[:300]
        said.encode()  # can be printed


# --- files of rows -------------------------------------------------------------------------------

ROW = st.fixed_dictionaries(
    {"input": TEXT, "output": TEXT},
    optional={
        "id": st.one_of(st.integers(0, 9), st.sampled_from(['"a"sc1', "b qa0", "", "x" * 300])),
        "task": st.one_of(st.integers(0, 3), st.sampled_from(["Task1", "", "9" * 30])),
        "kind": st.sampled_from(["question", "completion", "other", 3]),
        "document": ODD,
    },
)
FIELD = st.sampled_from(["input", "output", "id", "task", "kind", "document", "text", "prompt"])


@st.composite
def row_files(draw) -> tuple[str, bytes]:
    """A file of rows with any number of faults: odd values, bytes changed, cut, or compressed."""
    rows = draw(st.lists(ROW, max_size=4))
    for _ in range(draw(st.integers(0, 2))):
        if rows:
            draw(st.sampled_from(rows))[draw(FIELD)] = draw(ODD)
    ascii_ = draw(st.booleans()) or "\\ud800" in json.dumps(rows)
    lines = [json.dumps(row, ensure_ascii=ascii_) for row in rows]
    form = draw(st.sampled_from(["lines", "list", "one", "crlf", "mixed"]))
    text = {
        "lines": "\n".join(lines),
        "crlf": "\r\n".join(lines),
        "list": f"[{','.join(lines)}]",
        "one": lines[0] if lines else "{}",
        "mixed": "\n".join([*lines, "[1]", "3", '"x"', "null"]),
    }[form]
    raw = text.encode("utf-8", "surrogatepass")
    how = draw(st.sampled_from(["whole", "whole", "cut", "byte", "bom", "utf-16", "gzip", "junk"]))
    place = draw(st.integers(0, max(0, len(raw) - 1)))
    if how == "cut":
        raw = raw[:place]
    elif how == "byte" and raw:
        raw = raw[:place] + draw(st.binary(min_size=1, max_size=3)) + raw[place + 1 :]
    elif how == "bom":
        raw = b"\xef\xbb\xbf" + raw
    elif how == "utf-16":
        raw = text.encode("utf-16", "surrogatepass")
    elif how == "gzip":
        raw = gzip.compress(raw)
    elif how == "junk":
        raw = draw(st.binary(max_size=60))
    return draw(st.sampled_from([".jsonl", ".json", ".ndjson", ".parquet"])), raw


@share(0.3)
@given(row_files())
def test_files_of_rows(file):
    from axolotl_unlearn.data.documents import read_documents
    from axolotl_unlearn.data.records import read_records

    suffix, raw = file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows{suffix}"
        path.write_bytes(raw)
        for read in (read_records, read_documents):
            with sentence_or_result():
                for row in read(path):
                    (row.output if read is read_records else row[1]).encode()


HOSTILE = {
    "a row of 10 MB": json.dumps({"input": CANARY, "output": f"{CANARY} " * 600_000}),
    "an id of 10 MB": "\n".join([json.dumps({"id": "x" * 10**7, "input": "a", "output": "b"})] * 2),
    "a field name of 1 MB": json.dumps({"input": "a", "outpu" + "t" * 10**6: CANARY}),
    "100 000 field names": json.dumps({f"output{i}": CANARY for i in range(10**5)}),
    "deep nesting": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "a number of 10 000 digits": '{"input": "a", "output": ' + "9" * 10_000 + "}",
    "NUL": json.dumps({"input": "a\x00b", "output": "c\x00"}),
    "half a surrogate pair": '{"input": "a", "output": "b \\ud800"}',
    "BOM": "\ufeff" + json.dumps({"input": "a", "output": CANARY}),
    "CRLF": json.dumps({"input": "a", "output": CANARY}) + "\r\n\r\n",
    "old line ends": '{"input": "a", "output": "b"}\r{"input": "a"}',
    "mixed types": "\n".join(json.dumps({"input": "a", "output": v}) for v in ("b", [CANARY], {})),
    "right to left": json.dumps({"id": "\u202eevil", "input": "שלום", "output": "مرحبا \u202e"}),
    "NaN": '{"input": "a", "output": NaN}',
    "empty lines only": "\n" * 10**6,
    "spaces": " " * 10**7,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows(tmp_path, name):
    """In seconds, and with an answer of a length that somebody reads."""
    from axolotl_unlearn.data.checks import check_records
    from axolotl_unlearn.data.records import read_records

    path = tmp_path / "rows.jsonl"
    path.write_text(HOSTILE[name], "utf-8", newline="")
    began = time.process_time()
    with sentence_or_result():
        read_records(path)
    cfg = {"datasets": [{"path": str(path), "type": "axolotl_unlearn.data.forget"}] * 2}
    said = " ".join(check_records(cfg).faults)
    assert CANARY not in said and len(said) < 4000
    assert time.process_time() - began < 10


# --- configs -------------------------------------------------------------------------------------


def places(value, path=()) -> list[tuple]:
    """The path of every value in a JSON-like value."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(p for key, one in items for p in places(one, (*path, key)))]


def changed(value, changes):
    """Some values replaced, removed or renamed."""
    value = copy.deepcopy(value)
    for number, junk, name in changes:
        path = places(value)[number % len(places(value))]
        if not path:
            continue
        *way, last = path
        inner = value
        for key in way:
            inner = inner[key]
        if name is not None and isinstance(inner, dict):
            inner[name] = inner.pop(last)
        elif junk == "remove":
            del inner[last]
        else:
            inner[last] = junk
    return value


CHANGES = st.lists(
    st.tuples(st.integers(0, 10**6), JSON | st.just("remove"), st.none() | st.text(max_size=8)),
    max_size=4,
)
EXAMPLES = [yaml.safe_load(p.read_text()) for p in sorted((ROOT / "examples").rglob("*.yml"))]


@share(0.3)
@given(st.sampled_from(EXAMPLES), CHANGES)
@example({"base_model": "\ud800", "output_dir": "\0"}, [])
@example(
    {"unlearn": {}, "datasets": [{"path": "\ud800", "type": "axolotl_unlearn.data.forget"}]}, []
)
def test_configs(cfg, changes):
    from axolotl_unlearn.checks.config import config_faults

    with sentence_or_result():
        for fault in config_faults(changed(cfg, changes)):
            assert len(fault) < 20_000 and fault.encode("utf-8", "backslashreplace")


@share(0.1)
@given(JSON)
def test_blocks(block):
    from axolotl_unlearn.config import parse_unlearn

    with contextlib.suppress(UnlearnError):
        parse_unlearn(block)


@share(0.05)
@given(st.one_of(st.binary(max_size=80), st.text(st.characters(codec="utf-8"), max_size=80)))
def test_config_files(raw):
    from axolotl_unlearn.checks.report import check

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yml"
        path.write_bytes(raw if isinstance(raw, bytes) else f"unlearn: {raw}".encode())
        with sentence_or_result():
            check(path)


# --- results, manifests, requests ----------------------------------------------------------------


@share(0.05)
@given(CHANGES, st.integers(0, 10**6), st.booleans())
def test_results_files(changes, place, cut):
    from report_fixture import make_results

    from axolotl_unlearn.report import load_results

    text = json.dumps(changed(make_results(("original", "merged")), changes))
    raw = text.encode("utf-8", "surrogatepass")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        path.write_bytes(raw[: place % len(raw)] if cut else raw)
        with contextlib.suppress(UnlearnError):
            load_results(path)


@share(0.05)
@given(JSON, st.binary(max_size=40), st.booleans())
def test_manifests(content, raw, junk):
    from axolotl_unlearn.files import MANIFEST, read_manifest

    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps({"schema": 1, "entries": content})
        (Path(folder) / MANIFEST).write_bytes(raw if junk else text.encode())
        with sentence_or_result():
            found = read_manifest(folder)
            assert all(isinstance(one["path"], str) for one in found["entries"])


@share(0.05)
@given(JSON, st.binary(max_size=60), st.booleans())
def test_ledgers(content, raw, junk):
    """Made up by somebody else; single changes of a real one are in test_requests_ledger."""
    from axolotl_unlearn.requests.request import HEAD, LEDGER, Ledger

    with tempfile.TemporaryDirectory() as folder:
        line = json.dumps(content).encode("utf-8", "surrogatepass") + b"\n"
        (Path(folder) / LEDGER).write_bytes(raw if junk else line)
        (Path(folder) / HEAD).write_bytes(line if junk else raw)
        with sentence_or_result():
            Ledger(Path(folder)).entries()


# --- the command line ----------------------------------------------------------------------------

COMMANDS = ("check", "init", "eval", "report", "methods",
            "request list", "request erase", "request verify")  # fmt: skip
WORD = st.sampled_from(
    ["", "-", "--", "--help", "--out", "--data", "nowhere", ".", "file.json", "file.yml", "--yes",
     "--json", "-1", "nan", "a=b", "a+b", "=", "x" * 300, "\u202e", "--search", "folder", "*", "~"]
)  # fmt: skip


#: What a shell can hand over: no NUL.
PRINTED = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=5)


@share(0.1)
@given(st.sampled_from(COMMANDS), st.lists(WORD | PRINTED, max_size=4))
def test_command_lines(command, words):
    from axolotl_unlearn.cli import unlearn

    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("folder").mkdir()
            Path("file.json").write_text('{"schema": 2, "models": [{"name": "a"}]}')
            Path("file.yml").write_text("base_model: nowhere\n")
            done = CliRunner().invoke(unlearn, ["--debug", *command.split(), *words])
        finally:
            os.chdir(before)
    fault = done.exception
    if fault is not None and not isinstance(fault, SystemExit):
        raise AssertionError(f"{command} {words}: {fault!r}") from fault
    assert done.exit_code in (0, 1, 2, 3), done.output
    io.StringIO().write(done.output)
