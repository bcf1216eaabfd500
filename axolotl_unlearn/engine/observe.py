"""One forward of a model that finds what is needed and nothing else.

The model runs as usual up to its LM head. There the engine steps in: it picks the hidden states of
the positions that are asked about, computes logits for those alone, and gives numbers of positions
back in the logits' place (`axolotl_unlearn.engine.head`). Where only hidden states of some layer
are asked for, later layers do not run (`axolotl_unlearn.engine.layers`). Where the model can take
rows laid end to end, padding is not computed at all (`axolotl_unlearn.engine.packing`).

Shape letters: R rows, T time, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from axolotl_unlearn.engine import layers as decoder
from axolotl_unlearn.engine.batch import Batch, indices, to_device
from axolotl_unlearn.engine.head import (
    head_device,
    head_is_frozen,
    learn_after_head,
    output_vocabulary,
    run_to_head,
)
from axolotl_unlearn.engine.head_losses import (
    DEFAULT_PLAN,
    ChunkPlan,
    Group,
    GroupNumbers,
    head_statistics,
)
from axolotl_unlearn.engine.needs import HEAD, ForwardResult, ForwardSpec, Head, States, targets
from axolotl_unlearn.engine.packing import layout_of


def observe(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    needs: ForwardSpec,
    *,
    unwrapped: nn.Module | None = None,
    plan: ChunkPlan = DEFAULT_PLAN,
) -> ForwardResult:
    """What ``needs`` asks of ``model`` about a batch, in one forward, with gradient if enabled.

    Args:
        model: as wrapped for training; ``unwrapped`` the bare (PEFT) model inside.
        batch: input_ids, attention_mask, labels ``[R, T]``.
    """
    unwrapped = model if unwrapped is None else unwrapped
    batch = Batch.of(batch)
    device = batch.device
    learn_after_head(model, unwrapped, device)
    layout = layout_of(model, unwrapped, batch)
    place = head_device(unwrapped, device)
    groups = group_positions(needs, targets(batch), place)
    vocabulary, frozen = output_vocabulary(unwrapped), head_is_frozen(unwrapped)
    numbers: list[GroupNumbers] = []
    inner: list[int] = []
    tapped: AbstractContextManager[dict[int, Tensor]] = nullcontext({})
    if needs.layers or needs.profiles is not None:
        # What the last layer gives is met after the final norm, at the head.
        if needs.profiles is not None:
            inner = list(range(len(decoder.decoder_layers(unwrapped)) - 1))
        if layers := sorted({*needs.layers, *inner}):
            later = decoder.decoder_layers(unwrapped)[layers[-1] + 1 :]
            weights = (weight for layer in later for weight in layer.parameters())
            # DDP waits for gradients of later layers: then the forward must go on.
            awaited = isinstance(model, DistributedDataParallel) and any(
                weight.requires_grad for weight in weights
            )
            stop = not (needs.reach_head or awaited)
            tapped = decoder.tap_layers(unwrapped, layers, stop=stop)

    def program(head_inputs: Tensor, head: Head) -> list[Tensor]:
        if groups:
            numbers[:] = head_statistics(
                lambda row, time: layout.pick(head_inputs, row, time),
                groups,
                head,
                plan=plan,
                vocabulary=vocabulary,
                frozen_head=frozen,
            )
        states = [
            layout.pick(
                head_inputs if layer is HEAD else outputs[layer], *indices(mask, device)
            ).to(place)
            for layer, mask in needs.states.items()
        ]
        if needs.profiles is not None:
            all_layers = (*(outputs[layer] for layer in inner), head_inputs)
            states.append(decoder.row_profiles(all_layers, needs.profiles, layout.pick).to(place))
        zero = head_inputs.flatten()[:0].sum()
        return [zero, *(stats.graded for stats in numbers), *states]

    with tapped as outputs:
        zero, *pieces = run_to_head(model, layout.inputs, program, unwrapped)
    # Gradients pass through the model's output; what has none does not.
    numbers = [
        GroupNumbers(piece, stats.values.to(device))
        for stats, piece in zip(numbers, pieces, strict=False)
    ]
    groups = [group.on(device) for group in groups]
    logp = torch.zeros(batch["labels"].shape, device=device)
    return read_groups(groups, numbers, needs, pieces[len(groups) :], zero, logp)


def group_positions(needs: ForwardSpec, next_ids: NDArray, device: torch.device) -> list[Group]:
    """Every position at which ``needs`` asks for logits, by what it asks there.

    Args:
        next_ids: ``[R, T]`` next-token targets.
    """
    asked = [needs.labels, needs.logged, needs.moments]
    asked += [valuation.positions for valuation in needs.valuations]
    code = np.zeros(next_ids.shape, dtype=np.int64)
    for bit, mask in enumerate(asked):
        if mask is not None:
            code |= mask.astype(np.int64) << bit
    patterns = [pattern for pattern in np.unique(code).tolist() if pattern]
    if not patterns:
        return []
    where = [(code == pattern).nonzero() for pattern in patterns]
    places = to_device(np.concatenate([np.stack([*at, next_ids[at]]) for at in where], 1), device)
    groups = []
    for pattern, (row, time, own) in zip(
        patterns, places.split([len(at[0]) for at in where], 1), strict=True
    ):
        labels, logged, moments, *looks = (bool(pattern >> bit & 1) for bit in range(len(asked)))
        valuations = tuple(v for v, here in zip(needs.valuations, looks, strict=True) if here)
        logged = logged and not labels
        groups.append(Group(row, time, own, labels, logged, valuations, moments))
    return groups


def read_groups(
    groups: Sequence[Group],
    numbers: Sequence[GroupNumbers],
    needs: ForwardSpec,
    states: Sequence[Tensor],
    zero: Tensor,
    logp: Tensor,
) -> ForwardResult:
    """What was found in all groups, and hidden states, by what ``needs`` asked.

    Args:
        states: ``[Q, D]`` of each layer in ``needs.states``, then ``ForwardResult.profiles``.
        zero: see `ForwardResult`; ``logp``: nothing but 0.
    """
    values: dict[str, list[Tensor]] = {one.entry.name: [] for one in needs.valuations}
    weighted: dict[str, Tensor] = {}
    rows, times, columns = [], [], []
    moments = None if needs.moments is None else logp.new_zeros(*logp.shape, 2)
    for group, stats in zip(groups, numbers, strict=True):
        if group.moments:
            two = stats.graded[:, int(group.labels) :][:, :2]
            moments = moments.index_put((group.row, group.time), two)
        if group.labels or group.logged:
            rows.append(group.row)
            times.append(group.time)
            columns.append((stats.graded if group.labels else stats.values)[:, 0])
        own = stats.values[:, int(group.logged) :].unbind(-1)
        for valuation, column in zip(group.valuations, own, strict=True):
            values[valuation.entry.name].append(column)
        if group.valuations:
            side = group.valuations[0].entry.side
            weighted[side] = weighted.get(side, 0) + group.factor * stats.graded[:, -1].sum()
    if columns:
        logp = logp.index_put((torch.cat(rows), torch.cat(times)), torch.cat(columns))
    return ForwardResult(
        logp,
        {
            layer: States(taken, mask)
            for (layer, mask), taken in zip(needs.states.items(), states, strict=False)
        },
        {name: torch.cat(parts) if parts else logp.new_zeros(0) for name, parts in values.items()},
        weighted,
        zero,
        moments=moments,
        profiles=None if needs.profiles is None else states[-1],
    )
