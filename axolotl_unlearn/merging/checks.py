"""What must hold before a merge. mergekit is silent on most of it; each fault is one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging import ENDS
from axolotl_unlearn.merging.recipe import Recipe
from axolotl_unlearn.merging.sources import Adapter, Parent
from axolotl_unlearn.merging.weights import RECORD, Model, read_json

# Two adapters that started from one draw keep a cosine of their A factors well above this,
# two that did not have one of about 1/sqrt(r * n_in): measured in the lab notebook.
SAME_INIT = 0.2

# Relative distance |parent - base| / |base| of the tensor that moved least. Unrelated weights have
# about sqrt(2) everywhere; a fine-tuned model keeps at least one tensor close to its start.
UNRELATED = 0.7


def check(
    recipe: Recipe, base: Model, parents: Sequence[Parent], *, force: bool = False
) -> list[str]:
    """Raise on the first fault; return warnings. ``force`` lets pass what may be deliberate:
    another base, another LoRA initialisation."""
    warnings: list[str] = []
    for parent in parents:
        check_shapes(base, parent)
        warnings += _tokenizer(base, parent, force) + _same_base(base, parent, force)
    for source in (*parents, *(() if recipe.space == "factors" else (base,))):
        # A NaN in one adapter would poison the merge in silence.
        if broken := source.tensors.scan[1]:
            raise UnlearnError(
                f"{source.path}: tensor {broken} holds NaN or infinity: that run diverged, train "
                "it again."
            )
    if recipe.space == "factors":
        _factors(parents)
        for other, cosine in zip(parents[1:], initialisation_cosines(parents), strict=True):
            if cosine < SAME_INIT:
                warnings += _refuse(
                    f"{parents[0].path} and {other.path} did not start from the same LoRA weights "
                    f"(cosine of their A factors {cosine:.3f}), so their factors have no common "
                    "axes: train both with one seed, or use --space delta",
                    force,
                )
    return warnings


def check_output(out: Path, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """The result may not land on something else: --overwrite replaces earlier merges only."""
    for path in inputs:
        if path.resolve() == out.resolve():
            raise UnlearnError(f"--out {out} is also an input of the merge: choose another folder.")
        if path.resolve().is_relative_to(out.resolve()):
            raise UnlearnError(f"--out {out} holds {path}, an input: choose another folder.")
    if out.exists() and not out.is_dir():
        raise UnlearnError(f"--out {out} is a file: choose a folder.")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UnlearnError(f"{out} already exists and is not empty: add --overwrite to replace it.")
    if not any((out / name).exists() for name in ("merge.json", "mergekit_config.yml")):
        raise UnlearnError(
            f"{out} is no result of a merge, --overwrite would delete it: choose another --out."
        )


def check_shapes(base: Model, parent: Parent) -> None:
    """Raise where the parent's tensors are not those of the base.

    Of tied matrices PEFT adds what one learned to both; the merge would to one.
    """
    names = set(parent.tensors)
    if isinstance(parent, Adapter):
        names = {*parent.factors, *parent.replaced}
        tied = [*parent.factors, *([] if parent.keeps_ties else parent.replaced)]
        for name in tied if base.tied else ():
            if name.removesuffix(".weight").rpartition(".")[2] in ENDS:
                raise UnlearnError(
                    f"{parent.path} adapts {name}, which the base {base.path} uses as embeddings "
                    "and as head: adapted they are two matrices, and the base has one; take it out "
                    "of the LoRA and train again."
                )
    strange = names - set(base.tensors)
    if isinstance(parent, Model):
        ours, theirs = (
            (one.config.get("architectures") or ["model without architecture"])[0]
            for one in (base, parent)
        )
        if ours != theirs:
            raise UnlearnError(
                f"{parent.path} is a {theirs} but the base {base.path} is a {ours}: merge models "
                "of one architecture."
            )
        strange = names ^ set(base.tensors)
    if strange:
        raise UnlearnError(
            f"{parent.path} and the base {base.path} do not hold the same tensors (first: "
            f"{min(strange)}): they are different models."
        )
    tokens = base.config.get("text_config", base.config).get("vocab_size")
    for name in sorted(names):
        ours, theirs = base.tensors.shape(name), parent.shape(name)
        if ours == theirs:
            continue
        if (ours[0], ours[1:]) == (tokens, theirs[1:]):
            raise UnlearnError(
                f"{parent.path} has {theirs[0]} tokens and the base {base.path} has {tokens}: its "
                "run added some (`special_tokens` or `tokens`), which the base has no weights for; "
                "save a base with them (`resize_token_embeddings`) and train all parents from it."
            )
        raise UnlearnError(
            f"{parent.path}: {name} has shape {list(theirs)} but {list(ours)} in the base "
            f"{base.path}: they are different models."
        )


#: What two tokenizers of one vocabulary may cut differently: spaces, scripts, digits, code.
PROBE = (
    "Where was Ada born?  In York, 1941-03-02.\n\n\tdef f(x): return {'a': x ** 2}  # 12,345 €\r\n"
    " naïve Zoë e\u0301 Straße ПРИВЕТ Ελληνικά العربية हिन्दी ไทย 日本語 한국어 🙂 \u00a0 ﬁn I'LL"
)


def _tokenizer(base: Model, parent: Parent, force: bool) -> list[str]:
    """Compared by what they do: one tokenizer is written differently by different libraries."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    pair = [one.path for one in (base, parent) if any((one.path / file).exists() for file in files)]
    if len(pair) < 2:
        return []
    try:
        loaded = [AutoTokenizer.from_pretrained(path, trust_remote_code=False) for path in pair]
    except Exception as error:  # of many libraries; a tokenizer of its own code
        return _refuse(
            f"the tokenizers of {parent.path} and of the base {base.path} cannot be compared "
            f"({type(error).__name__}): copy the base's files there",
            force,
        )
    if difference := tokenizer_difference(*loaded):
        raise UnlearnError(
            f"{parent.path} has another tokenizer than the base {base.path} ({difference}): its "
            "token ids mean something else; train both runs with the base's tokenizer."
        )
    return []


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


