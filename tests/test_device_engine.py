"""The pretended accelerator itself, and the engine and evaluation on it: the numbers of the
processor, and what the host waits for."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pretend_device
import pytest
import torch
from accelerate import dispatch_model
from conftest import CONFIGS, entries_for, random_batch, tiny_llama, with_lora
from test_eval_generate import PROMPTS, Words

from axolotl_unlearn.engine.batch import Batch, to_host
from axolotl_unlearn.engine.head import bare_model
from axolotl_unlearn.engine.needs import ForwardSpec, label_positions
from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.engine.token_scoring import Query, score_queries, score_texts
from axolotl_unlearn.evaluation.generate import generate_greedily
from axolotl_unlearn.objectives import OBJECTIVES
from axolotl_unlearn.reference.level import Level
from axolotl_unlearn.reference.start import make_reference
from axolotl_unlearn.training.level import LevelledReference, profiles

pytestmark = pytest.mark.usefixtures("pretended")
PACKAGE = Path(__file__).parents[1] / "axolotl_unlearn"


@pytest.mark.parametrize("other", ["cpu", "pretend:1"])
@pytest.mark.parametrize("mixed", [
    lambda here, there: here + there,
    lambda here, there: here @ there.T,
    lambda here, there: torch.cat([here, there]),
    lambda here, there: here[0, 0] * there,
])  # fmt: skip
def test_tensors_of_two_devices_do_not_mix(mixed, other):
    here, there = (torch.ones(3, 3, device=device) for device in ("pretend:0", other))
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        mixed(here, there)


@pytest.mark.parametrize("waiting, allowed", [
    (lambda x: x.sum().item(), lambda x: x.sum()),
    (lambda x: bool(x.any()), lambda x: x.any()),
    (lambda x: x.cpu(), lambda x: x.to("pretend:1")),
    (lambda x: x.nonzero(), lambda x: x.argmax()),
    (lambda x: x[x > 0], lambda x: x.masked_fill(x > 0, 0)),
    (lambda x: torch.repeat_interleave(x[0].long()), lambda x: x[0].repeat(2)),
    (lambda x: torch.tensor([1], device=x.device), lambda x: torch.ones(1, device=x.device)),
    (
        lambda x: torch.ones(2).to(x.device, non_blocking=True),
        lambda x: torch.ones(2).pin_memory().to(x.device, non_blocking=True),
    ),
    (lambda x: torch.accelerator.synchronize(), lambda x: x.new_empty(3)),
])  # fmt: skip
def test_what_waits_is_counted(waiting, allowed):
    tensor = torch.ones(3, 3, device="pretend")
    with pretend_device.watch(__file__) as seen:
        allowed(tensor)
        assert not seen.total
        waiting(tensor)
    ((_, place), times) = next(iter(seen.waits.items()))
    assert seen.total == times == 1 and Path(__file__).name in place


def test_what_nobody_wrote_is_no_number_and_bytes_are_counted():
    memory = torch.pretend
    before = memory.memory_allocated()
    memory.reset_peak_memory_stats()
    made = torch.empty(1024, 256, device="pretend")
    assert made.isnan().all().item()
    filled = made.fill_(1).to(torch.float16) @ torch.ones(256, 8, device="pretend").half()
    there = torch.zeros(512, 4, device="pretend:1")
    del made
    assert memory.memory_allocated() - before == filled.numel() * 2 and there.numel() * 4 == 8192
    assert memory.max_memory_allocated() - before >= 1024 * 256 * 6
    assert memory.memory_allocated(1) >= 8192


# --- the engine ----------------------------------------------------------------------------------


#: A model over two devices: tokens go in on the first, logits come out on the second.
SPREAD = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), "pretend:0")
SPREAD |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "pretend:1")

PAIRED = {name for name, one in OBJECTIVES.items() if one.sees == "pairs"}


def placed(model, place: str):
    """A model somewhere, or spread."""
    if place != "spread":
        return model.to(place)
    dispatch_model(bare_model(model), SPREAD, main_device="pretend:0")
    return model


def steps(
    place: str, *configs, lora: bool = True
) -> tuple[list[float], torch.Tensor, pretend_device.Watch]:
    """Three steps with LoRA, the last two of the same rows: losses, the last gradient, and what the
    last step asked of the device."""
    model = placed(with_lora(tiny_llama()) if lora else tiny_llama(), place).train()
    reference = make_reference("auto", model, starting_adapter=False)
    reference.remember_hidden = True
    entries, losses = entries_for(*configs), []
    device = torch.device("pretend:0" if place == "spread" else place)
    for seed in (0, 1, 1):
        batch = random_batch(seed, alternatives=any(PAIRED & {*one.values()} for _, one in configs))
        batch = Batch.sent({name: v.numpy() for name, v in batch.items()}, device)
        model.zero_grad()
        with pretend_device.watch("/axolotl_unlearn/") as seen:
            loss = step_loss(model, batch, entries, reference=reference).total
            loss.backward()
        losses.append(loss.item())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return losses, torch.cat([gradient.flatten().cpu() for gradient in gradients]), seen


def same_steps(place: str, *configs, **how) -> pretend_device.Watch:
    """Steps somewhere are those of the processor."""
    expected, gradient, _ = steps("cpu", *configs, **how)
    losses, found, seen = steps(place, *configs, **how)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)
    return seen


def test_a_step_is_that_of_the_processor_and_waits_for_nothing():
    seen = same_steps("pretend:0", *CONFIGS)
    assert seen.operations > 100 and seen.total == 0, str(seen)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("name", [n for n, one in OBJECTIVES.items() if not one.against_heldout])
def test_a_model_over_two_devices_trains_with_every_objective(name, lora):
    """Each ended in torch's error of tensors on two devices."""
    objective = {"objective": name}
    if OBJECTIVES[name].sees == "hidden":
        objective["layer"] = 0
    side = "retain" if OBJECTIVES[name].side == "retain" else "forget"
    same_steps("spread", (side, objective), ("retain", {"objective": "kl"}), lora=lora)


