"""Training in parts: ``torchrun --nproc_per_node=2 two_ranks_sharded.py OUT``.

Each of two gloo processes has half of every weight (FSDP2) and some rows of one batch. The starting
model is asked in its parts before the first step. Written to OUT, for each objective: the largest
difference of loss and gradient at the third step from one process with the whole batch, and the
largest gradient.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent))
from conftest import CONFIGS, entries_for, random_batch, tiny_llama, with_lora  # noqa: E402

from axolotl_unlearn.engine.step import step_loss  # noqa: E402
from axolotl_unlearn.engine.views import unit_counts  # noqa: E402
from axolotl_unlearn.objectives import OBJECTIVES  # noqa: E402
from axolotl_unlearn.reference.base import asks_for_logits, precompute  # noqa: E402
from axolotl_unlearn.reference.sharded import whole  # noqa: E402
from axolotl_unlearn.reference.start import make_reference  # noqa: E402

ROWS = ([0, 3, 5], [1, 2, 4, 6, 7])  # pairs stay together


def configs(name):
    """An objective on the side it is for, and something plain on the other."""
    objective = OBJECTIVES[name]
    config = {"objective": name, "weight": 0.4} | (
        {"layer": 0} if "layer" in objective.parameters else {}
    )
    side = "retain" if objective.side == "retain" else "forget"
    other = {"forget": ("retain", "nll"), "retain": ("forget", "npo")}[side]
    return (side, config), (other[0], {"objective": other[1], "weight": 0.4})


def third_step(model, batch, entries, folder, sharded):
    """Loss and gradients when two updates have led away from the starting model."""
    counts = unit_counts(entries, batch)
    if sharded:
        dist.all_reduce(counts)
    reference = make_reference("auto", model, starting_adapter=False, sharded=sharded)
    if sharded and folder:
        precompute(reference, model, [batch], entries, folder, part=dist.get_rank())
        reference.release(model, keep_head=asks_for_logits(entries))
        dist.barrier()
        reference.save_start(Path(folder, "start")) if dist.get_rank() == 0 else None
        dist.barrier()
        start = reference
        # As a resumed run has it.
        reference = make_reference("auto", model, starting_adapter=False, sharded=True)
        reference.load_start(Path(folder, "start"), torch.device("cpu"), dist.get_rank())
        assert reference._known.path == start._known.path
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.02)
    given = {"reference": reference, "counts": counts, "scale": 2 if sharded else 1}
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        loss = step_loss(model, batch, entries, **given).total
        loss.backward()
    loss = loss.detach().clone()
    if sharded:
        dist.all_reduce(loss)
        loss /= 2
    return loss, {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    batch = random_batch(seed=3, alternatives=True)
    mine = {key: value[ROWS[dist.get_rank()]] for key, value in batch.items()}
    found = {}
    runs = {n: one for n, one in OBJECTIVES.items() if not one.against_heldout} | {"lora": None}
    for name, objective in runs.items():
        entries = entries_for(*(configs(name) if objective else CONFIGS))
        start = tiny_llama(seed=1).train()
        start = start if objective else with_lora(start)
        loss, gradients = third_step(copy.deepcopy(start), batch, entries, None, False)
        folder = [tempfile.mkdtemp() if objective else None]
        dist.broadcast_object_list(folder)
        model = copy.deepcopy(start)
        for layer in (model if objective else model.get_base_model()).model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        own_loss, own = third_step(model, mine, entries, folder[0], True)
        assert own.keys() == gradients.keys(), name
        found[name] = {
            "sees": objective and objective.sees,
            "loss": abs(float(own_loss - loss)),
            "gradient": max(float((own[n] - g).abs().max()) for n, g in gradients.items()),
            "largest": max(float(g.abs().max()) for g in gradients.values()),
        }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
