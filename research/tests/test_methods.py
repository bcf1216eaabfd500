"""Methods of research/methods: by hand, and by real `axolotl train` with `unlearn.extensions`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import random_batch, tiny_llama, with_lora
from safetensors.torch import load_file
from test_fuzz_training import prepared_rows
from test_train_axolotl import adapter, assert_same, config, logs, stage, train  # noqa: F401
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from axolotl_unlearn.checks.config import setting_faults
from axolotl_unlearn.columns import ROLES
from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.engine.views import make_entries, unit_counts
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.base import row_keys
from axolotl_unlearn.training.phases import make_phases
from research.methods.attribution import RowWeights, attribution_weights, attributions
from research.methods.duals import Duals
from research.methods.flatten import Flatten, all_flattened, flattened
from research.methods.retain_filter import RetainFilter, most_changed
from research.methods.saliency import salient
from research.methods.sharpness import moved_uphill
from research.methods.surgery import Surgery, adam_scales, dot, gru, gu, pcgrad
from research.methods.weights import Anneal

# ruff: noqa: F811
PRESETS = Path(__file__).parents[1] / "methods/presets"
SIDES = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}}
SHARDED = {"fsdp_config": {"x": 1}, "adapter": "lora", "lora_r": 4, "lora_alpha": 4}


def of(name: str, **settings) -> list[dict]:
    """`unlearn.extensions` with one of them."""
    return [{"extension": f"research.methods.{name}", **settings}]


def preset(name: str) -> dict:
    return yaml.safe_load((PRESETS / f"{name}.yml").read_text("utf-8"))["unlearn"]


REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}
PHASES = {"phases": [{"steps": 3, **SIDES}, {"steps": 3, "forget": {"objective": "ga"}}]}
GUARD, TARF = of("attribution:RowWeights", temperature=1), of("retain_filter:RetainFilter")


@pytest.mark.parametrize(
    ("cfg", "block", "says"),
    [
        (SHARDED, SIDES | {"extensions": of("surgery:Surgery", method="gu")}, "use DDP instead of"),
        (SHARDED, SIDES | {"extensions": GUARD}, "asks the model about single rows"),
        (SHARDED, preset("tarf"), "asks the model about single rows"),
        (SHARDED, SIDES | {"extensions": of("sharpness:Sharpness")}, "needs both gradients whole"),
        ({"weight_decay": 0.01}, SIDES | {"extensions": of("saliency:Saliency")}, "`weight_decay`"),
        (REENTRANT, SIDES | {"extensions": of("surgery:Surgery")}, "use_reentrant: false"),
        (
            {"optimizer": "adamw_8bit"},
            SIDES | {"extensions": of("surgery:Surgery", method="gu")},
            "second moments in full",
        ),
        ({}, {"forget": SIDES["forget"], "extensions": of("surgery:Surgery")}, "joins two"),
        (
            {},
            {"forget": SIDES["forget"], "extensions": of("flatten:Flatten", of="retain")},
            "beside each `forget`",
        ),
        ({}, {"retain": SIDES["retain"], "extensions": of("flatten:Flatten")}, "forget gradient"),
        ({}, {"forget": {"objective": "ga"}, "extensions": GUARD}, "add `retain`"),
        ({}, SIDES | {"forget": {"objective": "rmu"}, "extensions": GUARD}, "rmu is no loss"),
        ({}, PHASES | {"extensions": TARF}, "`retain` from phase 2 on"),
        ({}, SIDES | {"extensions": of("duals:Duals")}, "give the level"),
        ({}, SIDES | {"extensions": of("duals:Duals", entry="x", at_most=1.0)}, "called 'x'"),
        ({}, SIDES | {"extensions": [*of("surgery:Surgery"), *of("sharpness:Sharpness")]}, "both"),
    ],
)
def test_faults_are_found_before_anything_is_loaded(cfg, block, says):
    assert any(says in fault for fault in setting_faults(cfg, parse_unlearn(block)))
    fine = SIDES | {"extensions": of("surgery:Surgery", method="gu")}
    assert not setting_faults(
        {"adapter": "lora", "lora_r": 4, "lora_alpha": 4, "lora_target_linear": True},
        parse_unlearn(fine),
    )


def model_inputs(row: dict) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name]]) for name in ("input_ids", "attention_mask", "labels")}


def test_retain_rows_that_are_drawn_along_are_left_out(stage):
    """Those whose loss plain transformers find most changed by the first phase (TARF); a resumed
    run leaves out the same."""
    from peft import PeftModel

    phases = [
        {"steps": 3, "forget": {"objective": "ga"}},
        {"steps": 2, "retain": {"objective": "nll"}},
        {"steps": 1, "retain": {"objective": "nll"}},
    ]
    block = config(stage, "x")["unlearn"] | {"phases": phases}
    block["extensions"] = of("retain_filter:RetainFilter", share=0.34)
    del block["forget"], block["retain"]
    options = {"unlearn": block, "num_epochs": "DELETE", "save_strategy": "steps", "save_steps": 1}
    options |= {"learning_rate": 5e-3, "dataset_prepared_path": str(stage / "rows-along")}
    run = train(stage, "along", **options)

    def known(step: int) -> dict:
        state = json.loads((run / f"checkpoint-{step}/trainer_state.json").read_text())
        return state["stateful_callbacks"]["RetainFilter"]["attributes"]

    assert known(2)["left_out"] == [] and known(3) == known(4) == known(6)

    rows = [r for r in prepared_rows(stage / "rows-along") if r["role"] == ROLES["retain"]]
    inputs = [*map(model_inputs, rows)]

    @torch.no_grad()
    def losses(model) -> torch.Tensor:
        return torch.stack([model(**row).loss for row in inputs])

    base = AutoModelForCausalLM.from_pretrained(stage / "base").eval()
    before = losses(base)
    after = losses(PeftModel.from_pretrained(base, str(run / "checkpoint-3")).eval())
    assert sorted(known(3)["before"]) == pytest.approx(sorted(before.tolist()), abs=1e-4)
    largest = (after - before).abs().topk(3).indices.tolist()
    assert {row_keys(inputs[i])[0].hex() for i in largest} == set(known(3)["left_out"])
    assert len(rows) == 9 and len(known(3)["left_out"]) == 3
    for entry in logs(run)[3:6]:  # divided by the number of labels that are left
        assert entry["loss"] == pytest.approx(entry["retain/nll"], abs=1e-4)
    without = options | {"unlearn": {k: v for k, v in block.items() if k != "extensions"}}
    whole = train(stage, "not-along", **without)
    assert_same(run / "checkpoint-3", whole / "checkpoint-3", atol=0)
    with pytest.raises(AssertionError):
        assert_same(run / "checkpoint-4", whole / "checkpoint-4", atol=1e-6)
    resumed = train(stage, "along-4", **options, resume_from_checkpoint=str(run / "checkpoint-4"))
    assert_same(run, resumed, atol=0)


def test_forget_rows_weigh_by_their_attribution(stage):
    """As plain transformers find them (GUARD, all weights trained); a resumed run has the same
    weights, and at a high temperature the run is the ordinary one."""
    block = {"forget": {"objective": "ga"}, "retain": {"objective": "nll"}}
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "adapter": "DELETE"}
    options |= {"dataset_prepared_path": str(stage / "rows-weighed"), "learning_rate": 1e-4}

    def run(name: str, temperature: float | None, **more) -> Path:
        known = config(stage, "x")["unlearn"] | block
        if temperature is not None:
            known["extensions"] = of("attribution:RowWeights", temperature=temperature)
        return train(stage, name, unlearn=known, **options, **more)

    weighed = run("weighed", 1.0)
    state = json.loads((weighed / "checkpoint-2/trainer_state.json").read_text())
    known = state["stateful_callbacks"]["RowWeights"]["attributes"]["known"]

    model = AutoModelForCausalLM.from_pretrained(stage / "base").eval()
    gradients: dict[str, list] = {"forget": [], "retain": []}
    keys = []
    for row in prepared_rows(stage / "rows-weighed"):
        inputs = model_inputs(row)
        found = torch.autograd.grad(model(**inputs).loss, list(model.parameters()))
        flat = torch.cat([g.flatten() for g in found]).double()
        if row["role"] == ROLES["forget"]:
            gradients["forget"].append(flat)
            keys.append(row_keys(inputs)[0].hex())
        else:
            gradients["retain"].append(flat)
    mean = torch.stack(gradients["retain"]).mean(0)
    expected = 12 * (-(torch.stack(gradients["forget"]) @ mean)).softmax(0)
    assert {key: known[key] for key in keys} == known and len(known) == 12
    assert_close(torch.tensor([known[key] for key in keys]).double(), expected, rtol=1e-3, atol=0)
    assert max(known.values()) > 1.05 * min(known.values())

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return load_file(folder / "model.safetensors")

    resumed = run("weighed-2", 1.0, resume_from_checkpoint=str(weighed / "checkpoint-2"))
    ordinary, level = run("not-weighed", None), run("all-weighed", 1e9)
    for name, value in weights(weighed).items():
        assert_close(value, weights(resumed)[name], rtol=0, atol=0)
        assert_close(weights(level)[name], weights(ordinary)[name], rtol=0, atol=2e-5)


def test_a_flattened_gradient_is_that_of_the_whole_step(stage):
    """Micro-batches change nothing, other components do."""
    base = {"optimizer": "sgd", "learning_rate": 0.5, "max_steps": 2, "max_grad_norm": 1e9}
    both = {"forget": {"objective": "ga"}, "retain": {"objective": "nll"}}
    block = both | {"extensions": of("flatten:Flatten", components=2, how="hard")}
    one = train(stage, "quiet", **base, unlearn=block)
    cut = train(
        stage, "quiet-cut", **base, unlearn=block, micro_batch_size=1, gradient_accumulation_steps=4
    )
    assert_same(one, cut, atol=1e-5)
    other = train(stage, "loud", **base, unlearn=both)
    assert max((adapter(one)[n] - w).abs().max().item() for n, w in adapter(other).items()) > 1e-4


def test_a_multiplier_follows_the_loss_of_the_step(stage):
    """lambda 1, then + 2 (L - 3) with the L of each step, half of it below; it weighs the loss of
    the next step. The same from micro-batches, and after a resume to the last bit (without a
    reference, which would be asked about other batches then)."""
    block = {"forget": {"objective": "flat_logits", "weight": 0.01}}
    held = {"at_most": 3.0, "step": 2.0, "down": 0.5, "penalty": 0.1}
    block["retain"] = {"objective": "nll", "weight": 1.0}
    block["extensions"] = ["research.methods.objectives", *of("duals:Duals", **held)]
    base = {"optimizer": "sgd", "learning_rate": 0.1, "unlearn": block}
    whole = train(stage, "dual", **base, save_strategy="steps", save_steps=3)
    found = logs(whole)
    multiplier, gap = 1.0, 0.0
    for entry in found:
        weight = multiplier + 0.1 * max(0.0, gap)
        parts = 0.01 * entry["forget/flat_logits"] + weight * entry["retain/nll"]
        assert entry["loss"] == pytest.approx(parts, rel=1e-4)
        gap = entry["retain/nll"] - 3.0
        multiplier = max(0.0, multiplier + 2.0 * gap * (0.5 if gap < 0 else 1.0))
        assert entry["dual/retain/nll"] == pytest.approx(multiplier, rel=1e-4)
    assert multiplier > 2
    cut = train(stage, "dual-cut", **base, micro_batch_size=1, gradient_accumulation_steps=4)
    assert_same(whole, cut, atol=1e-5)
    resumed = train(
        stage, "dual-again", **base, save_strategy="steps", save_steps=3,
        resume_from_checkpoint=str(whole / "checkpoint-3"),
    )  # fmt: skip
    assert_same(whole, resumed, atol=0)
    assert [e["dual/retain/nll"] for e in logs(resumed)] == [e["dual/retain/nll"] for e in found]


def test_sharpness_takes_the_forget_gradient_uphill(stage):
    """rho to 0 is the plain step; a longer one is another; micro-batches change nothing; what is
    logged is not counted twice."""

    base = {"optimizer": "sgd", "learning_rate": 0.1, "save_strategy": "steps", "save_steps": 6}

    def sharp(name: str, rho: float, **more) -> Path:
        extensions = of("sharpness:Sharpness", rho=rho) if rho else []
        block = config(stage, "x")["unlearn"] | {"extensions": extensions}
        return train(stage, name, **base, unlearn=block, **more)

    one, other, none = sharp("sharp", 0.5), sharp("not-sharp", 0), sharp("sharp-0", 1e-9)
    assert_same(other, none, atol=1e-5)
    cut = sharp("sharp-cut", 0.5, micro_batch_size=1, gradient_accumulation_steps=4)
    assert_same(one, cut, atol=1e-5)
    gap = max((adapter(one)[n] - w).abs().max().item() for n, w in adapter(other).items())
    assert gap > 1e-4
    first = [logs(folder)[0] for folder in (one, other)]
    # the retain part is that of the start; the forget part is seen uphill, where it is more
    assert first[0]["retain/nll"] == first[1]["retain/nll"]
    assert first[0]["forget/npo"] > first[1]["forget/npo"]


def test_saliency_trains_few_neurons_and_resumes(stage):
    """A tenth of the rows of B move, A does not; the masks of the start serve a resumed run."""
    block = {"forget": {"objective": "simnpo"}, "retain": {"objective": "nll"}}
    block["extensions"] = of("saliency:Saliency", share=0.1)
    options = {"unlearn": block, "weight_decay": 0.0, "save_strategy": "steps", "save_steps": 3}
    whole = train(stage, "salient", **options)
    moved = total = 0
    start = adapter(train(stage, "salient-0", unlearn=block, learning_rate=1e-12, max_steps=1))
    for name, weight in adapter(whole).items():
        if "lora_A" in name:
            assert_close(weight, start[name], rtol=0, atol=1e-9)
        else:
            moved += int((weight != 0).any(-1).sum())
            total += len(weight)
    assert moved == pytest.approx(0.1 * total, abs=2)
    before = adapter(whole)
    (whole / "adapter_model.safetensors").unlink()
    train(  # in the folder that has the masks
        stage, "salient-again", **options, resume_from_checkpoint=str(whole / "checkpoint-3"),
        output_dir=str(whole),
    )  # fmt: skip
    assert all(torch.equal(before[name], weight) for name, weight in adapter(whole).items())


def test_surgery(stage):
    """4 pairs at once against 4 times 1, under SGD (see above); another update than the sum's."""
    base = {"optimizer": "sgd", "learning_rate": 0.1, "max_steps": 2, "save_strategy": "steps"}
    base |= {"save_steps": 1, "unlearn": config(stage, "x")["unlearn"]}
    added = train(stage, "added", **base)
    base["unlearn"] |= {"extensions": of("surgery:Surgery", method="gru")}
    one = train(stage, "gru-big", **base)
    cut = train(stage, "gru-cut", **base, micro_batch_size=1, gradient_accumulation_steps=4)
    assert_same(one, cut, atol=1e-6)
    gap = max((adapter(one)[n] - w).abs().max().item() for n, w in adapter(added).items())
    cosines = [entry["gradient_cosine"] for entry in logs(one)]
    assert gap > 1e-5 and all(-1 <= cosine <= 1 and cosine != 0 for cosine in cosines)


