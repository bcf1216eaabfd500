"""Task vectors, angles, trajectories and figures on hand-made weights."""

from __future__ import annotations

import json

import pytest
import torch
from merging_models import tiny_adapter, tiny_model, weights
from safetensors.torch import save_file

from axolotl_unlearn.errors import UnlearnError
from research.analysis import figures
from research.analysis.geometry import angle, task_vectors, update_angles
from research.analysis.trajectory import checkpoints, losses, trajectory


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("geometry")
    tiny_model(root / "base")
    return root / "base"


def moved(base, folder, changes):
    """A full model: the base plus the given changes of single weights."""
    folder.mkdir()
    tensors = weights(base)
    for name, change in changes.items():
        tensors[name] = tensors[name] + change
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder


Q = "model.layers.{}.self_attn.q_proj.weight"


def entries(**values):
    change = torch.zeros(32, 32)
    for place, value in values.items():
        row, column = (int(number) for number in place[1:].split("_"))
        change[row, column] = value
    return change


def test_task_vectors_by_hand(base, tmp_path):
    """Layer 0: d1 = (3, 4, 0), d2 = (0, 4, 3): norms 5 and 5, cosine 16/25, one shared entry, no
    conflict. Layer 1: d1 = 2, d2 = -2 on one entry: cosine -1, conflict 1.
    Whole: norms sqrt 29, product 16 - 4 = 12: cosine 12/29; 1 of 2 shared entries conflicts."""
    one = moved(base, tmp_path / "one", {Q.format(0): entries(a0_0=3.0, a0_1=4.0),
                                         Q.format(1): entries(a5_5=2.0)})  # fmt: skip
    two = moved(base, tmp_path / "two", {Q.format(0): entries(a0_1=4.0, a9_9=3.0),
                                         Q.format(1): entries(a5_5=-2.0)})  # fmt: skip
    result = task_vectors(base, [one, two])
    assert result["norm"] == pytest.approx([29**0.5] * 2, abs=1e-4)
    assert result["cosine"]["0,1"] == pytest.approx(12 / 29, abs=1e-5)
    assert result["sign_conflict"] == pytest.approx(0.5)
    rows = {row["layer"]: row for row in result["layers"]}
    assert rows["0"]["cosine"]["0,1"] == pytest.approx(16 / 25, abs=1e-5)
    assert rows["0"]["sign_conflict"] == 0 and rows["1"]["sign_conflict"] == 1
    assert rows["1"]["cosine"]["0,1"] == pytest.approx(-1, abs=1e-5)
    assert rows["embedding"]["cosine"]["0,1"] is None
    with pytest.raises(UnlearnError, match="two parents"):
        task_vectors(base, [one])


def test_angles_of_vectors_by_hand():
    x, y = [torch.tensor([1.0, 0.0])], [torch.tensor([1.0, 1.0])]
    assert angle(x, y) == pytest.approx(45)
    assert angle(x, [torch.tensor([0.0, -2.0])]) == pytest.approx(90)
    assert angle(x, [torch.zeros(2)]) is None


def test_update_angles_of_a_run(base, tmp_path):
    """Steps 10, 20: first along x by 1, then along y by 1: a and b at 90, a and a + b at 45."""
    steps = {
        10: moved(base, tmp_path / "checkpoint-10", {Q.format(0): entries(a0_0=1.0)}),
        20: moved(base, tmp_path / "checkpoint-20", {Q.format(0): entries(a0_0=1.0, a3_3=1.0)}),
    }
    (row,) = update_angles(base, steps)
    assert row["step"] == 10
    assert row["first_to_rest"] == pytest.approx(90, abs=1e-2)
    assert row["first_to_whole"] == pytest.approx(45, abs=1e-2)
    assert row["first_to_whole"] <= row["first_to_rest"]
    with pytest.raises(UnlearnError, match="at least two checkpoints"):
        update_angles(base, {10: steps[10]})


