"""Generation by vLLM in this process: ``axolotl-unlearn eval --backend vllm``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from axolotl_unlearn.device import free_and_total
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import ADAPTER_CONFIG, ModelSpec

#: Prompts between two stores; vLLM makes batches of its own.
AT_ONCE = 1000


def backend(asked: str | None, device: str, alone: bool) -> str | None:
    """What generates: "vllm", or None for transformers.

    Args:
        asked: "auto" takes vLLM where it is installed, the device is no CPU and the process is
            alone with it.

    Raises:
        UnlearnError: vLLM is asked for and cannot be used.
    """
    there = find_spec("vllm") is not None
    if asked == "auto":
        return "vllm" if there and alone and device != "cpu" else None
    if asked != "vllm":
        return None
    if not alone:
        raise UnlearnError(
            "`--backend vllm` places the model itself; leave out --device-map.",
            code="eval.vllm-alone",
        )
    if not there:
        raise UnlearnError(
            "`--backend vllm` needs vLLM, which is not installed: `pip install "
            "'axolotl-unlearn[vllm]'`, or leave out `--backend` (transformers generates).",
            code="eval.no-vllm",
        )
    return "vllm"


def generate(
    spec: ModelSpec,
    tokenizer: Any,
    prompts: Sequence[str],
    most: int,
    dtype: str,
    on_batch: Callable[[list[int], list[str]], None],
    seed: int | None = None,
) -> None:
    """Continuations of raw prompts, as `evaluation.generate.generate_greedily` makes them.

    The engine takes nine tenths of the memory that the device has left.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    if not prompts:
        return
    given: dict[str, Any] = {"dtype": dtype, "seed": 0}
    lora = None
    if spec.adapter:
        config = json.loads(Path(spec.adapter, ADAPTER_CONFIG).read_text("utf-8"))
        rank = max(config["r"], *(config.get("rank_pattern") or {}).values(), 8)
        # It takes powers of two.
        given |= {"enable_lora": True, "max_lora_rank": 1 << (rank - 1).bit_length()}
        lora = LoRARequest(spec.name, 1, spec.adapter)
    if memory := free_and_total():
        given["gpu_memory_utilization"] = 0.9 * memory[0] / memory[1]
    engine = LLM(spec.model, **given)
    sampling = SamplingParams(temperature=float(seed is not None), max_tokens=most, seed=seed)
    for start in range(0, len(prompts), AT_ONCE):
        part = prompts[start : start + AT_ONCE]
        asked = [{"prompt_token_ids": tokenizer(prompt)["input_ids"]} for prompt in part]
        said = engine.generate(asked, sampling, lora_request=lora)
        on_batch(list(range(start, start + len(part))), [one.outputs[0].text for one in said])
