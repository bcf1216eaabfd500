"""`axolotl-unlearn merge`: checks, merges tensor by tensor, writes result and recipe."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import yaml
from torch import Tensor

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import check_room, replacing, write, write_json
from axolotl_unlearn.merging.checks import (
    check,
    check_output,
    initialisation_cosines,
)
from axolotl_unlearn.merging.methods import merge_delta, merge_factors
from axolotl_unlearn.merging.recipe import Recipe
from axolotl_unlearn.merging.sources import TOKENIZER_FILES, Adapter, Parent, open_base, open_parent
from axolotl_unlearn.merging.weights import Model, read_json

SHARD = 1_000_000_000  # bytes; mergekit's writer holds one shard in memory


def merge(
    parents: Sequence[str | Path],
    base: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    force: bool = False,
    log: Callable[[str], None] = lambda line: None,
    progress: bool = False,
    **recipe_values,
) -> Path:
    """Merge adapters or full models that share a base; return the output folder.

    Writes the weights in float32 (of factors an adapter, else a model), config and tokenizer of the
    base, `mergekit_config.yml` (the same merge of full weights by mergekit) and `merge.json`
    (recipe, hashes, versions, time).

    Args:
        parents: Folders; ``negate:PATH`` turns a parent's change round.
        recipe_values: Of `Recipe`.

    Raises:
        UnlearnError: Before any weight is merged.
    """
    started, out = time.perf_counter(), Path(out)
    recipe = Recipe.from_dict(recipe_values).for_parents(len(parents))
    model, opened = open_base(base), [open_parent(parent) for parent in parents]
    check_output(out, overwrite=overwrite, inputs=[model.path, *(parent.path for parent in opened)])
    for warning in check(recipe, model, opened, force=force):
        log(f"Warning: {warning}")
    written = opened[0] if recipe.space == "factors" else model
    log(check_room(out, 4 * sum(math.prod(shape) for shape, _ in written.tensors.layout.values())))

    facts: dict = {
        "recipe": recipe.to_dict(),
        "forced": force,
        "base": {"path": str(model.path), "sha256": _known_hash(model)},
        "parents": [
            {"path": str(given), "sha256": parent.fingerprint}
            for given, parent in zip(parents, opened, strict=True)
        ],
    }
    # Built beside the target and moved at the end: an interrupted merge leaves nothing half-done.
    partial, old = (out.with_name(out.name + end) for end in (".partial", ".old"))
    for left in (partial, old):
        if left.exists():
            shutil.rmtree(left)
    partial.mkdir(parents=True)
    try:
        if recipe.space == "factors":
            facts["initialisation_cosine"] = initialisation_cosines(opened)
            _write_adapter(partial, merge_factors(recipe, opened, progress), opened[0])
        else:
            write_model(partial, recipe, model, opened, progress)
            write(partial / "mergekit_config.yml", _recipe_text(recipe, model, opened, out))
        copy_tokenizer(model.path, partial)
        facts["seconds"] = round(time.perf_counter() - started, 2)
        facts["versions"] = {name: version(name) for name in ("mergekit", "peft", "torch")}
        write_json(partial / "merge.json", facts, indent=2)
    except BaseException:
        shutil.rmtree(partial)
        raise
    # A kill in between leaves none rather than half of one.
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    return out


def write_model(
    folder: Path, recipe: Recipe, base: Model, parents: Sequence[Parent], progress: bool = False
) -> None:
    """The merged full model in float32, one tensor at a time.

    Tensors that no parent touches, and buffers that are not floating point, are the base's own.
    """
    from mergekit.io.tensor_writer import TensorWriter
    from rich.progress import track

    writer = TensorWriter(str(folder), max_shard_size=SHARD)
    for name in track(base.tensors, "merging", transient=True, disable=not progress):
        own = base.tensors[name]
        if own.is_floating_point():
            own = own.float()
            if any(parent.touches(name) for parent in parents):
                own = merge_delta(recipe, name, own, [one.weight(name, own) for one in parents])
        writer.save_tensor(name, own, clone=False)
    writer.finalize()
    config = {key: value for key, value in base.config.items() if key != "torch_dtype"}
    write_json(folder / "config.json", config | {"dtype": "float32"}, indent=2)


def copy_tokenizer(source: Path, folder: Path) -> None:
    for file in TOKENIZER_FILES:
        if (source / file).exists():
            shutil.copy(source / file, folder / file)


def _write_adapter(folder: Path, tensors: dict[str, Tensor], like: Adapter) -> None:
    from safetensors.torch import save_file

    config = like.config | {
        "r": like.rank, "lora_alpha": like.rank, "rank_pattern": {}, "alpha_pattern": {},
        "use_rslora": False, "init_lora_weights": True, "inference_mode": True,
    }  # fmt: skip
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(folder / "adapter_model.safetensors") as draft:
        save_file(tensors, draft, metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", config, indent=2)


def _recipe_text(recipe: Recipe, base: Model, parents: Sequence[Parent], out: Path) -> str:
    """mergekit's YAML with a head that says how to run it and what it cannot say."""
    adapted = [isinstance(parent, Adapter) for parent in parents]
    names = [str(p.path / "merged" if a else p.path) for p, a in zip(parents, adapted, strict=True)]
    head = [
        "Written by `axolotl-unlearn merge`. By mergekit itself:",
        f"  mergekit-yaml {out}/mergekit_config.yml OUT"
        + (f" --random-seed {recipe.seed}" if recipe.random else ""),
    ]
    if any(adapted):
        head.append("after `axolotl merge-lora` of the adapters (it writes their merged/ folders).")
    for parent in parents:
        if parent.negated:
            head.append("Negated parents must be written as models first:")
            head.append(f"  axolotl-unlearn merge --method linear --parents negate:{parent.path}")
    if recipe.random:
        head.append("mergekit draws other entries (we seed each tensor): merge.json repeats ours.")
    config = recipe.mergekit_config(str(base.path), names)
    return "\n".join(f"# {line}" for line in head) + "\n" + yaml.safe_dump(config, sort_keys=False)


def merge_from_recipe(path: str | Path, out: str | Path, *, force: bool = False, **options) -> Path:
    """Repeat the merge that a `merge.json` describes, with every random drop, on the same weights.

    Raises:
        UnlearnError: The base or a parent is not what was merged then (``force`` lets it pass).
    """
    facts, log = read_json(Path(path)), options.get("log", lambda line: None)
    if missing := [key for key in ("recipe", "base", "parents") if key not in facts]:
        raise UnlearnError(
            f"{path} has no {missing[0]!r}: give the merge.json that `axolotl-unlearn merge` wrote."
        )
    Recipe.from_dict(facts["recipe"])
    for given in (facts["base"], *facts["parents"]):
        if given.get("sha256") is None:
            log(f"Warning: {path} holds no hash of {given['path']}: not compared.")
        elif open_parent(given["path"]).fingerprint != given["sha256"]:
            sentence = f"{given['path']} has other weights than when {path} was written"
            if not force:
                raise UnlearnError(f"{sentence}: bring them back, or add --force.")
            log(f"Warning: {sentence} (forced).")
    return merge(
        [parent["path"] for parent in facts["parents"]],
        facts["base"]["path"],
        out,
        force=force or bool(facts.get("forced")),
        **facts["recipe"],
        **options,
    )


def _known_hash(base: Model, limit: int = 4_000_000_000) -> str | None:
    """The base's hash when it is known or cheap: a factor merge reads nothing else of 28 GB."""
    stored = sum(file.stat().st_size for file in set(base.tensors.files.values()))
    return base.fingerprint if "scan" in base.tensors.__dict__ or stored <= limit else None
