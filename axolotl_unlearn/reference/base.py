"""A reference: what it was asked it remembers as far as memory goes, since it never changes.

Of what distribution objectives (KL) ask, hidden states are kept, from which the exact distribution
follows through the head (hidden_size numbers a position instead of the vocabulary, and no error as
with the k most likely tokens). What it remembers needs no forward in later epochs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from axolotl_unlearn.device import pinned
from axolotl_unlearn.engine.batch import Batch, to_device, to_host
from axolotl_unlearn.engine.head import final_logits, output_vocabulary
from axolotl_unlearn.engine.head_losses import DEFAULT_PLAN, ChunkPlan
from axolotl_unlearn.engine.needs import (
    HEAD,
    ForwardResult,
    ForwardSpec,
    Head,
    Layer,
    States,
    label_positions,
)
from axolotl_unlearn.engine.observe import observe
from axolotl_unlearn.engine.views import Entry, together, view_of
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.sharded import anyone, is_sharded, whole
from axolotl_unlearn.reference.store import RowStore

LOG = logging.getLogger(__name__)


class Reference:
    """Base: remembers label log-probs (and hidden states if asked) by the content of a row."""

    #: Whether the reference is the model without its adapter.
    without_adapter = False

    #: How its logits are cut.
    plan: ChunkPlan = DEFAULT_PLAN

    def __init__(self, remember_hidden: bool = False) -> None:
        self.remember_hidden = remember_hidden
        self.forwards = 0  # reference forwards so far, for tests and the log
        self.complete = False  # after `release`, when nothing more can be computed
        self._known: MutableMapping[bytes, Tensor] | RowStore = {}

    def keep_in(self, folder: Path, part: int = 0) -> None:
        """Remember in files of this folder instead of in memory, and know what they hold."""
        self._known = RowStore(folder, "answers", part)

    def keep_for_run(self, folder: Path, gib: float, part: int = 0, known: int = 0) -> None:
        """Remember in a file of one run, hidden states up to so many GiB (0: not at all).

        Another run's are deleted but for the first ``known`` (`count`) of a checkpoint: computed
        again in other batches they would differ in their last bits.
        """
        self.remember_hidden |= gib > 0
        self._known = RowStore(folder, "answers", part, alone=True, limit=gib * 2**30)
        self._known.keep(known)
        if self.count < known:
            LOG.warning(
                "%s holds %d of the %d answers that the checkpoint counts; the others are computed "
                "again, and the last bits of the weights may differ.",
                self._known.path, self.count, known,
            )  # fmt: skip

    @property
    def count(self) -> int:
        """Answers that are known."""
        return len(self._known)

    def refresh(self) -> None:
        """Flush this process's file and read those of all."""
        if isinstance(self._known, RowStore):
            self._known.refresh()

    def release(self, model: nn.Module, keep_head: bool) -> None:
        """Give up the means to compute more; a row that is not known is an error from now on."""
        self.complete = True

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """While inside, ``model`` is the reference."""
        raise NotImplementedError
        yield

    @contextmanager
    def opened(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The model that `precompute` asks: the policy, which is still the starting model."""
        yield policy

    def digest(self, model: nn.Module, precision: str) -> str:
        """Hash of everything that this reference's numbers depend on, apart from the tokens."""
        return weights_digest(model, without_adapter=self.without_adapter, also=precision)

    def head(self, model: nn.Module) -> Head:
        """The LM head of the reference, while the policy is in place."""
        raise NotImplementedError

    def logits(self, model: nn.Module) -> Head:
        """Logits of the reference from its hidden states, while the policy is in place."""
        return final_logits(self.head(model), model)

    @torch.no_grad()
    def look_up(
        self,
        model: nn.Module,
        unwrapped: nn.Module,
        batch: Mapping[str, Tensor],
        needs: ForwardSpec,
    ) -> ForwardResult:
        """What the reference says about a batch, computing only what is not known.

        Args:
            needs: label log-probs of whole rows, and hidden states.
        """
        batch = Batch.of(batch)
        asked = _asked_of(batch, needs)
        rows = self._unknown(asked, unwrapped, batch)
        fresh = self._compute(model, unwrapped, batch, needs, asked, rows) if rows else {}
        device = batch.device
        known = np.zeros(batch["labels"].shape, dtype=np.float32)
        where = label_positions(batch)
        for i, key in enumerate(asked.get(LABELS, ())):
            if key is not None:
                known[i, where[i]] = self._known[key].numpy()
        logp = to_device(known, device)
        states = {}
        for layer, mask in needs.states.items():
            told = [k for k in asked[layer] if k is not None]
            told = [fresh[k] if k in fresh else self._known[k] for k in told]
            states[layer] = States(_joined(told, device) if told else logp.new_zeros(0), mask)
        at_head = HEAD in states and len(states[HEAD].values)
        logits = self.logits(unwrapped) if at_head else None
        return ForwardResult(logp, states, logits=logits, known=known)

    def _unknown(self, asked: Asked, unwrapped: nn.Module, batch: Batch) -> list[int]:
        """Rows of which something must be computed."""
        unknown = [
            [key is not None and key not in self._known for key in keys] for keys in asked.values()
        ]
        rows = [i for i, row in enumerate(zip(*unknown, strict=True)) if any(row)]
        if self.complete:
            if rows:
                raise UnlearnError(
                    f"the reference has not seen {len(rows)} rows of this batch: with `cached` or "
                    "a teacher all rows must be in `datasets:` or `test_datasets:`."
                )
        elif is_sharded(unwrapped) and anyone(bool(rows), batch.device):
            return rows or [0]  # a forward gathers weights, so all processes take part
        return rows

    def _compute(
        self,
        model: nn.Module,
        unwrapped: nn.Module,
        batch: Batch,
        needs: ForwardSpec,
        asked: Asked,
        rows: list[int],
    ) -> dict[bytes | None, Tensor]:
        """Run some rows, remember what is to be remembered, return hidden states by key."""
        self.forwards += 1
        part, part_needs = _cut_out(batch, needs, rows)
        # DDP's own forward would synchronise buffers, and not every process computes at this time.
        called = model.module if isinstance(model, DistributedDataParallel) else model
        with evaluating(unwrapped), self.active(unwrapped):
            result = observe(called, part, part_needs, unwrapped=unwrapped, plan=self.plan)
        keys = {what: [own[i] for i in rows] for what, own in asked.items()}
        values = {layer: states.values for layer, states in result.states.items()}
        copied = {LABELS: result.logp} if any(keys.get(LABELS, ())) else {}
        copied |= values if self.remember_hidden else {}
        copied = dict(zip(copied, to_host([*copied.values()]), strict=True))
        if LABELS in copied:
            copied[LABELS] = copied[LABELS][torch.from_numpy(part_needs.labels)]
        fresh: dict[bytes | None, Tensor] = {}
        for what, mask in _masks(part_needs).items():
            lengths = mask.sum(-1).tolist()
            if what in values:
                fresh |= zip(keys[what], values[what].split(lengths), strict=True)
            if what in copied:
                for key, own in zip(keys[what], copied[what].split(lengths), strict=True):
                    if key is not None:
                        self._known[key] = own
        if isinstance(self._known, RowStore):
            self._known.flush()
        return fresh

    def label_logp(self, row: dict[str, Any]) -> Tensor:
        """Remembered log-probs of one row's labels, ``[T]``; the row has been asked about."""
        columns = ("input_ids", "attention_mask", "labels")
        batch = {name: torch.as_tensor(row[name])[None] for name in columns}
        where = label_positions(batch)
        return self.look_up(None, None, batch, ForwardSpec(where)).logp[where].double()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules, a shared one more than once: 0.8 ms in 32 layers with LoRA, where ``modules()``,
    which makes a name for each and looks it up, takes 40."""
    modules = [model]
    for module in modules:
        modules += [child for child in module._modules.values() if child is not None]
    return modules


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``eval`` inside, then as before.

    By flags: ``eval`` and ``train`` set each through a check of its kind, 22 ms in 32 layers with
    LoRA. A model that does more when it is told (``use_kernels``) is told.
    """
    modules = modules_of(model)
    told = {kind for kind in set(map(type, modules)) if hasattr(kind, "use_kernels")}
    if any(module.use_kernels for module in modules if type(module) in told):
        was_training = model.training
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)
        return
    changed = [module for module in modules if module.training]
    for module in changed:
        module.__dict__["training"] = False
    try:
        yield
    finally:
        for module in changed:
            module.__dict__["training"] = True


