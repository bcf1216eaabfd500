"""`axolotl unlearn merge`: checks, merges tensor by tensor, writes result and recipe."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
import yaml

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging import factors as factor_merge
from axolotl_unlearn.merging.checks import (
    check,
    check_finite,
    check_output,
    check_resources,
    initialisation_cosines,
)
from axolotl_unlearn.merging.lora import to_factors
from axolotl_unlearn.merging.recipe import REFERENCES, Recipe
from axolotl_unlearn.merging.sources import (
    PREFIX,
    TOKENIZER_FILES,
    Adapter,
    Model,
    Parent,
    open_base,
    open_parent,
)
from axolotl_unlearn.merging.stream import merge_tensor, peak_bytes

SHARD = 1_000_000_000  # bytes; mergekit's writer holds one shard in memory
OUTPUTS = ("model", "adapter")
RECIPE_FILE = "mergekit_config.yml"
FACTS_FILE = "merge.json"


def merge(
    parents: Sequence[str | Path],
    base: str | Path,
    out: str | Path,
    *,
    method: str = "ties",
    space: str = "delta",
    density: float = 0.8,
    weights: Sequence[float] | None = None,
    scale: str = "average",
    seed: int = 0,
    output: str | None = None,
    rank: int | None = None,
    overwrite: bool = False,
    force: bool = False,
    log: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Merge adapters or full models that share a base; return the output folder.

    ``parents``: folders; ``negate:PATH`` turns a parent's change round. ``output``: ``model`` or
    ``adapter``; default is model for delta and adapter for factors. A delta merge as adapter is
    factored by SVD to ``rank`` (default: the parents' rank) and the energy kept is written down.

    Writes the weights in float32, config and tokenizer of the base, `mergekit_config.yml` (what
    mergekit would need to do the same) and `merge.json` (recipe, hashes, versions, times).
    Raises `UnlearnError` with one sentence before any weight is merged.
    """
    started = time.perf_counter()
    out = Path(out)
    recipe = Recipe.from_dict(
        {
            "method": method,
            "space": space,
            "density": density,
            "weights": weights,
            "scale": scale,
            "seed": seed,
        }
    ).for_parents(len(parents))
    output = output or ("adapter" if space == "factors" else "model")
    if output not in OUTPUTS:
        raise UnlearnError(f"Unknown merge output {output!r}: use model or adapter.")
    model = open_base(base)
    opened = [open_parent(parent) for parent in parents]
    check_output(out, overwrite=overwrite, inputs=[model.path, *(parent.path for parent in opened)])
    for warning in check(recipe, model, opened, force=force):
        log(f"Warning: {warning}")
    log(check_resources(out, *_resources(recipe, model, opened, output)))

    # Built beside the target and moved at the end: an interrupted merge leaves nothing half-done.
    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    facts: dict = {}
    if recipe.space == "factors":
        facts["initialisation_cosine"] = initialisation_cosines(opened)
        merged = factor_merge.merge_factors(
            recipe, opened, _count(progress, len(opened[0].factors))
        )
        if output == "adapter":
            _write_adapter(partial, merged, opened[0].config, opened[0].rank)
        else:
            folder = partial / "factors"
            _write_adapter(folder, merged, opened[0].config, opened[0].rank)
            _write_model(partial, Recipe(method="linear", weights=(1.0,)), model, [Adapter(folder)])
            shutil.rmtree(folder)
    elif output == "model":
        _write_model(partial, recipe, model, opened, progress)
    else:
        facts["energy_kept"] = _write_svd(partial, recipe, model, opened, rank, progress)
    for file in TOKENIZER_FILES:
        if (model.path / file).exists():
            shutil.copy(model.path / file, partial / file)
    (partial / RECIPE_FILE).write_text(_recipe_text(recipe, model, opened, out, output))
    facts = {
        "recipe": recipe.to_dict(),
        "reference": REFERENCES[recipe.method],
        "output": output,
        "base": {"path": str(model.path), "sha256": _known_hash(model)},
        "parents": [
            {"path": str(given), "sha256": _known_hash(parent)}
            for given, parent in zip(parents, opened, strict=True)
        ],
        **facts,
        "seconds": round(time.perf_counter() - started, 2),
        "versions": {name: version(name) for name in ("mergekit", "peft", "torch")},
    }
    (partial / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)
    return out


