"""The engine against the plain float64 implementation, and what it allocates and computes."""

from __future__ import annotations

import copy

import plain
import pytest
import torch
from conftest import assert_oracle, entries_for, moved, random_batch, tiny_llama, with_lora
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from axolotl_unlearn.engine.head import learn_after_head
from axolotl_unlearn.engine.head_losses import ChunkPlan
from axolotl_unlearn.engine.needs import ForwardSpec, label_positions
from axolotl_unlearn.engine.packing import can_pack
from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.engine.views import unit_counts
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.objectives.preference import _DIVERGENCES
from axolotl_unlearn.reference.start import check_trained, make_reference

FORGET, RETAIN, ALTERNATIVES = [0, 1, 2], [3, 4], [5, 6, 7]
HIDDEN = (("forget", "rmu"), ("retain", "hidden_mse"))

#: name -> (side, config, plain loss on (model, reference, batch))
CASES = {
    **{
        f"npo-{reduction}": (
            "forget",
            {"objective": "npo", "beta": 0.3, "reduction": reduction},
            lambda m, r, b, red=reduction: plain.npo(m, r, b, FORGET, 0.3, red),
        )
        for reduction in ("sum", "mean", "batch_token_mean")
    },
    "nll": ("retain", {"objective": "nll"}, lambda m, r, b: plain.nll(m, b, RETAIN)),
    "ga": ("forget", {"objective": "ga"}, lambda m, r, b: -plain.nll(m, b, FORGET)),
    **{
        f"kl-{direction}-{positions}": (
            "retain",
            {"objective": "kl", "direction": direction, "positions": positions},
            lambda m, r, b, d=direction, p=positions: plain.kl(m, r, b, RETAIN, d, p),
        )
        for direction in ("forward", "reverse")
        for positions in ("answer", "all")
    },
    "simnpo": (
        "forget",
        {"objective": "simnpo", "beta": 2.5, "gamma": 0.4},
        lambda m, r, b: plain.simnpo(m, b, FORGET, 2.5, 0.4),
    ),
    "wga": (
        "forget",
        {"objective": "wga", "alpha": 2.0},
        lambda m, r, b: plain.weighted(m, None, b, FORGET, lambda p, q: p**2),
    ),
    "tnpo": (
        "forget",
        {"objective": "tnpo", "beta": 4.0},
        lambda m, r, b: plain.weighted(m, r, b, FORGET, lambda p, q: 2 * p**4 / (p**4 + q**4)),
    ),
    "wtnpo": (
        "forget",
        {"objective": "wtnpo", "beta": 4.0, "alpha": 1.5},
        lambda m, r, b: plain.weighted(m, r, b, FORGET, lambda p, q: 2 * p**5.5 / (p**4 + q**4)),
    ),
    "satimp": (
        "forget",
        {"objective": "satimp", "beta1": 2.0, "beta2": 1.0},
        lambda m, r, b: plain.weighted(m, None, b, FORGET, lambda p, q: p**2 * (1 - p)),
    ),
    "match": (
        "forget",
        {"objective": "match", "width": 0.7, "floor": 0.1, "offset": -0.5},
        lambda m, r, b: plain.match(m, r, b, FORGET, 0.7, 0.1, -0.5),
    ),
    "undial": (
        "forget",
        {"objective": "undial", "beta": 3.0},
        lambda m, r, b: plain.undial(m, r, b, FORGET, 3.0),
    ),
    "nckd": (
        "forget",
        {"objective": "nckd", "temperature": 0.6, "k": 5},
        lambda m, r, b: plain.nckd(m, r, b, FORGET, 0.6, 5),
    ),
    **{
        f"rmu-{positions}": (
            "forget",
            {"objective": "rmu", "layer": 1, "coefficient": 3.0, "seed": 5, "positions": positions},
            lambda m, r, b, p=positions: plain.representation(
                m, r, b, FORGET, 1, lambda h: 3 * plain.control_vector(32, 5), p
            ),
        )
        for positions in ("answer", "all")
    },
    "adaptive_rmu": (
        "forget",
        {"objective": "adaptive_rmu", "layer": 1, "scale": 2.0, "positions": "all"},
        lambda m, r, b: plain.representation(
            m, r, b, FORGET, 1, lambda h: 2 * h.norm() * plain.control_vector(32, 0), "all"
        ),
    ),
    "hidden_mse": (
        "retain",
        {"objective": "hidden_mse", "layer": 1},
        lambda m, r, b: plain.representation(m, r, b, RETAIN, 1, lambda h: h),
    ),
    "po": ("forget", {"objective": "po"}, lambda m, r, b: plain.nll(m, b, ALTERNATIVES)),
    "dpo": (
        "forget",
        {"objective": "dpo", "beta": 0.3},
        lambda m, r, b: plain.dpo(m, r, b, FORGET, ALTERNATIVES, 0.3),
    ),
    **{
        f"flat-{name}": (
            "forget",
            {"objective": "flat", "divergence": name},
            lambda m, r, b, name=name: plain.flat(m, b, FORGET, ALTERNATIVES, name),
        )
        for name in _DIVERGENCES
    },
    "ceu": ("forget", {"objective": "ceu"}, lambda m, r, b: plain.ceu(m, b, FORGET)),
    **{
        config["objective"]: (
            "forget",
            config,
            lambda m, r, b, value=value: plain.over_labels(m, b, FORGET, value),
        )
        for config, value in (
            (
                {"objective": "masc", "rho": 0.02, "eta": 0.5, "k": 3, "b": 0.7},
                lambda logp, y: plain.masc(logp, y, 0.02, 0.5, 3, 0.7),
            ),
            (
                {"objective": "bst", "mix": 0.4, "top_k": 5},
                lambda logp, y: plain.bst(logp, y, 0.4, 5),
            ),
        )
    },
}


