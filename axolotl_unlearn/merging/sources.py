"""LoRA adapters as changes of their base's weights, and what a folder holds."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.weights import HEAD, Folder, Model, Tensors

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
PREFIX = "base_model.model."

# What an adapter_config.json may say and still mean "base + scaling B A". Anything else that is
# set (DoRA, aLoRA, QALoRA, what PEFT will add) changes the base, the input or the product.
PLAIN_LORA = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path ensure_weight_tying eva_config "
    "exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern "
    "layers_to_transform lora_alpha lora_dropout megatron_core modules_to_save peft_type "
    "peft_version qalora_group_size r rank_pattern revision runtime_config target_modules "
    "task_type use_rslora".split()
)
PLAIN_STARTS = ("true", "false", "gaussian", "orthogonal", "eva")


@dataclass
class Adapter(Folder):
    """A LoRA adapter folder, seen as changes of its base's weights (W + scaling * B A)."""

    config_file = "adapter_config.json"

    @cached_property
    def tensors(self) -> Tensors:
        if (file := self.path / "adapter_model.safetensors").exists():
            return Tensors.of_file(file)
        raise UnlearnError(
            f"{self.path} has adapter_config.json but no adapter_model.safetensors: train the "
            "adapter to its end, or save it again as safetensors."
        )

    @cached_property
    def factors(self) -> dict[str, tuple[str, str]]:
        """Base weight name -> (key of A, key of B)."""
        pairs = {}
        for key in self.tensors:
            if match := re.fullmatch(r"(.*\.lora_(?:embedding_)?)A((?:\.weight)?)", key):
                other = f"{match[1]}B{match[2]}"
                if other not in self.tensors:
                    raise UnlearnError(f"{self.path} holds {key} but not {other}: save it again.")
                module = match[1].rpartition(".lora_")[0].removeprefix(PREFIX)
                pairs[f"{module}.weight"] = (key, other)
        return pairs

    @cached_property
    def replaced(self) -> dict[str, str]:
        """Base weight name -> key of a fully trained copy (PEFT's modules_to_save)."""
        used = {key for pair in self.factors.values() for key in pair}
        return {
            key.removeprefix(PREFIX).replace(".modules_to_save.default", ""): key
            for key in self.tensors
            # PEFT also saves an untrained copy of adapted embeddings, as base_layer
            if key not in used
            and ".base_layer." not in key
            and not (self.keeps_ties and key.endswith(HEAD))
        }

    @property
    def keeps_ties(self) -> bool:
        """Whether whole copies of head and embeddings are one, as in the base (PEFT)."""
        return bool(self.config.get("ensure_weight_tying"))

    @property
    def rank(self) -> int:
        return int(self.config["r"])

    def scaling(self, name: str) -> float:
        """alpha / r (or alpha / sqrt(r) for rsLoRA) of one base weight, patterns included."""
        module = name.removesuffix(".weight")
        rank = _pattern(self.config.get("rank_pattern"), module, self.config["r"])
        alpha = _pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def touches(self, name: str) -> bool:
        return name in self.factors or name in self.replaced

    def weight(self, name: str, base: Tensor) -> Tensor:
        """The float32 weight after PEFT's merge of the adapter into ``base``."""
        if not self.touches(name):
            return base
        if name in self.replaced:
            change = self.tensors[self.replaced[name]].float() - base
        else:
            change = self.change(name)
        return base - change if self.negated else base + change

    def change(self, name: str) -> Tensor:
        """scaling * B A in float32, in the base weight's orientation."""
        key_a, key_b = self.factors[name]
        product = self.tensors[key_b].float() @ self.tensors[key_a].float()
        return (product.T if self.turned(name) else product) * self.scaling(name)

    def turned(self, name: str) -> bool:
        """Whether B A has the transposed shape of the base's weight."""
        return "lora_embedding" in self.factors[name][0] or bool(self.config.get("fan_in_fan_out"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the base's weight that the adapter expects."""
        if name in self.replaced:
            return self.tensors.shape(self.replaced[name])
        key_a, key_b = self.factors[name]
        shape = self.tensors.shape(key_b)[0], self.tensors.shape(key_a)[1]
        return shape[::-1] if self.turned(name) else shape


Parent = Model | Adapter


def _pattern(patterns: dict | None, module: str, default: float) -> float:
    """PEFT's rank_pattern and alpha_pattern: the first key that ends the module's path."""
    matches = (v for k, v in (patterns or {}).items() if re.match(rf"(.*\.)?({k})$", module))
    return next(matches, default)


def open_parent(path: str | Path) -> Parent:
    """An adapter or full model by what its folder holds; ``negate:PATH`` turns its change round
    (task-vector negation, arXiv 2212.04089)."""
    folder, negated = str(path).removeprefix("negate:"), str(path).startswith("negate:")
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UnlearnError(
            f"{folder} does not exist: `axolotl train` writes an adapter there, "
            "`axolotl merge-lora` a full model."
        )
    if (folder / "adapter_config.json").exists():
        adapter = Adapter(folder, negated)
        _supported(adapter)
        return adapter
    if (folder / "config.json").exists():
        return Model(folder, negated)
    raise UnlearnError(
        f"{folder} holds neither adapter_config.json nor config.json: give the output folder of a "
        "finished run."
    )


def open_base(path: str | Path) -> Model:
    """The common base: a full model, also one that training has downloaded from the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    folder = Path(path).expanduser()
    if not folder.exists():
        with suppress(HFValidationError, OSError, ValueError):  # nothing is fetched here
            folder = Path(snapshot_download(str(path), local_files_only=True))
    if not folder.is_dir():
        raise UnlearnError(
            f"base {folder} is no folder and no model in the hub's cache: give the model that "
            "both runs started from (`axolotl train examples/memorise.yml` writes out/memorised)."
        )
    if not (folder / "config.json").exists():
        raise UnlearnError(f"base {folder} holds no config.json: the base must be a full model.")
    return Model(folder)


def _supported(adapter: Adapter) -> None:
    config = adapter.config
    kind, bias = str(config.get("peft_type", "LORA")), config.get("bias", "none")
    init = str(config.get("init_lora_weights", True)).lower()
    fault, cure = "", "run `axolotl merge-lora` on it and give the merged folder."
    if kind.upper() != "LORA":
        fault = f"peft_type {kind} is not LORA"
    elif bias != "none":
        fault = f"bias {bias!r} is not supported here"
    elif config.get("alora_invocation_tokens"):
        fault = "an aLoRA acts on the tokens after its invocation only, so no weights equal it"
        cure = "train a plain LoRA."
    elif others := [key for key in sorted(config.keys() - PLAIN_LORA - {"bias"}) if config[key]]:
        fault = f"{others[0]} is not supported here"
    elif init not in PLAIN_STARTS:
        fault = f"init_lora_weights {init!r} changes the base itself"
    if fault:
        raise UnlearnError(f"{adapter.path / adapter.config_file}: {fault}; {cure}")
