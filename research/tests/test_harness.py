"""Steps of the demo and runs of a study: done once, and again when something changed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from scipy.stats import ttest_1samp

from research import harness
from research.runs import Runs, changed, in_parallel
from research.studies import reproduce

ROOT = Path(__file__).parents[2]
DEMO = """
from research import demo

demo.FORKS, demo.ALONE = False, ()
demo.STEPS = {"one": ("", "1"), "two": ("one", "2"), "three": ("two", "3"), "said": ("three", "4")}
demo.main()
"""
PAGE = """```bash
sh -c "mkdir -p out; echo x >> out/1"   # one
sh -c "cat examples/demo/two.jsonl > out/2"
cp out/2 out/3
echo that was all
```
"""


def test_the_demo_is_the_commands_of_its_page(tmp_path):
    """One that fails ends with its last lines, and what stands on it does not begin; a second call
    goes on there, and does again what stands on rows that have changed."""
    (tmp_path / "examples/demo").mkdir(parents=True)
    (tmp_path / "examples/README.md").write_text(PAGE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def demo() -> tuple[int, str]:
        words = [sys.executable, "-c", DEMO]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, said = demo()
    assert code == 1 and "two ended with exit code 1" in said and "No such file" in said
    assert "three needs two" in said and "that was all" not in said
    for rows, times in (("a", 2), ("a", 2), ("b", 3)):  # rows are new, as before, others
        (tmp_path / "examples/demo/two.jsonl").write_text(rows)
        code, said = demo()
        assert code == 0 and said.endswith("that was all\n")
        assert (tmp_path / "out/3").read_text() == rows
        assert (tmp_path / "out/1").read_text() == "x\n" * times


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_has_the_threads_that_it_is_given(tmp_path, threads):
    """torch read the variable when it was imported, in the process before."""
    script, said = tmp_path / "say.py", tmp_path / "said"
    script.write_text(f"import torch; open({str(said)!r}, 'w').write(str(torch.get_num_threads()))")
    runs = Runs(tmp_path / "study", threads=threads, forks=True)
    runs.command("say", [sys.executable, script], makes=said)
    assert said.read_text() == str(threads)


@pytest.mark.parametrize("slow", [True, False])
def test_no_study_trains_in_a_bfloat16_that_is_emulated(monkeypatch, tmp_path, slow):
    monkeypatch.setattr("research.runs.emulates_bfloat16", lambda: slow)
    monkeypatch.setattr(Runs, "command", lambda *given, **_: None)
    Runs(tmp_path).train("a", "smollm2/over", {"base_model": "b", "datasets": []})
    made = yaml.safe_load((tmp_path / "configs/a.yml").read_text())
    assert (made["bf16"], Runs(tmp_path, device="cuda").dtype) == (not slow, "bfloat16")


def test_a_value_at_a_path():
    config = {"unlearn": {"forget": [{"beta": 1}]}, "datasets": [{}], "gone": 1}
    paths = {"unlearn.forget.0.beta": 2, "datasets.1": {"path": "x"}, "gone": None, "new.key": 3}
    assert changed(config, paths) == {
        "unlearn": {"forget": [{"beta": 2}]}, "datasets": [{}, {"path": "x"}], "new": {"key": 3},
    }  # fmt: skip


def test_a_command_is_done_again_only_if_something_changed(tmp_path, capsys):
    made = tmp_path / "study" / "made"
    write = ["sh", "-c", f"echo x >> {made}"]

    def run(*facts) -> str:
        Runs(tmp_path / "study").command("write", write, *facts, makes=made)
        return made.read_text()

    assert [run(1), run(1), run(2)] == ["x\n", "x\n", "x\nx\n"]
    made.unlink()
    assert run(2) == "x\n"
    with pytest.raises(SystemExit, match="exit code 3; .* ends with"):
        Runs(tmp_path / "study").command("fail", ["sh", "-c", "exit 3"], makes=made)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_what_is_called_detectable_is_found_in_four_of_five(number):
    """Of few seeds Student's t: 2.8 errors, as of many, called .077 detectable at +.194 ± .347."""
    draws = np.random.default_rng(0).standard_normal((20_000, number))
    row = dict.fromkeys(reproduce.COLUMNS, 0.0)
    seeds = {str(n): {"single": row, "match": row | {"aggregate": draw}}
             for n, draw in enumerate(draws[0].tolist())}  # fmt: skip
    rows = reproduce.tables([seeds])["differences"]["rows"]
    (shown,) = (row for row in rows if row[0] == "match, single")
    smallest = float(shown[3]) / draws[0].std(ddof=1)
    found = ttest_1samp(draws + smallest, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)