def left_padded(batch):
    """The same rows with the padding on the left."""
    out = {k: v.clone() for k, v in batch.items()}
    for row, length in enumerate(batch["attention_mask"].sum(-1).tolist()):
        for key in ("input_ids", "attention_mask", "labels"):
            out[key][row] = batch[key][row].roll(batch[key].shape[1] - length)
    return out


def test_every_registered_objective_has_an_oracle():
    from axolotl_unlearn.objectives import OBJECTIVES

    # test_reference_heldout.py: compare with rows, not with a model
    elsewhere = {"feature_matching", "hidden_matching"}
    assert {config["objective"] for _, config, _ in CASES.values()} == set(OBJECTIVES) - elsewhere


@pytest.mark.parametrize("chunk, padding", [(None, "right"), (3, "left")])
@pytest.mark.parametrize("name", sorted(CASES))
def test_loss_and_gradients_equal_the_plain_implementation(name, chunk, padding):
    """float64 model with LoRA; loss and every adapter gradient to 1e-5 (float32 log-softmax)."""
    side, config, oracle = CASES[name]
    entries = entries_for((side, config))
    batch = random_batch(seed=3, alternatives="alternative" in entries[0].objective.roles(side))
    base = tiny_llama(seed=1).double()
    reference_model = copy.deepcopy(base)
    model = with_lora(base).double()
    plan = ChunkPlan(positions=chunk)
    reference = make_reference("auto", model, starting_adapter=False)
    reference.plan = plan
    padded = left_padded(batch) if padding == "left" else batch
    result = step_loss(model, padded, entries, reference=reference, plan=plan)
    assert_oracle(result.total, oracle(model, reference_model, batch), model)


def all_entries():
    return entries_for(
        ("forget", {"objective": "npo", "weight": 0.4, "kinds": "completion"}),
        ("forget", {"objective": "npo", "weight": 0.2, "beta": 0.5, "kinds": "question"}),
        ("retain", {"objective": "nll", "weight": 0.4}),
        ("retain", {"objective": "kl", "weight": 0.2}),
    )


def plainly(model, start, batch):
    """The loss of `all_entries` on its three forget rows by the slow code of `plain`."""
    return (
        0.4 * plain.npo(model, start, batch, [0, 2], 0.1, "sum")
        + 0.2 * plain.npo(model, start, batch, [1], 0.5, "sum")
        + 0.4 * plain.nll(model, batch, RETAIN)
        + 0.2 * plain.kl(model, start, batch, RETAIN, "reverse", "answer")
    )


def lora_model(dropout=0.0):
    return with_lora(tiny_llama(seed=1).double(), dropout=dropout).double()


def reference_for(model, mode="auto"):
    return make_reference(mode, model, starting_adapter=False)