def test_surgery_with_adam(stage):
    """GU reads the metric of the optimizer that Axolotl made; a step later it has one."""
    block = config(stage, "x")["unlearn"] | {"extensions": of("surgery:Surgery", method="gu")}
    folder = train(stage, "gu-adam", unlearn=block, max_steps=3)
    assert all(torch.isfinite(w).all() for w in adapter(folder).values())


def test_what_is_drawn_along():
    assert most_changed([1, 2, 3, 4], [1, 5, 2, 4], 0.5) == [1, 2]  # either way
    assert most_changed([1, 2, 3], [1, 1, 1], 0.1) == [2]  # none would be less than was asked
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [5, 6, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "labels": torch.tensor([[-100, 6, 7], [-100, 6, -100]]),
        "role": torch.tensor([1, 1]),
    }
    along = RetainFilter()
    assert along.on_rows(batch) is batch
    alone = {key: value[1:, :2] if value.dim() > 1 else value[1:] for key, value in batch.items()}
    along.left_out = [key.hex() for key in row_keys(alone)]  # known without its padding
    assert along.on_rows(batch)["role"].tolist() == [1, -1]


def test_attributions_and_their_weights():
    """By hand; a larger T tells rows apart less."""
    forget = [
        [torch.tensor([2.0]), torch.tensor([0.0])],
        [torch.tensor([0.0]), torch.tensor([1.0])],
    ]
    retain = [
        [torch.tensor([1.0]), torch.tensor([3.0])],
        [torch.tensor([3.0]), torch.tensor([1.0])],
    ]
    assert attributions(forget, retain) == pytest.approx([4.0, 2.0])
    assert attribution_weights([0.0, math.log(3)], 1.0) == pytest.approx([1.5, 0.5])
    assert attribution_weights([0.0, 1.0, -5.0], 1e9) == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("kept", [Duals(), RowWeights(temperature=1), RetainFilter()])
