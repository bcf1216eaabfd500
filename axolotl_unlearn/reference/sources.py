"""Where reference log-probs come from.

The reference is the model as it stood when training started, before any resume and with any
starting adapter. Two sources give it without a second model in memory:

- `AdapterOff`: a fresh LoRA is the identity at the start, so switching it off gives the reference;
- `FrozenCopy`: a copy of the *trained* weights alone (a starting adapter, or all weights in full
  fine-tuning), swapped in for the reference forward.

Either remembers the log-probs of labels it has computed: the reference never changes, so a row is
computed once. Only distribution objectives (KL) need a reference forward in later epochs, and with
``cached`` not even they: the reference's hidden states are kept, from which the exact distribution
follows through the head (hidden_size numbers a position instead of the vocabulary, and no error as
with the k most likely tokens).

`precompute` does all of that before training and keeps it in a folder named by the weights' hash.
Afterwards full fine-tuning needs no copy of the weights, apart from a trained head's for KL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from axolotl_unlearn.engine.entries import Entry
from axolotl_unlearn.engine.forward import observe
from axolotl_unlearn.engine.head import final_logits, output_head
from axolotl_unlearn.engine.needs import (
    HEAD,
    Found,
    Head,
    Layer,
    Needs,
    States,
    label_positions,
    together,
)
from axolotl_unlearn.engine.statistics import DEFAULT_PLAN, ChunkPlan
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.store import RowStore, weights_digest


class Reference:
    """Base: remembers label log-probs (and hidden states if asked) by the content of a row."""

    #: Whether the reference is the model without its adapter.
    without_adapter = False

    def __init__(self, plan: ChunkPlan = DEFAULT_PLAN, remember_hidden: bool = False) -> None:
        self.plan = plan
        self.remember_hidden = remember_hidden
        self.forwards = 0  # reference forwards so far, for tests and the log
        self.complete = False  # after `release`, when nothing more can be computed
        self._logp: MutableMapping[bytes, Tensor] | RowStore = {}
        self._hidden: MutableMapping[bytes, Tensor] | RowStore = {}

    def keep_in(self, folder: Path, part: int = 0) -> None:
        """Remember in files of this folder instead of in memory, and know what they hold."""
        self._logp = RowStore(folder, "logp", part)
        self._hidden = RowStore(folder, "hidden", part)

    def refresh(self) -> None:
        """Flush this process's files and read those of all."""
        for store in (self._logp, self._hidden):
            if isinstance(store, RowStore):
                store.refresh()

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
        self, model: nn.Module, unwrapped: nn.Module, batch: dict[str, Tensor], needs: Needs
    ) -> Found:
        """What the reference says about a batch, computing only what is not known.

        Args:
            needs: label log-probs of whole rows, and hidden states.
        """
        keys = _row_keys(batch)
        wants_logp = _rows(needs.labels, keys)
        layers = {
            layer: (_row_keys(batch, mask, layer), _rows(mask, keys))
            for layer, mask in needs.states.items()
        }
        todo = torch.tensor(
            [
                wants_logp[i]
                and keys[i] not in self._logp
                or any(
                    wants[i] and names[i] not in self._hidden for names, wants in layers.values()
                )
                for i in range(len(keys))
            ],
            dtype=torch.bool,
        )
        if self.complete and todo.any():
            raise UnlearnError(
                f"the reference has not seen {int(todo.sum())} rows of this batch: with `cached` "
                "or a teacher all rows must be in `datasets:` or `test_datasets:`."
            )
        if not self.complete and _is_sharded(unwrapped) and _anyone(todo.any(), batch):
            todo[0] |= not todo.any()  # a forward gathers weights, so all processes take part
        fresh: dict[bytes, Tensor] = {}
        if todo.any():
            index = todo.nonzero()[:, 0].to(batch["input_ids"].device)
            fresh = self._compute(model, unwrapped, batch, needs, index, keys, layers)
        logp = torch.zeros(batch["labels"].shape, device=batch["input_ids"].device)
        where = label_positions(batch)
        for i, row_wants in enumerate(wants_logp):
            if row_wants:
                logp[i, where[i]] = self._logp[keys[i]].to(logp.device)
        states = {}
        for layer, (names, wants) in layers.items():
            rows = [
                (fresh[name] if name in fresh else self._hidden[name]).to(logp.device)
                for name, row_wants in zip(names, wants, strict=True)
                if row_wants
            ]
            values = torch.cat(rows) if rows else logp.new_zeros(0)
            states[layer] = States(values, needs.states[layer])
        at_head = HEAD in states and len(states[HEAD].values)
        logits = self.logits(unwrapped) if at_head else None
        return Found(logp, states, logits=logits)

    def label_logp(self, row: dict[str, Any]) -> Tensor:
        """Remembered log-probs of one row's labels, ``[T]``; the row has been asked about."""
        columns = ("input_ids", "attention_mask", "labels")
        key = _row_keys({name: torch.as_tensor(row[name])[None] for name in columns})[0]
        return self._logp[key].double()

    def _compute(self, model, unwrapped, batch, needs, index, keys, layers) -> dict[bytes, Tensor]:
        """Run the rows ``index`` and remember what is to be remembered; the hidden states."""
        self.forwards += 1
        length = 1 + int(batch["attention_mask"][index].any(0).nonzero().max())  # trims padding
        part = {k: batch[k][index][:, :length] for k in ("input_ids", "attention_mask", "labels")}
        asked = Needs(
            None if needs.labels is None else needs.labels[index][:, :length],
            {layer: mask[index][:, :length] for layer, mask in needs.states.items()},
        )
        was_training = unwrapped.training
        unwrapped.eval()
        try:
            with self.active(unwrapped):
                found = observe(_callable(model), part, asked, unwrapped=unwrapped, plan=self.plan)
        finally:
            unwrapped.train(was_training)
        chosen = index.tolist()
        if asked.labels is not None:
            for i, logp, where in zip(chosen, found.logp, asked.labels, strict=True):
                if where.any():
                    self._logp[keys[i]] = logp[where].cpu()
        fresh: dict[bytes, Tensor] = {}
        for layer, states in found.states.items():
            names, _ = layers[layer]
            pieces = states.values.split(states.positions.sum(-1).tolist())
            for i, values in zip(chosen, pieces, strict=True):
                if len(values):
                    fresh[names[i]] = values
                    if self.remember_hidden:
                        self._hidden[names[i]] = values.cpu()
        return fresh


