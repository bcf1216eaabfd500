"""One forward of a model that finds what is needed and nothing else.

The model runs as usual up to its LM head. There the engine steps in: it picks the hidden states of
the positions that are asked about, computes logits for those alone, and gives numbers of positions
back in the logits' place. Because this happens inside the head's own ``forward``, wrappers that
gather or hook parameters there (DDP, FSDP2, ZeRO-3, PEFT) keep working. Where only hidden states of
some layer are asked for, later layers do not run (`axolotl_unlearn.engine.layers`). Where the model
can take rows laid end to end, padding is not computed at all (`axolotl_unlearn.engine.packing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from axolotl_unlearn.engine.head import (
    after_head,
    final_logits,
    head_is_frozen,
    intercept_head,
    learn_after_head,
    output_head,
    output_vocabulary,
)
from axolotl_unlearn.engine.layers import tap_layers
from axolotl_unlearn.engine.needs import HEAD, Found, Head, Needs, States, targets
from axolotl_unlearn.engine.packing import layout_of
from axolotl_unlearn.engine.statistics import (
    DEFAULT_PLAN,
    ChunkPlan,
    Group,
    GroupNumbers,
    head_statistics,
)


def observe(
    model: nn.Module,
    batch: dict[str, Tensor],
    needs: Needs,
    *,
    unwrapped: nn.Module | None = None,
    plan: ChunkPlan = DEFAULT_PLAN,
) -> Found:
    """What ``needs`` asks of ``model`` about a batch, in one forward, with gradient if enabled.

    Args:
        model: as wrapped for training; ``unwrapped`` the bare (PEFT) model inside.
        batch: input_ids, attention_mask, labels ``[R, T]``.
    """
    unwrapped = model if unwrapped is None else unwrapped
    learn_after_head(model, unwrapped, batch["input_ids"].device)
    layout = layout_of(model, unwrapped, batch)
    groups = group_positions(needs, targets(batch["labels"]))
    vocabulary, frozen = output_vocabulary(unwrapped), head_is_frozen(unwrapped)
    numbers: list[GroupNumbers] = []

    def program(head_inputs: Tensor, head: Head) -> list[Tensor]:
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
                head_inputs if layer is HEAD else outputs[layer], *mask.nonzero(as_tuple=True)
            )
            for layer, mask in needs.states.items()
        ]
        zero = head_inputs.flatten()[:0].sum()
        return [zero, *(found.graded for found in numbers), *states]

    with tap_layers(unwrapped, needs.layers, stop=not needs.reach_head) as outputs:
        zero, *pieces = run_to_head(model, layout.inputs, program, unwrapped)
    # Gradients pass through the model's output; what has none does not.
    numbers = [replace(found, graded=piece) for found, piece in zip(numbers, pieces, strict=False)]
    return read_groups(groups, numbers, needs, pieces[len(groups) :], zero)


def run_to_head(
    model: nn.Module,
    inputs: dict[str, Tensor],
    program: Callable[[Tensor, Head], list[Tensor]],
    unwrapped: nn.Module,
) -> list[Tensor]:
    """One forward of ``model`` whose head runs ``program``.

    Args:
        program: gets the hidden states that go into the head, and the way from such states to the
            logits that the model would give.

    Returns:
        What the program returned.
    """
    pieces: list[Tensor] = []
    with_gradient = torch.is_grad_enabled()

    def at_head(head_inputs: Tensor, head: Head) -> Tensor:
        pieces.extend(program(head_inputs, final_logits(head, unwrapped)))
        if not with_gradient:
            return head_inputs.new_zeros(1, 1, 1)
        return torch.cat([piece.flatten() for piece in pieces])[None, :, None]

    with intercept_head(output_head(unwrapped), at_head):
        output = model(**inputs, use_cache=False, return_dict=True).logits
    # Wrappers act on the output (FSDP2 hooks its gradient), so the numbers are taken from there;
    # models that treat logits after the head would treat ours too.
    if not with_gradient or after_head(unwrapped):
        return pieces
    flat = output.flatten().split([piece.numel() for piece in pieces])
    return [part.view_as(piece).to(piece.dtype) for part, piece in zip(flat, pieces, strict=True)]


def group_positions(needs: Needs, next_ids: Tensor) -> list[Group]:
    """Every position at which ``needs`` asks for logits, by what it asks there.

    Args:
        next_ids: ``[R, T]`` next-token targets.
    """
    nowhere = torch.zeros_like(next_ids, dtype=torch.bool)
    asked = [nowhere if mask is None else mask for mask in (needs.labels, needs.logged)]
    asked += [valuation.positions for valuation in needs.valuations]
    code = sum(mask.long() << bit for bit, mask in enumerate(asked))
    groups = []
    for pattern in code.unique().tolist():
        if pattern:
            row, time = (code == pattern).nonzero(as_tuple=True)
            labels, logged, *looks = (bool(pattern >> bit & 1) for bit in range(len(asked)))
            valuations = tuple(v for v, here in zip(needs.valuations, looks, strict=True) if here)
            ids = next_ids[row, time]
            groups.append(Group(row, time, ids, labels, logged and not labels, valuations))
    return groups


def read_groups(
    groups: Sequence[Group],
    numbers: Sequence[GroupNumbers],
    needs: Needs,
    states: Sequence[Tensor],
    zero: Tensor,
) -> Found:
    """What was found in all groups, and hidden states, by what ``needs`` asked.

    Args:
        states: ``[Q, D]`` of each layer in ``needs.states``.
        zero: see `Found`.
    """
    logp = torch.zeros_like(needs.masks[0], dtype=torch.float32)
    values: dict[str, list[Tensor]] = {valuation.name: [] for valuation in needs.valuations}
    weighted: dict[str, Tensor] = {}
    rows, times, columns = [], [], []
    for group, found in zip(groups, numbers, strict=True):
        if group.labels or group.logged:
            rows.append(group.row)
            times.append(group.time)
            columns.append((found.graded if group.labels else found.values)[:, 0])
        own = found.values[:, int(group.logged) :].unbind(-1)
        for valuation, column in zip(group.valuations, own, strict=True):
            values[valuation.name].append(column)
        if group.valuations:
            side = group.valuations[0].side
            weighted[side] = weighted.get(side, 0) + group.factor * found.graded[:, -1].sum()
    if columns:
        logp = logp.index_put((torch.cat(rows), torch.cat(times)), torch.cat(columns))
    return Found(
        logp,
        {
            layer: States(taken, mask)
            for (layer, mask), taken in zip(needs.states.items(), states, strict=True)
        },
        {name: torch.cat(found) if found else logp.new_zeros(0) for name, found in values.items()},
        weighted,
        zero,
    )
