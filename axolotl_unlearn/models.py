"""Which models are evaluated, how they are loaded, and the digest of their weights.

A model is a folder with weights, a folder with a LoRA adapter or adapters of routed shards (its
base is read from adapter_config.json), ``base+adapter``, or any of these as ``name=...``. A name on
the hub works where the hub does. Everything that can be wrong with a folder is said before weights
are loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axolotl_unlearn.device import emulates_bfloat16
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.shards import is_routed
from axolotl_unlearn.store import file_digest

ADAPTER_CONFIG = "adapter_config.json"
#: What `teacher --start` writes beside a model that lies halfway to its teacher.
START = "start.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "*.gguf",
            "shard-*/adapter_*")  # fmt: skip
_TOKENIZER = """
    tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json
    vocab.json merges.txt
""".split()
SERVERS = ("http://", "https://")
_CONFIG = ("config.json", "generation_config.json", ADAPTER_CONFIG)


def is_tokenizer(name: str) -> bool:
    """Whether a file of this name holds (a part of) a tokenizer that can be loaded by itself."""
    return name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json") or (
        name.endswith((".tiktoken", ".gguf"))
    )


def has_chat_template(name: str) -> bool:
    """As far as the files of a folder, or of the hub's cache, show."""
    folder = Path(name) if os.path.isdir(name) else cached_on_hub(name)
    if folder is None:
        return False
    file = folder / "tokenizer_config.json"
    said = file.read_text("utf-8", errors="replace") if file.is_file() else ""
    return '"chat_template"' in said or any(folder.glob("chat_template*"))


def unreachable(name: str) -> str | None:
    """What to say of a name on the hub, which is no folder: half a sentence; None if it is here."""
    from huggingface_hub import constants

    if os.path.exists(name) or cached_on_hub(name):
        return None
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE") in ("1", "true"):
        return (
            "is no folder here, and not in this machine's cache of the hub, which may not be asked "
            "(HF_HUB_OFFLINE); correct the path, or download it"
        )
    return "is no folder here: it will be looked for on the hub"


