"""A teacher, or a starting model that will be gone, asked about all rows before a weight moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainerCallback

from axolotl_unlearn.config import ReferenceArgs
from axolotl_unlearn.engine.packing import refuse_packing
from axolotl_unlearn.files import declare
from axolotl_unlearn.reference.base import Reference
from axolotl_unlearn.reference.frozen import FrozenCopy
from axolotl_unlearn.reference.precompute import asks_for_logits, precompute
from axolotl_unlearn.reference.teacher import require_same_sizes

if TYPE_CHECKING:
    from axolotl_unlearn.training.trainer import UnlearnTrainer


def ask(
    trainer: UnlearnTrainer,
    source: ReferenceArgs,
    reference: Reference,
    wrapped: nn.Module | None = None,
) -> None:
    """About all rows; ``wrapped``: the policy in its wrappers, if its weights are in parts."""
    # By phase, since what is asked about a row is the union over the entries of a step.
    asking = [[e for e in p.entries if trainer.source_of(e) == source] for p in trainer.phases]
    by_logits = any(map(asks_for_logits, asking))
    for one in trainer.extensions:
        one.on_reference(trainer, source, reference)
    if source.model:
        reference.options = {"trust_remote_code": bool(trainer.axolotl_cfg.trust_remote_code)}
        reference.device = trainer.args.device  # the policy may still be on none
    with reference.opened(trainer.model) as model, trainer.accelerator.autocast():
        by_states = any(e.objective.sees == "hidden" for entries in asking for e in entries)
        require_same_sizes(model, trainer.model, by_logits, by_states)
        if not trainer.unlearn_args.padding_free:
            refuse_packing(model)
        for entries in filter(None, asking):
            loaded, total = all_rows(trainer, equal=wrapped is not None)
            out = Path(trainer.args.output_dir)
            precompute(
                reference,
                wrapped or model,
                loaded,
                entries,
                declare(out, out / "reference", "log-probs", folder=True),
                unwrapped=model,
                precision=f"{trainer.accelerator.mixed_precision} {trainer.args.device.type}",
                part=trainer.args.process_index,
                total=total,
                progress=trainer.args.process_index == 0,
            )
        trainer.accelerator.wait_for_everyone()
        reference.refresh()
        reference.release(model, keep_head=by_logits)


def row_sets(trainer: UnlearnTrainer) -> list[Dataset]:
    """All rows that may be in a batch."""
    several = isinstance(trainer.eval_dataset, dict)
    evaluated = trainer.eval_dataset.values() if several else [trainer.eval_dataset]
    return [rows for rows in (trainer.train_dataset, *evaluated) if rows is not None]


def all_rows(
    trainer: UnlearnTrainer, equal: bool = False
) -> tuple[Iterator[dict[str, Tensor]], int]:
    """This process's share of all rows in batches of similar length, and their number; ``equal``:
    as many in every process, some of them twice."""
    sets = row_sets(trainer)
    sets += [one.also_asked for one in trainer.extensions if one.also_asked is not None]
    size = max(8, trainer.args.per_device_train_batch_size)
    chunks = []
    for rows in sets:
        order = sorted(range(len(rows)), key=rows["length"][:].__getitem__)
        chunks += [(rows, order[i : i + size]) for i in range(0, len(order), size)]
    if equal:
        chunks += islice(cycle(tuple(chunks)), -len(chunks) % trainer.args.world_size)
    mine = chunks[trainer.args.process_index :: trainer.args.world_size]
    loaded = (
        trainer._prepare_inputs(trainer.data_collator([rows[i] for i in chosen]))
        for rows, chosen in mine
    )
    return loaded, len(mine)


class AskSharded(TrainerCallback):
    """Asks a starting model whose weights are in parts, in its wrappers and before the first step;
    a resumed run, whose weights have moved, reads what it said."""

    def __init__(self, trainer: UnlearnTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        for number, (source, reference) in enumerate(trainer.references.items()):
            if not isinstance(reference, FrozenCopy):
                continue
            path = Path(args.output_dir, "reference", f"start-{number}.safetensors")
            if state.global_step:
                reference.load_start(path, args.device, args.process_index)
                continue
            ask(trainer, source, reference, trainer.model_wrapped)
            if state.is_world_process_zero:
                reference.save_start(path)