class AdapterOff(Reference):
    """The base model under a LoRA adapter that started fresh."""

    without_adapter = True

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        with model.disable_adapter():
            yield

    def head(self, model: nn.Module) -> Head:
        head = output_head(model)
        if hasattr(head, "base_layer"):  # LoRA on the head
            return head.base_layer
        if hasattr(head, "original_module"):  # head among modules_to_save
            return head.original_module
        # `forward` of the class: the instance's may be intercepted at that moment.
        return lambda hidden: type(head).forward(head, hidden)


class FrozenCopy(Reference):
    """A copy of the trained weights as they stand now, swapped in for reference forwards.

    Costs the memory of the trained weights only: an adapter's few, or all in full fine-tuning.
    The copy is held by parameter, never by name: wrappers (torch.compile, DDP) change names.

    Raises:
        UnlearnError: No parameter is trained, or the weights are sharded over processes, which
            would leave the policy in place of the reference.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ChunkPlan = DEFAULT_PLAN,
        remember_hidden: bool = False,
        copy: bool = True,
    ) -> None:
        """``copy=False``: `precompute` and `release` follow before any weight has moved."""
        super().__init__(plan, remember_hidden)
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise UnlearnError(
                "no parameter is trained; check `adapter:` and `unfrozen_parameters`."
            )
        if any(_is_part(p) for p in trained):
            raise UnlearnError(_SHARDED)
        self._frozen = {p: p.detach().clone() for p in trained} if copy else {}
        self._head: list[Tensor | None] | None = None  # weight and bias, after `release`

    def release(self, model: nn.Module, keep_head: bool) -> None:
        """Drop the copy; of a trained head keep one, from which distributions are formed."""
        super().release(model, keep_head)
        if keep_head:
            self._head = [
                p.detach().clone() if p is not None and p.requires_grad and not self._frozen
                else self._at_start(p)
                for p in _weights(model)
            ]  # fmt: skip
        self._frozen = {}

    def _at_start(self, parameter: Tensor | None) -> Tensor | None:
        """The value a parameter had; one that is not trained, or nothing yet, still has it."""
        if parameter is None:
            return None
        return self._frozen.get(parameter, parameter.detach())

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        self._require_swappable(model)
        policy = {parameter: parameter.data for parameter in self._frozen}
        try:
            for parameter, start in self._frozen.items():
                parameter.data = start.to(parameter.device, parameter.dtype)
            yield
        finally:
            for parameter, data in policy.items():
                parameter.data = data

    def _require_swappable(self, model: nn.Module) -> None:
        """Every copied parameter must still be one that a forward of this model uses."""
        present = {id(p) for p in model.parameters() if not _is_part(p)}
        if any(id(p) not in present for p in self._frozen):
            raise UnlearnError(_SHARDED)

    def head(self, model: nn.Module) -> Head:
        head = output_head(model)
        if hasattr(head, "base_layer") or hasattr(head, "original_module"):
            raise UnlearnError(
                "a KL objective with a starting adapter on the LM head is not supported: "
                "remove lm_head from lora_target_modules or modules_to_save."
            )
        if self._head is None:
            self._require_swappable(model)
            weight, bias = map(self._at_start, _weights(model))
        else:
            weight, bias = self._head
        return lambda hidden: F.linear(hidden, weight.to(hidden.dtype), bias)


_SHARDED = (
    "the trained weights are sharded over processes (FSDP, ZeRO-3), where no copy of them can "
    "stand in for the reference: start from a fresh LoRA adapter (`adapter: lora` without "
    "`lora_model_dir` or `peft_init_lora_weights`), or train with DDP."
)


def _weights(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the LM head."""
    head = output_head(model)
    return head.weight, getattr(head, "bias", None)


