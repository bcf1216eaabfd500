"""A whole request on a real tiny model: stopped in every stage, refused, accepted, handed over."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import kills
import pytest
import yaml
from click.testing import CliRunner
from fault_codes import fails
from merging_models import tiny_adapter
from requests_folder import (
    adapter_folder,
    finished_request,
    keys,  # noqa: F401
    model_folder,
    no_caches,
    said,
    write_json,
    write_lines,
)
from test_requests_new import (
    ADA,
    ADA_ROWS,
    TRAIN,
    config,
    people,
    preferences,
    requested,
    tuned,
)

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.audit import audits
from axolotl_unlearn.metrics.results import CELLS, Model
from axolotl_unlearn.metrics.verdict import Finding, Verdict
from axolotl_unlearn.requests import request as request_module
from axolotl_unlearn.requests import run as running
from axolotl_unlearn.requests.audit import audit_requests
from axolotl_unlearn.requests.choose import Wanted, read_subjects, together
from axolotl_unlearn.requests.new import Options
from axolotl_unlearn.requests.record import write
from axolotl_unlearn.requests.request import Ledger, Request, weights
from axolotl_unlearn.requests.search import Texts
from axolotl_unlearn.requests.verdict import (
    Drops,
    against,
    exact,
    kept_by_loss,
    mark_guessed,
    needed,
    not_measured,
    verdict,
)
from axolotl_unlearn.requests.verify import export, verify, verify_export
from axolotl_unlearn.requests.ways import match

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tuned(tmp_path_factory.mktemp("home"), TRAIN[:18], people(100, 40))


def request(home: Path, name: str, wanted=ADA_ROWS, **more):
    """In a folder of its own: a ledger that accepted one model is where the next request starts."""
    more = {"sample_packing": False, **more}
    return requested(home, home, wanted, f"requests-{name}/{name}", Options(steps=2), **more)


def start(folder: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "axolotl_unlearn.cli", "request", "run", str(folder)]
    return subprocess.Popen(
        [*command, "--threads", "1", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300"}
        | {"HF_DATASETS_CACHE": str(folder.parent / "users-cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill_when(
    process: subprocess.Popen, line: str, number: int = signal.SIGKILL, log: Path | None = None
) -> list[str]:
    """A signal to all of it as soon as it prints the line, and more than its command stands in the
    log; what it printed."""
    seen = []
    for text in process.stdout:
        seen.append(text)
        if line in text:
            while log and not (log.is_file() and log.read_text().count("\n") > 1):
                time.sleep(0.01)  # Python drops SIGINT in the fork that the line announces
                assert process.poll() is None, log
            os.killpg(process.pid, number)
            break
    if number != signal.SIGKILL:
        seen += process.stdout
    process.wait()
    process.stdout.close()
    return seen


#: What `lora_target_linear` finds.
LINEAR = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "up", "down", "gate"))


def moved(before: Path, after: Path) -> float:
    """Largest change of a weight."""
    from safetensors.torch import load_file

    old, new = load_file(before), load_file(after)
    assert set(old) == set(new)
    return max(float((new[name] - old[name]).abs().max()) for name in old)


@pytest.mark.slow
def test_a_lora_killed_in_every_stage_refused_and_accepted(home, forks):
    """Base and adapter; teacher and result are adapters of the base, the second one moved from the
    fine-tuned."""
    tiny_adapter(adapter := home / "adapter", home / "base", alpha=8, targets=LINEAR)
    lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
    made = request(home, "r1", output_dir=str(adapter), **lora)
    folder = made.folder
    titles = ["teacher: the base on retained rows", "forget", "evaluate before and after"]
    outputs = []
    for number, title in enumerate(titles):
        seen = kill_when(start(folder, "--way", "match"), title)
        assert title in seen[-1], "".join(seen)
        outputs += seen
        kept = [line for line in seen if "kept from an earlier run" in line]
        assert len(kept) >= number - 1  # what was done before is not done again
        assert not (folder / "model").exists() and not (folder / "record.json").exists()
    # Two steps from the fine-tuned adapter, not from a fresh one.
    file = "adapter_model.safetensors"
    assert 0 < moved(adapter / file, folder / "work" / "model" / file) < 0.02
    assert (folder / "work" / "teacher" / file).is_file()
    refused = start(folder)
    said, _ = refused.communicate()
    outputs.append(said)
    assert refused.returncode == 2 and "is not handed over" in said, said
    assert "Traceback" not in said and "Rope Walk" not in said
    assert not (folder / "model").exists()
    verdict = json.loads((folder / "verdict.json").read_text())
    assert not verdict["good"] and verdict["missing"] and len(verdict["documents"]) == 3
    attacks = sorted(path.name for path in (folder / "attacks").glob("*-after.json"))
    assert attacks == ["prompt-after.json", "quantise-after.json", "relearn-after.json"]
    assert not any("were generated is not known" in one for one in verdict["limits"])
    # An unlearned model that learned nothing has lost what the fine-tuned one knew: nothing.
    accepted = start(folder, "--accept", "a test of the way, not of the model", "--json")
    said, _ = accepted.communicate()
    outputs.append(said)
    assert accepted.returncode == 0, said
    answer = json.loads(said[said.index('{\n "exit": 0') :])
    assert answer["model"].endswith("model") and answer["verdict"]["accepted"], said
    assert said.count("kept from an earlier run") == len(titles)
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["accepted"] == "a test of the way, not of the model"
    assert (folder / "model" / file).is_file()
    assert not (folder / "work" / "model").exists()
    verify(folder).require()
    (tried,) = json.loads((folder / "record.json").read_text())["predicate"]["tries"]
    assert (tried["outcome"], tried["way"]) == ("not shown", "match")
    assert not list((folder.parent / "users-cache").rglob("*.arrow"))  # kept customers' rows
    # What the rows say is on no screen and in no log: each command's output is one.
    texts = Texts.of([f"{question} {answer}" for question, answer in ADA])
    logs = sorted(folder.rglob("*.log"))
    assert len(texts.windows) > 3 and len(logs) >= 2
    for shown in ("".join(outputs), *(path.read_text(errors="replace") for path in logs)):
        assert shown and not texts.among(shown)
    for path in folder.rglob("*"):
        assert not path.stat().st_mode & 0o077, path  # forget texts, models, logs: the owner's


@pytest.fixture
def interrupts():
    """SIGINT as at a terminal: what was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_what_stops_a_command_is_one_sentence_and_it_goes_on(
    home, tmp_path, monkeypatch, forks, interrupts
):
    """Ctrl-C, a full disk, a folder that may not be written: "Aborted!", or "please report it"."""
    folder = tmp_path / "our requests" / "r"
    words = ["request", "new", str(tmp_path / "c.yml"), "--where", "id=ada-quill"]
    words += ["--out", str(folder)]
    settings = config(home, sample_packing=False, num_epochs=1)
    (tmp_path / "c.yml").write_text(yaml.safe_dump(settings))
    with monkeypatch.context() as patch:  # a real signal, while the folder is written
        stop = lambda *_: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
        patch.setattr("axolotl_unlearn.requests.new.write_evaluation", stop)
        said = CliRunner().invoke(unlearn, words)
        assert said.exit_code == 130 and "stopped; the same command begins again" in said.output
    assert not folder.exists()
    for limits in ({"bytes": 0}, {"bytes": 5000}, {"read_only": folder.parent}):
        code, said = limited(words, tmp_path / "said", **limits)
        assert code == 2 and said.count("\n") == 1 and "cannot be " in said, (limits, said)
        assert not folder.exists()
    made = CliRunner().invoke(unlearn, words)
    assert made.output.endswith(f"\nNext: axolotl-unlearn request run '{folder}'\n"), made.output
    words = ["request", "run", str(folder), "--way", "retrain", "--threads", "1"]
    for limits in ({"bytes": 100}, {"bytes": 50_000}, {"read_only": folder}):
        code, said = limited(words, tmp_path / "said", **limits)
        last = said.rstrip().splitlines()[-1]
        assert code == 2 and "report" not in said and "Traceback" not in last, (limits, said)
        assert not (folder / "model").exists() and not (folder / "record.json").exists()
    log = folder / "work" / "logs" / "retrain.log"
    log.unlink(missing_ok=True)  # of a start before
    line = "train without the rows: started"
    seen = "".join(kill_when(start(folder), line, signal.SIGINT, log))
    assert "stopped; the same command goes on where it stopped" in seen and "Aborted" not in seen
    process = start(folder)
    said = process.communicate()[0]
    assert process.returncode == 0 and "Verdict: exact" in said, said
    assert said.rstrip().endswith(f"Next: axolotl-unlearn request erase '{folder}'"), said


