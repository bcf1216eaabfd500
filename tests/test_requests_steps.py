"""Steps of a run: kept, done again, stopped."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from fault_codes import fails

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import request as module
from axolotl_unlearn.requests import steps as module_of_steps
from axolotl_unlearn.requests.request import held
from axolotl_unlearn.requests.steps import Steps


def run(folder: Path, rows, **more) -> str:
    """Steps `rows(run)`; what was said."""
    said = io.StringIO()
    with held(folder) as lock, redirect_stdout(said):
        rows(Steps(folder, lock, **more))
    return said.getvalue()


def test_a_step_is_kept_as_long_as_nothing_it_depends_on_changes(tmp_path):
    given, done = tmp_path / "in.txt", []
    given.write_text("1")

    def rows(one, settings=None, stops=False):
        nonlocal done
        with one.step("first", "first", inputs=[given]) as due:
            done += ["first"] * due
        with one.step("second", "second", settings=settings, output=given) as due:
            done += ["second"] * due
            if stops:
                raise UnlearnError("it stopped here.", code="test.stopped")

    run(tmp_path, rows)
    assert run(tmp_path, rows).count("kept from an earlier run") == 2
    assert done == ["first", "second"]
    run(tmp_path, lambda one: rows(one, settings=1))
    assert done == ["first", "second", "second"]
    given.write_text("2")  # the first's input, and so the second's
    with fails("test.stopped"):
        run(tmp_path, lambda one: rows(one, stops=True))
    said = run(tmp_path, rows)  # what failed is no result
    assert said.replace("\n", " ").count("started again from its beginning") == 1
    assert done[3:] == ["first", "second", "second"]
    given.unlink()

    def third(one):
        nonlocal done
        with one.step("third", "third", output=given) as due:
            done += ["3"] * due

    run(tmp_path, third)
    run(tmp_path, third)  # its output is gone
    assert done[6:] == ["3", "3"]


def test_a_command_that_fails_is_one_sentence_with_the_end_of_its_log(tmp_path):
    code = "import os; print('9%| 1/9 [2.0', 'it/s]', sep=''); print(os.environ['A']); exit(3)"
    words = [sys.executable, "-c", code]
    with fails("requests.command-failed") as error:
        run(tmp_path, lambda one: one.command("x", words), environment={"A": "mine"})
    assert re.search(r"exit code 3; the log .*logs/x.log ends with:\nmine$", str(error.value))


def test_a_training_reads_no_rows_that_an_earlier_start_prepared(tmp_path, monkeypatch):
    """Axolotl found them by the name of their file: rows of a request that was carried out since a
    kill were learned, and the record said "exact"."""
    old, config, out = tmp_path / "prepared" / "5eed", tmp_path / "c.yml", tmp_path / "model"
    config.write_text("base_model: base")
    old.mkdir(parents=True)

    def trained(*_):
        assert not old.exists()
        out.mkdir()
        (out / "model.safetensors").touch()

    monkeypatch.setattr(Steps, "command", trained)
    run(tmp_path, lambda one: one.train("x", config, out))


def test_a_training_says_how_far_it_is(tmp_path, monkeypatch):
    """By what the Trainer prints, and by lines of its own kind; the time left by the pace seen."""
    monkeypatch.setattr(module_of_steps, "SAY_SECONDS", 0.0)
    code = "import time\nfor n in '345':\n    print(dict(loss='1.1', epoch=n), flush=True)\n"
    code += "    print('shard', n, flush=True)\n    time.sleep(.2)"

    def rows(one):
        with one.step("x", "train it"):
            one.command("x", [sys.executable, "-c", code], 30.0, "shard ")

    said = [line[9:] for line in run(tmp_path, rows).splitlines()[1:-1]]
    left = [re.search(r", about (\d+) s left$", line) for line in said[2::2]]
    assert [5 <= int(one[1]) <= 60 for one in left] == [True, True]  # .2 s a pass, 26 and 25 to go
    assert [re.sub(", about.*", "", line) for line in said] == [
        f"train it: {what}" for n in "345" for what in (f"pass {n} of 30", f"shard {n}")
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_ends_with_the_run_and_none_starts_beside_it(tmp_path, monkeypatch, number):
    """Where the system cannot end it, it holds the folder until it has ended."""
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    driver = (
        "import sys; from pathlib import Path\n"
        "from axolotl_unlearn.requests.request import held\n"
        "from axolotl_unlearn.requests.steps import Steps\n"
        "folder = Path(sys.argv[1])\n"
        "with held(folder) as lock:\n"
        "    run = Steps(folder, lock)\n"
        f"    run.command('x', [sys.executable, '-c', {code!r}, str(folder / 'pid')])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", driver, str(tmp_path)])
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    with pytest.raises(UnlearnError, match="being run by another process"):
        run(tmp_path, print)
    process.send_signal(number)
    process.wait()
    monkeypatch.setattr(module, "LOCK_SECONDS", 20)
    run(tmp_path, print)  # waits until the command is gone
    assert not Path(f"/proc/{pid.read_text()}").exists() or _ended(int(pid.read_text()))


def _ended(pid: int) -> bool:
    """A child of nobody's that init has not collected yet."""
    try:
        os.kill(pid, 0)
    except OSError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z"