def cached_on_hub(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model of the hub in this machine's cache; None where it is not."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in ("config.json", "tokenizer_config.json"):  # of a tokenizer alone
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


@dataclass(frozen=True)
class ModelSpec:
    """A model to evaluate.

    Attributes:
        name: how the results call it.
        model: folder (or hub name) of the full model.
        adapter: folder of a PEFT adapter on top of it, or None.
    """

    name: str
    model: str
    adapter: str | None = None

    @property
    def served(self) -> bool:
        """Whether a server answers for it."""
        return self.model.startswith(SERVERS)

    @property
    def source(self) -> str:
        """ "base+adapter" or the model."""
        return f"{self.model}+{self.adapter}" if self.adapter else self.model

    @property
    def folders(self) -> list[Path]:
        return [Path(p) for p in (self.model, self.adapter) if p]


def parse_models(models: Sequence[str | ModelSpec]) -> list[ModelSpec]:
    """Model specs with different names, checked as far as files allow.

    Raises:
        UnlearnError: A missing folder, an adapter without its base, two equal names.
    """
    if not models:
        says, cure = "no model given", "name at least one: `axolotl-unlearn eval out/merged`"
        raise UnlearnError(f"{says}; {cure}.", code="models.none")
    specs, faults = [], []
    for one in models:
        try:
            specs.append(_checked(one if isinstance(one, ModelSpec) else _parse(one)))
        except UnlearnError as error:
            faults.append(error)
    if faults:
        raise UnlearnError(" ".join(map(str, faults)), code=faults[0].code)
    names = [spec.name for spec in specs]
    for spec in specs:
        if names.count(spec.name) > 1:
            says = f"two models are called {spec.name!r}"
            cure = f"give them names: `{spec.name}-1={spec.source}`"
            raise UnlearnError(f"{says}; {cure}.", code="models.same-name")
    return specs


def original_of(specs: Sequence[ModelSpec], name: str | None) -> ModelSpec | None:
    """The model before unlearning: by this name, else "original", else "memorised"."""
    by_name = {spec.name: spec for spec in specs}
    if name is not None:
        if name not in by_name:
            says = f"--original {name!r} is none of the models ({', '.join(by_name)})."
            raise UnlearnError(says, code="models.original")
        if name != "original" and "original" in by_name:
            says = f"--original {name!r}, but another model is named 'original'; rename that one."
            raise UnlearnError(says, code="models.original")
        return by_name[name]
    return by_name.get("original") or by_name.get("memorised")


def _parse(text: str) -> ModelSpec:
    name, equals, source = text.partition("=")
    # A path may hold "=", but then what stands before it is no plain name.
    if not equals or "/" in name or os.sep in name or Path(text).exists():
        name, source = "", text
    if equals and not name and not Path(text).exists() and text.startswith("="):
        raise UnlearnError(f"{text!r} has no name before '='; write name=path.", code="models.name")
    if re.match(r"[\w.-]+:\d+(/|$)", source) and not Path(source).exists():
        raise UnlearnError(f"{source}: of a server write http://{source}.", code="models.server")
    if "+" in source and not Path(source).exists():
        pairs = [(source[:n], source[n + 1 :]) for n, one in enumerate(source) if one == "+"]
        # A path may hold "+", too: the first pair of what is there.
        base, adapter = max(pairs, key=lambda pair: sum(p != "" and Path(p).exists() for p in pair))
        if not base or not adapter:
            says = f"{text!r}: write base+adapter, two folders joined by '+'."
            raise UnlearnError(says, code="models.base-and-adapter")
        return ModelSpec(name or _name_of(adapter), base, adapter)
    return ModelSpec(name or _name_of(source), source)


def _name_of(source: str) -> str:
    """Last part of a path; "merged" of an adapter run is named after the run."""
    if source.startswith(SERVERS):
        return "served"
    path = Path(source.rstrip("/"))
    if path.name == "merged" and (path.parent / ADAPTER_CONFIG).is_file():
        return path.parent.name
    return path.name or source


def lacking(folder: Path) -> tuple[str, str] | None:
    """What keeps a folder from being a full model, as a code and half a sentence."""
    if folder.is_file():
        return "is-a-file", "is a file; name the model's folder"
    weights = [p.name for pattern in _WEIGHTS for p in folder.glob(pattern) if p.is_file()]
    # Axolotl saves the base's config.json beside an adapter: only the weights tell them apart.
    full = any(not name.startswith("adapter_") for name in weights)
    if (folder / ADAPTER_CONFIG).is_file() and not full:
        return "adapter-as-base", (
            "is a LoRA adapter: merge it first (`axolotl merge-lora`), or name its base instead"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        return "two-models", (
            "holds full weights beside an adapter, which transformers would add to them: move one "
            "of the two into a folder of its own"
        )
    if not (folder / "config.json").is_file():
        return "no-config", (
            "has no config.json, so it is no model; name the folder that holds it and the weights"
        )
    return None if full else ("no-weights", "has no weights; train, merge or copy the model first")


def _checked(spec: ModelSpec) -> ModelSpec:
    folder = Path(spec.model)
    if spec.served:
        return spec
    if not folder.exists():
        if "/" not in spec.model or is_path(spec.model):
            says = f"model {spec.name!r}: {spec.model} does not exist; train or merge it first, or"
            cure = "correct the path (relative paths start from the working folder)"
            raise UnlearnError(f"{says} {cure}.", code="models.missing")
        says = None if spec.adapter else unreachable(spec.model)
        if says and "HF_HUB_OFFLINE" in says:
            raise UnlearnError(f"model {spec.name!r}: {spec.model} {says}.", code="models.missing")
        return spec  # a name on the hub
    code, says = lacking(folder) or ("", "")
    if code == "adapter-as-base" and not spec.adapter:
        return _checked(ModelSpec(spec.name, _base_of(folder, spec.name), str(folder)))
    if code:
        raise UnlearnError(f"model {spec.name!r}: {folder} {says}.", code=f"models.{code}")
    if spec.adapter and not (Path(spec.adapter) / ADAPTER_CONFIG).is_file():
        says = f"model {spec.name!r}: {spec.adapter} has no {ADAPTER_CONFIG}, so it is no adapter"
        cure = "write base+adapter with a PEFT adapter folder behind the '+'"
        raise UnlearnError(f"{says}; {cure}.", code="models.no-adapter")
    return spec


def _base_of(adapter: Path, name: str) -> str:
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if not base:
        says = f"model {name!r}: {adapter / ADAPTER_CONFIG} names no base model"
        raise UnlearnError(f"{says}; write base+adapter.", code="models.adapter-without-base")
    if ("/" not in base or is_path(base)) and not Path(base).is_dir():
        says = f"model {name!r}: the base {base} of the adapter {adapter} does not exist"
        cure = "make it again, or write base+adapter with the folder where it is now"
        raise UnlearnError(f"{says}; {cure}.", code="models.base-missing")
    return base


def is_path(name: str) -> bool:
    """What is no name on the hub: explicit, deeper than "owner/name", or in a folder of ours."""
    return (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or (name.count("/") == 1 and os.path.isdir(os.path.dirname(name)))
        or name.startswith(("out/", "outputs/", "models/", "examples/"))
    )


def _fetched(name: str) -> Path:
    """The folder, in the cache of the hub, of the revision that is loaded: the newest, or the one
    here where the hub cannot be asked."""
    from huggingface_hub import snapshot_download

    says = "has no weights"
    for weights in (["*.safetensors"], ["pytorch_model*.bin", "adapter_model.bin"]):
        wanted = [*_CONFIG, *_TOKENIZER, *weights, "*.index.json"]
        try:
            folder = snapshot_download(name, allow_patterns=wanted, ignore_patterns="*/*")
        except (OSError, ValueError) as error:
            says = f"cannot be fetched ({first_line(error)})"
        else:
            if any(found for pattern in weights for found in Path(folder).glob(pattern)):
                return Path(folder)
    says = f"{name} of the hub {says}; correct the name, or download it."
    raise UnlearnError(says, code="models.cannot-load")


def weights_digest(spec: ModelSpec, but: str = "") -> str:
    """SHA-256 over weights, configs and tokenizer of a model, without files of a suffix; one of the
    hub is fetched first."""
    if spec.served:
        says = f"model {spec.name!r}: {spec.model} is a server, which gives no weights"
        cure = "give a folder here, or ask the server with `axolotl-unlearn audit`"
        raise UnlearnError(f"{says}: {cure}.", code="models.server")
    total = hashlib.sha256()
    for folder in spec.folders:
        if not folder.is_dir():
            folder = _fetched(str(folder))
        files = {path for pattern in _WEIGHTS for path in folder.glob(pattern)}
        files |= {folder / name for name in (*_CONFIG, *_TOKENIZER) if (folder / name).is_file()}
        for path in sorted(file for file in files if not but or file.suffix != but):
            total.update(f"{path.relative_to(folder)}:{file_digest(path)}\n".encode())
    return total.hexdigest()


def check_tokenizer(spec: ModelSpec) -> None:
    """Refuse folders without a tokenizer: transformers makes one without a token of them."""
    there = [file.name for place in spec.folders if place.is_dir() for file in place.iterdir()]
    if there and not any(map(is_tokenizer, there)) and not spec.served:
        says = f"model {spec.name!r}: no tokenizer in {spec.model}"
        cure = "copy the tokenizer files of the base model there"
        raise UnlearnError(f"{says}; {cure}.", code="models.no-tokenizer")


def load_tokenizer(spec: ModelSpec) -> Any:
    """The model's tokenizer; the adapter's own where the base has none, or has fewer tokens."""
    from transformers import AutoTokenizer

    check_tokenizer(spec)
    load = AutoTokenizer.from_pretrained
    places = [folder for folder in spec.folders if (folder / "tokenizer_config.json").is_file()]
    try:
        if len(places) == 2:  # an adapter of added tokens is trained with them
            base, adapter = (load(place, trust_remote_code=False) for place in places)
            base.chat_template = base.chat_template or adapter.chat_template  # that of its training
            return adapter if len(adapter) > len(base) else base
        return load(str(places[0]) if places else spec.model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        says = f"model {spec.name!r}: no tokenizer in {spec.model} ({first_line(error)})"
        cure = "copy the tokenizer files of the base model there"
        raise UnlearnError(f"{says}; {cure}.", code="models.no-tokenizer") from error


def load_model(
    spec: ModelSpec, *, dtype: Any, device: Any, device_map: Any = None, **options: Any
) -> Any:
    """The model in evaluation mode on `device`, its adapter merged into the weights.

    Args:
        device_map: "auto" spreads it over all devices, memory and disk instead (accelerate).
        options: For ``from_pretrained``.

    Raises:
        UnlearnError: It cannot be loaded, or a weight is NaN or infinite.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    # Not asked for on the terminal: code of a model's own runs where it is asked for.
    options = {"trust_remote_code": False, **options}
    try:
        model, facts = AutoModelForCausalLM.from_pretrained(
            spec.model, dtype=dtype, device_map=device_map, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        says = f"model {spec.name!r}: {spec.model} cannot be loaded ({first_line(error)})"
        raise UnlearnError(f"{says}; copy or make it again.", code="models.cannot-load") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    check_complete(spec.model, facts)
    if spec.adapter:
        from axolotl_unlearn.shards.model import route

        join = route if is_routed(spec.adapter) else merge_adapter
        model = join(model, spec.adapter)
    check_finite(model, spec.name)
    if str(model.dtype) == "torch.bfloat16" and str(device) == "cpu" and emulates_bfloat16():
        says = "this processor only emulates bfloat16, which is many times slower than float32"
        logging.getLogger(__name__).warning(f"{spec.name}: {says}")
    return (model if device_map else model.to(device)).eval()


def check_complete(source: str, facts: dict[str, Any]) -> None:
    """Refuse a model of which weights are missing: transformers draws them and only warns.

    Args:
        facts: The loading info of ``from_pretrained``.
    """
    if missing := sorted(facts["missing_keys"]):
        says = f"{source} lacks {len(missing)} weights (the first is {missing[0]})"
        cure = "which would be random numbers; copy or make it again"
        raise UnlearnError(f"{says}, {cure}.", code="models.weights-missing")


def merge_adapter(model: Any, adapter: str) -> Any:
    """The model with a LoRA in its weights, as it was trained.

    A base with fewer tokens is resized to the adapter's. Where a head that is tied to the
    embeddings, or they, have a LoRA or a copy, they are two matrices from then on: PEFT adds what
    one of them learned to both.

    Args:
        adapter: A folder, or a name on the hub, of which the size is not known before.

    Raises:
        UnlearnError: It does not fit the model.
    """
    import torch
    from peft import PeftModel

    shapes, ends = _adapter_shapes(Path(adapter)), {}
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        name = next((n for n, module in model.named_modules() if module is end), None)
        ends |= {name: end} if name else {}
    sizes = {
        shape["lora_embedding_A" in key]
        for key, shape in shapes.items()
        for name in ends
        if key.startswith(f"{name}.")
        and key.endswith(("weight", "lora_embedding_A"))
        and not key.endswith("lora_A.weight")
    }
    if len(sizes) == 1 and sizes != {model.get_input_embeddings().weight.shape[0]}:
        model.resize_token_embeddings(*sizes, mean_resizing=False)
    tied = len({id(end.weight) for end in ends.values()}) < len(ends)
    if tied and any(_changes(Path(adapter), shapes, name) for name in ends):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    with fitting(adapter):
        return PeftModel.from_pretrained(model, adapter).merge_and_unload()


@contextmanager
def fitting(adapter: Path | str) -> Iterator[None]:
    """Raises `UnlearnError` where PEFT says that an adapter does not fit its base."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        says = f"the adapter {adapter} does not fit its base model ({first_line(error)})"
        cure = "give the base that it was trained from"
        raise UnlearnError(f"{says}; {cure}.", code="models.adapter-misfit") from None


def _adapter_shapes(folder: Path) -> dict[str, list[int]]:
    """Shape of each tensor of an adapter by its name in the base model."""
    from safetensors import SafetensorError, safe_open

    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        return {}
    try:
        opened = safe_open(path, framework="pt")
    except SafetensorError as error:
        says = f"{path} cannot be read ({first_line(error)})"
        raise UnlearnError(f"{says}; copy or make it again.", code="models.cannot-load") from error
    with opened as file:
        return {
            key.removeprefix("base_model.model."): file.get_slice(key).get_shape()
            for key in file.keys()  # noqa: SIM118
        }


def _changes(folder: Path, shapes: dict[str, list[int]], module: str) -> bool:
    """Whether an adapter has trained a module; PEFT also keeps untrained copies of embeddings."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8")) if shapes else {}
    if config.get("ensure_weight_tying") and config.get("modules_to_save"):
        return False
    saved = module.rpartition(".")[2] in (config.get("modules_to_save") or ())
    return saved or any(key.startswith(f"{module}.lora_") for key in shapes)


def input_device(model: Any) -> Any:
    """The device that takes a model's tokens: of a spread one that of its embeddings."""
    import torch

    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    place = getattr(hook, "execution_device", None)
    return model.device if place is None else torch.device(place)


def check_finite(model: Any, name: str) -> None:
    """Refuse a model with a NaN or infinite weight; its scores would mean nothing."""
    import torch

    for key, parameter in model.named_parameters():
        if parameter.is_meta:  # lies on disk until it is used; a NaN there shows in the losses
            continue
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            count = int((~torch.isfinite(parameter)).sum())
            says = f"model {name!r}: {count} values of {key} are NaN or infinite; the run that made"
            cure = "or merged it failed: make it again (lower learning rate, float32)"
            raise UnlearnError(f"{says} {cure}.", code="models.not-finite")


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
