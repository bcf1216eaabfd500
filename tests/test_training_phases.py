"""Phases, weights that change, and how two gradients meet; real runs are in test_train_axolotl."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import random_batch, tiny_llama, with_lora
from torch.testing import assert_close
from transformers import get_scheduler

from axolotl_unlearn.checks.config import setting_faults
from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.engine.views import make_entries, unit_counts
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.experimental import extensions
from axolotl_unlearn.experimental.args import FlattenArgs
from axolotl_unlearn.experimental.attribution import RowWeights, attribution_weights, attributions
from axolotl_unlearn.experimental.duals import Duals
from axolotl_unlearn.experimental.flatten import Flatten, all_flattened, flattened
from axolotl_unlearn.experimental.retain_filter import RetainFilter, most_changed
from axolotl_unlearn.experimental.saliency import salient
from axolotl_unlearn.experimental.sharpness import moved_uphill
from axolotl_unlearn.reference.base import row_keys
from axolotl_unlearn.training.phases import make_phases, phase_at, phase_steps, restarting
from axolotl_unlearn.training.surgery import Surgery, adam_scales, dot, gru, gu, pcgrad

BLOCK = {
    "phases": [
        {"steps": 5, "forget": {"objective": "ga", "weight": 0.8, "anneal": "linear"}},
        {
            "epochs": 1.5,
            "learning_rate": 2e-4,
            "retain": {
                "objective": "nll",
                "weight": 1.0,
                "anneal": {"schedule": "cosine", "to": 0.5},
            },
        },
    ]
}


def phases():
    """5 steps, then 1.5 passes of 2 steps each: steps 0 to 4, and 5 to 7."""
    args = parse_unlearn(BLOCK)
    return make_phases(args, total=99, steps_per_epoch=2, learning_rate=1e-4)


def test_phases_follow_each_other():
    first, second = phases()
    assert phase_steps(parse_unlearn(BLOCK), 2) == [5, 3]
    assert (first.start, first.stop, second.start, second.stop) == (0, 5, 5, 8)
    assert [phase_at([first, second], step).start for step in (0, 4, 5, 7, 8)] == [0, 0, 5, 5, 5]
    assert (first.sides, second.sides) == ({"forget"}, {"retain"})
    assert second.learning_rate == pytest.approx(2)


def test_weights_are_a_function_of_the_step():
    """linear from .8 to 0 in 5 steps: quarters of .8. cosine from 1 to .5 in 3: half way at
    .5 + .5 (1 + cos(pi/2))/2 = .75. Beyond its steps a phase keeps its ends."""
    first, second = phases()
    assert [first.weights(step)[0] for step in range(6)] == pytest.approx(
        [0.8, 0.6, 0.4, 0.2, 0, 0]
    )
    assert [second.weights(step)[0] for step in (4, 5, 6, 7, 9)] == pytest.approx(
        [1, 1, 0.75, 0.5, 0.5]
    )


@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup"])
def test_the_learning_rate_begins_anew_in_each_phase(name):
    """It equals that of two runs one after the other, the second at twice the rate."""

    def made(optimizer, steps):
        return get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=steps)

    def rates(schedule, optimizer, steps):
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    def optimizer(rate):
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)

    one = optimizer(1e-4)
    got = rates(restarting(one, phases(), made), one, 8)
    want = []
    for rate, steps in ((1e-4, 5), (2e-4, 3)):
        alone = optimizer(rate)
        want += rates(made(alone, steps), alone, steps)
    assert got == pytest.approx(want) and max(want) == pytest.approx(2e-4)


def test_faults_of_phases():
    for block, says in {
        "not both": BLOCK | {"forget": {"objective": "ga"}},
        "`steps` or as `epochs`": {"phases": [{"forget": {"objective": "ga"}}]},
        "no objective": {"phases": [{"steps": 3}]},
        "did you mean 'steps'": {"phases": [{"step": 3, "forget": {"objective": "ga"}}]},
        "needs `forget` and `retain`": {"surgery": "gu", "forget": {"objective": "ga"}},
        "beside each `forget`": {"flatten": {"of": "retain"}, "forget": {"objective": "ga"}},
        "`flatten` looks at the forget": {"flatten": {}, "retain": {"objective": "nll"}},
        "add `retain`": {"attribution": {"temperature": 1}, "forget": {"objective": "ga"}},
        "rmu is no loss of the labels": SIDES
        | {"attribution": {"temperature": 1}, "forget": {"objective": "rmu"}},
        "not in the first phase": {
            "phases": [{"steps": 3, "leave_out": 0.1, "retain": {"objective": "nll"}}]
        },
        "add `retain` from there on": {
            "phases": [
                {"steps": 3, **SIDES},
                {"steps": 3, "leave_out": 0.1, "forget": {"objective": "ga"}},
            ]
        },
    }.items():
        with pytest.raises(UnlearnError) as caught:
            parse_unlearn(says)
        assert block in str(caught.value)


def test_what_is_drawn_along():
    assert most_changed([1, 2, 3, 4], [1, 5, 2, 4], 0.5) == [1, 2]  # either way
    assert most_changed([1, 2, 3], [1, 1, 1], 0.1) == [2]  # none would be less than was asked
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [5, 6, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "labels": torch.tensor([[-100, 6, 7], [-100, 6, -100]]),
        "role": torch.tensor([1, 1]),
    }
    along = RetainFilter(None, {})
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


@pytest.mark.parametrize("kept", [Duals(), RowWeights(), RetainFilter(None, {})])
def test_a_checkpoint_of_a_run_without_it_is_refused(kept):
    """A half-forgotten model would count as the start, or all rows would weigh the same."""
    state = SimpleNamespace(global_step=3, stateful_callbacks={"TrainerControl": {}})
    with pytest.raises(UnlearnError, match=f"step 3 holds nothing of {type(kept).__name__}"):
        kept.on_train_begin(None, state, None)


def test_tarf_weighs_its_ascent_as_published():
    """k(t) = max(0, k (T - t - t0) / T), T = 10, t0 = 2, k = .5; the first phase ends at t1 = 1."""
    args = parse_unlearn({"preset": "tarf"})
    first, second, last = make_phases(args, total=1, steps_per_epoch=1000, learning_rate=1e-4)
    assert [p.leave_out for p in (first, second, last)] == [None, 0.1, None]
    for phase in (first, second):
        for step in (phase.start, (phase.start + phase.stop) // 2, phase.stop - 1):
            expected = 0.5 * (10 - step / 1000 - 2) / 10
            assert phase.weights(step)[0] == pytest.approx(expected, abs=1e-4)
    assert last.sides == {"retain"} and last.stop == 10_000


SIDES = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}}
SHARDED = {"fsdp_config": {"x": 1}, "adapter": "lora"}


@pytest.mark.parametrize(
    ("cfg", "block", "says"),
    [
        ({"max_steps": 9}, BLOCK, "`max_steps` does not go with `unlearn.phases`"),
        ({"num_epochs": 2}, BLOCK, "`num_epochs` does not go with `unlearn.phases`"),
        ({"deepspeed": "x.json"}, {"preset": "ails-ntua-agad"}, "DeepSpeed's own"),
        (SHARDED, {"surgery": "gu"}, "use DDP instead of FSDP"),
        (SHARDED, {"attribution": {"temperature": 1}}, "`unlearn.attribution` asks the model"),
        (SHARDED, {"preset": "tarf"}, "`leave_out` of a phase asks the model about"),
        (SHARDED, {"sharpness": 0.01}, "`unlearn.sharpness: 0.01` needs both gradients"),
        (SHARDED, {"flatten": {"components": 4}}, "`unlearn.flatten` needs both gradients"),
        ({"weight_decay": 0.01}, {"saliency": {"share": 0.2}}, "`weight_decay` would move them"),
        (
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            {"surgery": "pcgrad"},
            "use_reentrant: false",
        ),
        (SHARDED | {"lora_model_dir": "out/x"}, {}, "set `fsdp_version: 2`"),
        (SHARDED, {"reference": "frozen_copy"}, "which no process has under FSDP"),
        (SHARDED, {"reference": {"adapter": "."}}, "cannot be switched in under FSDP"),
        ({}, {"reference": {"model": "./not-there"}}, "`reference.model: ./not-there` does not"),
    ],
)
def test_faults_beside_other_settings(cfg, block, says):
    """Each is found before anything is loaded, and not without its cause."""
    args = parse_unlearn(block if {"phases", "preset"} & set(block) else SIDES | block)
    assert any(says in fault for fault in setting_faults(cfg, args))
    assert not setting_faults({"adapter": "lora"}, parse_unlearn(SIDES | {"surgery": "gu"}))


@pytest.mark.parametrize("start", [{}, {"adapter": "lora", "lora_model_dir": "."}])
@pytest.mark.parametrize("reference", ["auto", "cached", {"model": "."}])
@pytest.mark.parametrize("way", [{"fsdp_version": 2, "fsdp_config": {"x": 1}},
                                 {"deepspeed": "zero3.json"}])  # fmt: skip
def test_full_fine_tuning_in_parts_is_taken(start, reference, way):
    args = parse_unlearn(SIDES | {"reference": reference})
    assert not setting_faults(way | start, args)


# -- surgery -------------------------------------------------------------------------------------


def vector(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def test_pcgrad_by_hand():
    """f = (1, 0), r = (-1, 1): <f, r> = -1. f' = f + r/2 = (.5, .5), r' = r + f = (0, 1)."""
    (joined,) = pcgrad(vector([1.0, 0.0]), vector([-1.0, 1.0]))
    assert_close(joined, torch.tensor([0.5, 1.5], dtype=torch.float64))
    (added,) = pcgrad(vector([1.0, 0.0]), vector([1.0, 1.0]))
    assert_close(added, torch.tensor([2.0, 1.0], dtype=torch.float64))


def test_pcgrad_sees_all_weights_as_one_vector():
    """Conflict in one tensor, outweighed by agreement in another: nothing is projected."""
    forget, retain = vector([1.0], [3.0]), vector([-1.0], [1.0])
    assert pcgrad(forget, retain)[0].item() == 0
    torch.manual_seed(0)
    forget = [torch.randn(3, 4).double(), torch.randn(5).double()]
    retain = [-f + 0.5 * torch.randn_like(f) for f in forget]
    joined = pcgrad(forget, retain)
    f, r = (torch.cat([x.flatten() for x in v]) for v in (forget, retain))
    f_kept, r_kept = f - (f @ r) / (r @ r) * r, r - (f @ r) / (f @ f) * f
    assert abs(f_kept @ r) < 1e-12 and abs(r_kept @ f) < 1e-12 and f @ r < 0
    assert_close(torch.cat([x.flatten() for x in joined]), f_kept + r_kept)


def test_gru_by_hand():
    """f = (1, 0), r = (-1, 1): <f, r> = -1, <r, r> = 2, f' = f + r/2 = (.5, .5); plus r. Without a
    conflict the sum."""
    (joined,) = gru(vector([1.0, 0.0]), vector([-1.0, 1.0]))
    assert_close(joined, torch.tensor([-0.5, 1.5], dtype=torch.float64))
    (added,) = gru(vector([1.0, 0.0]), vector([1.0, 1.0]))
    assert_close(added, torch.tensor([2.0, 1.0], dtype=torch.float64))


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
        found = flattened(one, one, FlattenArgs(components=2, **options))
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
        args = FlattenArgs(components=count, how=how, of="retain")
        assert_close(all_flattened([g, g[0]], [r, r[0]], args)[0], want)
        assert_close(all_flattened([g, g[0]], [r, r[0]], args)[1], g[0])  # no matrix
    assert flattened(g, torch.zeros_like(r), FlattenArgs()) is g
    # What overflowed is left to the check of the gradient (and to the scaler of fp16).
    assert flattened(g, r * math.inf, FlattenArgs()) is g


def test_flatten_meets_the_forget_gradient_alone():
    """In a step: forget flattened, then joined with retain; the cosine is of what is joined."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(matrix(4, 6))
    f, r = matrix(4, 6), matrix(4, 6)
    args = FlattenArgs(components=2)
    surgery, model = Surgery(None), torch.nn.ParameterList([weight])
    surgery.add(model, {"forget": (weight * f).sum(), "retain": (weight * r).sum()})
    cosine = surgery.finish(None, [Flatten(args)])
    quiet = flattened(f, f, args)
    assert_close(weight.grad, quiet + r)
    assert_close(cosine, (quiet * r).sum() / (quiet.norm() * r.norm()))


