"""Stages: order, reuse, keys that follow content, failures that show the log."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import kills
import pytest
from conftest import count
from rich.console import Console

from axolotl_unlearn import store
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import request
from axolotl_unlearn.requests.steps import last_lines
from research.harness import forks, step
from research.harness.runner import Job, Stage, stage_key, training_progress


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


WRITE = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"


def make_job(folder: Path, screen: io.StringIO | None, *stages: Stage, threads: int = 2) -> Job:
    console = Console(file=screen or io.StringIO(), width=200)
    job = Job(folder, threads=threads, console=console)
    for stage in stages:
        job.add(stage)
    return job


def states(job: Job) -> dict[str, str]:
    return {name: outcome.state for name, outcome in job.outcomes.items()}


def two_stages(folder: Path, word: str = "a") -> list[Stage]:
    source = folder / "source.txt"
    first = folder / "first.txt"
    copy = (
        "import sys; from pathlib import Path as P;"
        "P(sys.argv[2]).write_text(P(sys.argv[1]).read_text() * 2)"
    )
    return [
        Stage("first", "write", python(WRITE, first, word), first, inputs=[source]),
        Stage(
            "second",
            "double",
            python(copy, first, folder / "second.txt"),
            folder / "second.txt",
            needs=["first"],
        ),
    ]


def test_stages_run_in_order_and_are_kept_until_an_input_changes(tmp_path):
    (tmp_path / "source.txt").write_text("1")
    said = io.StringIO()
    job = make_job(tmp_path, said, *two_stages(tmp_path))
    job.run()
    assert states(job) == {"first": "done", "second": "done"}
    assert (tmp_path / "second.txt").read_text() == "aa"

    again = make_job(tmp_path, said, *two_stages(tmp_path))
    again.run()
    assert states(again) == {"first": "kept", "second": "kept"}
    assert "double: unchanged, kept from an earlier run" in said.getvalue()

    # Other content of an input changes the key of its stage and of those after it.
    (tmp_path / "source.txt").write_text("2")
    changed = make_job(tmp_path, said, *two_stages(tmp_path))
    changed.run()
    assert states(changed) == {"first": "done", "second": "done"}

    # A missing output is made again although its stamp is there.
    (tmp_path / "second.txt").unlink()
    remade = make_job(tmp_path, said, *two_stages(tmp_path))
    remade.run()
    assert states(remade) == {"first": "kept", "second": "done"}

    other = make_job(tmp_path, said, *two_stages(tmp_path, word="b"))
    other.run()
    assert states(other) == {"first": "done", "second": "done"}
    assert (tmp_path / "second.txt").read_text() == "bb"


def test_a_stage_killed_half_way_is_run_again(tmp_path):
    """The old stamp goes before the command starts, so half an output is never taken for whole."""
    (tmp_path / "source.txt").write_text("1")
    make_job(tmp_path, None, *two_stages(tmp_path)).run()
    (tmp_path / "source.txt").write_text("2")
    broken = two_stages(tmp_path)
    broken[0].command = python("import sys; sys.exit(1)")
    with pytest.raises(UnlearnError):
        make_job(tmp_path, None, *broken).run()
    (tmp_path / "source.txt").write_text("1")
    job = make_job(tmp_path, None, *two_stages(tmp_path))
    job.run()
    assert states(job)["first"] == "done"
    count("runs killed and resumed")


def test_a_stage_that_resumes_is_cleared_only_for_another_key(tmp_path):
    """It fails twice, is called again with other settings, and once more after it has ended."""
    cleared = []
    add = (
        "import sys; open(sys.argv[1], 'a').write('x'); sys.exit(len(open(sys.argv[1]).read()) < 4)"
    )

    def start(settings):
        stage = Stage(
            "s", "s", python(add, tmp_path / "written"), tmp_path / "written", settings=settings,
            before=lambda: cleared.append(settings), resumes=True,
        )  # fmt: skip
        make_job(tmp_path, None, stage).run()

    for settings in (1, 1, 2):
        with pytest.raises(UnlearnError):
            start(settings)
    start(2)
    assert cleared == [1, 2] and (tmp_path / "written").read_text() == "xxxx"
    (tmp_path / "written").unlink()
    with pytest.raises(UnlearnError):
        start(2)
    assert cleared == [1, 2, 2]


def test_killed_with_kill_9_a_job_goes_on(tmp_path):
    """`reproduce`, `demo` and the others are such jobs: killed at drawn moments, its stages with
    it, it does again what has no stamp, keeps the rest, and ends in the same files."""
    slow = (
        "import sys, time; from pathlib import Path as P; read, written = map(P, sys.argv[1:]);"
        "opened = written.open('w');"
        "[(opened.write(c * 2), opened.flush(), time.sleep(.02)) for c in read.read_text()]"
    )

    def stages(folder):
        places = [folder / f"{number}.txt" for number in range(4)]
        return [
            Stage(
                str(n), "w", python(slow, read, written), written,
                needs=[str(n - 1)] if n > 1 else [], inputs=[read],
            )
            for n, (read, written) in enumerate(zip(places, places[1:], strict=False), 1)
        ]  # fmt: skip

    def job(name):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "0.txt").write_text("abc")
        made = make_job(folder, None, *stages(folder))
        made.run()
        return made

    def texts(name):
        return {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.txt")}

    job("whole")
    whole, rng = texts("whole"), random.Random(1)
    assert len(whole["3.txt"]) == 24
    last = kills.moments(lambda: job("try"), tmp_path)
    for number in range(4):
        name = f"killed{number}"
        kills.kill_at(lambda name=name: job(name), rng.randrange(last), tmp_path)
        stamps = store.Store(tmp_path / name / "stamps")
        done = {one for one in "123" if (stamps.get(one) or {}).get("key")}
        found = states(job(name))  # begins when its watcher has ended what it had started
        assert {stage for stage, state in found.items() if state == "kept"} == done
        assert kills.same(whole, texts(name))


def test_independent_stages_run_side_by_side_up_to_the_threads(tmp_path):
    code = (
        "import sys, time, pathlib; s=time.time(); time.sleep(.6);"
        "pathlib.Path(sys.argv[1]).write_text(f'{s} {time.time()}')"
    )

    def overlapping(threads: int, folder: Path) -> bool:
        folder.mkdir()
        outputs = [folder / "a", folder / "b"]
        stages = [Stage(o.name, o.name, python(code, o), o) for o in outputs]
        make_job(folder, [], *stages, threads=threads).run()
        (a, b), (c, d) = (map(float, o.read_text().split()) for o in outputs)
        return max(a, c) < min(b, d)

    assert overlapping(2, tmp_path / "two")
    assert not overlapping(1, tmp_path / "one")


def test_threads_bound_what_runs_and_are_no_part_of_the_key(tmp_path):
    """A stage of two threads beside one of one does not fit into two; more than all is all. The
    number of threads of demo-real was part of the key: another number trained everything again."""
    code = "import os, sys, pathlib; pathlib.Path(sys.argv[1]).write_text(os.environ[sys.argv[2]])"
    path = tmp_path / "wide"

    def stage(threads):
        command = python(code, path, "OMP_NUM_THREADS")
        return Stage("wide", "wide", command, path, threads=threads)

    make_job(tmp_path, None, stage(4), threads=2).run()
    assert path.read_text() == "2"
    again = make_job(tmp_path, None, stage(1), threads=2)
    again.run()
    assert states(again) == {"wide": "kept"}


def test_versions_are_part_of_the_key(tmp_path, monkeypatch):
    """They were not: results of an older Axolotl were kept."""
    (tmp_path / "source.txt").write_text("1")
    make_job(tmp_path, None, *two_stages(tmp_path)).run()
    newer = {**store.versions(), "axolotl": "99"}
    monkeypatch.setattr("research.harness.runner.versions", lambda: newer)
    job = make_job(tmp_path, None, *two_stages(tmp_path))
    job.run()
    assert states(job) == {"first": "done", "second": "done"}
    assert {"axolotl", "torch", "mergekit"} <= set(store.versions())


def test_without_a_terminal_a_line_when_a_stage_starts_and_when_it_ends(tmp_path):
    (tmp_path / "source.txt").write_text("1")
    screen = io.StringIO()
    make_job(tmp_path, screen, *two_stages(tmp_path)).run()
    lines = [line.partition(" ")[2] for line in screen.getvalue().splitlines() if line]
    assert lines[0] == f"write: started, log {tmp_path / 'logs' / 'first.log'}"
    assert lines[1].startswith("write: done (") and lines[2].startswith("double: started")
    assert lines[3].startswith("double: done (") and len(lines) == 4


def test_failure_names_the_command_and_shows_the_end_of_its_log(tmp_path):
    code = (
        "import sys; print('x' * 10); print('\\r5/10 [00:01, 3.0it/s]'); sys.exit('no such file')"
    )
    stage = Stage("bad", "train", python(code), tmp_path / "never")
    slow = Stage("slow", "wait", python("import time; time.sleep(60)"), tmp_path / "slow")
    began = time.monotonic()
    with pytest.raises(UnlearnError) as error:
        make_job(tmp_path, None, slow, stage).run()
    message = str(error.value)
    assert "train" in message and "exit code 1" in message and "bad.log" in message
    assert message.partition("ends with:")[2] == "\nxxxxxxxxxx\nno such file"
    assert time.monotonic() - began < 30  # the other stage was ended


def test_command_that_writes_nothing_is_a_failure(tmp_path):
    stage = Stage("idle", "train", python("pass"), tmp_path / "missing.txt")
    with pytest.raises(UnlearnError, match="did not write"):
        make_job(tmp_path, None, stage).run()


def test_left_out_stage_says_why_and_does_not_block(tmp_path):
    said = io.StringIO()
    gate = Stage("gate", "merge", python("1/0"), tmp_path / "m", skip_if=lambda: "No parent.")
    after = Stage(
        "after", "score", lambda: python(WRITE, tmp_path / "o", "x"), tmp_path / "o", needs=["gate"]
    )
    job = make_job(tmp_path, said, gate, after)
    job.run()
    assert states(job) == {"gate": "left out", "after": "done"}
    assert "merge: left out. No parent." in said.getvalue()
    assert "merge: started" not in said.getvalue()


def test_key_depends_on_command_settings_inputs_and_stages_before(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("1")
    stage = Stage("s", "s", ["c"], tmp_path / "o", inputs=[path], settings={"seed": 0})
    keys = {stage_key(stage, ["c"], ["k"]), stage_key(stage, ["d"], ["k"])}
    keys.add(stage_key(stage, ["c"], ["other"]))
    path.write_text("2")
    keys.add(stage_key(stage, ["c"], ["k"]))
    stage.settings = {"seed": 1}
    keys.add(stage_key(stage, ["c"], ["k"]))
    assert len(keys) == 5
    assert stage_key(stage, ["c"], ["a", "b"]) == stage_key(stage, ["c"], ["b", "a"])


def test_progress_is_read_from_training_not_from_tokenisation(tmp_path):
    log = tmp_path / "train.log"
    assert training_progress(log) is None
    log.write_text("Saving the dataset: 44%| 10000/22944 [00:08<00:11, 1120 examples/s]\n")
    assert training_progress(log) is None
    with log.open("a") as file:
        file.write("[INFO] Starting trainer...\n\r  0%| 0/1434 [00:00<?, ?it/s]")
        file.write("\r  3%| 40/1434 [00:09<05:00, 5.3it/s]")
    assert training_progress(log) == (40, 1434)
    assert "it/s" not in last_lines(log)


def test_without_a_terminal_progress_comes_in_lines_with_an_estimate(tmp_path, monkeypatch):
    """Nothing was said between start and end of a stage, for minutes."""
    monkeypatch.setattr("research.harness.runner.SAY_SECONDS", 0.2)
    script = (
        "import sys, time, pathlib; print('Starting trainer...')\n"
        "for step in range(41): print(f'{step}/40 [', flush=True); time.sleep(0.02)\n"
        "pathlib.Path(sys.argv[1]).touch()"
    )
    made, said = tmp_path / "made", io.StringIO()
    job = Job(tmp_path, console=Console(file=said, force_terminal=False))
    job.add(Stage("train", "train", [sys.executable, "-c", script, str(made)], made))
    job.run()
    lines = [line.partition(" ")[2] for line in said.getvalue().splitlines()]
    assert re.fullmatch(r"train: step \d+ of 40, about [01] s left", lines[1]), lines


def test_seconds_of_kept_stages_count(tmp_path):
    (tmp_path / "source.txt").write_text("1")
    job = make_job(tmp_path, None, *two_stages(tmp_path))
    job.run()
    stamps = store.Store(tmp_path / "stamps")
    stamp = stamps.get("first")
    assert stamp["key"] == job.outcomes["first"].key and stamp["seconds"] >= 0
    assert job.cpu_seconds() > 0
    assert job.total_seconds() == pytest.approx(job.seconds(), abs=0.1)
    for name, seconds in (("first", 40.0), ("second", 2.5)):
        stamps.put(name, stamps.get(name) | {"seconds": seconds})
    again = make_job(tmp_path, None, *two_stages(tmp_path))
    again.run()
    assert again.total_seconds() == 42.5


@pytest.mark.parametrize(
    ("number", "forked"), [(signal.SIGTERM, False), (signal.SIGKILL, False), (signal.SIGKILL, True)]
)
def test_no_command_outlives_its_driver(tmp_path, number, forked):
    """The command writes the number of its own child, which sleeps; both must end with us. After
    kill -9 of the driver the fork server ends groups; of other commands the system ends one."""
    child = (
        "import os, subprocess, sys, time, pathlib\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
        f"number = {'os.getpid()' if number == signal.SIGKILL and not forked else 'one.pid'}\n"
        "pathlib.Path(sys.argv[1]).write_text(str(number))\n"
    )
    (tmp_path / "child.py").write_text(child + "time.sleep(120)")
    how = [str(tmp_path / "child.py")] if forked else ["-c", child + "time.sleep(120)"]
    driver = (
        "import sys; from pathlib import Path; from research.harness.runner import Job, Stage\n"
        "folder = Path(sys.argv[1])\n"
        f"command = [sys.executable, *{how!r}, str(folder / 'pid')]\n"
        "job = Job(folder, threads=1)\n"
        "job.add(Stage('s', 's', command, folder / 'never'))\n"
        "job.run()\n"
    )
    process = subprocess.Popen(python(driver, tmp_path))
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 600  # the fork server imports Axolotl
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=60) in (128 + number, -number)
    deadline = time.monotonic() + 20
    while _alive(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(int(pid.read_text()))


def test_a_fork_server_that_still_imports_ends_with_its_driver(tmp_path):
    """It kept the folder's lock until it had imported everything, on a busy machine longer than a
    start waits. Here it never ends with its imports."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n'research.harness.forkserver' in sys.orig_argv and time.sleep(600)\n"
    )
    driver = (
        "import os, sys; from pathlib import Path; from research.harness.runner import Job, Stage\n"
        "path = os.pathsep.join([sys.argv[1], os.environ.get('PYTHONPATH', '')])\n"
        "environment = {'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': path}\n"
        "job = Job(Path(sys.argv[1]), threads=1, environment=environment)\n"
        "job.add(Stage('s', 's', [sys.executable, '-m', 'this'], Path(sys.argv[1]) / 'never'))\n"
        "job.run()\n"
    )
    process = subprocess.Popen(python(driver, tmp_path))
    while not (servers := _children(process.pid, "research.harness.forkserver")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while (alive := _alive(servers[0])) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive:
        os.kill(servers[0], signal.SIGKILL)
    assert not alive


def test_a_command_that_was_asked_for_as_the_driver_left_ends_too(tmp_path, forks):
    """The driver was told to end while its server imported: nobody else knows of this command."""
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(120)")
    request = {"words": [str(tmp_path / "sleeps.py")], "log": str(tmp_path / "log")}
    (tmp_path / "log").touch()
    words = [sys.executable, "-m", "research.harness.forkserver"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    said, _ = server.communicate(json.dumps(request | {"environment": {}}) + "\n", timeout=300)
    pid = json.loads(said.splitlines()[0])["pid"]
    deadline = time.monotonic() + 5
    while (alive := _alive(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


def test_a_command_of_python_is_a_fork_and_does_not_notice(tmp_path, forks):
    """Arguments, environment, threads, group, log and exit code are those of a process; what it
    changes is its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, time\nimport torch\n"
        "print('said'); print('warned', file=sys.stderr)\n"
        "facts = {\n"
        "    'argv': sys.argv[1:], 'name': __name__, 'job': os.environ['A_JOB'],\n"
        "    'threads': [os.environ['OMP_NUM_THREADS'], torch.get_num_threads()],\n"
        "    'leads': os.getpgrp() == os.getpid(), 'input': sys.stdin.read(),\n"
        "    'imported': 'axolotl.cli.train' in sys.modules, 'left': getattr(torch, 'left', 0),\n"
        "}\n"
        "torch.left = 1\n"
        "while time.process_time() < 1: pass\n"
        "open(sys.argv[1], 'w').write(json.dumps(facts))\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    environment = {"A_JOB": "mine", "CUDA_VISIBLE_DEVICES": ""}
    job = Job(tmp_path, threads=2, environment=environment, console=Console(file=io.StringIO()))
    outs = [tmp_path / f"{n}.json" for n in range(3)]
    for n, (out, code, threads) in enumerate(zip(outs, (0, 0, 3), (1, 2, 1), strict=True)):
        words = [sys.executable, str(script), str(out), str(code)]
        before = [str(n - 1)] if n else []
        job.add(Stage(str(n), f"stage {n}", words, out, threads=threads, needs=before))
    before = os.times()
    with pytest.raises(UnlearnError, match="stage 2: .* ended with exit code 3; the log"):
        job.run()
    after = os.times()  # children: the server and its commands
    used = sum(after[2:4]) - sum(before[2:4])
    for out, threads in zip(outs, (1, 2, 1), strict=True):
        facts = json.loads(out.read_text())
        assert facts.pop("argv")[0] == str(out)
        assert facts.pop("threads") == [str(threads), threads]
        assert facts == {
            "name": "__main__", "job": "mine", "leads": True, "input": "", "imported": True,
            "left": 0,
        }  # fmt: skip
    assert (tmp_path / "logs" / "1.log").read_text().splitlines()[1:] == ["said", "warned"]
    assert used > 3 and job.cpu_seconds() == pytest.approx(used, rel=0.05)


def test_no_second_start_runs_beside_a_job(tmp_path, monkeypatch):
    monkeypatch.setattr(request, "LOCK_SECONDS", 0.1)
    with request.held(tmp_path), pytest.raises(UnlearnError, match="run by another process; wait"):
        make_job(tmp_path, None).run()


def _children(pid: int, word: str) -> list[int]:
    """Those whose command has the word."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(pid)]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in shown.splitlines() if word in line]


def _alive(pid: int) -> bool:
    """Running: neither gone nor waiting to be collected by its parent."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(found.stdout.strip()) and not found.stdout.startswith("Z")


def test_a_step_of_the_demo_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    """Lines with an estimate; a failure ends with the log's last lines and its exit code."""
    monkeypatch.setattr(step, "SAY_SECONDS", 0.3)
    train = "import sys, time\nprint('Starting trainer', flush=True)\nfor n in range(1, 9):\n"
    train += "    print(f'{n}/8 [', flush=True); time.sleep(.2)\nprint('1/1 ['); sys.exit(3)"
    assert step.main("a run", [sys.executable, "-c", train], tmp_path) == 3
    said = capsys.readouterr().out
    assert re.search(r"a run: \[#+\.+\] [2-7] of 8 steps, about \d s left", said)
    assert "ended with exit code 3" in said and "Starting trainer" in said
    assert step.main("other", [sys.executable, "-c", ""], tmp_path) == 0
    assert "other: done (0 s)" in capsys.readouterr().out


def test_a_step_is_a_fork_of_what_has_imported_the_libraries(tmp_path, monkeypatch, capfd):
    """Its output, its exit code and its end with the process that listens; else a new process."""
    monkeypatch.setattr(forks, "IMPORTED", ())
    monkeypatch.chdir(tmp_path)
    Path("said.py").write_text("import sys\nprint('pytest' in sys.modules)\nsys.exit(3)\n")
    words = [sys.executable, "-m", "research.harness.step", "run", sys.executable, "said.py"]
    for fork in ("True", "False"):
        monkeypatch.setattr(forks, "possible", lambda _, fork=fork: fork == "True")
        assert forks.main(words) == 3
        assert Path("out/logs/run.log").read_text().split() == [fork]
    assert capfd.readouterr().out.count("ended with exit code 3") == 2