def _is_part(parameter: Tensor) -> bool:
    """Whether this process holds a part of the weight only (FSDP2 or ZeRO-3)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "placements")


def _rows(mask: Tensor | None, keys: list[bytes]) -> list[bool]:
    """Rows of which a mask holds something."""
    return [False] * len(keys) if mask is None else mask.any(-1).tolist()


def _row_keys(
    batch: dict[str, Tensor], mask: Tensor | None = None, layer: Layer = HEAD
) -> list[bytes]:
    """A key for each row from its tokens, labels, ``mask`` and layer, independent of padding."""
    real = batch["attention_mask"].bool().cpu()
    parts = [batch["input_ids"].cpu(), batch["labels"].cpu()]
    if mask is not None:
        parts.append(mask.cpu())
    suffix = b"" if layer is HEAD else b"|layer %d" % layer
    return [
        hashlib.blake2b(
            b"|".join(part[i, real[i]].numpy().tobytes() for part in parts) + suffix,
            digest_size=16,
        ).digest()
        for i in range(len(real))
    ]


def _is_sharded(model: nn.Module) -> bool:
    """Whether a forward gathers weights from other processes (FSDP, ZeRO-3)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return any(_is_part(p) for p in model.parameters()) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
    )


def _anyone(mine: Tensor, batch: dict[str, Tensor]) -> bool:
    flag = mine.to(batch["input_ids"].device, torch.float32)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag)


def _callable(model: nn.Module) -> nn.Module:
    """The model to call without a gradient: DDP's own forward would synchronise buffers, and not
    every process computes a reference at the same time."""
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    return model.module if is_ddp else model


def asks_for_logits(entries: Sequence[Entry]) -> bool:
    """Whether any objective compares with the reference's distributions."""
    return any(e.objective.reference and e.objective.sees == "distributions" for e in entries)


def reference_needs(entries: Sequence[Entry], batch: dict[str, Tensor]) -> Needs:
    """What those entries that compare ask of the reference about a batch."""
    views = (entry.view(batch) for entry in entries if entry.objective.reference)
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
        batches: collated batches of all rows (or of this process's share), see `step_loss`.
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
    before = reference.forwards
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("reference", total=total)
        for batch in batches:
            needs = reference_needs(entries, batch)
            if needs.anything():
                reference.look_up(model, unwrapped, batch, needs)
            bar.advance(task)
    reference.refresh()
    return reference.forwards - before


def adapter_changes_model(model: nn.Module) -> bool:
    """Whether switching the adapters off would change the model as it stands.

    A LoRA is the identity while one of its factors is zero: B, or A for embeddings. Initialisations
    such as PiSSA, OLoRA and LoftQ are not, and the first two move a part of the base weights into
    the adapter. Weights that are not here (meta device, a ZeRO-3 partition) count as zero.
    """
    factors = (
        parameter
        for name, parameter in model.named_parameters()
        if "lora_B." in name or "lora_embedding_A." in name
    )
    return any(not p.is_meta and bool(p.detach().any()) for p in factors)


def make_reference(
    mode: str,
    model: nn.Module,
    *,
    starting_adapter: bool,
    plan: ChunkPlan,
    will_precompute: bool = False,
) -> Reference:
    """Take the reference from the model as it stands now (call before any resume).

    Args:
        mode: ``auto``, ``adapter_off``, ``frozen_copy`` or ``cached``.
        starting_adapter: whether the adapter changes the model at the start: it was loaded from
            ``lora_model_dir``, or see `adapter_changes_model`.
        will_precompute: `precompute` comes before the first training step, so nothing is copied.

    Raises:
        UnlearnError: If the adapter cannot simply be switched off.
    """
    has_adapter = hasattr(model, "disable_adapter")
    fresh_adapter = has_adapter and not starting_adapter
    if mode == "adapter_off" and not fresh_adapter:
        why = (
            "the adapter changes the model from the start (lora_model_dir, peft_init_lora_weights)"
            if has_adapter
            else "there is no adapter"
        )
        raise UnlearnError(
            f"`unlearn.reference: adapter_off` does not give the starting model because {why}; "
            "use `auto` or `frozen_copy`."
        )
    remember = mode == "cached"
    if fresh_adapter and mode != "frozen_copy":
        return AdapterOff(plan, remember)
    return FrozenCopy(model, plan, remember, copy=not (remember and will_precompute))
