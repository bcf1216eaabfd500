"""Trackers, by real `axolotl train`."""

import time
import zipfile

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


def test_mlflow_offline(stage, monkeypatch):  # noqa: F811
    """Into a folder; MLflow is no dependency of ours."""
    pytest.importorskip("mlflow", exc_type=ImportError)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = {"mlflow_tracking_uri": str(stage / "mlruns"), "mlflow_experiment_name": "e"}
    train(stage, "mlflow", use_mlflow=True, max_steps=2, **place)
    (metrics,) = (stage / "mlruns").glob("*/*/metrics")
    for name in LOGGED:
        assert len((metrics / name).read_text().splitlines()) == 2, name


def test_comet_offline(stage, monkeypatch):  # noqa: F811
    """Into an archive that could be sent later; Comet is no dependency of ours."""
    pytest.importorskip("comet_ml", exc_type=ImportError)
    folder = stage / "comet-files"
    folder.mkdir()
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(folder))
    train(stage, "comet", use_comet=True, comet_online=False, comet_project_name="p", max_steps=2)
    import comet_ml

    comet_ml.end()
    (archive,) = folder.glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        said = b"".join(map(files.read, files.namelist())).decode("utf-8", errors="replace")
    assert all(f'"train/{name}"' in said for name in LOGGED) and "clerk" not in said