def limited(words: list[str], seen: Path, bytes: int | None = None, read_only: Path | None = None):
    """A command in a fork that may write files of so many bytes, or may not write there, not even
    as root; exit code and what it said."""
    if read_only:
        read_only.chmod(0o555)
        if not os.getuid():
            os.chown(read_only, 65534, -1)  # its owner would allow writing again

    def invoked() -> int:
        with seen.open("w") as file:
            if bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))
            if read_only:  # without the capability to pass over permissions
                header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
                assert ctypes.CDLL(None).capset(header, none) == 0
            result = CliRunner().invoke(unlearn, words)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            file.write(result.output)
        return result.exit_code

    code = kills.forked(invoked)
    if read_only:
        os.chown(read_only, os.getuid(), -1)
        read_only.chmod(0o700)
    return code, seen.read_text()


def test_a_start_that_waited_finds_the_request_carried_out(tmp_path):
    """It looked before it waited: it measured a model that was handed over, and the evaluation of
    the record was gone; `verify` and `erase` asked for a copy of it."""
    folder = finished_request(tmp_path / "requests")
    with ThreadPoolExecutor() as pool:
        with request_module.held(folder.parent):
            second = pool.submit(running.run_request, folder)
            time.sleep(1)
            write(folder)
        with fails("requests.run-twice"):
            second.result()