def test_the_story_by_hand(tmp_path):
    """Gaps of the merge to the better parent: .9 - .7 and .8 - .6, so +0.200 both times."""

    def seed(over, under, merged):
        scores = {"over": over, "under": under, "merged": merged, "single": 0.5, "retrained": 0.9}
        return {n: dict.fromkeys(reproduce.COLUMNS, value) for n, value in scores.items()}

    both = {"1": seed(0.7, 0.5, 0.9), "2": seed(0.5, 0.6, 0.8)}
    found = reproduce.tables([both])
    row = ["merged, the better parent", "+0.200 ± 0.000", "2 of 2", "0.000"]
    assert found["differences"]["rows"][0] == row
    assert found["comparison"]["rows"][2][:3] == ["merged", 2, "0.850 ± 0.635"]
    short = {"1": seed(0.7, 0.5, 0.9), "2": {"over": dict.fromkeys(reproduce.COLUMNS, 0.9)}}
    assert reproduce.tables([short])["differences"]["rows"][0][2] == "1 of 1"  # a seed cut short
    later = {n: dict.fromkeys(reproduce.COLUMNS, v) for n, v in (("single", 0.6), ("match", 0.7))}
    found = reproduce.tables([both, {"2": later}])
    assert [row[:3] for row in found["comparison"]["rows"][3:4]] == [["single", 2, "0.550 ± 0.635"]]
    gaps = {row[0]: row[1:3] for row in found["differences"]["rows"]}
    assert gaps["merged, single"] == ["+0.300 ± 1.271", "2 of 2"]
    assert gaps["match, single"] == ["+0.100", "1 of 1"] and gaps["match, retrained"][1] == "0 of 1"
    of = {"a": (0.6, 0.5, 0.7), "b": (0.4, 0.3, 0.5), "c": (0.2, 0.1, 0.4)}
    of |= {"retrained": (0.9, 0.8, 1)}
    one = {n: dict.fromkeys(reproduce.COLUMNS, v) | {"intervals": dict.fromkeys(reproduce.COLUMNS, ends)}
           for n, (v, *ends) in of.items()}  # fmt: skip
    (tmp_path / "attacks").mkdir()
    first = SimpleNamespace(out=tmp_path)
    gain = {"value": 0.2, "low": 0.1, "high": 0.3, "p": 0.01}
    row = {"variant": "nf4"} | dict.fromkeys(("gain", "above_control"), {"recalled": gain})
    file = {"model": "a", "attack": "quantise", "title": "Q", "rows": [row, row]}
    (tmp_path / "attacks/quantise-a.json").write_text(json.dumps(file))
    tests = {name: {"p_corrected": p} for name, p in (("loss", 0.01), ("zlib", 0.2))}
    (tmp_path / "attacks/membership-b.json").write_text(json.dumps({"tests": tests}))
    rows = reproduce.leaderboard(one, first)["rows"]
    assert [row[-4:-1] for row in rows[1:3]] == [
        ["+0.20 [+0.10, +0.30]", "", ""], ["", "", "1 of 2"]
    ]  # fmt: skip
    assert [(row[0], row[-5]) for row in rows] == [
        ("retrained", ""), ("a", ""), ("b", "no"), ("c", "yes")
    ]  # fmt: skip
    assert rows[1][1] == "0.600 [0.50, 0.70]"
    assert reproduce.leaderboard({}, first)["rows"] == []  # of a seed that was not begun


def test_jobs_run_in_their_order_and_within_their_time(tmp_path):
    """A job waits for those that it names, well ended or not; what goes on too long is stopped."""
    log = tmp_path / "log"

    def says(name: str, seconds: float = 0.0, fails: bool = False) -> None:
        with log.open("a") as file:
            file.write(f"{name} ")
        time.sleep(seconds)
        assert not fails

    jobs = {
        "last": (["bad", "long"], lambda: says("last")),
        "bad": ([], lambda: says("bad", fails=True)),
        "long": (["bad"], lambda: says("long", 0.5)),
    }
    assert in_parallel(jobs, 2, 1) == {"bad": False, "long": True, "last": True}
    assert log.read_text() == "bad long last "
    began = time.monotonic()
    ended = in_parallel(
        {"slow": ([], lambda: says("slow", 60)), "never": (["slow"], list)}, 2, 0.01
    )
    assert ended == {"slow": False} and time.monotonic() - began < 20


@pytest.mark.parametrize("build", ["for a CPU", "for CUDA"])
def test_imports_look_at_no_gpu_with_either_build_of_torch(monkeypatch, build):
    """With that for CPUs nothing started: neither `make test` nor `make demo`."""
    import torch

    looks = []
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: looks.append(1), raising=False)
    if build == "for a CPU":
        monkeypatch.delattr(torch._C, "_cuda_getDeviceCount")
    monkeypatch.setattr(gc, "get_objects", list)
    monkeypatch.setattr(harness.importlib, "import_module", lambda _: torch.cuda.is_available())
    harness.import_libraries("one", always=())
    assert not looks and hasattr(torch._C, "_cuda_getDeviceCount") == (build == "for CUDA")


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_fork_that_could_use_no_gpu_becomes_a_process(tmp_path, monkeypatch, gpus):
    """A build for CUDA counts a look for a GPU that is not there the same: forks took 10 s each."""
    import torch

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    script = tmp_path / "looks.py"
    script.write_text("import sys; print('torch' in sys.modules)")
    Runs(tmp_path, forks=True).command("looks", [sys.executable, script], makes=tmp_path / "x")
    assert (tmp_path / "logs/looks.log").read_text().strip() == str(not gpus)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's prctl")
