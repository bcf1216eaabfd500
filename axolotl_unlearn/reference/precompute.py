"""A reference asked about all rows before training, into a folder named by the weights' hash.

Afterwards full fine-tuning needs no copy of the weights, apart from a trained head's for KL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor, nn

from axolotl_unlearn.engine.entries import Entry
from axolotl_unlearn.engine.needs import ForwardSpec
from axolotl_unlearn.engine.views import together, view_of
from axolotl_unlearn.reference.base import Reference, is_sharded


def asks_for_logits(entries: Sequence[Entry]) -> bool:
    """Whether any objective compares with the reference's distributions."""
    return any(e.objective.reference and e.objective.sees == "distributions" for e in entries)


def reference_needs(entries: Sequence[Entry], batch: dict[str, Tensor]) -> ForwardSpec:
    """What those entries that compare ask of the reference about a batch."""
    views = (view_of(entry, batch) for entry in entries if entry.objective.reference)
    return together(view.of_reference() for view in views)


def precompute(
    reference: Reference,
    model: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    entries: Sequence[Entry],
    folder: Path,
    *,
    unwrapped: nn.Module | None = None,
    precision: str = "float32",
    part: int = 0,
    total: int | None = None,
    progress: bool = True,
) -> int:
    """Compute and store what ``entries`` will ask, before training; what is stored is kept.

    The folder gets a subfolder named by a hash of the weights, config and precision; in it, rows
    are found by a hash of their tokens, labels and positions, so other weights, data, template or
    tokenizer can never meet these numbers. An interrupted run goes on where it stopped.

    Args:
        model: at its starting weights. ``unwrapped``: the bare (PEFT) model.
        batches: collated batches of all rows (or of this process's share), see `step_loss`; of a
            sharded model as many in every process.
        precision: name of the precision of the forward (autocast is the caller's).
        part: number of this process.
        total: number of batches, for the progress bar.

    Returns:
        Number of forwards it took.
    """
    from rich.progress import Progress

    unwrapped = model if unwrapped is None else unwrapped
    reference.remember_hidden = True
    reference.keep_in(Path(folder) / reference.digest(unwrapped, precision), part)
    before, sharded = reference.forwards, is_sharded(unwrapped)
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("reference", total=total)
        for batch in batches:
            needs = reference_needs(entries, batch)
            if needs.anything() or sharded:  # all processes, whatever their rows are
                reference.look_up(model, unwrapped, batch, needs)
            bar.advance(task)
    for module in unwrapped.modules() if sharded else ():
        if hasattr(module, "reshard"):  # FSDP2 leaves the root gathered until a backward
            module.reshard()
    reference.refresh()
    return reference.forwards - before
