"""The command group itself: what a shell does with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "axolotl_unlearn.cli"]


@pytest.mark.parametrize("read", [1, 0])
@pytest.mark.parametrize("arguments", [["methods"], ["methods", "tofu-npo"]])
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
    assert said == "" and run.returncode in (0, 141)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "rex", "one_cycle", "constant"])
def test_a_schedule_costs_no_import(schedule, tmp_path):
    """`check` took 9 s, for torch, where `lr_scheduler` was set."""
    config = tmp_path / "my.yml"
    config.write_text(
        "plugins: [axolotl_unlearn.UnlearnPlugin]\nbase_model: someone/model\n"
        f"unlearn: {{preset: zjuklab-paper}}\nlr_scheduler: {schedule}\ndatasets: []\n"
    )
    code = f"""
import sys
from axolotl_unlearn.cli import unlearn
try:
    unlearn(["check", {str(config)!r}])
except SystemExit:
    print("loaded", [m for m in ("axolotl", "transformers", "torch") if m in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert b"loaded []" in run.stdout, run
    assert b"is no schedule" not in run.stderr


def test_schedules_without_options_can_be_made():
    import torch
    from transformers import get_scheduler

    from axolotl_unlearn.checks.preflight import _SCHEDULES

    for name in _SCHEDULES - {"one_cycle", "rex"}:
        get_scheduler(name, torch.optim.SGD([torch.zeros(1)], lr=1.0), 1, 10)