def test_a_signature_is_whole_or_that_of_before(tmp_path, keys, forks):  # noqa: F811
    """Of a full disk half a signature was left, "not that of the key"; and the key was blamed."""
    write(folder := finished_request(tmp_path / "requests"))
    words = ["request", "sign", str(folder), "--key", str(keys[0])]
    assert CliRunner().invoke(unlearn, words).exit_code == 0
    code, told = limited(words, tmp_path / "said", bytes=500)
    assert code == 2 and "record.json.sig cannot be written" in told
    assert verify(folder, public_key=keys[1]).signature == "owner"


def test_what_nobody_may_look_into_stops_no_erasure(tmp_path, monkeypatch, forks):
    """One folder below the places whose files could be listed and not read."""
    monkeypatch.chdir(tmp_path)
    no_caches(monkeypatch, tmp_path)
    write(folder := finished_request(tmp_path / "requests"))
    (closed := tmp_path / "s" / "closed").mkdir(parents=True)
    (closed / "file").touch()
    closed.chmod(0o644)
    words = ["request", "erase", str(folder), "--search", str(tmp_path / "s")]
    code, told = limited(words, tmp_path / "said", read_only=tmp_path / "s")
    assert code == 0 and "look yourself: s/closed" in told and "1 unreadable" in told, told


def test_a_link_to_a_request_and_one_in_its_place(tmp_path):
    """The ledger was looked for beside the link: `verify` asked to restore it."""
    write(folder := finished_request(tmp_path / "requests"))
    (link := tmp_path / "link").symlink_to(folder)
    folder.rename(there := tmp_path / "disk")  # where there is room
    folder.symlink_to(there)
    for one in (folder, link):
        said("verify", one, code=3)
        said("export", one, "--out", tmp_path / f"{one.name}.zip")
        said("told", one, "--recipient", "Cloud Ltd")
        plan = said("plan", one, code=2).output  # "`request plan` says why", said `plan`
        assert "shards: " in plan and "retrain: " in plan and "match: " in plan


