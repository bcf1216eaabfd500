"""Where reference log-probs come from.

The reference is the model as it stood when training started, before any resume and with any
starting adapter. Two sources give it without a second model in memory:

- `AdapterOff`: a fresh LoRA is the identity at the start, so switching it off gives the reference;
- `FrozenCopy`: a copy of the *trained* weights alone (a starting adapter, or all weights in full
  fine-tuning), swapped in for the reference forward.

Either remembers the log-probs of labels it has computed: the reference never changes, so a row is
computed once. Only distribution objectives (KL) need a reference forward in later epochs, and with
``cached`` not even they: the reference's hidden states are kept, from which the exact distribution
follows through the head (hidden_size numbers a position instead of the vocabulary).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.head import Head, output_head, output_vocabulary
from axolotl_unlearn.packing import Pick
from axolotl_unlearn.scoring import (
    DEFAULT_PLAN,
    IGNORE,
    ChunkPlan,
    Entry,
    Positions,
    position_statistics,
    run_to_head,
    targets,
)


class Reference:
    """Base: remembers label log-probs (and hidden states if asked) by the content of a row."""

    def __init__(self, plan: ChunkPlan = DEFAULT_PLAN, remember_hidden: bool = False) -> None:
        self.plan = plan
        self.remember_hidden = remember_hidden
        self.forwards = 0  # reference forwards so far, for tests and the log
        self._logp: dict[bytes, Tensor] = {}
        self._hidden: dict[bytes, Tensor] = {}

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """While inside, ``model`` is the reference."""
        raise NotImplementedError
        yield

    def head(self, model: nn.Module) -> Head:
        """Logits of the reference from its hidden states, while the policy is in place."""
        raise NotImplementedError

    @torch.no_grad()
    def look_up(
        self,
        model: nn.Module,
        unwrapped: nn.Module,
        batch: dict[str, Tensor],
        *,
        label_rows: Tensor,
        distribution_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Reference log-probs and hidden states of a batch, computing only what is not known.

        Args:
            label_rows: ``[R]`` bool, rows whose label log-probs are needed.
            distribution_mask: ``[R, T]`` bool, positions whose distributions are needed.

        Returns:
            logp ``[R, T]`` (0 elsewhere) and ``[R, T] -> row of hidden`` packed as ``[P, D]`` in
            the order of ``distribution_mask.nonzero()``.
        """
        keys = _row_keys(batch)
        wants_hidden = distribution_mask.any(-1)
        todo = torch.tensor(
            [
                bool(label_rows[i])
                and key not in self._logp
                or bool(wants_hidden[i])
                and key not in self._hidden
                for i, key in enumerate(keys)
            ],
            dtype=torch.bool,
        )
        fresh_hidden: dict[bytes, Tensor] = {}
        if todo.any():
            index = todo.nonzero()[:, 0].to(batch["input_ids"].device)
            length = 1 + int(batch["attention_mask"][index].any(0).nonzero().max())  # trims padding
            part = {
                k: batch[k][index][:, :length] for k in ("input_ids", "attention_mask", "labels")
            }
            self._forward(
                model, unwrapped, part, [keys[i] for i in index.tolist()],
                label_rows[index], distribution_mask[index][:, :length], fresh_hidden,
            )  # fmt: skip
        logp = torch.zeros(batch["labels"].shape, device=batch["input_ids"].device)
        where = targets(batch["labels"]) != IGNORE
        for i in label_rows.nonzero()[:, 0].tolist():
            logp[i, where[i]] = self._logp[keys[i]].to(logp.device)
        hidden = [
            (fresh_hidden.get(keys[i]) if keys[i] in fresh_hidden else self._hidden[keys[i]])
            for i in wants_hidden.nonzero()[:, 0].tolist()
        ]
        packed = torch.cat([h.to(logp.device) for h in hidden]) if hidden else logp.new_zeros(0)
        return logp, packed

    def _forward(self, model, unwrapped, part, keys, label_rows, mask, fresh_hidden) -> None:
        self.forwards += 1
        labels = (targets(part["labels"]) != IGNORE) & label_rows[:, None]
        positions = Positions.select(part, [], labels)
        vocabulary = output_vocabulary(unwrapped)
        grabbed: dict[str, Tensor] = {}

        def program(pick: Pick, head: Head) -> Tensor:
            row, time = mask.nonzero(as_tuple=True)
            grabbed["distributions"] = pick(row, time)
            found = position_statistics(
                pick(positions.row, positions.time),
                positions,
                head,
                plan=self.plan,
                vocabulary=vocabulary,
                frozen_head=True,  # no gradient is wanted
            )
            grabbed["logp"] = found[:, 0]
            return found

        was_training = unwrapped.training
        unwrapped.eval()
        try:
            with self.active(unwrapped):
                run_to_head(model, part, program, unwrapped)
        finally:
            unwrapped.train(was_training)
        counts = labels.sum(-1).tolist()
        for key, wanted, logp in zip(
            keys, label_rows.tolist(), grabbed["logp"].split(counts), strict=True
        ):
            if wanted:
                self._logp[key] = logp.cpu()
        pieces = grabbed["distributions"].split(mask.sum(-1).tolist())
        for key, hidden in zip(keys, pieces, strict=True):
            if len(hidden):
                fresh_hidden[key] = hidden
                if self.remember_hidden:
                    self._hidden[key] = hidden.cpu()


