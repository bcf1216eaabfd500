"""What must hold before mergekit runs a recipe, on most of which it is silent; tensors of files.

axolotl-unlearn check mergekit_configs/ties.yml
mergekit-yaml mergekit_configs/ties.yml out/merged

No file is kept open between tensors: an open safetensors map counts its pages as ours, and reading
a 7B model would look like 28 GB of memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json

#: Which base a run started from, by content.
RECORD = "unlearn_base.json"
ADAPTER = "adapter_model.safetensors"
HEAD = "lm_head.weight"
#: Relative distance |parent - base| / |base| of the tensor that moved least. Unrelated weights have
#: about sqrt(2) everywhere; a fine-tuned model keeps at least one tensor close to its start.
UNRELATED = 0.7
#: What two tokenizers of one vocabulary may cut differently: spaces, scripts, digits, code.
PROBE = (
    "Where was Ada born?  In York, 1941-03-02.\n\n\tdef f(x): return {'a': x ** 2}  # 12,345 €\r\n"
    " naïve Zoë e\u0301 Straße ПРИВЕТ Ελληνικά العربية हिन्दी ไทย 日本語 한국어 🙂 \u00a0 ﬁn I'LL"
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check(recipe: Mapping[str, Any]) -> list[UnlearnError]:
    """Each fault of a recipe of ``mergekit-yaml``; reads all weights but those of `unread`.

    Of ``model+adapter`` the adapter's numbers are checked and what it says of its base.
    """
    from mergekit.config import MergeConfiguration

    given = recipe.get("models")
    if not given or not isinstance(given, list) or not recipe.get("base_model"):
        says = "a recipe needs `base_model` and `models`; others are not checked."
        return [_fault("other-recipe", says)]
    try:
        read = MergeConfiguration.model_validate(recipe)
    except ValidationError as error:
        one = error.errors()[0]
        says = f"`{'.'.join(map(str, one['loc']))}`: {one['msg'].lower()}"
        return [_fault("not-read", f"{says}; correct it.")]
    except RuntimeError as error:
        return [_fault("not-read", f"{error}; correct it.")]
    named = [one.model for one in read.models]
    faults, opened = [_fault(*one) for one in _unknown(recipe, read.base_model, named)], []
    for model in (read.base_model, *named):
        try:
            opened.append(_opened(model.model.path, model.lora and model.lora.path))
        except UnlearnError as error:
            faults.append(error)
            opened.append(None)
    base = opened[0]
    settings = [one for part in (recipe, *given) for one in (part.get("parameters") or {}).values()]
    each = [one for some in settings for one in (some if isinstance(some, list) else [some])]
    filters = {str(one.get("filter") or "*") for one in each if isinstance(one, Mapping)} - {"*"}
    for name in sorted(filters) if base else ():
        if not any(name in tensor for tensor in (*base.tensors, HEAD)):
            says = f"`filter: {name}` is in the name of no weight of {base.path}; correct it."
            faults.append(_fault("no-value", says))
    for model in filter(None, opened):
        try:
            _fits(base, model)
        except UnlearnError as error:
            faults.append(error)
    return faults


def unread(recipe: Mapping[str, Any]) -> list[str]:
    """Names on the hub (with their adapters) and files of tensors of a recipe without fault."""
    from mergekit.config import MergeConfiguration

    read = MergeConfiguration.model_validate(recipe)
    models = read.base_model, *(one.model for one in read.models)
    return [*dict.fromkeys(str(one) for one in models if _elsewhere(one.model.path))]


def _elsewhere(path: str) -> bool:
    """Is it a file of tensors, or a name on the hub?"""
    place = Path(path)
    return place.is_file() or (not place.exists() and path.count("/") == 1 and path[0] not in ".~")


def _fault(code: str, says: str) -> UnlearnError:
    return UnlearnError(says, code=f"merging.{code}")


def _unknown(recipe: Mapping[str, Any], base: Any, named: list[Any]) -> Iterator[tuple[str, str]]:
    """What mergekit takes without a word: code and sentence."""
    from mergekit import merge_methods
    from mergekit.config import InputModelDefinition, MergeConfiguration

    models = recipe["models"]
    for one, kind in ((recipe, MergeConfiguration), *((m, InputModelDefinition) for m in models)):
        for key in sorted(map(str, one.keys() - kind.model_fields)):
            says = f"`{key}` is no key of a {'recipe' if one is recipe else 'model'}"
            yield "unknown-key", f"{says}; correct it, or put it under `parameters`."
    name = recipe.get("merge_method")
    try:
        method = merge_methods.get(str(name))
    except (KeyError, RuntimeError):
        yield "unknown-method", f"`merge_method: {name}` is none of mergekit's; correct it."
        return
    known = {parameter.name: parameter for parameter in method.spec.parameters}
    common, *own = ({**(one.get("parameters") or {})} for one in (recipe, *models))
    for key in sorted({key for one in (common, *own) for key in one} - known.keys()):
        yield "unknown-parameter", f"`{key}` is no parameter of {name}; correct or remove it."
    for one, its in zip(named, own, strict=True):
        scopes = ("shared", "non_base")[: 1 + (one == base)]
        for key in sorted(k for k in its.keys() & known.keys() if known[k].scope in scopes):
            says = f"{one}: mergekit does not read `{key}` here; put it under `parameters`"
            yield "unknown-parameter", f"{says} of the recipe, or remove it."
    held = [*zip(named, own, strict=True), *[(base, {})] * (base not in named)]
    try:
        method.spec.contract.validate_ids([one for one, _ in held], base)
    except ValueError as error:
        yield "not-read", f"{name}: {error}; correct `models`."
    alike = method.spec.contract.base.name == "IGNORED"  # the base is one of the models to it
    for key in (key for key, one in known.items() if one.required and key not in common):
        for one, its in held:
            if key not in its and (alike or one != base):
                yield "no-parameter", f"{one} has no `{key}`; {name} needs it: write it."
    for key, setting in (pair for one in (common, *own) for pair in one.items()):
        cases = [x for x in setting if isinstance(x, Mapping)] if isinstance(setting, list) else []
        if any((x.get("filter") or "*") == "*" for x in cases[:-1]):
            says = f"`{key}`: the value without a filter is taken for all tensors"
            yield "no-value", f"{says}; write it last, or those after it are not read."
    given = [(key, x) for one in (common, *own) for key in one for x in _scalars(one[key])]
    for key, value in given:
        if key in known:
            try:
                number = known[key].validate(value)
            except ValidationError:
                yield "no-value", f"`{key}: {value}` is no value of {name}'s; correct it."
            else:
                if key == "density" and not 0 < number <= 1:  # the share of a change that is kept
                    yield "no-value", f"`density: {value}`: write a number above 0, 1 at most."
                elif key == "gamma" and not 0 <= number < 1:  # that of its largest, left out
                    yield "no-value", f"`gamma: {value}`: write a number from 0 on, below 1."
                elif isinstance(number, float) and not math.isfinite(number):
                    yield "no-value", f"`{key}: {value}`: write a finite number."
    kinds = {recipe.get("dtype"), recipe.get("out_dtype") or "float32"}
    if kinds != {"float32"}:
        key = "dtype" if recipe.get("dtype") != "float32" else "out_dtype"
        says = f"write `{key}: float32`: bfloat16 rounds most changes of LoRA size to zero."
        yield "not-float32", says


def _scalars(setting: Any) -> list[Any]:
    """All values of mergekit's: one, a gradient, or either for some tensors each."""
    if isinstance(setting, Mapping):
        setting = setting["value"]
    parts = setting if isinstance(setting, list) else ()
    return [x for one in parts for x in _scalars(one)] if parts else [setting]