def test_a_weight_that_rises_with_the_loss():
    """SHA256: .3 6^gap + .8 in [1.2, 2.8]: 1.2 at or below the level, 2.6 at 1, 2.8 from there on.
    The level is the mean of the first epoch's three losses, 2; till then the weight stays."""
    rise = parse_unlearn({"preset": "sha256"}).retain[0].constraint.rise
    assert [rise.weight(g) for g in (-5.0, 0.0, 0.5, 1.0, 1.1, 1e9)] == pytest.approx(
        [1.2, 1.2, 0.3 * math.sqrt(6) + 0.8, 2.6, 2.8, 2.8]
    )
    (entry,) = (e for e in make_entries(parse_unlearn({"preset": "sha256"}).entries())
                if e.side == "retain")  # fmt: skip
    duals, seen = Duals(), []
    for step, loss in enumerate((1.0, 2.0, 3.0, 2.5, 3.0, 1.0), 1):
        seen.append(duals.on_weights([entry], [1.2])[0])
        duals.add(entry, torch.tensor(4 * loss), torch.tensor(4.0))
        if step == 4:  # a checkpoint: JSON keeps all that the rest needs
            again, state = Duals(), SimpleNamespace(epoch=step / 3, stateful_callbacks=None)
            state.stateful_callbacks = {"Duals": json.loads(json.dumps(duals.state()))}
            again.on_train_begin(None, state, None)
            again.add(entry, torch.tensor(4 * loss), torch.tensor(4.0))
            duals = again
        duals.on_step_end(None, SimpleNamespace(epoch=step / 3), None)
    assert seen == pytest.approx([1.2, 1.2, 1.2, 1.2, 0.3 * math.sqrt(6) + 0.8, 2.6])
    assert duals.weight(entry) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (SIDES, []),
        (SIDES | {"saliency": {"share": 0.5}, "sharpness": 0.1}, ["Saliency", "Sharpness"]),
        (SIDES | {"flatten": {}, "attribution": {"temperature": 1}}, ["RowWeights", "Flatten"]),
        ({"preset": "tarf"}, ["RetainFilter"]),
        ({"preset": "sha256"}, ["Duals"]),
        ({"phases": [{"steps": 2, **SIDES, "retain": {
            "objective": "nll", "constraint": {"at_most": 1.0, "step": 0.1}}}]}, ["Duals"]),
        (SIDES | {"reference": {"twins": "twins.jsonl"}}, ["AskTwins"]),
    ],
)  # fmt: skip
def test_a_config_gets_the_extensions_that_its_keys_ask_for(block, found):
    """One that is not found would leave a run without what its config says."""
    assert [kind.__name__ for kind in extensions(parse_unlearn(block))] == found


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


