"""A reference: what it was asked it remembers, since it never changes.

Of what distribution objectives (KL) ask, hidden states are kept, from which the exact distribution
follows through the head (hidden_size numbers a position instead of the vocabulary, and no error as
with the k most likely tokens). So later epochs need no reference forward.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from axolotl_unlearn.device import pinned
from axolotl_unlearn.engine.batch import Batch, to_device, to_host
from axolotl_unlearn.engine.head import final_logits, output_head
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
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.reference.store import RowStore

LOG = logging.getLogger(__name__)


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

    def keep_for_run(
        self, folder: Path, gib: float, part: int = 0, known: Mapping[str, int] | None = None
    ) -> None:
        """Remember in files of one run, hidden states up to so many GiB (0: not at all).

        Another run's are deleted but for the first ``known`` (`counts`) of a checkpoint: computed
        again in other batches they would differ in their last bits.
        """
        self._logp = RowStore(folder, "logp", part, alone=True)
        if gib:
            self.remember_hidden = True
            self._hidden = RowStore(folder, "states", part, alone=True, limit=gib * 2**30)
        for store in self._on_disk():
            store.keep(count := (known or {}).get(store.path.stem, 0))
            if len(store) < count:
                LOG.warning(
                    "%s holds %d of the %d answers that the checkpoint counts; the others are "
                    "computed again, and the last bits of the weights may differ.",
                    store.path, len(store), count,
                )  # fmt: skip

    def counts(self) -> dict[str, int]:
        """How many answers each file has."""
        return {store.path.stem: len(store) for store in self._on_disk()}

    def refresh(self) -> None:
        """Flush this process's files and read those of all."""
        for store in self._on_disk():
            store.refresh()

    def _on_disk(self) -> list[RowStore]:
        return [one for one in (self._logp, self._hidden) if not isinstance(one, dict)]

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
        from axolotl_unlearn.reference.precompute import weights_digest

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
        asked = _Asked.of(batch, needs)
        rows = self._unknown(asked, unwrapped, batch)
        fresh = self._compute(model, unwrapped, batch, needs, asked, rows) if rows else {}
        return self._answer(unwrapped, batch, needs, asked, fresh)

    def _unknown(self, asked: _Asked, unwrapped: nn.Module, batch: Batch) -> list[int]:
        """Rows of which something must be computed."""
        stores = [(self._logp, asked.labels)]
        stores += [(self._hidden, keys) for keys in asked.states.values()]
        unknown = [[key is not None and key not in store for key in keys] for store, keys in stores]
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
        asked: _Asked,
        rows: list[int],
    ) -> dict[bytes | None, Tensor]:
        """Run some rows, remember what is to be remembered, return hidden states by key."""
        self.forwards += 1
        part, part_needs = _cut_out(batch, needs, rows)
        # DDP's own forward would synchronise buffers, and not every process computes at this time.
        called = model.module if isinstance(model, DistributedDataParallel) else model
        with evaluating(unwrapped), self.active(unwrapped):
            result = observe(called, part, part_needs, unwrapped=unwrapped, plan=self.plan)
        logp_asked = part_needs.labels is not None and any(asked.labels[i] for i in rows)
        copied = [result.logp] if logp_asked else []
        if self.remember_hidden:
            copied += [states.values for states in result.states.values()]
        on_cpu = to_host(copied)
        if logp_asked:
            where = part_needs.labels
            for i, logp, here in zip(rows, on_cpu.pop(0).numpy(), where, strict=True):
                if asked.labels[i] is not None:
                    self._logp[asked.labels[i]] = torch.from_numpy(logp[here])
        fresh: dict[bytes | None, Tensor] = {}
        for number, (layer, states) in enumerate(result.states.items()):
            lengths = states.positions.sum(-1).tolist()
            keys = [asked.states[layer][i] for i in rows]
            fresh |= zip(keys, states.values.split(lengths), strict=True)
            if self.remember_hidden:
                for key, values in zip(keys, on_cpu[number].split(lengths), strict=True):
                    if key is not None:
                        self._hidden[key] = values
        for store in self._on_disk():
            store.flush()
        return fresh

    def _answer(
        self,
        unwrapped: nn.Module,
        batch: Batch,
        needs: ForwardSpec,
        asked: _Asked,
        fresh: dict[bytes | None, Tensor],
    ) -> ForwardResult:
        """What is known of the batch, put together."""
        device = batch.device
        known = np.zeros(batch["labels"].shape, dtype=np.float32)
        where = label_positions(batch)
        for i, key in enumerate(asked.labels):
            if key is not None:
                known[i, where[i]] = self._logp[key].numpy()
        logp = to_device(known, device)
        states = {}
        for layer, keys in asked.states.items():
            told = [fresh[k] if k in fresh else self._hidden[k] for k in keys if k is not None]
            values = _joined(told, device) if told else logp.new_zeros(0)
            states[layer] = States(values, needs.states[layer])
        at_head = HEAD in states and len(states[HEAD].values)
        logits = self.logits(unwrapped) if at_head else None
        return ForwardResult(logp, states, logits=logits, known=known)

    def label_logp(self, row: dict[str, Any]) -> Tensor:
        """Remembered log-probs of one row's labels, ``[T]``; the row has been asked about."""
        columns = ("input_ids", "attention_mask", "labels")
        batch = {name: torch.as_tensor(row[name])[None] for name in columns}
        where = label_positions(batch)
        return self.look_up(None, None, batch, ForwardSpec(where)).logp[where].double()


