"""One forward of a model that finds what is needed and nothing else.

The model runs as usual up to its LM head. There the engine steps in: it picks the hidden states of
the positions that are asked about, computes logits for those alone, and gives numbers of positions
back in the logits' place. Because this happens inside the head's own ``forward``, wrappers that
gather or hook parameters there (DDP, FSDP2, ZeRO-3, PEFT) keep working. Where only hidden states of
some layer are asked for, later layers do not run (`axolotl_unlearn.engine.layers`). Where the model
can take rows laid end to end, padding is not computed at all.

Two things are learnt once about a model, on a few made-up tokens: what it does to its logits after
the head, and whether it keeps rows apart that are laid end to end. Both are tried, not assumed.

Shape letters: R rows, T time, N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from axolotl_unlearn.engine.head_losses import (
    DEFAULT_PLAN,
    ChunkPlan,
    Group,
    GroupNumbers,
    head_statistics,
)
from axolotl_unlearn.engine.host import indices, on_host, to_device
from axolotl_unlearn.engine.needs import HEAD, ForwardResult, ForwardSpec, Head, States, targets
from axolotl_unlearn.errors import UnlearnError

LOG = logging.getLogger(__name__)


def observe(
    model: nn.Module,
    batch: dict[str, Tensor],
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
    learn_after_head(model, unwrapped, batch["input_ids"].device)
    layout = layout_of(model, unwrapped, batch)
    groups = group_positions(needs, targets(batch["labels"]))
    vocabulary, frozen = output_vocabulary(unwrapped), head_is_frozen(unwrapped)
    numbers: list[GroupNumbers] = []
    inner: list[int] = []
    tapped: AbstractContextManager[dict[int, Tensor]] = nullcontext({})
    if needs.layers or needs.profiles is not None:
        from axolotl_unlearn.engine import layers as decoder

        # What the last layer gives is met after the final norm, at the head.
        if needs.profiles is not None:
            inner = list(range(len(decoder.decoder_layers(unwrapped)) - 1))
        if layers := sorted({*needs.layers, *inner}):
            stop = not (needs.reach_head or decoder.is_awaited(model, unwrapped, layers[-1]))
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
            layout.pick(head_inputs if layer is HEAD else outputs[layer], *indices(mask))
            for layer, mask in needs.states.items()
        ]
        if needs.profiles is not None:
            all_layers = (*(outputs[layer] for layer in inner), head_inputs)
            states.append(decoder.row_profiles(all_layers, needs.profiles, layout.pick))
        zero = head_inputs.flatten()[:0].sum()
        return [zero, *(stats.graded for stats in numbers), *states]

    with tapped as outputs:
        zero, *pieces = run_to_head(model, layout.inputs, program, unwrapped)
    # Gradients pass through the model's output; what has none does not.
    numbers = [replace(stats, graded=piece) for stats, piece in zip(numbers, pieces, strict=False)]
    result = read_groups(groups, numbers, needs, pieces[len(groups) :], zero)
    if needs.gradients is None:
        return result
    from axolotl_unlearn.engine.row_gradients import norms_of_rows

    return replace(result, gradients=norms_of_rows(unwrapped, batch, needs.gradients))


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


def group_positions(needs: ForwardSpec, next_ids: Tensor) -> list[Group]:
    """Every position at which ``needs`` asks for logits, by what it asks there.

    Args:
        next_ids: ``[R, T]`` next-token targets.
    """
    asked = [needs.labels, needs.logged, needs.moments]
    asked += [valuation.positions for valuation in needs.valuations]
    code = np.zeros(next_ids.shape, dtype=np.int64)
    for bit, mask in enumerate(asked):
        if mask is not None:
            code |= on_host(mask).astype(np.int64) << bit
    patterns = [pattern for pattern in np.unique(code).tolist() if pattern]
    if not patterns:
        return []
    where = [(code == pattern).nonzero() for pattern in patterns]
    ids = on_host(next_ids)
    places = to_device(
        np.concatenate([np.stack([*at, ids[at]]) for at in where], 1), next_ids.device
    )
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
) -> ForwardResult:
    """What was found in all groups, and hidden states, by what ``needs`` asked.

    Args:
        states: ``[Q, D]`` of each layer in ``needs.states``, then ``ForwardResult.profiles``.
        zero: see `ForwardResult`.
    """
    logp = torch.zeros_like(needs.masks[0], dtype=torch.float32)
    values: dict[str, list[Tensor]] = {valuation.name: [] for valuation in needs.valuations}
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
            values[valuation.name].append(column)
        if group.valuations:
            side = group.valuations[0].side
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


@dataclass(frozen=True)
class Layout:
    """How the rows of a batch lie in the model's input.

    Attributes:
        inputs: keyword arguments of the model.
        place: ``[R, T]`` index of each token in the packed row; None if padded.
    """

    inputs: dict[str, Tensor]
    place: Tensor | None = None

    def pick(self, hidden: Tensor, row: Tensor, time: Tensor) -> Tensor:
        """``[R, T, D]`` or ``[1, N, D]`` hidden states at positions of the batch, ``[P, D]``."""
        if self.place is None:
            return hidden[row, time]
        return hidden[0, self.place[row, time]]


def packed_layout(batch: dict[str, Tensor], blocks: Blocks, dtype: torch.dtype) -> Layout:
    """All real tokens in one row, ``[1, N]``, with positions from 0 in each.

    Args:
        blocks: what the model is told of the rows; ``dtype`` its attention's.
    """
    real = on_host(batch["attention_mask"]).astype(bool)
    inputs = np.stack([on_host(batch["input_ids"])[real], (real.cumsum(-1) - 1)[real]])
    place = real.ravel().cumsum() - 1
    device = batch["input_ids"].device
    ids, positions, place = to_device(np.concatenate([*inputs, place]), device).split(
        [*[inputs.shape[1]] * 2, place.size]
    )
    packed = {"input_ids": ids[None], "position_ids": positions[None]}
    packed |= blocks(real.sum(-1), device, dtype)
    return Layout(packed, place.view(real.shape))


#: Lengths of rows laid end to end to what a model is told of them beside their positions.
Blocks = Callable[[NDArray, torch.device, torch.dtype], dict[str, Any]]


def positions_alone(lengths: NDArray, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Transformers finds the rows in their positions; it waits for the device."""
    return {}