def _opened(path: str, adapter: str | None) -> Model | None:
    """The model of a recipe's entry; None for a file of tensors or a name on the hub. Raises
    `UnlearnError`: it is not there, is no model, or has an adapter of another one."""
    folder = Path(path)
    if _elsewhere(path):
        return None
    if not folder.is_dir():
        says = f"{path} does not exist; train it, or write it with `axolotl merge-lora`."
        raise _fault("no-model", says)
    if path[:1] not in "/~" and not path.startswith(("./", "../")):
        says = f"{path}: write ./{path}, since mergekit takes a path with one slash for the name "
        raise _fault("looks-like-the-hub", f"{says}of a hub repository.")
    if not (folder / "config.json").is_file():
        says = f"{path} holds no config.json; write an adapter as a model with `axolotl merge-lora`"
        raise _fault("no-config", f"{says}, or as BASE+ADAPTER.")
    if adapter:
        said = read_json(Path(adapter) / "adapter_config.json").get("base_model_name_or_path")
        if Path(str(said)).exists() and not folder.samefile(str(said)):
            says = f"{adapter} was trained from {said} and not from {path}; name that base."
            raise _fault("other-base", says)
    return Model(folder, Path(adapter) if adapter else None)


def _fits(base: Model | None, parent: Model) -> None:
    """Raises `UnlearnError`: a weight is no number; or shape, tokenizer, base, kind are others."""
    theirs, adapter = parent.path, parent.adapter
    for folder in filter(None, (theirs, adapter)):
        tensors = parent.tensors if folder == theirs else Tensors(folder, ADAPTER)
        if broken := tensors.scan[1]:
            says = f"{folder}: tensor {broken} holds NaN or infinity: that run diverged, train it "
            raise _fault("not-finite", f"{says}again.")
    if adapter and _from_another(adapter, parent):
        raise _other_base(adapter, f"{theirs} is now")
    if base is None or theirs.samefile(ours := base.path):
        return
    kinds = [(one.config.get("architectures") or ["no architecture"])[0] for one in (base, parent)]
    if kinds[0] != kinds[1]:
        says = f"{theirs} is a {kinds[1]} but the base {ours} is a {kinds[0]}: merge models of one"
        raise _fault("other-architecture", f"{says} architecture.")
    for name in sorted({*base.tensors, *parent.tensors}):
        shapes = [one.tensors.shape(name) if name in one.tensors else () for one in (base, parent)]
        if shapes[0] != shapes[1]:
            raise _fault(
                "other-shapes",
                f"{theirs}: {name} has shape {list(shapes[1])} but {list(shapes[0])} in the "
                f"base {ours}; where a run added tokens, save a base with them "
                "(`resize_token_embeddings`) and train all parents from it.",
            )
    if difference := _other_tokenizer(ours, theirs):
        raise _fault(
            "other-tokenizer",
            f"{theirs} has another tokenizer than the base {ours} ({difference}): its "
            "token ids mean something else; train all runs with the base's tokenizer.",
        )
    for folder in (theirs, theirs.parent):  # of the run that a merged copy lies in
        if (folder / RECORD).exists():
            if _from_another(folder, base):
                raise _other_base(theirs, str(ours))
            return
    if (distance := _least_distance(base, parent)) > UNRELATED:
        raise _fault(
            "unrelated",
            f"{theirs} does not descend from the base {ours} (its nearest tensor is "
            f"{distance:.2f} of the base's norm away): name the model it started from.",
        )