def test_a_checkpoint_of_a_run_without_it_is_refused(kept):
    """A half-forgotten model would count as the start, or all rows would weigh the same."""
    state = SimpleNamespace(global_step=3, stateful_callbacks={"TrainerControl": {}})
    with pytest.raises(UnlearnError, match=f"step 3 holds nothing of {type(kept).__name__}"):
        kept.on_train_begin(None, state, None)


def test_tarf_weighs_its_ascent_as_published():
    """k(t) = max(0, k (T - t - t0) / T), T = 10, t0 = 2, k = .5; the first phase ends at t1 = 1."""
    args = parse_unlearn(preset("tarf"))
    first, second, last = make_phases(args, total=1, steps_per_epoch=1000, learning_rate=1e-4)
    *anneals, filtered = args.extensions
    assert filtered.parameters == {"share": 0.1, "phase": 2}
    for phase, one in zip((first, second), anneals, strict=True):
        extension = one.kind(**one.parameters)
        extension.begin(SimpleNamespace(phases=[first, second, last]))
        for step in (phase.start, (phase.start + phase.stop) // 2, phase.stop - 1):
            extension.state = SimpleNamespace(global_step=step)
            (weight, *_) = extension.on_weights(
                phase.entries, [entry.args.weight for entry in phase.entries]
            )
            assert weight == pytest.approx(0.5 * (10 - step / 1000 - 2) / 10, abs=1e-4)
    cosine = Anneal(entry="forget/ga", to=0.5, schedule="cosine")
    cosine.phase = SimpleNamespace(start=5, stop=8)
    assert [cosine.weight(1.0, s) for s in (4, 5, 6, 7, 9)] == pytest.approx([1, 1, 0.75, 0.5, 0.5])
    assert last.sides == {"retain"} and last.stop == 10_000


def vector(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


PLAIN, METRIC = ({"scales": scales} for scales in ([None], vector([1.0, 2.0])))
#: Way -> forget gradient, retain gradient, what they are joined to.
JOINED = [
    # f = (1, 0), r = (-1, 1): <f, r> = -1. f' = f + r/2 = (.5, .5), r' = r + f = (0, 1).
    (pcgrad, {}, vector([1.0, 0.0]), vector([-1.0, 1.0]), vector([0.5, 1.5])),
    (pcgrad, {}, vector([1.0, 0.0]), vector([1.0, 1.0]), vector([2.0, 1.0])),
    # All weights are one vector: conflict in one tensor is outweighed by agreement in another.
    (pcgrad, {}, vector([1.0], [3.0]), vector([-1.0], [1.0]), vector([0.0], [4.0])),
    # <r, r> = 2: f' = f + r/2 = (.5, .5), plus r. Without a conflict the sum.
    (gru, {}, vector([1.0, 0.0]), vector([-1.0, 1.0]), vector([-0.5, 1.5])),
    (gru, {}, vector([1.0, 0.0]), vector([1.0, 1.0]), vector([2.0, 1.0])),
    # h = (1, 2): <f, r>_h = 4, <r, r>_h = 3, f' = f - 4/3 r = (5, -5)/3. Without a metric:
    # <f, r> = 5, <r, r> = 5, f' = (2, -1).
    (gu, METRIC, vector([3.0, 1.0]), vector([1.0, 2.0]), vector([1 + 5 / 3, 2 - 5 / 3])),
    (gu, PLAIN, vector([3.0, 1.0]), vector([1.0, 2.0]), vector([3.0, 1.0])),
    (gu, PLAIN, vector([3.0, 1.0]), vector([0.0, 0.0]), vector([3.0, 1.0])),
]


@pytest.mark.parametrize(("way", "how", "forget", "retain", "joined"), JOINED)
def test_gradients_are_joined_by_hand(way, how, forget, retain, joined):
    for found, wanted in zip(way(forget, retain, **how), joined, strict=True):
        assert_close(found, wanted)


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_flatten_by_hand():
    """diag(4, 2, 1), two components of itself: inputs alone 4/2 and 2, outputs again, or both."""
    one = torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))
    for options, left in (
        ({"side": "input"}, (2, 2, 1)),
        ({"side": "output"}, (2, 2, 1)),
        ({}, (1, 2, 1)),
        ({"how": "quadratic"}, (0.25, 2, 1)),
        ({"how": "hard"}, (0, 0, 1)),
    ):
        found = flattened(one, one, Flatten(components=2, **options))
        assert_close(found, torch.diag(torch.tensor(left, dtype=torch.float64)))