def test_entries_limited_to_kinds_split_the_forget_rows():
    """Rows 0 and 2 are completions, row 1 a question: two NPO terms with their own beta."""
    model, batch = lora_model(), random_batch(seed=3)
    result = step_loss(model, batch, all_entries(), reference=reference_for(model))
    assert_oracle(result.total, plainly(model, tiny_llama(seed=1).double(), batch), model)
    assert set(result.parts) >= {"forget/npo", "forget/npo.question", "retain/nll", "retain/kl"}


def test_the_log_has_a_position_s_kl_whatever_the_loss_is_divided_by():
    """ZJUKLAB's divisor, a padded length, made of it a number of no unit."""
    model, batch, found = with_lora(tiny_llama(seed=1)), random_batch(seed=3), []
    for more in ({}, {"divide_by_length": 256}):
        entries = entries_for(("retain", {"objective": "kl", **more}))
        parts = step_loss(model, batch, entries, reference=reference_for(model)).parts
        found.append({name: (total / count).item() for name, (total, count) in parts.items()})
    assert found[1]["kl"] == pytest.approx(found[0]["kl"]) and found[0]["kl"] > 0
    assert found[1]["retain/kl"] < found[0]["retain/kl"] / 2


def test_forget_rows_that_weigh_differently():
    """A token's value in GA, a row's in NPO, times the weight of its row; retain rows weigh 1."""
    model, batch = lora_model(), random_batch(seed=3)
    base = tiny_llama(seed=1).double()
    weight = torch.tensor([0.5, 2.0, 0.25, 9.0, 9.0], dtype=torch.float64)
    entries = entries_for(
        ("forget", {"objective": "ga"}),
        ("forget", {"objective": "npo", "beta": 0.1, "reduction": "sum"}),
        ("retain", {"objective": "nll"}),
    )
    batch = batch | {"weight": weight}
    got = step_loss(model, batch, entries, reference=reference_for(model)).total
    rows = [plain.row_logps(model, batch, row) for row in range(3)]
    values = [plain.npo(model, base, batch, [row], 0.1, "sum") for row in range(3)]
    expected = (
        sum(w * row.sum() for w, row in zip(weight, rows, strict=False)) / sum(map(len, rows))
        + sum(w * value for w, value in zip(weight, values, strict=False)) / 3
        + plain.nll(model, batch, RETAIN)
    )
    assert_oracle(got, expected, model)


def test_alternatives_go_with_forget_rows_of_their_kind():
    """Kinds 0, 1, 0 of forget rows and of their alternatives: DPO for questions sees rows 1 and 6
    alone. One forward for all roles, and one value a pair."""
    model, batch = lora_model(), random_batch(seed=3, alternatives=True)
    base = tiny_llama(seed=1).double()
    entries = entries_for(
        ("forget", {"objective": "dpo", "beta": 0.3, "kinds": "question"}),
        ("forget", {"objective": "flat", "kinds": "completion"}),
        ("retain", {"objective": "nll"}),
    )
    assert unit_counts(entries, batch)[:2].tolist() == [1, 2]
    learn_after_head(model, model, "cpu")
    can_pack(model, model, batch)
    runs: list[object] = []
    model.get_base_model().model.register_forward_hook(lambda *a: runs.append(a[0]))
    got = step_loss(model, batch, entries, reference=reference_for(model)).total
    assert len(runs) == 2  # the policy's and the reference's
    expected = (
        plain.dpo(model, base, batch, [1], [6], 0.3)
        + plain.flat(model, batch, [0, 2], [5, 7], "total_variation")
        + plain.nll(model, batch, RETAIN)
    )
    assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def slice_rows(batch, rows):
    return {k: v[rows] for k, v in batch.items()}


