"""Trackers, by real `axolotl train`."""

import time

import pytest
from test_train_axolotl import stage, train  # noqa: F401 (a fixture)

#: What every tracker gets from a run of the over example.
LOGGED = ("loss", "forget_nll", "retain_nll", "kl", "log_ratio", "forget/npo", "retain/nll")


def test_tensorboard_and_wandb_offline(stage, monkeypatch):  # noqa: F811
    """Both hold all parts."""
    wandb = pytest.importorskip("wandb")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(stage / "wandb-files"))
    (stage / "wandb-files").mkdir()
    loggers = {"use_tensorboard": True, "use_wandb": True, "wandb_project": "p"}
    out = train(stage, "tracked", wandb_mode="offline", **loggers, max_steps=3)
    found = events.EventAccumulator(str(next(out.glob("runs/**/events*")).parent)).Reload()
    assert {f"train/{name}" for name in LOGGED} <= set(found.Tags()["scalars"])
    wandb.finish()
    (kept,) = (stage / "wandb-files").glob("wandb/offline-run-*/*.wandb")
    for _ in range(100):  # its own process writes the file
        if left := [name for name in LOGGED if f"train/{name}".encode() not in kept.read_bytes()]:
            time.sleep(0.2)
    assert not left