def merge_from_recipe(path: str | Path, out: str | Path, **options) -> Path:
    """Repeat the merge that a `merge.json` describes (with every random drop)."""
    facts = json.loads(Path(path).read_text(encoding="utf-8"))
    for key in ("recipe", "base", "parents"):
        if key not in facts:
            raise UnlearnError(
                f"{path} has no {key!r}: give the merge.json that `axolotl unlearn merge` wrote."
            )
    recipe = facts["recipe"]
    Recipe.from_dict(recipe)
    return merge(
        [parent["path"] for parent in facts["parents"]],
        facts["base"]["path"],
        out,
        output=facts.get("output"),
        **recipe,
        **options,
    )


def write_zeros(parent: str | Path, path: str | Path) -> Path:
    """An adapter of zeros shaped like ``parent``: the base of factor merges by mergekit-pytorch."""
    from safetensors.torch import save_file

    adapter = open_parent(parent)
    if not isinstance(adapter, Adapter):
        raise UnlearnError(f"{parent} is a full model: --zeros needs a LoRA adapter.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(factor_merge.zeros_like(adapter), path, metadata={"format": "pt"})
    return path


def _known_hash(parent: Parent, limit: int = 4_000_000_000) -> str | None:
    """The content hash when it is known or cheap: 28 GB take longer to hash than to merge."""
    stored = sum(file.stat().st_size for file in set(parent.tensors.files.values()))
    if "fingerprint" in parent.__dict__ or stored <= limit:
        return parent.fingerprint
    return None


def _count(progress: Callable[[int, int], None], total: int) -> Callable[[str], None]:
    done = 0

    def step(_name: str) -> None:
        nonlocal done
        done += 1
        progress(done, total)

    return step


def _resources(
    recipe: Recipe, base: Model, parents: Sequence[Parent], output: str
) -> tuple[int, int]:
    """Bytes of disk and of memory that the merge needs at most (estimates)."""
    overhead = 700_000_000  # the interpreter with torch
    counts = {name: _entries(shape) for name, (shape, _) in base.tensors.layout.items()}
    touched = [
        count for name, count in counts.items() if any(parent.touches(name) for parent in parents)
    ]
    model_bytes = 4 * sum(counts.values())
    adapter_bytes = 4 * sum(
        _entries(shape)
        for parent in parents[:1]
        if isinstance(parent, Adapter)
        for shape, _ in parent.tensors.layout.values()
    )
    largest = max(touched, default=0)
    if recipe.space == "factors":
        disk = model_bytes + adapter_bytes if output == "model" else adapter_bytes
        return disk, overhead + 3 * adapter_bytes
    memory = overhead + peak_bytes(recipe, largest, len(parents))
    if output == "adapter":
        return adapter_bytes or model_bytes // 10, memory + 16 * largest
    return model_bytes, memory + min(SHARD, model_bytes) + 4 * max(counts.values())


def _entries(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def merged_tensors(
    recipe: Recipe,
    base: Model,
    parents: Sequence[Parent],
    progress: Callable[[int, int], None] = lambda done, total: None,
):
    """Yield (name, float32 tensor, moved) of the merged full model, one at a time.

    Tensors that no parent touches, and buffers that are not floating point, are the base's own.
    """
    names = list(base.tensors)
    for done, name in enumerate(names, 1):
        stored = base.tensors.layout[name][1]
        shape = base.tensors.shape(name)
        touching = any(parent.touches(name) for parent in parents)
        if not touching or not stored.startswith(("F", "BF")):
            tensor = base.tensors[name]
            yield name, tensor.float() if tensor.is_floating_point() else tensor, False
        else:

            def own(rows: slice, name=name, shape=shape):
                tensor = (
                    base.tensors.rows(name, rows.start, rows.stop) if shape else base.tensors[name]
                )
                return tensor.float()

            def theirs(parent: Parent, name=name, shape=shape, own=own):
                def read(rows: slice):
                    weight = parent.weight(name, own(rows), rows if shape else None)
                    check_finite(weight, name, parent.path)
                    return weight

                return read

            merged = merge_tensor(recipe, name, shape, own, [theirs(parent) for parent in parents])
            yield name, merged, True
        progress(done, len(names))


def _write_model(
    folder: Path,
    recipe: Recipe,
    base: Model,
    parents: Sequence[Parent],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    from mergekit.io.tensor_writer import TensorWriter

    writer = TensorWriter(str(folder), max_shard_size=SHARD)
    for name, tensor, _ in merged_tensors(recipe, base, parents, progress):
        writer.save_tensor(name, tensor, clone=False)
    writer.finalize()
    config = {key: value for key, value in base.config.items() if key != "torch_dtype"}
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_adapter(folder: Path, tensors: dict, template: dict, rank: int) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = factor_merge.adapter_config(template, rank)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_svd(
    folder: Path,
    recipe: Recipe,
    base: Model,
    parents: Sequence[Parent],
    rank: int | None,
    progress: Callable[[int, int], None],
) -> dict[str, float]:
    """A delta merge as LoRA adapter; returns the energy kept by each tensor and on the whole."""
    adapters = [parent for parent in parents if isinstance(parent, Adapter)]
    rank = rank or max((parent.rank for parent in adapters), default=0)
    if rank < 1:
        raise UnlearnError("Full models have no LoRA rank: give --rank for the adapter to write.")
    tensors, energies, kept, total = {}, {}, 0.0, 0.0
    for name, merged, moved in merged_tensors(recipe, base, parents, progress):
        if not moved or merged.ndim != 2:
            if moved and not torch.equal(merged, base.tensors[name].float()):
                raise UnlearnError(
                    f"{name} changed and is no matrix: a LoRA adapter cannot hold it, use "
                    "--output model."
                )
            continue
        change = merged - base.tensors[name].float()
        size = float(change.square().sum())
        if size == 0:
            continue
        a, b, energy = to_factors(change, rank)
        stem = PREFIX + name.removesuffix("weight")
        tensors[stem + "lora_A.weight"], tensors[stem + "lora_B.weight"] = a, b
        energies[name] = energy
        kept, total = kept + energy * size, total + size
    modules = sorted({name.split(".")[-2] for name in energies})
    template = adapters[0].config if adapters else _lora_config(base.path)
    template = {**template, "target_modules": modules, "fan_in_fan_out": False}
    _write_adapter(folder, tensors, template, rank)
    return {"all": kept / total if total else 1.0, **energies}


def _lora_config(base: Path) -> dict:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "bias": "none",
        "lora_dropout": 0.0,
    }


def _recipe_text(
    recipe: Recipe, base: Model, parents: Sequence[Parent], out: Path, output: str
) -> str:
    """mergekit's YAML with a head that says how to run it and what it cannot say."""
    head = [
        f"# Written by `axolotl unlearn merge` ({REFERENCES[recipe.method]}). By mergekit itself:"
    ]
    if recipe.space == "factors":
        zeros = str(parents[0].path / "zeros.safetensors")
        config = factor_merge.mergekit_config(recipe, parents, zeros)
        if config is None:
            method, parameters = factor_merge.factor_call(
                recipe, [parent.scaling(next(iter(parent.factors))) for parent in parents], "A"
            )
            head = [
                f"# {method} with these parameters is not in stock mergekit, or A and B differ;",
                f"# repeat it with: axolotl unlearn merge --recipe {out}/{FACTS_FILE} --out ...",
            ]
            config = {
                "merge_method": method,
                "models": [{"model": str(parent.path)} for parent in parents],
                "parameters": parameters,
                "dtype": "float32",
            }
        else:
            head += [
                f"#   axolotl unlearn merge --parents {parents[0].path} --zeros {zeros}",
                f"#   mergekit-pytorch {out}/{RECIPE_FILE} OUT",
                "#   and then the steps at the top of mergekit_configs/factors-ties.yml.",
            ]
    else:
        names, negated = [], [parent for parent in parents if parent.negated]
        for parent in parents:
            names.append(
                str(parent.path / "merged" if isinstance(parent, Adapter) else parent.path)
            )
        config = recipe.mergekit_config(str(base.path), names)
        random = f" --random-seed {recipe.seed}" if recipe.random else ""
        head.append(f"#   mergekit-yaml {out}/{RECIPE_FILE} OUT{random}")
        if any(isinstance(parent, Adapter) for parent in parents):
            head.append(
                "# after `axolotl merge-lora` of the adapters (it writes their merged/ folders)."
            )
        if negated:
            head += [
                "# Negated parents (their change turned round) must be written as models first:",
                *(
                    f"#   axolotl unlearn merge --method linear --parents negate:{parent.path} ..."
                    for parent in negated
                ),
            ]
        if recipe.random:
            head.append(
                "# mergekit draws other entries (we seed each tensor): merge.json repeats ours."
            )
        if output == "adapter":
            head.append(
                "# The result here is that merge factored by SVD: see energy_kept in merge.json."
            )
    return "\n".join(head) + "\n" + yaml.safe_dump(config, sort_keys=False)
