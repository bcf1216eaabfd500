"""Activation patching, batched: the log-prob drops that the Unlearning Depth Score is made of.

Shape letters: R rows of a batch, T time, D hidden, P answer positions, L layers, N all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.continuations import encode_pairs
from axolotl_unlearn.metrics.intervals import Mean, mean_interval
from research.probes.depth_metrics import TAU, depth_scores

Encoded = Sequence[tuple[list[int], list[int]]]


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of decoder layers.

    Raises:
        UnlearnError: if the model has none of the length its config names.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnlearnError(
        f"{type(model).__name__} has no list of {count} layers; depth needs a decoder whose layers "
        "can be patched."
    )


@contextmanager
def _watched(
    layers: Sequence[nn.Module], keep: Callable[[Any], Any] = lambda output: output
) -> Iterator[list[Any]]:
    """While inside, what each layer gives, or what ``keep`` makes of it, is put into the yielded
    list."""
    seen: list[Any] = []
    handles = [
        layer.register_forward_hook(lambda _module, _inputs, output: seen.append(keep(output)))
        for layer in layers
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _begun_after(
    layers: Sequence[nn.Module], number: int, output: Any, whole: bool
) -> Iterator[None]:
    """While inside, that layer gives ``output``; unless ``whole``, those before are passed by."""

    def passed(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if isinstance(output, tuple) else hidden_states

    with ExitStack() as stack:
        for layer in () if whole else layers[:number]:
            stack.enter_context(patch.object(layer, "forward", passed))
        handle = layers[number].register_forward_hook(lambda *_: output)
        stack.callback(handle.remove)
        yield


def _states(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@torch.inference_mode()
def capture(model: Any, batch: Mapping[str, Tensor], row: Tensor, time: Tensor) -> Tensor:
    """Residual stream after each layer at the given positions, ``[L, P, D]``."""
    with _watched(decoder_layers(model), lambda output: _states(output)[row, time]) as seen:
        model(**batch, use_cache=False, logits_to_keep=1)
    return torch.stack(seen)


@torch.inference_mode()
def answer_logps(
    model: Any, batch: Mapping[str, Tensor], row: Tensor, time: Tensor, target: Tensor
) -> Tensor:
    """``[P]`` log-prob of each answer token."""
    keep = time.unique()
    logits = model(**batch, use_cache=False, logits_to_keep=keep).logits
    chosen = logits[row, torch.searchsorted(keep, time.contiguous())].float()
    return chosen.log_softmax(-1).gather(-1, target[:, None])[:, 0]


def _patched(output: Any, row: Tensor, time: Tensor, states: Tensor) -> Any:
    """What a layer gave with ``[P, D]`` states put at the answer positions, and only there; the
    rest of the sequence stays the model's own."""
    hidden = _states(output).clone()
    hidden[row, time] = states.to(hidden)
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def patching_drops(
    original: Any,
    source: Any,
    encoded: Encoded,
    *,
    batch_size: int = 16,
    on_batch: Callable[[int], None] | None = None,
) -> NDArray[np.float64]:
    """Fall of the mean answer log-prob in the original for each patched layer, ``[N, L]``.

    Args:
        original: The model before unlearning, which is patched.
        source: The model whose states are put into it: same architecture, same tokenizer.
        encoded: Token ids (prompt, answer) of each row.
        batch_size: Rows; of a batch the outputs of all layers are kept, ``[L, R, T, D]``.

    Raises:
        UnlearnError: if the two models have layers of other number or width.
    """
    shapes = [
        (len(decoder_layers(m)), m.config.get_text_config().hidden_size) for m in (original, source)
    ]
    if shapes[0] != shapes[1]:
        raise UnlearnError(
            f"the models have {shapes[0][0]} layers of width {shapes[0][1]} and {shapes[1][0]} of "
            f"{shapes[1][1]}; depth compares models of one architecture."
        )
    drops = np.zeros((len(encoded), shapes[0][0]))
    order = sorted(range(len(encoded)), key=lambda i: -sum(map(len, encoded[i])))
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        batch, row, time, target = _pack([encoded[i] for i in numbers], original.device)
        states = capture(source, {k: v.to(source.device) for k, v in batch.items()}, row, time)
        layers = decoder_layers(original)
        # Later layers read the keys of earlier ones.
        whole = bool(getattr(original.config.get_text_config(), "num_kv_shared_layers", 0))
        with _watched(layers) as outputs:
            plain = answer_logps(original, batch, row, time, target)
        for layer in range(shapes[0][0]):
            given = _patched(outputs[layer], row, time, states[layer])
            with _begun_after(layers, layer, given, whole):
                patched = answer_logps(original, batch, row, time, target)
            fall = torch.zeros(len(numbers), dtype=torch.double, device=plain.device)
            fall.index_add_(0, row, (plain - patched).double())
            drops[numbers, layer] = (fall / row.bincount(minlength=len(numbers))).cpu().numpy()
        if on_batch is not None:
            on_batch(len(numbers))
    return drops


