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


@pytest.mark.parametrize(
    "schedule", ["cosine", "rex", "cosine_with_min_lr", "polynomial", "cosin", "greedy"]
)
def test_a_schedule_costs_no_import(schedule, tmp_path):
    """`check` took 9 s, for torch, where `lr_scheduler` was set."""
    config = tmp_path / "my.yml"
    config.write_text(
        "plugins: [axolotl_unlearn.UnlearnPlugin]\nbase_model: someone/model\n"
        f"unlearn: {{preset: zjuklab-paper}}\nlr_scheduler: {schedule}\ndatasets: []\n"
        "optimizer: adamw_torch\nadam_beta2: 0.95\n"
        "lr_scheduler_kwargs: {min_lr: 0.1}\n"
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


def test_the_list_of_optimizers_is_that_of_the_installed_axolotl():
    from axolotl.utils.schemas.enums import CustomSupportedOptimizers

    from axolotl_unlearn.checks.axolotl_options import VALUES

    own = {one.value for one in CustomSupportedOptimizers} - {"came_pytorch"}
    later = {"muon_8bit", "scao"}  # from Axolotl 0.20 on
    assert set(VALUES["own_optimizers"]) - later == own - later


def test_the_table_of_schedules_is_that_of_the_installed_libraries():
    """Names, and each option that one of them takes, for `check` without torch."""
    import inspect

    import torch
    from transformers import get_scheduler, optimization
    from transformers.trainer_utils import SchedulerType

    from axolotl_unlearn.checks.axolotl_options import VALUES

    schedules = VALUES["schedules"]
    assert set(schedules) - {"one_cycle", "rex"} == {one.value for one in SchedulerType}
    classes = {
        "reduce_lr_on_plateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
        "one_cycle": torch.optim.lr_scheduler.OneCycleLR,
        "greedy": optimization.GreedyLR,
    }
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "verbose"}
    ours |= {"epochs", "steps_per_epoch", "max_lr", "total_steps", "cycle_momentum"}
    for name, known in schedules.items():
        function = classes.get(name) or optimization.TYPE_TO_SCHEDULER_FUNCTION.get(name)
        takes = set(inspect.signature(function).parameters) if function else set()
        assert takes - ours <= set(known) | {"base_momentum", "max_momentum"}, name
        assert set(known) <= takes, name
    given = {"num_decay_steps": 2} | {"min_lr": 0.1}
    for name, known in schedules.items():
        if name not in ("one_cycle", "rex"):
            options = {key: value for key, value in given.items() if key in known}
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
            get_scheduler(name, optimizer, 1, 10, options)