@pytest.mark.parametrize("forks", [False, True])
def test_what_a_killed_study_has_started_ends_with_it(tmp_path, forks):
    """`kill` of `make demo` left its trainings running."""
    script, log = tmp_path / "long.py", tmp_path / "logs/one.log"
    script.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    code = f"""from research.runs import *; run = Runs(Path({str(tmp_path)!r}), forks={forks})
def work(): run.command("one", [sys.executable, {str(script)!r}], makes=run.out / "x")
in_parallel({{"one": ([], work)}}, 1, 9)"""
    study = subprocess.Popen([sys.executable, "-c", code])
    while not (log.exists() and log.read_text().strip()):
        time.sleep(0.1)
    study.terminate()
    study.wait()
    state, ends = Path("/proc", log.read_text().strip(), "stat"), time.monotonic() + 20
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < ends, "it went on"


def test_a_story_of_one_step(tmp_path, monkeypatch, forks):
    """Development, choice, one fresh seed, with the stock commands; nothing is done twice."""
    sizes = reproduce.Sizes(
        stories=2, pii=2, facts_forget=22, facts_retain=4, nonmembers=44, general=8, replay=2,
        background=2, background_per_pass=2, passes=1,
    )  # fmt: skip
    monkeypatch.setattr(reproduce, "SIZES", sizes)
    monkeypatch.setattr(reproduce, "TINY", reproduce.TINY[:2])
    monkeypatch.setattr(reproduce.Tiny, "strengths", reproduce.TINY[:2])
    monkeypatch.setattr(reproduce, "PAIRS", ((0, 1),))
    options = ("--min-members", "5", "--max-gen-toks", "4")
    monkeypatch.setattr(reproduce.Tiny, "options", options)
    real = Runs.train

    def short(self, name, example, changes=None):
        return real(self, name, example, dict(changes or {}) | {"max_steps": 1, "lora_r": 2})

    monkeypatch.setattr(Runs, "train", short)
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "--seeds", "1"])
    reproduce.main()
    dev, fresh = (reproduce.Tiny(tmp_path, seed) for seed in (reproduce.DEVELOPMENT, 1))
    found = reproduce.results("x", dev, [fresh], "")
    assert tuple(found["seeds"]["1"]) == reproduce.STORY
    assert set(found["development"]) == {"original", "try0", "try1", "pair01"}
    assert [row[1] for row in found["tables"]["development"]["rows"]] == [2, 1]
    config = yaml.safe_load((tmp_path / "1/configs/over.yml").read_text())
    assert config["seed"] == 1 and config["unlearn"]["forget"]["beta"] == reproduce.TINY[0]
    gone = {"aggregate": 0.99, "intervals": dict.fromkeys(reproduce.COLUMNS, (0.98, 1))}
    found["seeds"]["1"] |= {"gone": dict.fromkeys(reproduce.COLUMNS, 0.99) | gone}
    row = ["gone", *"abcdef", "1 of 9", "good"]
    found["tables"]["leaderboard"]["rows"].append(row)  # made elsewhere, as a method of six tries
    found["tables"]["development"]["rows"].append(["gone", 6, *"abcdef"])
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path)
    for _ in range(2):  # read once more, nothing is added
        (tmp_path / "old.json").write_text(json.dumps(found))
        found = reproduce.results("x", dev, [fresh], "", ["old"], "old")
        made = found["tables"]
        (first, *_) = made["leaderboard"]["rows"]
        assert (first[0], first[6:], found["earlier_hours"] < 0.1) == ("gone", row[6:], True)
        assert [row[1] for row in made["development"]["rows"]] == [2, 1, 6]
    before = (tmp_path / "1/runs.json").read_bytes()
    reproduce.main()
    assert (tmp_path / "1/runs.json").read_bytes() == before
    monkeypatch.setattr(reproduce, "IMAGES", tmp_path)
    (tmp_path / "old.json").write_text(json.dumps(found | {"seeds": {"2": found["seeds"]["1"]}}))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--to", "new", "--beside", "old"])
    reproduce.main()  # means over the seeds of both files, and their picture
    rows = json.loads((tmp_path / "new.json").read_text())["tables"]["comparison"]["rows"]
    assert [row[1] for row in rows] == [2] * 6 + [1] and (tmp_path / "new.svg").is_file()
