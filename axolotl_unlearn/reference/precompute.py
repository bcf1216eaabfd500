"""A reference asked about all rows before training, into a folder named by the weights' hash.

Afterwards full fine-tuning needs no copy of the weights, apart from a trained head's for KL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from axolotl_unlearn.engine.batch import Batch
from axolotl_unlearn.engine.head import output_vocabulary
from axolotl_unlearn.engine.views import Entry, together, view_of
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.base import Reference
from axolotl_unlearn.reference.sharded import is_sharded


def asks_for_logits(entries: Sequence[Entry]) -> bool:
    """Whether any objective compares with the reference's distributions."""
    return any(e.objective.reference and e.objective.sees == "distributions" for e in entries)


def precompute(
    reference: Reference,
    model: nn.Module,
    batches: Iterable[Batch],
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
        batches: of this process, ``total`` of them; of a sharded model as many in every process.
        precision: name of the precision of the forward (autocast is the caller's).

    Returns:
        Number of forwards it took.
    """
    from rich.progress import track

    unwrapped = model if unwrapped is None else unwrapped
    reference.remember_hidden = True
    reference.keep_in(Path(folder) / reference.digest(unwrapped, precision), part)
    before, sharded = reference.forwards, is_sharded(unwrapped)
    for batch in track(batches, "reference", total=total, transient=True, disable=not progress):
        views = (view_of(entry, batch) for entry in entries if entry.objective.reference)
        needs = together(view.of_reference() for view in views)
        if needs.anything() or sharded:  # all processes, whatever their rows are
            reference.look_up(model, unwrapped, batch, needs)
    for module in unwrapped.modules() if sharded else ():
        if hasattr(module, "reshard"):  # FSDP2 leaves the root gathered until a backward
            module.reshard()
    reference.refresh()
    return reference.forwards - before


def require_same_sizes(teacher: nn.Module, policy: nn.Module, logits: bool, states: bool) -> None:
    """Distributions (``logits``) are compared entry by entry, hidden states number by number."""
    theirs, ours = output_vocabulary(teacher), output_vocabulary(policy)
    if logits and theirs != ours:
        raise UnlearnError(
            f"the teacher's LM head has {theirs} outputs and the policy's {ours}: a KL objective "
            "needs the same number; resize one of them (`resize_token_embeddings`).",
            code="reference.vocabulary",
        )
    theirs, ours = (m.config.get_text_config().hidden_size for m in (teacher, policy))
    if states and theirs != ours:
        raise UnlearnError(
            f"the teacher's hidden states have {theirs} numbers and the policy's {ours}: "
            "objectives on hidden states (hidden_mse, adaptive_rmu) need a teacher of the same "
            "hidden size; use another one, or `reference: auto` for them.",
            code="reference.hidden-size",
        )