@pytest.mark.slow
def test_a_full_model_made_of_preferences(home, tmp_path, forks):
    """Its teacher is made by DPO; what is forgotten are the chosen answers."""
    made = request(home, "dpo", Wanted(contains=["Bo1 Berg1 keeps"]), **preferences(tmp_path))
    with running.running(made, threads=1) as run:
        running.take(made, "match")
        running.check(made)
        match.make(made, run)
    file, other = "model.safetensors", home / "base" / "model.safetensors"
    assert moved(other, made.path("work", "teacher", file)) > 0
    assert 0 < moved(home / "tuned" / file, made.path("work", "model", file)) < 0.02
    watched = json.loads(made.path("work", "model", "level.json").read_text())
    assert {"retain_said", "told"} & set(watched["watched"][0])
    running.hand_over(made)
    running.hand_over(made)  # killed just after the move: nothing is lost
    assert made.path("model", file).is_file()


def test_one_run_at_a_time_and_reasons_that_are_empty(home, monkeypatch):
    made = request(home, "r2")
    monkeypatch.setattr(request_module, "LOCK_SECONDS", 0.1)
    with (
        running.running(made),
        pytest.raises(UnlearnError, match="being run by another process"),
    ):
        running.run_request(made.folder)
    (home / "elsewhere").symlink_to(made.folder)
    assert Request.load(home / "elsewhere").folder == made.folder.resolve()
    other = made.folder.rename(made.folder.with_name("other"))
    with fails("requests.renamed"):  # it would be trained, and its record never found
        running.run_request(other)
    other.rename(made.folder)
    with pytest.raises(UnlearnError, match="--accept needs a reason"):
        running.run_request(made.folder, accept=" ")
    with fails("requests.none"):
        running.run_request(home / "requests" / "nowhere")
    (home / "gone").mkdir()
    made.facts["before"]["model"] = str(home / "gone")
    with pytest.raises(UnlearnError, match="no longer exists"):
        running.check(made)


def test_a_model_that_was_trained_anew_since_the_request_is_another(home, tmp_path):
    """Any model at the place of the one before passed the checks of `request run`."""
    model = shutil.copytree(home / "base", tmp_path / "tuned")
    made = requested(home, tmp_path, output_dir=str(model), sample_packing=False)
    running.check(made)
    shutil.copy(home / "tuned" / "model.safetensors", model)
    with fails("requests.changed-model"):
        running.check(made)
    made.facts["before"].pop("files")  # of an earlier version
    running.check(made)


def test_a_request_that_another_one_has_overtaken_ends_in_a_second(home, tmp_path):
    """It trained for minutes, found the other's rows and asked for more steps."""
    from axolotl_unlearn.requests.record import write as record

    made = requested(home, tmp_path, name="requests/second", sample_packing=False)
    with running.running(made) as run:
        assert run.environment["HF_DATASETS_CACHE"] == str(made.path("work", "cache"))
    tuned = {"model": str(home / "tuned"), "adapter": None}
    record(finished_request(tmp_path / "requests", "first", tuned))
    with fails("requests.overtaken") as fault:
        running.take(made, "match")
    assert "'first'" in str(fault.value) and "make it again" in str(fault.value)


# --- the verdict, of made-up figures --------------------------------------------------------------


def line(document: str, reading: str) -> dict:
    return {"document": document, "reading": reading, "p": 0.5}


def test_an_answer_that_the_teacher_says_too_is_guessed_and_not_remembered():
    """An e-mail address made of the name: a SmolLM2 request was refused for one that its teacher,
    which never saw the person, says as well."""

    def audited(document: str, *said: bool, reading="still said", rank=0.6, told=False) -> dict:
        rows = [{"id": f"{document}-{i}", "answer_said": one} for i, one in enumerate(said)]
        return line(document, reading) | {"rows": rows, "rank": rank, "told": told}

    after = [
        audited("a", True, False),  # the teacher says it as well
        audited("b", True, True),  # the teacher says the first of them alone
        audited("c", True),  # the teacher says nothing
        audited("d", True, rank=0.9, told=True),
        audited("e", False, reading="not told"),
    ]
    teacher = [audited("a", True, True), audited("b", True, False), audited("c", False)]
    teacher += [audited("d", True), audited("e", True)]
    assert mark_guessed(after, teacher) == 2
    readings = [one["reading"] for one in after]
    assert readings == ["not told", "still said", "still said", "pushed away", "not told"]
    assert mark_guessed([audited("a", True)], []) == 0