class AdapterOff(Reference):
    """The base model under a LoRA adapter that started fresh."""

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
    """

    def __init__(
        self, model: nn.Module, plan: ChunkPlan = DEFAULT_PLAN, remember_hidden: bool = False
    ) -> None:
        super().__init__(plan, remember_hidden)
        self._frozen = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        if not self._frozen:
            raise UnlearnError(
                "no parameter is trained; check `adapter:` and `unfrozen_parameters`."
            )

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        swapped = []
        for name, parameter in model.named_parameters():
            if name in self._frozen:
                swapped.append((parameter, parameter.data))
                parameter.data = self._frozen[name]
        try:
            yield
        finally:
            for parameter, data in swapped:
                parameter.data = data

    def head(self, model: nn.Module) -> Head:
        head = output_head(model)
        if hasattr(head, "base_layer") or hasattr(head, "original_module"):
            raise UnlearnError(
                "a KL objective with a starting adapter on the LM head is not supported: "
                "remove lm_head from lora_target_modules or modules_to_save."
            )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        weight = self._frozen.get(names.get(id(head.weight)), head.weight)
        bias = getattr(head, "bias", None)
        bias = None if bias is None else self._frozen.get(names.get(id(bias)), bias)
        return lambda hidden: F.linear(hidden, weight.to(hidden.dtype), bias)


def _row_keys(batch: dict[str, Tensor]) -> list[bytes]:
    """A key for each row from its tokens and labels, independent of padding."""
    ids, labels = batch["input_ids"].cpu(), batch["labels"].cpu()
    real = batch["attention_mask"].bool().cpu()
    return [
        hashlib.blake2b(
            ids[i, real[i]].numpy().tobytes() + b"|" + labels[i, real[i]].numpy().tobytes(),
            digest_size=16,
        ).digest()
        for i in range(len(ids))
    ]


def needs_reference(entries: Sequence[Entry]) -> bool:
    """Whether any objective compares with the reference."""
    return any(entry.objective.reference for entry in entries)


def make_reference(
    mode: str, model: nn.Module, *, starting_adapter: bool, plan: ChunkPlan
) -> Reference:
    """Take the reference from the model as it stands now (call before any resume).

    Args:
        mode: ``auto``, ``adapter_off``, ``frozen_copy`` or ``cached``.
        starting_adapter: whether the adapter was loaded from ``lora_model_dir``.

    Raises:
        UnlearnError: If the adapter cannot simply be switched off.
    """
    has_adapter = hasattr(model, "disable_adapter")
    fresh_adapter = has_adapter and not starting_adapter
    if mode == "adapter_off" and not fresh_adapter:
        why = "the run starts from lora_model_dir" if has_adapter else "there is no adapter"
        raise UnlearnError(
            f"`unlearn.reference: adapter_off` does not give the starting model because {why}; "
            "use `auto` or `frozen_copy`."
        )
    remember = mode == "cached"
    if fresh_adapter and mode != "frozen_copy":
        return AdapterOff(plan, remember)
    return FrozenCopy(model, plan, remember)