def _joined(values: list[Tensor], device: torch.device) -> Tensor:
    """``[q, D]`` each to ``[Q, D]`` on the device, in one copy where none is there yet."""
    if any(v.device == device for v in values):
        return torch.cat([v.to(device) for v in values])
    joined = torch.cat(values)
    return pinned(joined, device).to(device, non_blocking=True)


#: In the place of a layer: what is asked are label log-probs.
LABELS = "labels"
What = Layer | Literal["labels"]
#: The key under which each row's answer is remembered; None where nothing is asked of it.
Asked = dict[What, list[bytes | None]]


def _masks(needs: ForwardSpec) -> dict[What, NDArray]:
    return ({} if needs.labels is None else {LABELS: needs.labels}) | needs.states


def _asked_of(batch: Batch, needs: ForwardSpec) -> Asked:
    asked: Asked = {}
    for what, mask in _masks(needs).items():
        keys = row_keys(batch) if what == LABELS else row_keys(batch, mask, what)
        asked[what] = [k if any_ else None for k, any_ in zip(keys, mask.any(-1), strict=True)]
    return asked


def _cut_out(batch: Batch, needs: ForwardSpec, rows: list[int]) -> tuple[Batch, ForwardSpec]:
    """Some rows of a batch without the padding that they share, and what is asked of them."""
    part = batch.rows(rows, ("input_ids", "attention_mask", "labels"))
    length = part["labels"].shape[1]
    labels = None if needs.labels is None else needs.labels[rows, :length]
    return part, ForwardSpec(labels, {k: m[rows, :length] for k, m in needs.states.items()})