@pytest.mark.parametrize("how", ["soft", "quadratic", "hard"])
def test_flatten_is_the_published_formula(how):
    """RepSelect: (1 - P_out) G (1 - P_in) with P = sum_k (1 - (s_min/s_k)^p) d_k d_k' over the top
    eigenvectors d_k of R'R (inputs) and RR' (outputs), R the retain gradient, of rank 3 here; p 1
    or 2, or P the whole projection."""
    torch.manual_seed(0)
    g, r = matrix(5, 7), matrix(5, 3) @ matrix(3, 7)
    for count, kept in ((2, 2), (512, 3)):

        def rest(square: torch.Tensor, kept: int = kept) -> torch.Tensor:
            values, directions = torch.linalg.eigh(square)
            s, d = values[-kept:].sqrt(), directions[:, -kept:]
            share = {"soft": s[0] / s, "quadratic": (s[0] / s) ** 2, "hard": 0 * s}[how]
            return torch.eye(len(square), dtype=torch.float64) - d @ torch.diag(1 - share) @ d.T

        want = rest(r @ r.T) @ g @ rest(r.T @ r)
        args = Flatten(components=count, how=how, of="retain")
        assert_close(all_flattened([g, g[0]], [r, r[0]], args)[0], want)
        assert_close(all_flattened([g, g[0]], [r, r[0]], args)[1], g[0])  # no matrix
    assert flattened(g, torch.zeros_like(r), Flatten()) is g
    # What overflowed is left to the check of the gradient (and to the scaler of fp16).
    assert flattened(g, r * math.inf, Flatten()) is g