def test_gu_by_hand():
    """f = (3, 1), r = (1, 2), h = (1, 2): <f, r>_h = 4, <r, r>_h = 3, f' = f - 4/3 r = (5, -5)/3.
    Without a metric: <f, r> = 5, <r, r> = 5, f' = (2, -1)."""
    forget, retain = vector([3.0, 1.0]), vector([1.0, 2.0])
    (joined,) = gu(forget, retain, vector([1.0, 2.0]))
    assert_close(joined - retain[0], torch.tensor([5.0, -5.0], dtype=torch.float64) / 3)
    (plain,) = gu(forget, retain, [None])
    assert_close(plain - retain[0], torch.tensor([2.0, -1.0], dtype=torch.float64))
    (nothing,) = gu(forget, vector([0.0, 0.0]), [None])
    assert_close(nothing, forget[0])


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
    surgery, forwards = Surgery(method), []
    model.get_base_model().model.register_forward_hook(lambda *_: forwards.append(1))
    step_loss(model, batch, entries)  # the packing is tried out once
    forwards.clear()
    for part in parts:
        surgery.add(model, step_loss(model, part, entries, counts=counts).losses)
    assert len(forwards) == 2
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    cosine = surgery.finish(optimizer)
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
    assert cosine.item() == pytest.approx(float(product) / lengths)
