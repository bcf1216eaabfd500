"""`unlearn.watch` and the trackers, by real `axolotl train`, in a process of their own.

After forty other runs in one process this test failed; alone it passes. Why was not found.
"""

from test_train_axolotl import config, stage, train  # noqa: F401 (a fixture)


def test_a_watched_run_tells_and_ends_and_everybody_logs_it(  # noqa: F811 (fixture)
    stage,  # noqa: F811
    monkeypatch,
    capfd,
    caplog,
):
    """TensorBoard and Weights & Biases, both offline; the bar shows what matters."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(stage / "wandb-files"))
    (stage / "wandb-files").mkdir()
    watch = {"retain_nll": 0.01, "repetition": 0.0, "every": 1, "rows": 2, "tokens": 24}
    block = config(stage, "x")["unlearn"] | {"watch": watch}
    loggers = {
        "use_tensorboard": True,
        "use_wandb": True,
        "wandb_project": "p",
        "wandb_mode": "offline",
    }
    out = train(stage, "watched", unlearn=block, **loggers, max_steps=3)
    said = capfd.readouterr()
    said = said.out + said.err + caplog.text
    assert "over 0.01; it goes on." in said and "retain_nll=" in said
    assert "answers to retain prompts go in circles; it goes on" in said
    events = EventAccumulator(str(next(out.glob("runs/**/events*")).parent)).Reload()
    assert {"train/retain_nll", "train/forget_nll", "train/kl", "train/log_ratio"} <= set(
        events.Tags()["scalars"]
    )
    assert list((stage / "wandb-files").glob("wandb/offline-run-*/*.wandb"))
    block["watch"] |= {"repetition": None, "then": "stop"}
    out = train(stage, "stopped", unlearn=block, max_steps=3)
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-1"]
