"""The precomputed reference: on disk, resumable, never stale, and without a second model."""

from __future__ import annotations

import copy
import os
import random

import kills
import plain
import pytest
import torch
from conftest import CONFIGS, entries_for, moved, random_batch, tiny_llama, with_lora
from data_tokenizers import byte_tokenizer
from fault_codes import fails
from torch.testing import assert_close

from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.base import evaluating, precompute, weights_digest
from axolotl_unlearn.reference.start import adapters_off, make_reference
from axolotl_unlearn.reference.store import RowStore
from axolotl_unlearn.reference.teacher import Teacher, require_same_base, require_same_tokenizer


def cached(model, starting_adapter=False):
    return make_reference("cached", model, starting_adapter=starting_adapter, will_precompute=True)


@pytest.mark.parametrize(
    "kind",
    ["fresh adapter", "starting adapter", "starting adapter, head", "full", "full, tied head"],
)
@pytest.mark.parametrize("training", ["plain", "dropout", "checkpointing"])
def test_precomputed_reference_gives_the_loss_of_a_second_model(kind, training, tmp_path):
    """Precompute, train on, resume in a new process (a new object): always the start model's."""
    model = tiny_llama(seed=1, tie="tied" in kind).double()
    if "adapter" in kind:
        dropout = 0.5 if training == "dropout" else 0.0
        head, trained = ["lm_head"] if "head" in kind else None, "starting" in kind
        model = with_lora(model, dropout=dropout, trained=trained, saved=head).double()
    if training == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    start = copy.deepcopy(model).eval()
    entries, batch = entries_for(*CONFIGS), random_batch(seed=3)
    for run in range(2):
        reference = cached(model, "starting" in kind)
        forwards = precompute(reference, model, [batch], entries, tmp_path, progress=False)
        assert forwards == (1 if run == 0 else 0)
        reference.release(model, keep_head=True)
        trained = copy.deepcopy(model)
        moved(trained)
        if kind.startswith("full"):  # the head's own copy is the only one
            assert reference._head is not None
        assert not getattr(reference, "_frozen", {})
        trained.eval()  # the oracle cannot repeat dropout; the reference never has any
        got = step_loss(trained, batch, entries, reference=reference)
        want = plain.recipe(trained, start, batch)
        assert_close(got.total.double(), want, rtol=1e-5, atol=1e-5)


def adapted(kind):
    """Tiny models with an adapter; a layer of each kind that PEFT wraps."""
    import peft

    small = {"task_type": "CAUSAL_LM"}
    configs = {
        "lora": peft.LoraConfig(
            r=4, target_modules=["q_proj"], modules_to_save=["lm_head"],
            trainable_token_indices={"embed_tokens": [3]}, **small,
        ),
        "dora": peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, **small),
        "ia3": peft.IA3Config(
            target_modules=["v_proj"], feedforward_modules=[], init_ia3_weights=False, **small
        ),
        "norms": peft.LNTuningConfig(target_modules=["input_layernorm"], **small),
        "prefix": peft.PromptTuningConfig(num_virtual_tokens=2, **small),
    }  # fmt: skip
    model = peft.get_peft_model(tiny_llama(seed=1), configs[kind]).train()
    moved(model)
    return model


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "norms", "prefix"])
def test_without_its_adapters_a_model_is_as_peft_makes_it(kind):
    """To the bit; afterwards all is as before: flags, what is trained, modes (a part that stood in
    evaluation stays there). Tuners but LoRA are asked."""
    model = adapted(kind)
    model.get_base_model().model.norm.eval()
    state = [
        (name, m.training, getattr(m, "_disable_adapters", None))
        for name, m in model.named_modules()
    ]
    trained = [p.requires_grad for p in model.parameters()]
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        with_adapters = model(ids).logits
        model.eval()
        with model.disable_adapter():
            want = model(ids).logits
    model.train()
    model.get_base_model().model.norm.eval()
    assert not torch.equal(want, with_adapters)
    with torch.no_grad(), evaluating(model), adapters_off(model):
        assert not any(module.training for module in model.modules())
        if kind in ("lora", "dora"):  # by flags alone
            assert [p.requires_grad for p in model.parameters()] == trained
        assert torch.equal(model(ids).logits, want)
    assert [p.requires_grad for p in model.parameters()] == trained
    assert state == [
        (name, m.training, getattr(m, "_disable_adapters", None))
        for name, m in model.named_modules()
    ]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, with_adapters)


