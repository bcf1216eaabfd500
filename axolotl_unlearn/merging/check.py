"""What must hold before mergekit runs a recipe, on most of which it is silent.

axolotl-unlearn check mergekit_configs/ties.yml
mergekit-yaml mergekit_configs/ties.yml out/merged
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.weights import RECORD, Model, read_json

#: Relative distance |parent - base| / |base| of the tensor that moved least. Unrelated weights have
#: about sqrt(2) everywhere; a fine-tuned model keeps at least one tensor close to its start.
UNRELATED = 0.7
#: What two tokenizers of one vocabulary may cut differently: spaces, scripts, digits, code.
PROBE = (
    "Where was Ada born?  In York, 1941-03-02.\n\n\tdef f(x): return {'a': x ** 2}  # 12,345 €\r\n"
    " naïve Zoë e\u0301 Straße ПРИВЕТ Ελληνικά العربية हिन्दी ไทย 日本語 한국어 🙂 \u00a0 ﬁn I'LL"
)


def check(recipe: Mapping[str, Any]) -> list[UnlearnError]:
    """Each fault of a recipe of ``mergekit-yaml``; reads all weights.

    Of a file of tensors in the place of a model (`mergekit-pytorch`) and of a name on the hub
    nothing is checked, of ``model+adapter`` what the adapter says of its base.
    """
    if not isinstance(recipe.get("models"), list) or not recipe.get("base_model"):
        says = "a recipe needs `base_model` and `models`; others are not checked."
        return [UnlearnError(says, code="merging.other-recipe")]
    faults, opened = list(_unknown(recipe)), []
    for source in (recipe["base_model"], *(one.get("model") for one in recipe["models"])):
        try:
            opened.append(_opened(str(source)))
        except UnlearnError as error:
            faults.append(error)
    base = None if faults else opened[0]
    for model in filter(None, opened if base else ()):
        try:
            _fits(base, model)
        except UnlearnError as error:
            faults.append(error)
    return faults


def _unknown(recipe: Mapping[str, Any]) -> Iterator[UnlearnError]:
    """What mergekit takes without a word."""
    from mergekit import merge_methods

    try:
        method = merge_methods.get(str(recipe.get("merge_method")))
    except (KeyError, RuntimeError):
        says = f"`merge_method: {recipe.get('merge_method')}` is none of mergekit's; correct it."
        yield UnlearnError(says, code="merging.unknown-method")
        return
    known = {parameter.name for parameter in method.spec.parameters}
    for one in (recipe, *recipe["models"]):
        for name in sorted(set(one.get("parameters") or {}) - known):
            says = f"`{name}` is no parameter of {recipe['merge_method']}; correct or remove it."
            yield UnlearnError(says, code="merging.unknown-parameter")
    if recipe.get("dtype") != "float32":
        says = "write `dtype: float32`: bfloat16 rounds most changes of LoRA size to zero."
        yield UnlearnError(says, code="merging.not-float32")


def _opened(source: str) -> Model | None:
    """The model of a recipe's entry; None for a file of tensors or a name on the hub.

    Raises:
        UnlearnError: It is not there, is no model, or has an adapter of another one.
    """
    path, _, adapter = source.partition("+")
    folder = Path(path)
    if folder.is_file() or (not folder.exists() and path.count("/") == 1 and path[0] != "."):
        return None
    if not folder.is_dir():
        raise UnlearnError(
            f"{path} does not exist; train it, or write it with `axolotl merge-lora`.",
            code="merging.no-model",
        )
    if path[0] not in "/~" and not path.startswith(("./", "../")):
        raise UnlearnError(
            f"{path}: write ./{path}, since mergekit takes a path with one slash for the name of a "
            "hub repository.",
            code="merging.looks-like-the-hub",
        )
    if not (folder / "config.json").is_file():
        raise UnlearnError(
            f"{path} holds no config.json; write an adapter as a model with `axolotl merge-lora`, "
            "or as BASE+ADAPTER.",
            code="merging.no-config",
        )
    if adapter:
        said = read_json(Path(adapter) / "adapter_config.json").get("base_model_name_or_path")
        if Path(str(said)).exists() and not folder.samefile(str(said)):
            raise UnlearnError(
                f"{adapter} was trained from {said} and not from {path}; name that base.",
                code="merging.other-base",
            )
    return Model(folder)


def _fits(base: Model, parent: Model) -> None:
    """
    Raises:
        UnlearnError: A weight is no number; another architecture, shape, tokenizer or base.
    """
    if broken := parent.tensors.scan[1]:
        raise UnlearnError(
            f"{parent.path}: tensor {broken} holds NaN or infinity: that run diverged, train it "
            "again.",
            code="merging.not-finite",
        )
    if parent.path.samefile(base.path):
        return
    ours, theirs = (
        (one.config.get("architectures") or ["model without architecture"])[0]
        for one in (base, parent)
    )
    if ours != theirs:
        raise UnlearnError(
            f"{parent.path} is a {theirs} but the base {base.path} is a {ours}: merge models of "
            "one architecture.",
            code="merging.other-architecture",
        )
    for name in sorted({*base.tensors, *parent.tensors}):
        shapes = [one.tensors.shape(name) if name in one.tensors else () for one in (base, parent)]
        if shapes[0] != shapes[1]:
            raise UnlearnError(
                f"{parent.path}: {name} has shape {list(shapes[1])} but {list(shapes[0])} in the "
                f"base {base.path}; where a run added tokens, save a base with them "
                "(`resize_token_embeddings`) and train all parents from it.",
                code="merging.other-shapes",
            )
    _same_tokenizer(base, parent)
    _same_base(base, parent)


def _same_tokenizer(base: Model, parent: Model) -> None:
    """Compared by what they do: one tokenizer is written differently by different libraries."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    pair = [one.path for one in (base, parent) if any((one.path / file).exists() for file in files)]
    if len(pair) < 2:
        return
    try:
        loaded = [AutoTokenizer.from_pretrained(path, trust_remote_code=False) for path in pair]
        difference = tokenizer_difference(*loaded)
    except Exception as error:  # of many libraries; a tokenizer of its own code
        difference = f"they cannot be compared: {type(error).__name__}"
    if difference:
        raise UnlearnError(
            f"{parent.path} has another tokenizer than the base {base.path} ({difference}): its "
            "token ids mean something else; train all runs with the base's tokenizer.",
            code="merging.other-tokenizer",
        )


