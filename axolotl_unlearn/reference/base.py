"""A reference: what it was asked it remembers, since it never changes.

Only distribution objectives (KL) need a reference forward in later epochs, and with ``cached`` or a
teacher not even they: hidden states are kept, from which the exact distribution follows through the
head (hidden_size numbers a position instead of the vocabulary, and no error as with the k most
likely tokens).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.engine.forward import observe
from axolotl_unlearn.engine.head import final_logits
from axolotl_unlearn.engine.needs import HEAD, Found, Head, Layer, Needs, States, label_positions
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


def is_part(parameter: Tensor) -> bool:
    """Whether this process holds a part of the weight only (FSDP2 or ZeRO-3)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "placements")


def _is_sharded(model: nn.Module) -> bool:
    """Whether a forward gathers weights from other processes (FSDP, ZeRO-3)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return any(is_part(p) for p in model.parameters()) or any(
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