def test_factor_angles_start_at_the_first_checkpoint(base, tmp_path):
    steps = {}
    for step in (1, 2, 3):
        steps[step] = tmp_path / f"checkpoint-{step}"
        tiny_adapter(steps[step], base, train_seed=step, targets=("q_proj",))
    (row,) = update_angles(base, steps, space="factors")
    vectors = [torch.cat([t.flatten() for t in weights(steps[s]).values()]) for s in (1, 2, 3)]
    a, b = vectors[1] - vectors[0], vectors[2] - vectors[1]
    cosine = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0)
    assert row["first_to_rest"] == pytest.approx(float(torch.rad2deg(torch.acos(cosine))), abs=1e-3)


def test_trajectory_scores_base_and_checkpoints(base, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for step in (20, 3):
        moved(base, run / f"checkpoint-{step}", {Q.format(0): entries(a0_0=float(step))})
    assert list(checkpoints(run)) == [3, 20]
    start = float(weights(base)[Q.format(0)][0, 0])

    def score(model):
        return {"moved": float(model.state_dict()[Q.format(0)][0, 0]) - start}

    rows = trajectory(base, run, score)
    assert [(row["run"], row["step"]) for row in rows] == [("run", 0), ("run", 3), ("run", 20)]
    assert [row["scores"]["moved"] for row in rows] == pytest.approx([0, 3, 20], abs=1e-4)
    with pytest.raises(UnlearnError, match="save_steps"):
        checkpoints(base)


def test_losses_of_the_last_state(tmp_path):
    for step, value in ((5, 9.0), (10, 1.0)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        log = [{"step": step, "loss": value, "forget/npo": 2.0, "epoch": 1.0, "learning_rate": 0.1},
               {"step": step, "eval_runtime": 3.0}]  # fmt: skip
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert losses(tmp_path) == {"loss": [(10, 1.0)], "forget/npo": [(10, 2.0)]}
    assert losses(tmp_path, ["epoch"]) == {"epoch": [(10, 1.0)]}
    with pytest.raises(UnlearnError, match="no trainer_state.json"):
        losses(tmp_path / "nothing")


def test_pareto_front():
    points = [(0.1, 0.9), (0.5, 0.5), (0.4, 0.4), (0.9, 0.1), (0.5, 0.3), (None, 1.0)]
    assert figures.pareto_front(points) == [(0.1, 0.9), (0.5, 0.5), (0.9, 0.1)]


def test_figures_draw_their_data(tmp_path):
    """Each figure saves, and its lines hold the numbers that went in."""
    scores = {"aggregate": 0.5, "mia_auc": 0.4, "retain": 0.7, "forget": 0.6,
              "forget_task1_regurgitation": 0.2, "forget_task2_regurgitation": 0.4}  # fmt: skip
    sweep = [{"recipe": {"density": d}, "scores": scores} for d in (0.8, 0.2)]
    drawn = {
        "density": figures.density_figure(sweep),
        "path": figures.path_figure(
            [{"position": p, "stop": s, "scores": scores} for p, s in ((0, "over"), (1, "under"))]
        ),
        "trajectory": figures.trajectory_figure([{"step": 3, "scores": scores}]),
        "loss": figures.loss_figure({"over": {"loss": [(1, 2.0), (2, 1.0)]}}),
        "angles": figures.angle_figure(
            [{"step": 1, "first_to_rest": 80.0, "first_to_whole": None}]
        ),
        "layers": figures.layer_figure(
            {"layers": [{"layer": "0", "sign_conflict": None, "cosine": {"0,1": 0.3}}]}
        ),
        "pareto": figures.pareto_figure(
            [{"name": "over", "kind": kind, "scores": scores} for kind in ("candidate", "winner")]
        ),
    }
    for name, figure in drawn.items():
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 2000
    line = drawn["density"].axes[0].lines[0]
    assert list(line.get_xdata()) == [0.2, 0.8] and list(line.get_ydata()) == [0.5, 0.5]
    curve = drawn["trajectory"].axes[0].lines[0]
    assert list(curve.get_ydata()) == pytest.approx([0.3])