@pytest.mark.parametrize("cut", [[[0, 3], [1, 2, 4]], [[0, 1, 3], [2, 4]]])
def test_accumulation_gives_the_update_of_one_big_batch(cut):
    """Sums over units, divided by the counts of the whole step, whatever the cut."""
    model, batch, entries = lora_model(), random_batch(seed=3), all_entries()
    reference = reference_for(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    whole = torch.autograd.grad(
        step_loss(model, batch, entries, reference=reference).total, trained
    )
    parts = [slice_rows(batch, rows) for rows in cut]
    counts = sum(unit_counts(entries, part) for part in parts)
    sums = [torch.zeros_like(p) for p in trained]
    for part in parts:
        loss = step_loss(model, part, entries, reference=reference, counts=counts).total
        for total, gradient in zip(sums, torch.autograd.grad(loss, trained), strict=True):
            total += gradient
    for total, gradient in zip(sums, whole, strict=True):
        assert_close(total, gradient, rtol=1e-6, atol=1e-8)


def test_one_policy_forward_and_one_reference_forward():
    """The decoder runs once for the policy, once for the reference; later steps ask the
    reference for KL rows only, and with `cached` not at all."""
    for mode, later in (("auto", 1), ("cached", 0)):
        model, batch, entries = lora_model(), random_batch(seed=3), all_entries()
        reference = reference_for(model, mode)
        learn_after_head(model, model, "cpu")  # few tokens, once a model, as for packing
        can_pack(model, model, batch)
        runs: list[object] = []
        model.get_base_model().model.register_forward_hook(lambda *a, seen=runs: seen.append(a[0]))
        first = step_loss(model, batch, entries, reference=reference).total
        assert len(runs) == 2 and reference.forwards == 1
        second = step_loss(model, batch, entries, reference=reference).total
        assert len(runs) == 3 + later and reference.forwards == 1 + later
        assert_close(first, second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["auto", "frozen_copy", "cached"])
@pytest.mark.parametrize("dropout, checkpointing", [(0.0, False), (0.5, True)])
def test_references_agree_with_a_separately_loaded_model(mode, dropout, checkpointing):
    """All modes give the untouched base model's log-probs to 1e-5, in training mode too."""
    base = tiny_llama(seed=1).double()
    model = with_lora(copy.deepcopy(base), dropout=dropout, trained=False).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    reference = reference_for(model, mode)
    with torch.no_grad():  # training moves the adapter afterwards
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    batch, entries = random_batch(seed=3), all_entries()
    step_loss(model, batch, entries, reference=reference).total.backward()
    logp = reference.look_up(model, model, batch, ForwardSpec(labels=label_positions(batch))).logp
    for row in range(5):
        where = [t for t, _ in plain.label_positions(batch, row)]
        assert_close(
            logp[row, where].double(), plain.row_logps(base, batch, row), rtol=1e-5, atol=1e-5
        )
    assert model.training


def test_frozen_copy_of_a_starting_adapter_is_that_adapter_not_the_base():
    base = tiny_llama(seed=1).double()
    model = with_lora(base, trained=True).double()
    start = copy.deepcopy(model)
    reference = make_reference("auto", model, starting_adapter=True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    batch, entries = random_batch(seed=3), all_entries()
    got = step_loss(model, batch, entries, reference=reference).total
    expected = plainly(model, start, batch)
    assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("mode", ["frozen_copy", "cached"])
def test_trained_tokens_of_the_head_stay_as_they_were_in_the_reference(mode, tie):
    """PEFT makes the head's weight anew of the base's and what was trained: that of today was taken
    for that of the start."""
    tokens = [*range(3, 20)]
    trained = tokens if tie else {"lm_head": tokens, "embed_tokens": tokens}
    lora = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=trained)
    model = moved(get_peft_model(tiny_llama(seed=1, tie=tie).double(), lora))
    batch, entries, start = random_batch(seed=3), all_entries(), copy.deepcopy(model)
    reference = make_reference(mode, model, starting_adapter=True)
    step_loss(model, batch, entries, reference=reference)  # `cached` asks once
    got = step_loss(moved(model), batch, entries, reference=reference).total
    assert_close(got.double(), plainly(model, start, batch), rtol=1e-5, atol=1e-5)


def test_an_adapter_switched_off_is_no_reference_where_weights_of_the_base_train():
    """`unfrozen_parameters` beside a fresh LoRA: the reference moved with the policy."""
    model = with_lora(tiny_llama(seed=1).double(), trained=False).double()
    check_trained(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora_" in name or "up_proj" in name
    with pytest.raises(UnlearnError, match="2 weights outside of the adapter are trained"):
        check_trained(model)
    start, reference = copy.deepcopy(model), reference_for(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.requires_grad)
    batch = random_batch(seed=3)
    got = step_loss(model, batch, all_entries(), reference=reference).total
    assert_close(got.double(), plainly(model, start, batch), rtol=1e-5, atol=1e-5)
    with pytest.raises(UnlearnError, match="no parameter is trained"):
        check_trained(model.requires_grad_(False))


@pytest.mark.parametrize("tie", [False, True])
def test_full_fine_tuning_with_a_frozen_copy(tie):
    """Head and embeddings train too; the reference keeps their start values, and the gradient of
    every weight equals the plain implementation's."""
    model = tiny_llama(seed=1, tie=tie).double()
    start, plan = copy.deepcopy(model), ChunkPlan(positions=4)
    reference = make_reference("auto", model, starting_adapter=False)
    reference.plan = plan
    batch, entries = random_batch(seed=3), all_entries()
    got = step_loss(moved(model), batch, entries, reference=reference, plan=plan).total
    assert_oracle(got, plainly(model, start, batch), model)


def test_the_frozen_copy_is_swapped_in_under_torch_compile():
    """Compiled, every name begins with _orig_mod.: matched by name, nothing was swapped, the policy
    was its own reference, and KL and log-ratio were 0 at every step."""
    model = tiny_llama(seed=1).double()
    start = copy.deepcopy(model)
    reference = reference_for(model)
    compiled = torch.compile(model, backend="eager")
    batch, entries = random_batch(seed=3), all_entries()
    parts = step_loss(moved(compiled), batch, entries, reference=reference).parts
    expected = {
        "forget/npo": plain.npo(model, start, batch, [0, 2], 0.1, "sum"),
        "retain/kl": plain.kl(model, start, batch, RETAIN, "reverse", "answer"),
    }
    for name, value in expected.items():
        total, count = parts[name]
        assert_close(total.double() / count, value.detach(), rtol=1e-5, atol=1e-5)
    assert expected["retain/kl"] > 1e-3  # the comparison is not of zeros


def test_a_frozen_copy_of_weights_that_become_sharded_is_refused(tmp_path):
    """FSDP2 puts new parameters in place of those that were copied: swapping by name did not reach
    what the forward gathers, and the policy was its own reference."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model = with_lora(tiny_llama(seed=1), trained=True)
        reference = make_reference("auto", model, starting_adapter=True)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnlearnError, match="sharded over processes"):
            step_loss(moved(model), random_batch(seed=3), all_entries(), reference=reference)
        with pytest.raises(UnlearnError, match="sharded over processes"):
            make_reference("auto", model, starting_adapter=True)
    finally:
        torch.distributed.destroy_process_group()


def test_no_row_by_time_by_vocabulary_tensor_is_made():
    """Largest tensor in forward and backward stays below rows x time x vocabulary, and with
    small chunks follows the chunk (watched on every operation)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(value, torch.Tensor):
                    self.numel = max(self.numel, value.numel())
            return out

    vocabulary, time = 4001, 24
    batch = random_batch(seed=3, time=time, vocabulary=vocabulary)
    labelled = int((batch["labels"] != -100).sum())
    weights = vocabulary * 32  # the head itself
    sizes = {}
    for chunk in (None, 4):
        model = with_lora(tiny_llama(seed=1, vocabulary=vocabulary))
        reference = make_reference("auto", model, starting_adapter=False)
        reference.plan = ChunkPlan(positions=chunk)
        with Largest() as watch:
            step_loss(
                model, batch, all_entries(), reference=reference, plan=ChunkPlan(positions=chunk)
            ).total.backward()
        sizes[chunk] = watch.numel
    assert sizes[None] <= labelled * vocabulary < 5 * time * vocabulary
    assert sizes[4] <= max(weights, 4 * vocabulary)


def test_losses_of_either_side_and_weights_given_from_outside():
    """weights (.1, 0, .5, 2) for those of the config; the sides add up to the total."""
    model, batch, entries = lora_model(), random_batch(seed=3), all_entries()
    base = tiny_llama(seed=1).double()
    result = step_loss(
        model, batch, entries, reference=reference_for(model), weights=[0.1, 0.0, 0.5, 2.0]
    )
    forget = 0.1 * plain.npo(model, base, batch, [0, 2], 0.1, "sum")
    retain = 0.5 * plain.nll(model, batch, RETAIN) + 2 * plain.kl(
        model, base, batch, RETAIN, "reverse", "answer"
    )
    assert set(result.losses) == {"forget", "retain"}
    assert_close(result.total, result.losses["forget"] + result.losses["retain"])
    for side, expected in (("forget", forget), ("retain", retain)):
        assert_oracle(result.losses[side], expected, model)
    alone = step_loss(model, batch, entries[2:3])
    assert set(alone.losses) == {"retain"}
