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
    assert said == "" and run.returncode in (0, 1)