def test_flatten_meets_the_forget_gradient_alone():
    """In a step: forget flattened, then joined with retain; the cosine is of what is joined."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(matrix(4, 6))
    f, r = matrix(4, 6), matrix(4, 6)
    args, model = Flatten(components=2), torch.nn.ParameterList([weight])
    args.begin(SimpleNamespace(reduce=lambda x: x))
    args.add(model, {"forget": (weight * f).sum(), "retain": (weight * r).sum()})
    args.finish()
    quiet = flattened(f, f, args)
    assert_close(weight.grad, quiet + r)
    wanted = (quiet * r).sum() / (quiet.norm() * r.norm())
    assert args.logged()["gradient_cosine"] == pytest.approx(float(wanted), abs=1e-6)


def test_a_weight_that_rises_with_the_loss():
    """SHA256: .3 6^gap + .8 in [1.2, 2.8]: 1.2 at or below the level, 2.6 at 1, 2.8 from there on.
    The level is the mean of the first epoch's three losses, 2; till then the weight stays."""
    args = parse_unlearn(preset("sha256"))
    settings = args.extensions[0].parameters
    assert [settings["rise"].weight(g) for g in (-5.0, 0.0, 0.5, 1.0, 1.1, 1e9)] == pytest.approx(
        [1.2, 1.2, 0.3 * math.sqrt(6) + 0.8, 2.6, 2.8, 2.8]
    )
    (entry,) = (e for e in make_entries(args.entries()) if e.side == "retain")
    duals, seen = Duals(**settings), []
    for step, loss in enumerate((1.0, 2.0, 3.0, 2.5, 3.0, 1.0), 1):
        seen.append(duals.on_weights([entry], [1.2])[0])
        duals.add(1.2, torch.tensor(4 * loss), torch.tensor(4.0))
        if step == 4:  # a checkpoint: JSON keeps all that the rest needs
            again, state = Duals(**settings), SimpleNamespace(epoch=step / 3)
            state.stateful_callbacks = {"Duals": json.loads(json.dumps(duals.state()))}
            again.on_train_begin(None, state, None)
            again.add(1.2, torch.tensor(4 * loss), torch.tensor(4.0))
            duals = again
        duals.on_step_end(None, SimpleNamespace(epoch=step / 3), None)
    assert seen == pytest.approx([1.2, 1.2, 1.2, 1.2, 0.3 * math.sqrt(6) + 0.8, 2.6])
    assert duals.weight(1.2) == pytest.approx(1.2)


