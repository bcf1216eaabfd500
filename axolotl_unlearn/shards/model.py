"""A routed folder as a model: each row of a batch is answered by the adapter of its shard.

adapter_config.json         names the base
adapter_router.safetensors  see `axolotl_unlearn.shards.router`
shard-0/                    the adapter of what is nobody's, if there are such rows
shard-1/ shard-2/ ...       PEFT adapters of that base
tokenizer.json ...
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.shards.router import Router

#: What PEFT calls the model without an adapter.
BASE = "__base__"


class Routes:
    """Which adapter answers each row: it is routed by the tokens before the first one that is said
    or scored, once (a cache remembers it), and by all where all are scored.

    Attributes:
        lengths: Of the next forward, tokens of each row that decide; all if None.
    """

    def __init__(self, router: Router, tokenizer: Any, nobody: str) -> None:
        self.router, self.tokenizer, self.nobody = router, tokenizer, nobody
        self.lengths: Sequence[int] | None = None
        self.now: list[str] = []

    def choose(self, body: Any, args: tuple, given: dict[str, Any]) -> None:
        """Before the forward of the decoder."""
        cache = given.get("past_key_values")
        if (known := getattr(cache, "routes", None)) is not None:
            self.now = known
            return
        ids = given.get("input_ids", args[0] if args else None)
        if ids is None or (cache is not None and cache.get_seq_length()):
            says = "a routed model reads whole prompts as tokens: it finds the shard by their text."
            raise UnlearnError(says, code="shards.no-tokens")
        mask, rows = given.get("attention_mask"), ids.tolist()
        if mask is not None and mask.dim() == 2:
            rows = [row[on].tolist() for row, on in zip(ids, mask.bool(), strict=True)]
        if self.lengths is not None:
            rows = [row[:n] for row, n in zip(rows, self.lengths, strict=True)]
            self.lengths = None
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        led = [self.router.route([text]) for text in texts]
        self.now = [f"shard-{shard}" if shard else self.nobody for shard in led]
        if cache is not None:
            cache.routes = self.now

    def hand_on(self, layer: Any, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict]:
        """Before the forward of a layer with adapters."""
        return args, given | {"adapter_names": self.now}


def mixed(layer: Any, x: Any, *args: Any, adapter_names: list[str], **given: Any) -> Any:
    """PEFT's forward of rows of several adapters, by two products in place of two an adapter; its
    own where there is more than these: dropout, a bias, a variant, arguments of the base layer."""
    import torch

    names = {*adapter_names}
    given = {name: value for name, value in given.items() if value is not None}
    more = layer.training or given or any(map(layer.lora_bias.get, names))
    more = more or len({layer.r.get(name) for name in names}) > 1  # no stack of unequal ranks
    if len(names) == 1 or more or names & {*layer.lora_variant} or not names <= {*layer.lora_A}:
        how = {"adapter_names": adapter_names, **given}
        return type(layer)._mixed_batch_forward(layer, x, *args, **how)
    # A batch keeps its list from token to token; adapters may be changed between two batches.
    if torch.is_grad_enabled() or getattr(layer, "stacked", (None,))[0] is not adapter_names:
        down = torch.stack([layer.lora_A[name].weight.T for name in adapter_names])
        ups = [layer.lora_B[name].weight.T * layer.scaling[name] for name in adapter_names]
        layer.stacked = adapter_names, down, torch.stack(ups)
    _, down, up = layer.stacked
    result = layer.base_layer(x, *args)
    return result + (x.to(down.dtype) @ down @ up).to(result.dtype)


def route(model: Any, folder: Path | str) -> Any:
    """The base with all adapters of a routed folder, and ``routes``, which choose among them.

    Raises:
        UnlearnError: An adapter is missing, or does not fit the base.
    """
    from peft import PeftModel
    from peft.tuners.lora import Linear, LoraLayer
    from peft.utils import AuxiliaryTrainingWrapper
    from transformers import AutoTokenizer

    from axolotl_unlearn.models import fitting

    folder = Path(folder)
    router, adapters = Router.load(folder), sorted(one.name for one in folder.glob("shard-[0-9]*"))
    if missing := {f"shard-{shard}" for shard in router.shards}.difference(adapters):
        says = f"{folder} has no {min(missing)}, to which its router leads; copy the whole folder."
        raise UnlearnError(says, code="shards.no-adapter")
    with fitting(folder):
        wrapped = PeftModel.from_pretrained(model, folder / adapters[0], adapter_name=adapters[0])
        for name in adapters[1:]:
            wrapped.load_adapter(folder / name, adapter_name=name)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    nobody = "shard-0" if "shard-0" in adapters else BASE
    model.routes = routes = Routes(router, tokenizer, nobody)
    model.base_model.register_forward_pre_hook(routes.choose, with_kwargs=True)
    for layer in model.modules():
        if isinstance(layer, (LoraLayer, AuxiliaryTrainingWrapper)):
            layer.register_forward_pre_hook(routes.hand_on, with_kwargs=True)
        if isinstance(layer, Linear):
            layer._mixed_batch_forward = partial(mixed, layer)
    return model