def _same_base(base: Model, parent: Parent, force: bool) -> list[str]:
    """By content where a record or the named base exists; else by distance, else a warning."""
    named = None
    for folder in (parent.path, parent.path.parent):  # of the run that a merged copy lies in
        if (folder / RECORD).exists():
            if read_json(folder / RECORD).get("sha256") == base.fingerprint:
                return []
            return _refuse(
                f"{parent.path} was trained from another base than {base.path} ({RECORD} holds "
                "another hash): give the base it started from, train it again",
                force,
            )
        if named is None and (file := folder / "adapter_config.json").exists():
            named = Path(read_json(file).get("base_model_name_or_path") or "/nowhere")
    if named is not None and named.resolve() == base.path.resolve():
        weights = parent.path / "adapter_model.safetensors"
        newest = max(file.stat().st_mtime for file in set(base.tensors.files.values()))
        if weights.exists() and newest > weights.stat().st_mtime:
            return [f"{base.path} is newer than {parent.path}: was it trained again since?"]
        return []
    if named is not None and (named / "config.json").exists():
        if Model(named).fingerprint == base.fingerprint:
            return []
        return _refuse(
            f"{parent.path} was trained from {named}, whose weights differ from the base "
            f"{base.path}: give --base {named}",
            force,
        )
    if isinstance(parent, Adapter):
        return [f"{parent.path} does not say which base it was trained from: not checked."]
    if (distance := _least_distance(base, parent)) <= UNRELATED:
        return []
    return _refuse(
        f"{parent.path} does not descend from the base {base.path} (its nearest tensor is "
        f"{distance:.2f} of the base's norm away): give the model it started from",
        force,
    )


def _least_distance(base: Model, parent: Model) -> float:
    least = float("inf")
    for name in base.tensors:
        ours = base.tensors[name].float()
        if ours.dim() > 1 and ours.any():
            # A negated weight lies as far away on the other side.
            least = min(least, float((parent.weight(name, ours) - ours).norm() / ours.norm()))
        if least <= UNRELATED:
            break
    return 0.0 if least == float("inf") else least


def _factors(parents: Sequence[Parent]) -> None:
    first = parents[0]
    for one in parents:
        fault, cure = "", "use --space delta."
        if not isinstance(one, Adapter):
            fault = f"{one.path} is a full model: --space factors merges LoRA adapters"
            cure = "give the adapter folder or use --space delta."
        elif one.negated:
            fault = f"negate:{one.path} has no meaning for factors (-B times -A is B A)"
            cure = "use --space delta, or a negative weight with scale 'sum'."
        elif keys := [key for key in ("rank_pattern", "alpha_pattern") if one.config.get(key)]:
            fault = f"{one.path} has a {keys[0]}: a factor merge needs one rank and alpha"
        elif one.replaced:
            fault = f"{one.path} holds fully trained tensors ({next(iter(one.replaced))})"
        elif first.rank != one.rank:
            ranks = f"{first.path} has LoRA rank {first.rank} and {one.path} rank {one.rank}"
            fault = f"{ranks}: a factor merge needs one rank"
        elif other := set(first.factors) ^ set(one.factors):
            fault = f"{first.path} and {one.path} do not adapt the same modules ({min(other)})"
        if fault:
            raise UnlearnError(f"{fault}; {cure}")


def initialisation_cosines(parents: Sequence[Adapter]) -> list[float]:
    """Mean cosine of the A factors of the first parent with those of each other parent.

    A starts random and B at zero, so A remembers its draw: about 1 at the start, falling with
    training; adapters of different draws have a cosine of about 0 throughout.
    """

    pairs = []
    for other in parents[1:]:
        keys = [a for a, _ in parents[0].factors.values()]
        starts = ((one.tensors[a].float().flatten() for one in (parents[0], other)) for a in keys)
        pairs.append(fmean(torch.cosine_similarity(*two, dim=0).item() for two in starts))
    return pairs


def _refuse(sentence: str, force: bool) -> list[str]:
    if not force:
        raise UnlearnError(sentence + ", or add --force.")
    return [f"{sentence} (forced)."]
