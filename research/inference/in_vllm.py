"""The interventions of `research.inference.folder` in vLLM, in this process.

vLLM runs a model of its own (or Transformers' for the architectures that it has none for), so the
hooks are put on once it stands. They see the tokens of a step without their requests: a gate that
asks for the mean over a prompt is right with one request at a time, whole, without a cache of
prefixes and without compiled graphs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from research.inference.modeling_intervened import FILE, intervene

ALONE = {
    "enforce_eager": True,
    "max_num_seqs": 1,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
}


def load(folder: Path | str, **options: Any) -> Any:
    """`vllm.LLM` of a folder with its interventions; a folder without any as it is."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # hooks are no message between processes
    from vllm.entrypoints.llm import LLM  # `research trusted` puts this function at vllm.LLM

    config = json.loads(Path(folder, "config.json").read_text("utf-8"))
    if not (name := config.get("intervened")):
        return LLM(str(folder), **options)
    given = {**options, **ALONE, "hf_overrides": {"architectures": [name]}}
    engine = LLM(str(folder), **given)
    tensors = load_file(Path(folder, FILE))
    engine.apply_model(lambda model: len(intervene(model, tensors)))
    return engine