def test_weights_are_uphill_only_inside():
    """Weights (3, 4) and .1, gradient (3, 4) and 0, of length 5, rho 1; then the same bits."""
    weights = [torch.nn.Parameter(torch.tensor([3.0, 4.0])), torch.nn.Parameter(torch.tensor(0.1))]
    gradient = [torch.tensor([3.0, 4.0]), torch.tensor(0.0)]
    with moved_uphill(weights, gradient, 1.0):
        assert_close(weights[0].detach(), torch.tensor([3.6, 4.8]))
    assert weights[0].tolist() == [3.0, 4.0] and torch.equal(weights[1], torch.tensor(0.1))
    with pytest.raises(RuntimeError), moved_uphill(weights, gradient, 0.3):
        raise RuntimeError
    assert weights[0].tolist() == [3.0, 4.0]
    with moved_uphill(weights, [torch.zeros(2), torch.tensor(0.0)], 1.0):
        assert weights[0].tolist() == [3.0, 4.0]


def test_salient_by_hand():
    """Rows of norm 5, 1 (first weight), 2 (second), the third has no gradient and does not count:
    a third of three neurons is the first. Half of six values: 4, 3 and 2."""
    gradients = [torch.tensor([[3.0, -4.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0]])]
    gradients.append(torch.zeros(3, 2))
    first, second, third = salient(gradients, 1 / 3, "neuron")
    assert first.tolist() == [[1, 1], [0, 0]] and not second.any() and not third.any()
    first, second, third = salient(gradients, 0.5, "weight")
    assert first.tolist() == [[1, 1], [0, 0]] and second.tolist() == [[1, 0]] and not third.any()


