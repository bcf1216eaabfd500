"""The engine in two gloo processes: ``torchrun --nproc_per_node=2 two_ranks.py OUT``.

Each process gets some rows of one batch, only the first gets rows that KL is for. Written to OUT:
the largest difference of any adapter gradient from one process with the whole batch, under DDP,
under FSDP2 and, where DeepSpeed is installed, under ZeRO; the same of full fine-tuning under FSDP2
with a reference that was asked before the model was sharded; and what the comparison is worth (the
largest gradient).
"""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from conftest import random_batch, tiny_llama, with_lora  # noqa: E402

from axolotl_unlearn.config import ObjectiveArgs  # noqa: E402
from axolotl_unlearn.engine.head_losses import ChunkPlan  # noqa: E402
from axolotl_unlearn.engine.layers import freeze_after  # noqa: E402
from axolotl_unlearn.engine.step import step_loss  # noqa: E402
from axolotl_unlearn.engine.views import make_entries, unit_counts
from axolotl_unlearn.reference.start import make_reference  # noqa: E402
from research.methods.surgery import Surgery  # noqa: E402

CONFIGS = (
    ("forget", {"objective": "npo", "weight": 0.4}),
    ("retain", {"objective": "nll", "weight": 0.4}),
    ("retain", {"objective": "kl", "weight": 0.2, "kinds": "question"}),
)
#: The first ends at layer 0 on both processes; the second where a process has no retain row.
RMU = ("forget", {"objective": "rmu", "layer": 0, "positions": "all"})
HIDDEN = (RMU, ("retain", {"objective": "hidden_mse", "layer": 0, "positions": "all"}))
MIXED = (RMU, ("retain", {"objective": "kl"}))
ROWS = ([0, 3], [1, 2, 4])  # row 3 is the only retained question


def losses_of(model, wrapped, batch, entries, counts, scale):
    """The loss of a step, with a reference of its own."""
    reference = make_reference("auto", model, starting_adapter=False, plan=ChunkPlan())
    given = {"reference": reference, "unwrapped": model, "counts": counts, "scale": scale}
    return lambda: step_loss(wrapped, batch, entries, **given)


def gradients(model, wrapped, batch, entries, counts, scale):
    """Two steps without an update: the second has the forget rows' reference in memory."""
    of_step = losses_of(model, wrapped, batch, entries, counts, scale)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        of_step().total.backward()
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def hidden(start, batch, rows, configs):
    """The largest difference under DDP, of objectives on hidden states."""
    entries = make_entries([(side, ObjectiveArgs(**config)) for side, config in configs])
    mine = {key: value[rows] for key, value in batch.items()}
    counts = unit_counts(entries, mine)
    dist.all_reduce(counts)
    model, whole = copy.deepcopy(start), copy.deepcopy(start)
    if configs is HIDDEN:
        freeze_after(model, 0)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    found = gradients(model, ddp, mine, entries, counts, 2)
    expected = gradients(whole, whole, batch, entries, None, 1)
    assert configs is not HIDDEN or found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def under_zero(level, model, batch, entries, counts):
    """The same with weights, gradients or the optimizer's state sharded by DeepSpeed."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    trained = [p for p in model.parameters() if p.requires_grad]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": level, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(trained, lr=0.0), config=settings
    )
    if level == 3:  # no process has a whole weight
        assert not any(p.numel() for p in model.parameters())
    of_step = losses_of(model, engine, batch, entries, counts, 2)
    for _ in range(2):
        engine.backward(of_step().total)
        found = {n: safe_get_full_grad(p) for n, p in model.named_parameters() if p.requires_grad}
        engine.step()
    return {name: grad.clone() for name, grad in found.items()}


def asked_before(model, batch, entries):
    """A reference that knows the batch and computes nothing more, from a model that is whole."""
    reference = make_reference(
        "cached", model, starting_adapter=False, plan=ChunkPlan(), will_precompute=True
    )
    with torch.no_grad():
        step_loss(model, batch, entries, reference=reference, unwrapped=model)
    reference.release(model, keep_head=True)
    return reference


def after_updates(model, batch, entries, reference, counts, scale):
    """Gradients of the third step of SGD in full fine-tuning: the reference is not the policy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    given = {"reference": reference, "unwrapped": model, "counts": counts, "scale": scale}
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        step_loss(model, batch, entries, **given).total.backward()
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }


def mean_over_ranks(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def joined(model, wrapped, batch, entries, counts, scale, reduce):
    """PCGrad of both sides."""
    of_step = losses_of(model, wrapped, batch, entries, counts, scale)
    surgery = Surgery(method="pcgrad")
    surgery.begin(SimpleNamespace(reduce=lambda x: reduce(x) * dist.get_world_size()))
    with getattr(wrapped, "no_sync", nullcontext)():
        losses = of_step().losses
    surgery.add(model, losses)
    surgery.finish()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    entries = make_entries([(side, ObjectiveArgs(**config)) for side, config in CONFIGS])
    batch = random_batch(seed=3)
    mine = {key: value[ROWS[rank]] for key, value in batch.items()}
    counts = unit_counts(entries, mine)
    dist.all_reduce(counts)
    start = with_lora(tiny_llama(seed=1)).train()
    whole = copy.deepcopy(start)
    found = {}

    model = copy.deepcopy(start)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    found["ddp"] = gradients(model, ddp, mine, entries, counts, 2)

    sides = [0, 1, 2], [3, 4]  # forget, retain rows
    rmu = {
        "rmu": hidden(start, batch, ROWS[rank], HIDDEN),
        "rmu and kl": hidden(start, batch, sides[rank], MIXED),
    }

    found["pcgrad"] = joined(model, ddp, mine, entries, counts, 2, mean_over_ranks)

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = copy.deepcopy(start)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found["fsdp2"] = gradients(model, model, mine, entries, counts, 2)

    if util.find_spec("deepspeed"):
        for level in (1, 2, 3):
            model = copy.deepcopy(start)
            found[f"zero {level}"] = under_zero(level, model, mine, entries, counts)

    full = tiny_llama(seed=1).train()
    model = copy.deepcopy(full)
    reference = asked_before(model, mine, entries)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = after_updates(model, mine, entries, reference, counts, 2)

    if rank == 0:
        # No process group matters here: the whole batch in one process.
        expected = gradients(whole, whole, batch, entries, None, 1)
        together = joined(whole, whole, batch, entries, None, 1, lambda tensor: tensor)
        result = {
            way: max(
                (got[n] - (together if way == "pcgrad" else expected)[n]).abs().max().item()
                for n in expected
            )
            for way, got in found.items()
        }
        reference = asked_before(full, batch, entries)
        alone = after_updates(full, batch, entries, reference, None, 1)
        result["fsdp2 full"] = max((sharded[n] - alone[n]).abs().max().item() for n in alone)
        result |= rmu
        result["largest"] = max(g.abs().max().item() for g in expected.values())
        Path(out).write_text(json.dumps(result), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