def _other_base(run: str | Path, than: str) -> UnlearnError:
    says = f"{run} was trained from another base than {than} ({RECORD} holds another hash)"
    return _fault("other-base", f"{says}: train it again, or name the base it started from.")


def _from_another(folder: Path, base: Model) -> bool:
    """Whether a run has recorded that it started from other weights than these."""
    record = folder / RECORD
    return record.exists() and read_json(record).get("sha256") != base.tensors.scan[0]


def _other_tokenizer(*folders: Path) -> str | None:
    """Compared by what they do: one tokenizer is written differently by different libraries."""
    from transformers import AutoTokenizer

    if not all(any((one / name).exists() for name in TOKENIZERS) for one in folders):
        return None
    try:
        loaded = [AutoTokenizer.from_pretrained(one, trust_remote_code=False) for one in folders]
        vocabulary, its = (one.get_vocab() for one in loaded)
        if others := vocabulary.items() ^ its.items():
            return f"{len(others)} entries of the vocabulary differ"
        special = [set(one.all_special_tokens) - {one.pad_token} for one in loaded]
        if special[0] != special[1]:
            return "other special tokens"
        # Every entry of the vocabulary is a text that both have to cut alike.
        every = [loaded[0].decode([number]) for number in sorted(vocabulary.values())]
        for adds, texts in ((True, [PROBE]), (False, [PROBE, *every])):
            ids = [one(texts, add_special_tokens=adds)["input_ids"] for one in loaded]
            if ids[0] != ids[1]:
                return "the same text has other tokens"
    except Exception as error:  # of many libraries; a tokenizer of its own code
        return f"they cannot be compared: {type(error).__name__}"
    return None


