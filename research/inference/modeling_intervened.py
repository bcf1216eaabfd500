"""A causal language model with interventions on the outputs of named modules.

This file lies beside the weights, so ``AutoModelForCausalLM.from_pretrained(folder,
trust_remote_code=True)`` loads both. ``interventions.tensors`` holds, for a module M,

    project:M     [K, D], orthonormal rows Q: the output h becomes h - (h Q') Q
    rotate:M      [K, D], steering vectors s_k, with
    centroids:M   [K, D] and gate:M [2]: threshold, amount.

Of the centroids nearer (cosine, to the mean of h over the tokens of a prompt) than the threshold
the mean vector s turns h to (h - amount s), scaled to the length of h. Without one h stays.
"""

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

FILE = "interventions.tensors"


def turned(h, vectors, centroids, gate, mask=None, chosen=None):
    """(rotated h ``[B, T, D]``, the vectors ``[B, D]`` that did it)."""
    if chosen is None:
        weight = torch.ones_like(h[..., :1]) if mask is None else mask.unsqueeze(-1).to(h)
        mean = (h * weight).sum(1) / weight.sum(1).clamp(min=1)
        near = torch.cosine_similarity(mean[:, None].float(), centroids[None], dim=-1) > gate[0]
        chosen = (near.float() @ vectors) / near.sum(1, keepdim=True).clamp(min=1)
    moved = h - gate[1] * chosen[:, None].to(h)
    length = h.norm(dim=-1, keepdim=True) / moved.norm(dim=-1, keepdim=True).clamp(min=1e-8)
    return torch.where(chosen[:, None].any(-1, keepdim=True), moved * length, h), chosen


def intervene(model, tensors):
    """Put the interventions on a model; returns handles whose ``remove()`` takes them off."""
    state = {}

    def remember(module, args, kwargs):
        state["mask"] = kwargs.get("attention_mask")

    def hook_of(kind, own):
        def hook(module, args, output):
            h, *rest = output if isinstance(output, tuple) else (output,)
            # vLLM: the tokens of a prompt [T, D], and beside them the stream that they go to.
            flat = h.dim() == 2
            stream = rest[0] if flat and rest and rest[0] is not None else 0
            h = (h + stream)[None] if flat else h
            values = [value.to(h.device) for value in own]
            if kind == "project":
                rows = values[0].to(h)
                new = h - (h @ rows.mT) @ rows
            else:
                mask = state.get("mask")
                mask = mask if mask is not None and mask.shape == h.shape[:2] else None
                before = state.get(module)  # the tokens that follow a prompt have its vectors
                before = before if h.shape[1] == 1 and before is not None else None
                same = before is not None and len(before) == len(h)
                new, state[module] = turned(h, *values, mask, before if same else None)
            new = new[0] - stream if flat else new
            return (new, *rest) if isinstance(output, tuple) else new

        return hook

    handles = [model.register_forward_pre_hook(remember, with_kwargs=True)]
    for name, value in tensors.items():
        kind, _, path = name.partition(":")
        if kind in ("project", "rotate"):
            more = (
                [tensors[f"{key}:{path}"] for key in ("centroids", "gate")]
                if kind == "rotate"
                else []
            )
            module = model.get_submodule(path)
            handles.append(module.register_forward_hook(hook_of(kind, [value, *more])))
    return handles


class IntervenedForCausalLM:
    """Loads the model that config.json names, and the interventions beside its weights."""

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        """Asked for by Transformers; a folder is written by `research.inference.folder` alone."""

    @classmethod
    def from_pretrained(cls, path, *args, config=None, **options):
        options = {
            k: v for k, v in options.items() if k not in ("trust_remote_code", "code_revision")
        }
        kind = getattr(transformers, config.intervened)
        loaded = kind.from_pretrained(path, *args, config=config, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # Older Transformers ask this class for every later model of this kind, ours or not.
        if getattr(config, "auto_map", None):
            intervene(model, load_file(Path(path) / FILE))
        return loaded