def block_lengths(lengths: NDArray, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Where rows begin, as kernels of flash attention take it; transformers would read it from the
    positions in every layer."""
    lengths = lengths[lengths > 0]
    ends = to_device(np.concatenate([[0], lengths.cumsum()]).astype(np.int32), device)
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def block_mask(lengths: NDArray, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What is added to the scores of sdpa, ``[1, 1, N, N]``: a mask of bools would be made into
    this, and copied to a stride that its kernels take, in every layer."""
    row = to_device(np.repeat(np.arange(len(lengths)), lengths), device)
    width = -(-len(row) // 16) * 16
    mask = torch.full((len(row), width), -torch.inf, dtype=dtype, device=device)[:, : len(row)]
    return {"attention_mask": mask.masked_fill_((row[:, None] == row).tril(), 0)[None, None]}


def layout_of(model: nn.Module, unwrapped: nn.Module, batch: dict[str, Tensor]) -> Layout:
    """The batch laid end to end where the model can take that and it pays, else as it is."""
    blocks = can_pack(model, unwrapped, batch)
    if blocks is None:
        return Layout({name: batch[name] for name in ("input_ids", "attention_mask")})
    return packed_layout(batch, blocks, _attention_dtype(unwrapped, batch["input_ids"].device))


def is_worthwhile(batch: dict[str, Tensor], hidden_size: int, blockwise: bool) -> bool:
    """Whether laying rows end to end saves computation.

    A layer costs about ``12 D^2`` multiplications a token outside attention and ``2 D`` a pair of
    positions inside; without a kernel for blocks, attention runs over all pairs of the one row.
    With one, padding saves nothing.
    """
    if blockwise:
        return True
    lengths = on_host(batch["attention_mask"]).sum(-1).astype(float)
    rows, width = batch["attention_mask"].shape
    if rows == 1:
        return False
    tokens = lengths.sum()
    packed = 6 * hidden_size * tokens + tokens**2
    padded = 6 * hidden_size * rows * width + rows * width**2
    return bool(packed < 0.95 * padded)


#: Model -> what it is told of rows laid end to end, learnt once; None: it does not keep them apart.
_PACKING: WeakKeyDictionary[nn.Module, Blocks | None] = WeakKeyDictionary()


def can_pack(model: nn.Module, unwrapped: nn.Module, batch: dict[str, Tensor]) -> Blocks | None:
    """What the model must be told of this batch laid end to end; None: it should not be, since the
    model cannot keep rows apart or it does not pay."""
    if unwrapped not in _PACKING:
        _PACKING[unwrapped] = _learn_packing(model, unwrapped, batch["input_ids"].device)
    config = unwrapped.config.get_text_config()
    worthwhile = is_worthwhile(batch, config.hidden_size, _is_blockwise(config))
    return _PACKING[unwrapped] if worthwhile else None


def _learn_packing(model: nn.Module, unwrapped: nn.Module, device: torch.device) -> Blocks | None:
    config, name = unwrapped.config.get_text_config(), type(unwrapped).__name__
    if _attention_of(config) not in _TOLD:
        return None
    told = _TOLD[_attention_of(config)]
    if told is block_mask and _has_windows(config):  # one mask would not do for all layers
        told = positions_alone
    for blocks in dict.fromkeys((told, positions_alone)):
        try:
            if _keeps_rows_apart(model, unwrapped, device, blocks):
                return blocks
        except (RuntimeError, TypeError, ValueError):  # a model that cannot be told so
            if blocks is positions_alone:
                raise
    LOG.info("%s does not keep rows apart when laid end to end; batches are padded.", name)
    return None


def _keeps_rows_apart(
    model: nn.Module, unwrapped: nn.Module, device: torch.device, blocks: Blocks
) -> bool:
    """A second row must get the same hidden states whatever stands before it, and those that it
    gets alone. Three forwards of a few tokens."""
    first, other, second = _made_up_rows(unwrapped, 7, 7, 9)
    run = partial(_run_made_up, model, unwrapped, device, blocks=blocks)
    alone, after_first, after_other = (
        run(rows)[0] for rows in ([second], [first, second], [other, second])
    )
    moved = (after_first[:7] - after_other[:7]).abs().max().float()
    leak = (after_first[7:].float() - after_other[7:].float()).abs().max()
    shift = (after_first[7:].float() - alone.float()).abs().max()
    low = alone.dtype in (torch.bfloat16, torch.float16)
    same = bool(shift <= (5e-2 if low else 1e-3) * alone.float().abs().max())
    return bool(leak <= 1e-4 * moved) and same


#: Attentions that may keep rows apart, and what they are told.
_TOLD: dict[str, Blocks] = {
    "eager": positions_alone,
    "sdpa": block_mask,
    "flash_attention_2": block_lengths,
    "flash_attention_3": block_lengths,
    "flex_attention": positions_alone,  # transformers builds one block mask a forward
}


def _attention_of(config: Any) -> str:
    return str(getattr(config, "_attn_implementation", "sdpa"))


def _is_blockwise(config: Any) -> bool:
    """Whether attention runs over blocks, and not over all pairs of the one row."""
    return _attention_of(config).startswith(("flash", "flex"))


def _has_windows(config: Any) -> bool:
    """Whether some layers see less than all that stands before, or have no attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = (getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size"))
    return kinds != {"full_attention"} or any(window)


def _attention_dtype(unwrapped: nn.Module, device: torch.device) -> torch.dtype:
    """Of queries and keys."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return _bare(unwrapped).get_input_embeddings().weight.dtype


def refuse_packing(unwrapped: nn.Module) -> None:
    """Always pad this model's batches (``unlearn.padding_free: false``)."""
    _PACKING[unwrapped] = None


def output_head(model: nn.Module) -> nn.Module:
    """The LM head of a (PEFT-wrapped) causal language model."""
    base = _bare(model)
    head = base.get_output_embeddings()
    if head is None:
        raise UnlearnError(
            f"{type(base).__name__} has no output embeddings; unlearning needs a causal language "
            "model with an LM head."
        )
    return head


def output_vocabulary(model: nn.Module) -> int:
    """V of the LM head."""
    head = output_head(model)
    weight = getattr(head, "weight", None)
    if weight is None:
        weight = head.base_layer.weight
    out = getattr(head, "out_features", None)
    return int(out if out else weight.shape[0])


def head_is_frozen(model: nn.Module) -> bool:
    """Whether nothing in the LM head is trained (LoRA on it would count as trained)."""
    return not any(parameter.requires_grad for parameter in output_head(model).parameters())


@contextmanager
def intercept_head(head: nn.Module, program: Callable[[Tensor, Head], Tensor]) -> Iterator[None]:
    """While inside, calling ``head(hidden)`` runs ``program(hidden, original_forward)``."""
    had_own = "forward" in vars(head)
    original = head.forward
    # Not traced by torch.compile: a program is another closure at every step.
    head.forward = torch.compiler.disable(lambda hidden, *_, **__: program(hidden, original))
    try:
        yield
    finally:
        if had_own:
            head.forward = original
        else:
            del head.forward


Change = Callable[[Tensor], Tensor]
#: What models do to the logits that their head gives, with a number of their config: capped as
#: Gemma 2 does, multiplied (Cohere, HyperCLOVA X), divided (Granite).
_CHANGES: tuple[Callable[[Tensor, float], Tensor], ...] = (
    lambda z, value: torch.tanh(z / value) * value,
    lambda z, value: z * value,
    lambda z, value: z / value,
)
_NAMES = ("logit", "lm_head", "softcap")

#: Bare model -> what it does to its logits after the head, learnt once; None: nothing.
_AFTER_HEAD: WeakKeyDictionary[nn.Module, Change | None] = WeakKeyDictionary()


def learn_after_head(model: nn.Module, unwrapped: nn.Module, device: torch.device | str) -> None:
    """Find out what a model does to its logits after the head, unless it is known.

    Raises:
        UnlearnError: It is nothing that is known here.
    """
    bare = _bare(unwrapped)
    if bare not in _AFTER_HEAD:
        keep_packing_of_weights(bare)
        _AFTER_HEAD[bare] = _change_after_head(model, unwrapped, device)


def _change_after_head(
    model: nn.Module, unwrapped: nn.Module, device: torch.device | str
) -> Change | None:
    """Of all that the model's config allows, what comes nearest to its own logits. One forward.

    Raises:
        UnlearnError: Nothing comes near, or the model gives NaN.
    """
    name = type(_bare(unwrapped)).__name__
    _, made, logits = _run_made_up(model, unwrapped, device, _made_up_rows(unwrapped, 9))
    if made.isnan().any():
        raise UnlearnError(
            f"{name} gives NaN at made-up tokens: its numbers overflow. Load it in float32 or "
            "bfloat16; if that does not help, the run that made it failed."
        )
    logits = logits.to(made.device).float()  # the head of a spread model may lie elsewhere

    def changed(change: Change | None) -> Tensor:
        return (made if change is None else change(made)).float()

    def error(change: Change | None) -> float:
        gap = (changed(change) - logits).abs().max().item()
        return gap if math.isfinite(gap) else math.inf

    best = min(_candidates(unwrapped.config.get_text_config()), key=error)
    if not torch.allclose(changed(best), logits, rtol=2e-2, atol=1e-3):
        raise UnlearnError(
            f"{name} changes its logits after the LM head in a way that is not known here; please "
            "report the model's name."
        )
    return best


def _candidates(config: Any) -> list[Change | None]:
    """One or two changes with numbers that the config keeps under fitting names, then none."""
    values = [
        value
        for key, value in vars(config).items()
        if any(name in key for name in _NAMES)
        and isinstance(value, (int, float))
        and value not in (0, 1)  # of no effect, and True and False
    ]
    single = [partial(change, value=value) for value in values for change in _CHANGES]
    double: list[Change] = [
        lambda z, first=first, second=second: second(first(z))
        for first, second in permutations(single, 2)
        if first.keywords != second.keywords
    ]
    return [*single, *double, None]


def keep_packing_of_weights(model: nn.Module) -> None:
    """Of a 4-bit model that is trained on a CPU. In evaluation bitsandbytes packs its weights anew
    there, for good, for a kernel that passes no gradient on.

    Raises:
        UnlearnError: It has done so.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise UnlearnError(
                    "the model's 4-bit weights were packed for inference on a CPU, which passes no "
                    "gradient on: load the model again and train it before it is evaluated."
                )


def after_head(model: nn.Module) -> Change | None:
    """What the model does to its logits after the head; None where it does nothing.

    Outside a forward it is found out where it is not known (`learn_after_head`).
    """
    if _bare(model) not in _AFTER_HEAD:
        learn_after_head(model, model, next(model.parameters()).device)
    return _AFTER_HEAD[_bare(model)]


def final_logits(head: Head, model: nn.Module) -> Head:
    """``head`` followed by `after_head`: hidden states to the logits that the model would give."""
    change = after_head(model)
    return head if change is None else lambda states: change(head(states))


def _bare(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _made_up_rows(model: nn.Module, *lengths: int) -> list[Tensor]:
    """Rows ``[1, n]`` of random tokens, the same on all processes.

    Pad and special tokens could be treated apart; they are unlikely, not excluded.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    return [torch.randint(0, vocabulary, (1, n), generator=generator) for n in lengths]


@torch.no_grad()
def _run_made_up(
    model: nn.Module,
    unwrapped: nn.Module,
    device: torch.device | str,
    rows: Sequence[Tensor],
    blocks: Blocks = positions_alone,
) -> tuple[Tensor, Tensor, Tensor]:
    """A forward of made-up rows ``[1, n]`` laid end to end: hidden states before the head,
    ``[N, D]``, what the head makes of them, and the model's logits, ``[N, V]``."""
    device = torch.device(device)
    kept: list[Tensor] = []

    def keep(states: Tensor, head: Head) -> Tensor:
        kept.extend((states[0], head(states)))
        return kept[1]

    inputs = {"input_ids": torch.cat(list(rows), 1).to(device)}
    if len(rows) > 1:
        places = torch.cat([torch.arange(row.shape[1]) for row in rows])
        inputs["position_ids"] = places[None].to(device)
        lengths = np.array([row.shape[1] for row in rows])
        inputs |= blocks(lengths, device, _attention_dtype(unwrapped, device))
    was_training = unwrapped.training
    unwrapped.eval()
    try:
        with intercept_head(output_head(unwrapped), keep):
            logits = model(**inputs, use_cache=False, return_dict=True).logits
    finally:
        unwrapped.train(was_training)
    return kept[0], kept[1][0], logits[0]