def _pack(rows: Encoded, device: Any) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Right-padded batch; row, predicting position and target of every answer token, ``[P]``."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    where = []
    for number, (prompt, answer) in enumerate(rows):
        tokens = prompt + answer
        ids[number, : len(tokens)] = torch.tensor(tokens)
        mask[number, : len(tokens)] = 1
        where += [(number, len(prompt) + i - 1, token) for i, token in enumerate(answer)]
    row, time, target = torch.tensor(where, device=device).unbind(-1)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}, row, time, target


def depth_report(
    records: Sequence[Record],
    retrained_drop: NDArray[np.float64],
    drops: Mapping[str, NDArray[np.float64]],
    *,
    tau: float = TAU,
    retrained_name: str = "retrained",
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Scores with intervals over documents, and one curve a model for the report.

    Args:
        records: The rows behind the drops, in their order.
        retrained_drop: D1, ``[N, L]``.
        drops: D2 of each unlearned model by name.

    Returns:
        ``{"tau", "rows", "layers", "models": {name: {"score", "low", "high", "n", "layers":
        [erased share a layer], "sentence"}}}`` and curves of the mean drop over layers.

    Raises:
        UnlearnError: if no row leaves a gap: then there was nothing to forget.
    """
    documents = [record.document for record in records]
    if not (retrained_drop > tau).any():
        raise UnlearnError(
            f"no forget row loses more than {tau} nats when the retrained model's states are put "
            "into the original: the retrained model knows the rows too, or the original never did."
        )
    report: dict[str, Any] = {
        "tau": tau,
        "rows": len(records),
        "layers": retrained_drop.shape[1],
        "models": {},
    }
    curves = [_curve(retrained_name, retrained_drop, documents)]
    for name, drop in drops.items():
        scores = depth_scores(retrained_drop, drop, tau)
        known = ~np.isnan(scores)
        kept = [d for d, ok in zip(documents, known, strict=True) if ok]
        low, high = mean_interval(Mean(scores[known], kept))
        value = float(scores[known].mean())
        weight = np.where(retrained_drop > tau, retrained_drop, 0).sum(0)
        reached = np.where(retrained_drop > tau, np.clip(drop, 0, retrained_drop), 0).sum(0)
        report["models"][name] = {
            "score": value,
            "low": low,
            "high": high,
            "n": int(known.sum()),
            "layers": [
                float(r / w) if w > 0 else None for r, w in zip(reached, weight, strict=True)
            ],
            "sentence": _sentence(name, value, low, high),
        }
        curves.append(_curve(name, drop, documents))
    return report, curves


def _sentence(name: str, value: float, low: float, high: float) -> str:
    if low > 0.8:
        meaning = "the knowledge is gone from nearly all layers, as in the retrained model"
    elif high < 0.2:
        meaning = "the knowledge is still there in nearly all layers, only unspoken"
    else:
        meaning = "part of the knowledge can be read from the layers"
    return f"{name}: depth {value:.2f} [{low:.2f}, {high:.2f}] of 1: {meaning}."


def _curve(name: str, drop: NDArray[np.float64], documents: Sequence[str]) -> dict[str, Any]:
    points = []
    for layer in range(drop.shape[1]):
        low, high = mean_interval(Mean(drop[:, layer], documents))
        points.append({"x": layer, "y": float(drop[:, layer].mean()), "low": low, "high": high})
    return {
        "title": "Depth: what each layer no longer knows",
        "model": name,
        "metric": "fall of the answers' log-prob, nats a token (retrained: complete forgetting)",
        "x_label": "layer",
        "points": points,
    }


def encode_records(tokenizer: Any, records: Sequence[Record]) -> list[tuple[list[int], list[int]]]:
    """Token ids (prompt, answer) of forget rows; the answer is what is asked for."""
    return encode_pairs(tokenizer, [(record.input, record.output) for record in records])