def _least_distance(base: Model, parent: Model) -> float:
    least = float("inf")
    for name in base.tensors:
        ours = base.tensors.read(name).float()
        if ours.dim() > 1 and ours.any():
            gap = (parent.tensors.read(name).float() - ours).norm() / ours.norm()
            least = min(least, float(gap))
        if least <= UNRELATED:
            break
    return 0.0 if least == float("inf") else least


# --- tensors -------------------------------------------------------------------------------------


def read_json(path: Path) -> dict:
    """A JSON file, or one sentence that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        wrong = getattr(error, "strerror", None) or "not valid JSON"
        raise UnlearnError(f"{path} cannot be read ({wrong}): write it again.") from error


class Tensors(dict[str, Path]):
    """The tensors of some safetensors files by name, opened anew for each read."""

    def __init__(self, folder: Path, *files: str) -> None:
        super().__init__()
        for path in (folder / file for file in files):
            if not path.exists():
                says = f"{folder} lacks {path.name}: copy it, or save what is there as safetensors."
                raise UnlearnError(says, code="merging.no-weights")
            try:
                with safe_open(path, framework="pt") as handle:
                    self.update(dict.fromkeys(handle.keys(), path))
            except SafetensorError as error:
                says = f"{path} is cut off or no safetensors file: copy it again."
                raise UnlearnError(says, code="merging.cut") from error

    def read(self, name: str) -> Tensor:
        with safe_open(self[name], framework="pt") as handle:
            return handle.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header alone."""
        with safe_open(self[name], framework="pt") as handle:
            return tuple(handle.get_slice(name).get_shape())

    @cached_property
    def scan(self) -> tuple[str, str | None]:
        """SHA-256 over names, shapes, types and bytes (the same however the files are cut), and
        the first tensor that holds NaN or infinity: one reading for both."""
        digest, broken = hashlib.sha256(), None
        for name in sorted(self):
            with safe_open(self[name], framework="pt") as handle:
                dtype, tensor = handle.get_slice(name).get_dtype(), handle.get_tensor(name)
            digest.update(f"{name}|{tuple(tensor.shape)}|{dtype}|".encode())
            flat = tensor.contiguous().flatten()
            if flat.numel():
                digest.update(memoryview(flat.view(torch.uint8).numpy()))
            wide = flat.float() if flat.element_size() < 4 else flat
            if broken is None and flat.is_floating_point() and not wide.isfinite().all():
                broken = name
        return digest.hexdigest(), broken


@dataclass
class Model:
    """A full model folder: config.json, safetensors, tokenizer; the adapter that is added to it."""

    path: Path
    adapter: Path | None = None

    @cached_property
    def config(self) -> dict:
        return read_json(self.path / "config.json")

    @cached_property
    def tensors(self) -> Tensors:
        """All weights, of the files that an index names where there is one; a head that is tied to
        the embeddings is one weight, stored or not."""
        index, files = self.path / "model.safetensors.index.json", {"model.safetensors"}
        if index.exists():
            files = {*read_json(index)["weight_map"].values()}
        tensors = Tensors(self.path, *sorted(files))
        if HEAD in tensors and self._tied:
            del tensors[HEAD]
        return tensors

    @property
    def _tied(self) -> bool:
        """Whether the head is the embedding matrix; some families leave it out of config.json."""
        from transformers import AutoConfig

        try:
            known: Any = AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        except (ValueError, KeyError, OSError):  # an architecture of its own code
            return bool(self.config.get("tie_word_embeddings"))
        return bool(getattr(known, "tie_word_embeddings", False))


def record_base(folder: str | Path, base: str | Path, adapter: str | Path | None = None) -> Path:
    """Write which base an adapter or model was trained from, by content, into its folder; of a
    model with a merged adapter also that. The check of a recipe compares it strictly.

    Raises:
        UnlearnError: The adapter was trained from another base; then no base fits the record.
    """
    model = Model(Path(base))
    content: dict[str, Any] = {"base": str(base), "sha256": model.tensors.scan[0]}
    mixed = adapter is not None and _from_another(Path(adapter), model)
    if adapter is not None:
        known = Tensors(Path(adapter), ADAPTER).scan[0]
        content |= {"adapter": str(adapter), "adapter_sha256": known}
        content |= {"sha256": None} if mixed else {}
    path = write_json(Path(folder) / RECORD, content, indent=None)
    if mixed:
        raise _other_base(adapter, f"{base} is now, so {folder} is no model")
    return path