def test_gu_in_the_metric_of_a_real_adam():
    """After real steps of AdamW: forget's part of the update, f'/h, is orthogonal to the retain
    gradient of every weight; without the metric it is not."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 3).double()) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    assert adam_scales(optimizer, weights) == [None, None]
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn_like(weight) * torch.rand_like(weight) ** 3
        optimizer.step()
    state = optimizer.state[weights[0]]
    h = adam_scales(optimizer, weights)
    assert_close(h[0], (state["exp_avg_sq"] / (1 - 0.95**3)).sqrt() + 1e-6)
    forget, retain = ([torch.randn_like(w) for w in weights] for _ in range(2))
    update = [(g - r) / x for g, r, x in zip(gu(forget, retain, h), retain, h, strict=True)]
    assert all(abs((u * r).sum()) < 1e-9 for u, r in zip(update, retain, strict=True))
    unaware = gu(forget, retain, [None, None])
    update = [(g - r) / x for g, r, x in zip(unaware, retain, h, strict=True)]
    assert all(abs((u * r).sum()) > 1e-3 for u, r in zip(update, retain, strict=True))


@pytest.mark.parametrize("method", ["pcgrad", "gu", "gru"])
def test_two_gradients_from_one_forward(method):
    """Over two micro-batches, equal to the formula on gradients of two runs that know one side
    each; one forward a micro-batch."""
    model = with_lora(tiny_llama(seed=1).double()).double().train()
    block = {"forget": {"objective": "ga"}, "retain": {"objective": "nll", "weight": 2.0}}
    entries = make_entries(parse_unlearn(block).entries())
    batch = random_batch(seed=3)
    parts = [{k: v[rows] for k, v in batch.items()} for rows in ([0, 3], [1, 2, 4])]
    counts = unit_counts(entries, batch)
    surgery, forwards = Surgery(method=method), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    surgery.begin(SimpleNamespace(reduce=lambda x: x, optimizer=lambda: optimizer))
    model.get_base_model().model.register_forward_hook(lambda *_: forwards.append(1))
    step_loss(model, batch, entries)  # the packing is tried out once
    forwards.clear()
    for part in parts:
        surgery.add(model, step_loss(model, part, entries, counts=counts).losses)
    assert len(forwards) == 2
    surgery.finish()
    cosine = surgery.logged()["gradient_cosine"]
    sides = {
        entry.side: torch.autograd.grad(step_loss(model, batch, [entry]).total, trained)
        for entry in entries
    }
    if method == "gu":
        want = gu(sides["forget"], sides["retain"], [None] * len(trained))
    else:
        want = {"pcgrad": pcgrad, "gru": gru}[method](sides["forget"], sides["retain"])
    for parameter, gradient in zip(trained, want, strict=True):
        assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)
    product = dot(sides["forget"], sides["retain"])
    lengths = math.sqrt(
        dot(sides["forget"], sides["forget"]) * dot(sides["retain"], sides["retain"])
    )
    assert cosine == pytest.approx(float(product) / lengths, abs=1e-6)