class AdapterOff(Reference):
    """The base model under a LoRA adapter that started fresh."""

    without_adapter = True

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        with adapters_off(model):
            yield

    def head(self, model: nn.Module) -> Head:
        head = output_head(model)
        if hasattr(head, "base_layer"):  # LoRA on the head
            return head.base_layer
        if hasattr(head, "original_module"):  # head among modules_to_save
            return head.original_module
        # `forward` of the class: the instance's may be intercepted at that moment.
        return lambda hidden: type(head).forward(head, hidden)


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


#: What PEFT calls the weights that `disable_adapter` switches off, beside a tuner's own prefix.
_SWITCHED = ("modules_to_save", "trainable_tokens_")


def check_trained(model: nn.Module) -> None:
    """Something is trained, and an adapter's folder will hold all of it.

    Raises:
        UnlearnError: Nothing is trained, or weights of the base beside an adapter are.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise UnlearnError("no parameter is trained; check `adapter:` and `unfrozen_parameters`.")
    if hasattr(model, "disable_adapter") and (outside := trained_outside(model)):
        raise UnlearnError(
            f"{len(outside)} weights outside of the adapter are trained (first {outside[0]}), "
            "which an adapter's folder does not hold, so what they forget would be lost: remove "
            "`unfrozen_parameters` or `adapter`, or name the module in `lora_modules_to_save`."
        )


def trained_outside(model: nn.Module) -> list[str]:
    """Names of trained parameters that switching the adapters off would leave as they are."""
    own = (getattr(model.base_model, "prefix", "lora_"), *_SWITCHED)
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return [name for name in trained if not any(part in name for part in own)]


def make_reference(
    mode: str,
    model: nn.Module,
    *,
    starting_adapter: bool,
    plan: ChunkPlan,
    will_precompute: bool = False,
    sharded: bool = False,
) -> Reference:
    """The starting model as the reference: as it stands now (call before any resume).

    A fresh LoRA is the identity at the start, so switching it off gives the reference. Else it is a
    copy of the *trained* weights alone (a starting adapter, or all weights in full fine-tuning).

    Args:
        mode: ``auto``, ``frozen_copy`` or ``cached``.
        starting_adapter: the adapter changes the model at the start.
        will_precompute: `precompute` comes before the first training step, so nothing is copied.
        sharded: the weights are, or will be, in parts, so that no copy can be swapped in.

    Raises:
        UnlearnError: A copy of weights in parts is asked for.
    """
    remember = mode == "cached"
    fresh = hasattr(model, "disable_adapter") and not (starting_adapter or trained_outside(model))
    if fresh and mode != "frozen_copy":
        return AdapterOff(plan, remember)
    from axolotl_unlearn.reference.frozen import SHARDED, FrozenCopy

    if sharded and mode == "frozen_copy":
        raise UnlearnError(SHARDED)
    return FrozenCopy(model, plan, remember, not (sharded or (remember and will_precompute)))


def _modules(model: nn.Module) -> list[nn.Module]:
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
    modules = _modules(model)
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


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """PEFT's ``disable_adapter`` without its look at every parameter (64 ms in 32 layers): no
    gradient is taken inside, so none needs to be switched off.

    Raises:
        UnlearnError: An adapter was switched on inside, so the reference was the policy.
    """
    layers = None if torch.is_grad_enabled() else _switches(model)
    if layers is None:
        with model.disable_adapter():
            yield
        return
    on = [layer for layer in layers if not layer._disable_adapters]
    for layer in on:
        layer._disable_adapters = True
    try:
        yield
        if not all(layer._disable_adapters for layer in layers):
            raise UnlearnError(
                "an adapter was on while the reference ran, so the policy was its own reference: "
                "use `unlearn.reference: frozen_copy`."
            )
    finally:
        for layer in on:
            layer._disable_adapters = False


def _switches(model: nn.Module) -> list[nn.Module] | None:
    """The adapter layers of a LoRA, which a flag switches; None of other adapters."""
    from peft.tuners.lora import LoraModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if type(getattr(model, "base_model", None)) is not LoraModel:
        return None
    modules = _modules(model)
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    switched = {kind for kind in set(map(type, modules)) if issubclass(kind, kinds)}
    return [module for module in modules if type(module) in switched]


def _joined(values: list[Tensor], device: torch.device) -> Tensor:
    """``[q, D]`` each to ``[Q, D]`` on the device, in one copy where none is there yet."""
    if any(v.device == device for v in values):
        return torch.cat([v.to(device) for v in values])
    joined = torch.cat(values)
    return pinned(joined, device).to(device, non_blocking=True)


@dataclass(frozen=True)
class _Asked:
    """The key under which each row's answer is remembered; None where nothing is asked.

    Attributes:
        labels: ``[R]`` of label log-probs; ``states``: ``[R]`` of hidden states by layer.
    """

    labels: list[bytes | None]
    states: dict[Layer, list[bytes | None]]

    @classmethod
    def of(cls, batch: Batch, needs: ForwardSpec) -> _Asked:
        nothing: list[bytes | None] = [None] * len(batch["input_ids"])
        return cls(
            nothing if needs.labels is None else _keys_where(needs.labels, row_keys(batch)),
            {
                layer: _keys_where(mask, row_keys(batch, mask, layer))
                for layer, mask in needs.states.items()
            },
        )


def _keys_where(mask: NDArray, keys: list[bytes]) -> list[bytes | None]:
    """The keys of the rows of which ``mask`` holds something."""
    return [k if any_ else None for k, any_ in zip(keys, mask.any(-1), strict=True)]


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


def is_part(parameter: Tensor) -> bool:
    """Whether this process holds a part of the weight only (FSDP2 or ZeRO-3)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "placements")


def whole(parameter: Tensor) -> Tensor:
    """The weight without its parts' borders; all processes ask at once, and each gets all of it."""
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor()
    if hasattr(parameter, "ds_id"):
        import deepspeed  # `deepspeed.zero` is no module

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward gathers weights from other processes (FSDP, ZeRO-3)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return any(is_part(p) for p in model.parameters()) or any(
        type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()
    )


def anyone(mine: bool, device: torch.device) -> bool:
    """Whether any process says yes."""
    flag = torch.tensor(float(mine), device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag)