def test_a_reference_with_an_adapter_that_is_on_is_an_error():
    """What switches one on again while the reference runs would make the policy its reference."""
    model = adapted("lora")
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    hook = layer.register_forward_hook(lambda *_: layer.enable_adapters(True))
    reference = make_reference("auto", model, starting_adapter=False)
    with pytest.raises(UnlearnError, match="adapter was on while the reference ran"):
        step_loss(model, random_batch(seed=3), entries_for(*CONFIGS), reference=reference)
    hook.remove()
    assert not any(getattr(m, "_disable_adapters", False) for m in model.modules())
    assert all(module.training for module in model.modules())


def test_rows_that_are_not_stored_are_an_error_once_released(tmp_path):
    model, entries = tiny_llama(seed=1), entries_for(*CONFIGS)
    reference = cached(model)
    precompute(reference, model, [random_batch(seed=3)], entries, tmp_path, progress=False)
    reference.release(model, keep_head=True)
    with pytest.raises(UnlearnError, match="has not seen"):
        step_loss(model, random_batch(seed=4), entries, reference=reference)


def test_killed_with_kill_9_a_precomputation_goes_on(tmp_path):
    """At drawn moments: what is on the disk is kept, and all numbers are those of a run in peace,
    bit for bit."""
    model, entries = tiny_llama(seed=1), entries_for(*CONFIGS)
    batches = [random_batch(seed=s) for s in range(4)]

    def asked(folder):
        return precompute(cached(model), model, batches, entries, folder, progress=False)

    def stored(folder):
        (home,) = folder.iterdir()
        store = RowStore(home, "answers")
        return {key: store[key] for key in store}

    assert asked(tmp_path / "whole") == 4
    whole = {key: value.numpy().tobytes() for key, value in stored(tmp_path / "whole").items()}
    last, rng = kills.moments(lambda: asked(tmp_path / "try"), tmp_path), random.Random(0)
    shares = []
    for number in range(4):
        folder = tmp_path / f"killed {number}"
        kills.kill_at(lambda folder=folder: asked(folder), rng.randrange(last // 4, last), tmp_path)
        shares.append(asked(folder))
        again = {key: value.numpy().tobytes() for key, value in stored(folder).items()}
        assert kills.same(whole, again)
    assert min(shares) < 4, "nothing was ever kept"


@pytest.mark.parametrize(
    "change", ["weight", "config", "precision", "tokens", "labels", "positions"]
)
def test_nothing_stale_is_ever_used(change, tmp_path):
    """Whatever changes what the reference would say makes it say it again."""
    model, batch = tiny_llama(seed=1), random_batch(seed=3)
    entries, precision = entries_for(*CONFIGS), "float32"
    precompute(cached(model), model, [batch], entries, tmp_path, progress=False)
    if change == "weight":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    elif change == "config":
        model.config.rms_norm_eps = 1e-3
    elif change == "precision":
        precision = "bf16"
    elif change == "tokens":
        batch["input_ids"][3, 0] += 1
    elif change == "labels":
        batch["labels"][3, : int(batch["attention_mask"][3].sum())] = batch["input_ids"][
            3, : int(batch["attention_mask"][3].sum())
        ]
    else:
        entries = entries_for(*CONFIGS[:2], ("retain", {"objective": "kl", "positions": "all"}))
    reference = cached(model)
    assert (
        precompute(
            reference, model, [batch], entries, tmp_path, precision=precision, progress=False
        )
        == 1
    )


@pytest.mark.parametrize("gib", [1.0, 1100 / 2**30])
def test_states_are_remembered_and_a_killed_run_goes_on_with_those_of_its_checkpoint(gib, tmp_path):
    """Four batches, the first two again. A run killed after the third goes on from a checkpoint
    after the second: what came later is forgotten, so the third batch is asked of the same rows,
    and every loss is that of the whole run to the last bit. 1 100 bytes take some rows."""
    model, entries = with_lora(tiny_llama(seed=1)), entries_for(*CONFIGS)
    batches = [random_batch(seed=seed) for seed in (0, 1, 2, 3, 0, 1)]
    batches[2]["input_ids"][4], batches[2]["labels"][4] = (
        batches[0][name][4] for name in ("input_ids", "labels")
    )

    def reference(folder):
        made = make_reference("auto", model, starting_adapter=False)
        return made, tmp_path / folder

    def losses(asked, chosen):
        return [step_loss(model, batch, entries, reference=asked).total.item() for batch in chosen]

    whole, folder = reference("whole")
    whole.keep_for_run(folder, gib)
    expected = losses(whole, batches)
    assert whole.forwards == (4 if gib == 1 else 6)
    store = RowStore(folder, "answers")
    kept = sum(store[key].nbytes for key in store if store[key].dim() == 2)
    assert 0 < kept <= gib * 2**30
    killed, folder = reference("killed")
    killed.keep_for_run(folder, gib)
    losses(killed, batches[:2])
    checkpoint = killed.count
    losses(killed, batches[2:3])
    killed.refresh()
    resumed, _ = reference("killed")
    resumed.keep_for_run(folder, gib, known=checkpoint)
    assert losses(resumed, batches[2:]) == expected[2:]
    assert resumed.forwards == (2 if gib == 1 else 4)
    afresh, _ = reference("killed")
    afresh.keep_for_run(folder, gib)
    assert losses(afresh, batches) == expected and afresh.forwards == whole.forwards


def test_a_checkpoint_without_the_answers_that_it_counts_is_said(tmp_path, caplog):
    """One that was copied alone, or whose run's folder another run has begun anew."""
    model = with_lora(tiny_llama(seed=1))
    reference = make_reference("auto", model, starting_adapter=False)
    reference.keep_for_run(tmp_path, 1, known=7)
    assert "answers-0.bin holds 0 of the 7 answers" in caplog.text


@pytest.mark.parametrize("bit", [1, 0x80])
def test_a_changed_bit_in_a_store_is_a_sentence_or_a_row_that_is_asked_again(tmp_path, bit):
    store = RowStore(tmp_path, "logp")
    values = {bytes([i]) * 16: torch.arange(5.0) + i for i in range(3)}
    for key, value in values.items():
        store[key] = value
    store.close()
    path = tmp_path / "logp-0.bin"
    content = path.read_bytes()
    for place in range(len(content) // 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        try:
            read = {key: store[key] for store in [RowStore(tmp_path, "logp")] for key in store}
        except UnlearnError as error:
            assert "damaged" in str(error)
        else:
            assert all(torch.equal(value, values[key]) for key, value in read.items()), place


def test_digest_of_a_fresh_adapter_is_that_of_its_base():
    """The adapter is off in the reference, so its (unseeded) start does not matter. That of a
    starting adapter, and its scale (an edited `lora_alpha`), do."""
    models = [with_lora(tiny_llama(seed=1), seed=seed) for seed in (0, 1)]
    assert len({weights_digest(model, without_adapter=True) for model in models}) == 1
    found = {weights_digest(model, without_adapter=False) for model in models}
    for layer in models[0].modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 0.5)
    assert len(found | {weights_digest(models[0], without_adapter=False)}) == 3


# -- a teacher: another model, or another adapter of the same base -------------------------------

KL_BOTH_WAYS = (
    ("forget", {"objective": "npo", "weight": 0.4}),
    ("retain", {"objective": "kl", "weight": 0.2}),
    ("retain", {"objective": "kl", "weight": 0.3, "direction": "forward"}),
)


@pytest.fixture
def teachers(tmp_path):
    """A base, and an adapter of it, in folders; the base with the adapter, as a model."""
    tiny_llama(seed=1).save_pretrained(tmp_path / "base")
    taught = with_lora(tiny_llama(seed=1), seed=5)
    taught.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    taught.save_pretrained(tmp_path / "adapter")
    tiny_llama(seed=2).save_pretrained(tmp_path / "other")
    return tmp_path, taught


def policy_of(folder, kind):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    return base if kind == "full" else with_lora(base, seed=3, trained=kind == "starting adapter")


@pytest.mark.parametrize("teacher", ["model", "model with adapter"])
@pytest.mark.parametrize("kind", ["fresh adapter", "starting adapter", "full"])
def test_a_teacher_is_the_separately_run_model(teacher, kind, teachers):
    """NPO and KL in both directions equal those to a model of its own, to float32; the policy is
    left as it was: the same weights are trained, nothing else is left in it."""
    folder, taught = teachers
    policy, batch, entries = (
        policy_of(folder, kind),
        random_batch(seed=3),
        entries_for(*KL_BOTH_WAYS),
    )
    before = {n: (p.requires_grad, p.detach().clone()) for n, p in policy.named_parameters()}
    if teacher == "model":
        taught, reference = tiny_llama(seed=2), Teacher(str(folder / "other"))
    else:
        reference = Teacher(str(folder / "base"), str(folder / "adapter"))
    with reference.opened(policy) as model:
        precompute(reference, model, [batch], entries, folder / "store", progress=False)
        reference.release(model, keep_head=True)
    after = {n: (p.requires_grad, p.detach().clone()) for n, p in policy.named_parameters()}
    assert before.keys() == after.keys()
    assert all(before[n][0] == after[n][0] and before[n][1].equal(after[n][1]) for n in before)
    moved(policy)
    got = step_loss(policy, batch, entries, reference=reference)
    policy, taught = policy.eval(), taught.eval()
    want = (
        0.4 * plain.npo(policy, taught, batch, [0, 1, 2], 0.1, "sum")
        + 0.2 * plain.kl(policy, taught, batch, [3, 4], "reverse", "answer")
        + 0.3 * plain.kl(policy, taught, batch, [3, 4], "forward", "answer")
    )
    assert_close(got.total.double(), want, rtol=1e-4, atol=1e-4)
    assert plain.kl(policy, taught, batch, [3, 4], "reverse", "answer") > 0.01  # not the policy


def test_a_teacher_is_never_the_policy(teachers):
    """Asked about a row that it was not shown, it says so; the policy does not answer for it."""
    folder, _ = teachers
    policy, entries = policy_of(folder, "full"), entries_for(*KL_BOTH_WAYS)
    reference = Teacher(str(folder / "other"))
    with pytest.raises(UnlearnError, match="before training only"):
        step_loss(policy, random_batch(seed=3), entries, reference=reference)


def test_an_adapter_of_another_base_is_refused(teachers):
    folder, _ = teachers
    require_same_base(str(folder / "adapter"), str(folder / "base"))
    with fails("reference.other-base"):
        require_same_base(str(folder / "adapter"), str(folder / "other"))
    with fails("reference.no-adapter"):
        require_same_base(str(folder / "other"), str(folder / "base"))


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path):
    """A padding token that one of them lacks is no other tokenizer; one other word is."""
    ours = byte_tokenizer()
    for name, other in {
        "same": byte_tokenizer(),
        "other": byte_tokenizer(eos_token="<end>"),
    }.items():
        other.save_pretrained(tmp_path / name)
    require_same_tokenizer(str(tmp_path / "same"), ours)
    ours.add_special_tokens({"pad_token": "<nothing>"})
    require_same_tokenizer(str(tmp_path / "same"), ours)
    with pytest.raises(UnlearnError, match=r"other` has another tokenizer .* \(1 tokens of"):
        require_same_tokenizer(str(tmp_path / "other"), ours)
    with pytest.raises(UnlearnError, match="has no tokenizer"):
        require_same_tokenizer(str(tmp_path), ours)


def test_a_teacher_is_whole_in_every_process_where_the_policy_is_in_parts(tmp_path, monkeypatch):
    """FSDP's loading of the policy by the first process alone left a teacher empty in the others
    (weights on no device), and it was sent to where the policy was: nowhere."""
    from torch import distributed as dist

    tiny_llama(seed=2).save_pretrained(tmp_path / "teacher")
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
                        "LOCAL_RANK": "1", "RANK": "0"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        policy = tiny_llama(seed=1).to("meta")
        teacher = Teacher(str(tmp_path / "teacher"))
        teacher.device = torch.device("cpu")
        with teacher.opened(policy) as model:
            assert {p.device.type for p in model.parameters()} == {"cpu"}
            expected = dict(tiny_llama(seed=2).named_parameters())
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[name]), name
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    finally:
        dist.destroy_process_group()