def tokenizer_difference(first: Any, second: Any) -> str | None:
    """What two tokenizers do differently: the vocabulary, special tokens, a text; None for nothing.

    Every entry of the vocabulary is a text that both have to cut alike.
    """
    vocabulary = first.get_vocab()
    if vocabulary != second.get_vocab():
        count = len(set(vocabulary.items()) ^ set(second.get_vocab().items()))
        return f"{count} entries of the vocabulary differ"
    if set(first.all_special_tokens) - {first.pad_token} != (
        set(second.all_special_tokens) - {second.pad_token}
    ):
        return "other special tokens"
    every = [first.decode([number]) for number in sorted(vocabulary.values())]
    for special, texts in ((True, [PROBE]), (False, [PROBE, *every])):
        ours, theirs = (
            one(texts, add_special_tokens=special)["input_ids"] for one in (first, second)
        )
        if ours != theirs:
            return "the same text has other tokens"
    return None


def _same_base(base: Model, parent: Model) -> None:
    """By content where a record exists, else by distance."""
    for folder in (parent.path, parent.path.parent):  # of the run that a merged copy lies in
        if (folder / RECORD).exists():
            if read_json(folder / RECORD).get("sha256") == base.fingerprint:
                return
            raise UnlearnError(
                f"{parent.path} was trained from another base than {base.path} ({RECORD} holds "
                "another hash): name the base it started from, or train it again.",
                code="merging.other-base",
            )
    if (distance := _least_distance(base, parent)) > UNRELATED:
        raise UnlearnError(
            f"{parent.path} does not descend from the base {base.path} (its nearest tensor is "
            f"{distance:.2f} of the base's norm away): name the model it started from.",
            code="merging.unrelated",
        )


def _least_distance(base: Model, parent: Model) -> float:
    least = float("inf")
    for name in base.tensors:
        ours = base.tensors[name].float()
        if ours.dim() > 1 and ours.any():
            gap = (parent.tensors[name].float() - ours).norm() / ours.norm()
            least = min(least, float(gap))
        if least <= UNRELATED:
            break
    return 0.0 if least == float("inf") else least