def test_a_model_over_two_devices_is_scored_as_on_one():
    queries = [Query.of(range(3, 3 + n)) for n in (9, 4)]
    alone, spread = (score_queries(placed(tiny_llama(), p), queries) for p in ("cpu", "spread"))
    for one, other in zip(alone, spread, strict=True):
        for found, expected in ((other.logp, one.logp), (other.sd, one.sd)):  # made in float32
            torch.testing.assert_close(
                torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-6
            )


def test_copies_from_several_devices_are_all_waited_for(monkeypatch):
    """One from the second was read while it was under way: only the first was waited for."""
    waited, real = [], torch.accelerator.current_stream
    said = lambda device: waited.append(str(device)) or real(device)  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_stream", said)
    places = ("cpu", "pretend:0", "pretend:1", "pretend:1")
    copied = to_host([torch.full((2,), n, device=place) for n, place in enumerate(places)])
    assert sorted(waited) == ["pretend:0", "pretend:1"]
    assert [one.tolist() for one in copied] == [[n, n] for n in range(4)]


def test_no_double_is_made_on_a_device_that_may_have_none(monkeypatch):
    """Apple's has none: a look ended at the first row."""
    real = torch.Tensor.double

    def double(self):
        assert self.device.type == "cpu", "no float64"
        return real(self)

    monkeypatch.setattr(torch.Tensor, "double", double)
    rows = [{"input_ids": [*range(3, 9)], "labels": [-100, *range(4, 9)]}]
    here, there = (profiles(tiny_llama().to(place), rows)[0] for place in ("cpu", "pretend"))
    assert there.dtype == torch.float64
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5)


def test_the_level_is_aimed_at_without_a_wait_for_any_row():
    """`match` waited twelve times for every forget row."""
    place, batch = torch.device("pretend:0"), random_batch(forget=6)
    model = with_lora(tiny_llama()).to(place)
    asked = make_reference("auto", model, starting_adapter=False)
    batch = Batch.sent({name: values.numpy() for name, values in batch.items()}, place)
    level, needs = Level(), ForwardSpec(labels=label_positions(batch))
    rows = {group: [-torch.rand(40)] for group in itertools.product((0, 1), (1, 2, 3))}
    level.fit(rows, {group: [2 * one[0]] for group, one in rows.items()})
    plain = asked.look_up(model, model, batch, needs).logp
    levelled = LevelledReference(asked, level, tempered=False)
    with pretend_device.watch("/axolotl_unlearn/") as seen:
        found = levelled.look_up(model, model, batch, needs).logp
    assert seen.total == 0, str(seen)
    where = needs.labels[4]
    group = (int(batch["kind"][4]), int(batch["task"][4]))
    expected = level.aim(plain[4, where].cpu(), group)
    torch.testing.assert_close(found[4, where].cpu(), expected)
    assert not torch.equal(expected, plain[4, where].cpu())


# --- evaluation ----------------------------------------------------------------------------------

TOKENS = 24


def forwards(model) -> list[int]:
    """Rows of each forward, as they come."""
    seen: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    return seen


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1] * 3])
def test_generation_waits_less_than_once_a_token(prompts):
    """Forwards: as many as `model.generate` makes, and one a token of the prompts' spread."""
    model = tiny_llama(seed=3)
    model.generation_config.eos_token_id = None
    how = {"max_new_tokens": TOKENS, "batch_size": 64}
    expected = generate_greedily(model, Words(), prompts, **how)
    model, lengths = model.to("pretend"), [len(Words()(one)["input_ids"]) for one in prompts]
    seen = forwards(model)
    with pretend_device.watch("/axolotl_unlearn/", "/transformers/") as watch:
        found = generate_greedily(model, Words(), prompts, **how)
    assert found == expected
    assert len(seen) <= TOKENS + max(lengths) - min(lengths)
    assert watch.total <= len(seen) / 2, str(watch)


def test_all_facts_of_a_text_come_of_one_forward():
    """Log-probability, arg max, mean and spread of each token; a wait for each batch, and one of
    transformers, which looks for packed rows."""
    model, texts = tiny_llama(seed=3), [one for one in PROMPTS if " " in one]
    expected = score_texts(model, Words(), texts)
    model = model.to("pretend")
    seen = forwards(model)
    score_texts(model, Words(), texts[:1])  # what is verified once a model
    seen.clear()
    with pretend_device.watch("/axolotl_unlearn/", "/transformers/") as watch:
        found = score_texts(model, Words(), texts, batch_tokens=40)
    assert sum(seen) == len(set(texts)), seen
    assert watch.total <= 2 * len(seen), str(watch)
    for one, other in zip(found, expected, strict=True):
        for name in ("logp", "greedy", "mean", "sd"):
            ours, theirs = (torch.as_tensor(getattr(x, name)) for x in (one, other))
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_no_module_but_one_names_an_accelerator():
    named = re.compile(r"\b(cuda|xpu|npu|hpu|mps|is_cuda|is_xpu|pin_memory)\b")
    found = {
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "device.py"
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if named.search(line.partition("#")[0]) and "dataloader_pin_memory" not in line
    }
    assert not found, "\n".join(sorted(found))
