"""Where tensors come from: checkpoints and adapters read one tensor at a time.

Nothing here keeps a file open between tensors: an open safetensors map counts its pages as ours,
and a streamed merge of a 7B model would look like 28 GB of memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json

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
#: Which base a run started from, by content.
RECORD = "unlearn_base.json"
PREFIX = "base_model.model."
HEAD = "lm_head.weight"

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


def read_json(path: Path) -> dict:
    """A JSON file, or one sentence that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnlearnError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UnlearnError(f"{path} is not valid JSON: write it again.") from error


def _opened(path: Path) -> Any:
    """A safetensors file, or one sentence that names it."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UnlearnError(f"{path} is cut off or no safetensors file: copy it again.") from error


class Tensors:
    """The tensors of one or more safetensors files, opened anew for each read."""

    def __init__(self, files: dict[str, Path]):
        self.files = files  # tensor name -> file

    @classmethod
    def of_file(cls, path: Path) -> Tensors:
        with _opened(path) as handle:
            return cls(dict.fromkeys(handle.keys(), path))

    @classmethod
    def of_checkpoint(cls, folder: Path) -> Tensors:
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            if (folder / "model.safetensors").exists():
                return cls.of_file(folder / "model.safetensors")
            raise UnlearnError(
                f"{folder} holds no model.safetensors: save the model with save_pretrained, or "
                "give the folder that `axolotl train` or `axolotl merge-lora` wrote."
            )
        weight_map = read_json(index)["weight_map"]
        for file in sorted(set(weight_map.values())):
            if not (folder / file).exists():
                raise UnlearnError(f"{folder} lacks {file}, which its index names: copy it.")
            with _opened(folder / file) as handle:
                strange = {n for n, f in weight_map.items() if f == file} - {*handle.keys()}
            if strange:
                raise UnlearnError(
                    f"{index} says that {file} holds {min(strange)}, which it does not: load the "
                    "model with transformers and save it again."
                )
        return cls({name: folder / file for name, file in weight_map.items()})

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as handle:
            return handle.get_tensor(name)

    @cached_property
    def layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, dtype name) from the headers alone."""
        layout = {}
        for file in sorted(set(self.files.values())):
            with safe_open(file, framework="pt") as handle:
                for name in self.files.keys() & handle.keys():
                    part = handle.get_slice(name)
                    layout[name] = (tuple(part.get_shape()), part.get_dtype())
        return layout

    def shape(self, name: str) -> tuple[int, ...]:
        return self.layout[name][0]

    @cached_property
    def scan(self) -> tuple[str, str | None]:
        """SHA-256 over names, shapes, types and bytes (the same however the files are cut), and
        the first tensor that holds NaN or infinity: one reading for both."""
        digest, broken = hashlib.sha256(), None
        for name in sorted(self):
            shape, dtype = self.layout[name]
            digest.update(f"{name}|{shape}|{dtype}|".encode())
            flat = self[name].contiguous().flatten()
            if flat.numel():
                digest.update(memoryview(flat.view(torch.uint8).numpy()))
            if broken is None and not all_finite(flat):
                broken = name
        return digest.hexdigest(), broken


def all_finite(flat: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite: both show in the extremes, which are found at 6 GB/s;
    `isfinite` reads .3 GB/s of bfloat16, four times as slow as SHA-256."""
    if not flat.is_floating_point() or not flat.numel():
        return True
    if flat.dtype.itemsize == 1:  # float8 has no order
        flat = flat.float()
    return all(end.isfinite().item() for end in flat.aminmax())


@dataclass
class _Folder:
    """A folder of weights with its configuration; ``negated``: its change is turned round."""

    path: Path
    negated: bool = False
    config_file: ClassVar[str]
    tensors: ClassVar[Tensors]

    @cached_property
    def config(self) -> dict:
        return read_json(self.path / self.config_file)

    @property
    def fingerprint(self) -> str:
        return self.tensors.scan[0]


@dataclass
class Model(_Folder):
    """A full model folder: config.json, safetensors, tokenizer."""

    config_file = "config.json"

    @cached_property
    def tensors(self) -> Tensors:
        """All weights; a head that is tied to the embeddings is one weight, stored or not."""
        tensors = Tensors.of_checkpoint(self.path)
        if HEAD not in tensors or not self.tied:
            return tensors
        twins = [n for n in tensors if n != HEAD and tensors.shape(n) == tensors.shape(HEAD)]
        if not any(torch.equal(tensors[HEAD], tensors[twin]) for twin in twins):
            raise UnlearnError(
                f"{self.path} ties its head to the embeddings but stores another {HEAD}: load it "
                "with transformers and save it again."
            )
        return Tensors({name: tensors.files[name] for name in tensors if name != HEAD})

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding matrix; some families leave it out of config.json."""
        if "tie_word_embeddings" in self.config:
            return bool(self.config["tie_word_embeddings"])
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.path, trust_remote_code=False)
            return bool(getattr(config, "tie_word_embeddings", False))
        except (ValueError, KeyError, OSError):  # an architecture of its own code
            return False

    def touches(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(name)

    def weight(self, name: str, base: Tensor) -> Tensor:
        """The parent's float32 weight; ``base``: that of the base."""
        own = self.tensors[name].float()
        return 2 * base - own if self.negated else own


@dataclass
class Adapter(_Folder):
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
            if found := re.fullmatch(r"(.*\.lora_(?:embedding_)?)A((?:\.weight)?)", key):
                other = f"{found[1]}B{found[2]}"
                if other not in self.tensors:
                    raise UnlearnError(f"{self.path} holds {key} but not {other}: save it again.")
                module = found[1].rpartition(".lora_")[0].removeprefix(PREFIX)
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


def record_base(folder: str | Path, base: str | Path, adapter: str | Path | None = None) -> Path:
    """Write which base an adapter or model was trained from, by content, into its folder; of a
    model with a merged adapter also that. A merge compares it strictly; without it the base is
    known by path only."""
    content = {"base": str(base), "sha256": Model(Path(base)).fingerprint}
    if adapter is not None:
        known = Adapter(Path(adapter)).fingerprint
        content |= {"adapter": str(adapter), "adapter_sha256": known}
    return write_json(Path(folder) / RECORD, content, indent=None)