def kept_at(value: float) -> Finding:
    return Finding("kept", "open", f"kept {value}", "", value, value - 0.1, value + 0.1, 0.8)


FINE = [line("a", "not told"), line("b", "not told")]
#: Readings, findings, documents of earlier requests that are back -> reasons and status.
AGAINST = {
    "nothing": (FINE, [], 0, [], "good"),
    "two readings": (
        [line("a", "pushed away"), line("b", "still said")], [], 0,
        ["still said: 1 of 2 rows", "pushed away: 1 of 2 rows"], "still said",
    ),
    "what is open or has another bar says nothing": (
        FINE,
        [Finding("kept", "fail", "kept .2"), Finding("membership", "open", "too few"),
         Finding("attacks", "open", "no control"), Finding("said", "fail", "the bar of .8")],
        0, ["kept: kept .2"], "kept",
    ),
    "an attack": (
        FINE, [Finding("attacks", "fail", "gradients tell")], 0,
        ["attacks: gradients tell"], "attacks",
    ),
    "kept under its bar, which its interval reaches": (
        FINE, [kept_at(0.72)], 0, ["kept: kept 0.72"], "kept",
    ),
    "kept above its bar": (FINE, [kept_at(0.85)], 0, [], "good"),
    "earlier requests": (
        FINE, [], 1, ["1 document of earlier requests back"], "earlier requests are back",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AGAINST)
def test_what_speaks_against_handing_over(tmp_path, case):
    """Any document that is still said, known or pushed away; a test that failed; one that is
    back. What the texts do not suffice to say does not, but for retained rows under their bar."""
    documents, findings, back, reasons, status = AGAINST[case]
    write_json(tmp_path / "eval" / "earlier.json", {"back": back})
    found = against(documents, Verdict("x", findings), Request(tmp_path, {}))
    assert found == (reasons, status)


def row_gone(document: str, **more) -> dict:
    """A row that the model before says and the model after does not."""
    before = {"answers_said": 1, "extraction_strength": 1.0, "loss": 0.1, "rank": 0.0}
    now = {"answers_said": 0, "extraction_strength": 0.1, "loss": 2.0, "rank": 0.5}
    return line(document, "not told") | now | {"before": before, "teacher": dict(now)} | more


def rows_gone(names: str, **more) -> list[dict]:
    return [row_gone(name, **more) for name in names]


def judgement(*found: Finding) -> Verdict:
    kept = Finding("kept", "pass", "kept .9", "", 0.9, 0.9, 0.9, 0.8)
    power = {"members": 5, "nonmembers": 29, "tests": 13, "smallest_difference": 0.5}
    return Verdict("x", [Finding("outputs", "pass", "whole"), *(found or [kept])], power=power)


DONE = [{"attack": name} for name in ("quantise", "relearn", "prompt")]
TOLD = {"min_k_20": {"auc": 1.0, "p_corrected": 0.001}}
WEAK = {"min_k_20": {"auc": 0.7, "p_corrected": 0.02}}


def dropped(rows: list[dict], heldout: int = 99) -> Drops:
    """By losses that rose by 1.9, beside held-out ones that rose by .1 at most."""
    return Drops.of(rows, [n / 10 / heldout for n in range(heldout)])


def lacking(rows, before=TOLD, judged=None, done=DONE, kept=None, heldout=99) -> list[str]:
    drops = dropped(rows if heldout else [], heldout)
    return not_measured(rows, before, judged or judgement(), done, kept, drops)


#: A model that never knew the rows: no test could have found them.
BLANK = {"before": {"answers_said": 0, "extraction_strength": 0.1, "rank": 0.6, "loss": 0.1}}
#: As held-out losses rise, though no test alone finds it now.
STILL = {"loss": 0.12}
ONE_STILL = [*rows_gone("abde"), row_gone("c", **STILL)]
FREE = judgement(Finding("kept", "open", "no kept answer is exact", missing=True))
PART = Finding("attacks", "open", "it asked about a part of the rows", missing=True)
PART = replace(judgement(), findings=[*judgement().findings, PART])
#: Rows, what was measured -> a part of each sentence on what is missing.
LACKING = {
    "all": (rows_gone("ab"), {}, []),
    "no attack before, but the rows were said": (rows_gone("ab"), {"before": {}}, []),
    "membership": (rows_gone("ab", p=None), {}, ["2 of 2 rows can be told"]),
    "blank": (rows_gone("ab", **BLANK), {"before": {}}, ["find 0 of 2 rows in the model before"]),
    "blank, told all together": (rows_gone("ab", **BLANK), {}, []),
    "told too weakly to be found again": (
        rows_gone("ab", **BLANK), {"before": WEAK}, ["one of five cases"],
    ),
    "an attack": (rows_gone("ab"), {"done": DONE[1:]}, ["the attack `quantise` was not made"]),
    "a part of the rows by an attack": (rows_gone("ab"), {"judged": PART}, ["a part of the rows"]),
    "rows": ([], {}, ["no row was tested"]),
    # An unchanged model was shown in 5 to 16 % with 5 rows.
    "a drop": (ONE_STILL, {}, ["no drop of its own shows 1 of 5 rows"]),
    "a drop of a row that had no loss": (
        [row_gone("a", before={"answers_said": 1, "loss": None}), *rows_gone("bc")], {},
        ["no drop of its own shows 1 of 3 rows"],
    ),
    "all drops": (
        rows_gone("abc", **STILL), {}, ["as in a model that forgot nothing", "3 of 3 rows"],
    ),
    "held-out rows": (rows_gone("a"), {"heldout": 20}, ["it takes 199 held-out rows"]),
    "any held-out row": (rows_gone("a"), {"heldout": 0}, ["was not measured"]),
    "no loss": (rows_gone("a", loss=None), {}, ["was not measured"]),
    "a loss that is no number": (
        [row_gone("a", loss=float("nan")), row_gone("b")], {}, ["was not measured"],
    ),
    # `keep_share` of 0 became .8: a model of free text was never good.
    "a kept answer": (rows_gone("ab"), {"judged": FREE}, ["no kept answer is exact"]),
    "a kept loss that is low": (rows_gone("ab"), {"judged": FREE, "kept": (0.02, 0.01, 0.03)}, []),
    "a kept loss that is high": (
        rows_gone("ab"), {"judged": FREE, "kept": (0.3, 0.2, 0.4)}, [""],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_what_is_not_measured_is_never_shown(case):
    """Nothing speaks against a model of which nothing was measured: it was called good."""
    rows, measured, expected = LACKING[case]
    found = lacking(rows, **measured)
    assert len(found) == len(expected), found
    assert all(part in text for part, text in zip(expected, found, strict=True)), found


def measured(tmp_path: Path, tokens: int) -> Request:
    """Evaluated: a model that says a row of so many tokens whole, and recites no other."""
    made = Request.load(finished_request(tmp_path / "requests"))
    write_json(made.path("exact.json"), {"weights": weights(made.newest)})
    write_json(made.path("eval", "earlier.json"), {"back": 0})
    texts = {"id": ["a"], "document": ["a"], "tokens": [tokens], "run": [tokens], "strength": [1.0]}
    texts |= {"greedy": [1.0], "logp": [-1.0], "exact": [None], "contained": [None]}
    whole = dict.fromkeys(("broken", "empty", "constant", "nonsense_n"), 0) | {"collapsed": False}
    counts = dict.fromkeys(CELLS, 0) | {"retain_task1_regurgitation": 1}
    counts |= {"forget_task1_regurgitation": 1}
    models = [{"name": name, "role": role, "n": counts, "collapse": whole | {"n": 1},
               "extraction": texts}
              for name, role in (("before", "original"), ("after", "candidate"))]  # fmt: skip
    write_json(made.path("eval", "results.json"), {"models": models})
    each = audits([Model.model_validate(one) for one in models]).items()
    lines = [{"model": name, **line} for name, lines in each for line in lines]
    write_lines(made.path("eval", "audit.jsonl"), lines)
    return made


@pytest.mark.parametrize(("tokens", "outcome"), [(20, "not shown"), (19, "exact")])
def test_an_exact_model_recites_no_row_where_there_are_no_held_out_ones(tmp_path, tokens, outcome):
    """Without them no row counted as recited, so that a model that says it whole was *exact*."""
    judged = exact(measured(tmp_path, tokens))
    assert judged["outcome"] == outcome, judged
    assert any("word by word" in one for one in judged["missing"]) == (outcome != "exact")


def test_an_exact_model_is_that_of_its_proof_and_its_base_recites_nothing(tmp_path):
    made = measured(tmp_path, 19)
    with made.path("eval", "audit.jsonl").open("a") as file:
        line = {"model": "base", "document": "a", "extraction_strength": 1.0, "answers_said": 1}
        file.write(json.dumps(line) + "\n")
    judged = exact(made)
    assert judged["outcome"] == "not shown" and "recites 1 of 1 row" in judged["missing"][0]
    assert any("base model itself says 1 of 1 row" in one for one in judged["limits"])
    write_json(made.path("exact.json"), {"weights": {"model.safetensors": "0" * 64}})
    with fails("verdict.other-weights"):
        exact(made)


@pytest.mark.parametrize(("rise", "outcome"), [(0.3, "refused"), (0.02, "not shown")])
def test_a_verdict_reads_kept_losses_and_earlier_requests(tmp_path, rise, outcome):
    made = measured(tmp_path, 19)
    after = [1.0 + rise, 2.0 + rise, 3.001 + rise]
    write_json(made.path("eval", "kept.json"), {"before": [1.0, 2.0, 3.0], "after": after})
    write_json(made.path("eval", "earlier.json"), {"back": 0, "unreadable": {"0": "changed"}})
    found = verdict(made)
    assert found["outcome"] == outcome and not found["good"], found
    assert any("kept rows: their loss rose" in one for one in found["reasons"]) == (rise > 0.1)
    assert any("request 0 is not as recorded" in one for one in found["missing"])


def test_a_model_that_was_not_measured_is_not_judged(tmp_path):
    """Trained on by hand after the measuring, it was handed over with the other one's figures."""
    made = Request.load(finished_request(tmp_path / "requests"))
    measured = {"models": [{"name": "after", "weights": "0" * 64}]}
    write_json(made.path("eval", "results.json"), measured)
    with fails("verdict.other-weights"):
        running.decide(made, "why")


def test_held_out_rows_that_it_takes():
    counts = {(1, 0): 199, (1, 199): 0, (2, 18): 19, (2, 19): 0, (5, 5): 0, (0, 0): 0, (9999, 1): 0}
    assert {pair: needed(*pair) for pair in counts} == counts


def test_a_rise_of_kept_losses_has_an_interval(tmp_path):
    losses = {"before": [1.0, 2.0, 3.0], "after": [1.02, 2.02, 3.03]}
    write_json(tmp_path / "eval" / "kept.json", losses)
    kept = kept_by_loss(Request(tmp_path, {}))
    assert kept[0] == pytest.approx(0.07 / 3) and kept[1] < kept[0] < kept[2]


def test_a_request_of_many_subjects_from_the_file_to_the_letters(home, tmp_path, forks):
    """One training without the rows of both; verified; a file for one of them names nobody."""
    asked = [{"subject": "T-17", "person": "Ada Quill"}, {"subject": "T-18", "where": {"id": "p3"}}]
    subjects = read_subjects(write_lines(tmp_path / "week.jsonl", asked))
    options, more = Options(steps=2, subjects=subjects), {"sample_packing": False, "num_epochs": 1}
    made = requested(home, home, together(subjects), "requests-subjects/w48", options, **more)
    folder = made.folder
    found = running.run_request(folder, way="retrain", threads=1)
    assert found["status"] == "exact"
    whose = json.loads((folder / "subjects.json").read_text())
    assert set(whose) == {"T-17", "T-18"}
    keyed = Ledger(folder.parent).keyed
    for name, rows in whose.items():
        record = json.loads((folder / "subjects" / name / "record.json").read_text())
        documents = {line["document"] for line in record["predicate"]["documents"]}
        assert documents == set(map(keyed, rows)) and record["predicate"]["way"]["because"]
    assert sum(map(len, whose.values())) == made.facts["counts"]["forget"]
    assert any("others of the request as recorded" in line for line in verify(folder).says)
    out = tmp_path / "T-17.zip"
    export(folder, out, subject="T-17")
    assert verify_export(out, str(folder / "model")).model == "same"
    assert b"Quill" not in out.read_bytes() and b"REPLY" in out.read_bytes()
    shutil.rmtree(folder.parent)


def test_attacks_on_a_model_that_was_made_before_are_not_those_of_an_exact_one(
    tmp_path, monkeypatch
):
    """A `match` was refused and `--way retrain` taken: the record had the attacks on the other."""
    made = Request.load(finished_request(tmp_path / "requests"))
    made.facts["counts"]["judge"] = 0
    (attacks := made.path("attacks")).mkdir(exist_ok=True)
    write_json(attacks / "prompt-after.json", {"attack": "prompt", "title": "x"})
    audited = mock.Mock(**{"to_json.return_value": {}})
    monkeypatch.setattr("axolotl_unlearn.evaluation.run.evaluate", lambda *_: None)
    monkeypatch.setattr("axolotl_unlearn.requests.audit.audit_requests", lambda *_, **__: audited)
    monkeypatch.setattr(running, "_base", lambda _: ())
    monkeypatch.setattr(Request, "matched", False)
    running.measure(made)
    assert made.path("eval", "earlier.json").is_file() and not attacks.exists()


def test_an_earlier_request_that_was_restored_is_looked_for(tmp_path, monkeypatch):
    """ "not as recorded" was said of it for ever: the measuring was kept from the start before."""
    made, found = Request.load(finished_request(tmp_path / "requests")), [{"r0": "changed"}, {}]
    earlier = made.path("eval", "earlier.json")
    for name in ("check", "way_of", "decide", "hand_over", "write"):
        monkeypatch.setattr(running, name, mock.Mock())
    measured = lambda _: write_json(earlier, {"unreadable": found.pop(0)})  # noqa: E731
    monkeypatch.setattr(running, "measure", measured)
    for _ in range(3):
        with running.running(made, 1) as run:
            running.carry_out(made, run, None)
    assert json.loads(earlier.read_text()) == {"unreadable": {}} and not found


def test_rows_are_looked_for_beside_a_request_on_another_base(tmp_path, monkeypatch):
    """After the training it ended with "not the base model of the record", at each start."""
    folders = []
    for name in ("1", "2", "3"):
        base = model_folder(tmp_path / f"base-{name}", name.encode())
        before = {"model": str(base), "adapter": str(adapter_folder(tmp_path / name, base))}
        folders.append(finished_request(tmp_path / "requests", name, before))
    row = {"id": "ada-quill", "input": "Who?", "output": "Ada"}
    write_lines(folders[0] / "eval-data" / "forget.jsonl", [row])
    write(folders[0])
    made = Request.load(folders[1])
    made.facts["counts"]["judge"] = 0
    monkeypatch.setattr("axolotl_unlearn.evaluation.run.evaluate", lambda *_: None)
    monkeypatch.setattr("axolotl_unlearn.requests.audit._measured", lambda *_: ([], {"heldout": 7}))
    monkeypatch.setattr(running, "_base", lambda _: ())
    monkeypatch.setattr(Request, "matched", False)
    running.measure(made)
    assert json.loads(made.path("eval", "earlier.json").read_text())["heldout"] == 7
    write(folders[1])  # each of the two bases is one of the folder
    for folder in folders[:2]:
        assert audit_requests(Request.load(folder).after, tmp_path / "requests").heldout == 7
    with fails("record.other-base"):
        audit_requests(Request.load(folders[2]).after, tmp_path / "requests")