def row_keys(
    batch: Mapping[str, Tensor], mask: NDArray | None = None, layer: Layer = HEAD
) -> list[bytes]:
    """A key for each row from its tokens, labels, ``mask`` and layer, independent of padding."""
    batch = Batch.of(batch)
    real = batch.on_host("attention_mask").astype(bool)
    parts = [batch.on_host("input_ids"), batch.on_host("labels")]
    if mask is not None:
        parts.append(mask)
    suffix = b"" if layer is HEAD else b"|layer %d" % layer
    return [
        hashlib.blake2b(
            b"|".join(part[i, real[i]].tobytes() for part in parts) + suffix,
            digest_size=16,
        ).digest()
        for i in range(len(real))
    ]


def weights_digest(model: nn.Module, *, without_adapter: bool, also: str = "") -> str:
    """Hash of everything the reference's numbers depend on, apart from the tokens.

    Every weight and buffer (a LoRA adapter's excluded if the reference runs without it), the
    config and ``also`` (precision). About a second per GB.
    """
    digest = hashlib.blake2b(digest_size=12)
    config = model.config.to_dict() if hasattr(model, "config") else {}
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    digest.update(repr(sorted(config.items(), key=lambda item: item[0])).encode())
    digest.update(f"{type(model).__name__}|{also}|{without_adapter}".encode())
    if not without_adapter:  # what a LoRA's weights are multiplied by
        scales = [getattr(module, "scaling", None) for module in modules_of(model)]
        digest.update(repr([one for one in scales if isinstance(one, dict)]).encode())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(tensors):
        if without_adapter and "lora_" in name:
            continue
        value = whole(tensors[name]).detach()
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}".encode())
        scales = getattr(getattr(tensors[name], "quant_state", None), "absmax", None)
        for part in (value, scales):
            if part is not None and part.numel():
                flat = part.detach().cpu().contiguous().flatten().view(torch.uint8)
                digest.update(flat.numpy())
    return digest.hexdigest()


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
    Afterwards full fine-tuning needs no copy of the weights, apart from a trained head's for KL.

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
