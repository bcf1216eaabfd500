"""What a merge writes: a full model, an adapter, and the recipe for mergekit itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import yaml
from torch import Tensor

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import replacing, write_json
from axolotl_unlearn.merging import factors as factor_merge
from axolotl_unlearn.merging.recipe import REFERENCES, Recipe
from axolotl_unlearn.merging.sources import PREFIX, Adapter, Model, Parent
from axolotl_unlearn.merging.stream import merge_tensor

SHARD = 1_000_000_000  # bytes; mergekit's writer holds one shard in memory
RECIPE_FILE = "mergekit_config.yml"
FACTS_FILE = "merge.json"

Progress = Callable[[int, int], None]


def merged_tensors(
    recipe: Recipe,
    base: Model,
    parents: Sequence[Parent],
    progress: Progress = lambda done, total: None,
) -> Iterator[tuple[str, Tensor, bool]]:
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
                return lambda rows: parent.weight(name, own(rows), rows if shape else None)

            merged = merge_tensor(recipe, name, shape, own, [theirs(parent) for parent in parents])
            yield name, merged, True
        progress(done, len(names))


def write_model(
    folder: Path,
    recipe: Recipe,
    base: Model,
    parents: Sequence[Parent],
    progress: Progress = lambda done, total: None,
) -> None:
    from mergekit.io.tensor_writer import TensorWriter

    writer = TensorWriter(str(folder), max_shard_size=SHARD)
    for name, tensor, _ in merged_tensors(recipe, base, parents, progress):
        writer.save_tensor(name, tensor, clone=False)
    writer.finalize()
    config = {key: value for key, value in base.config.items() if key != "torch_dtype"}
    config["dtype"] = "float32"
    write_json(folder / "config.json", config, indent=2)


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: dict) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(folder / "adapter_model.safetensors") as draft:
        save_file(tensors, draft, metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", config, indent=2)


def write_extracted(
    folder: Path,
    recipe: Recipe,
    base: Model,
    parents: Sequence[Parent],
    rank: int,
    progress: Progress,
) -> dict[str, float]:
    """A merge on full weights as one LoRA adapter of ``rank``; returns the energy kept.

    Every weight that moved is in it: linear layers and embeddings as factors (mergekit's SVD, that
    of `mergekit-extract-lora`, which itself knows no OLMo), the rest, and what a parent trained
    whole, in modules_to_save. Energy is the share of the squared Frobenius norm of the change,
    of each weight and of all.
    """
    from peft import LoraConfig

    modules = _modules(base)
    tensors: dict[str, Tensor] = {}
    energies: dict[str, float] = {}
    ranks: dict[str, int] = {}
    whole: list[str] = []
    turned = False
    kept = total = 0.0
    for name, merged, moved in merged_tensors(recipe, base, parents, progress):
        if not moved:
            continue
        change = merged - base.tensors[name].float()
        size = float(change.double().square().sum())
        if size == 0:
            continue
        module, _, what = name.rpartition(".")
        kind = modules.get(module)
        stem = PREFIX + module
        by_hand = any(isinstance(p, Adapter) and name in p.replaced for p in parents)
        if what != "weight" or kind is None:
            raise UnlearnError(
                f"{name} changed, which a LoRA adapter cannot hold: use --output model."
            )
        if kind == "Embedding" and base.tied:
            raise UnlearnError(
                f"{name} changed and is the head as well: PEFT would load a LoRA of it for the "
                "input only; use --output model."
            )
        if by_hand or kind == "other":
            tensors[PREFIX + name], energy = merged, 1.0
            whole.append(module)
        else:
            across = kind in ("Embedding", "Conv1D")
            turned |= kind == "Conv1D"
            a, b = _factors(change.T if across else change, rank)
            product = b @ a
            lost = (change - (product.T if across else product)).double().square().sum()
            energy = 1 - float(lost) / size
            keys = ("lora_embedding_A", "lora_embedding_B")
            if kind != "Embedding":
                keys = ("lora_A.weight", "lora_B.weight")
            tensors[f"{stem}.{keys[0]}"], tensors[f"{stem}.{keys[1]}"] = a, b
            ranks[module] = len(a)
        energies[name] = energy
        kept, total = kept + energy * size, total + size
    if not ranks:
        raise UnlearnError(
            "No linear layer or embedding moved, nothing is left for a LoRA: use --output model."
        )
    smaller = {module: own for module, own in ranks.items() if own < rank}
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=sorted(ranks),
        modules_to_save=whole or None,
        rank_pattern=smaller,
        alpha_pattern=smaller,
        fan_in_fan_out=turned,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base.path),
        inference_mode=True,
    ).to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    write_adapter(folder, tensors, config)
    return {"all": kept / total, **energies}


def _factors(change: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] with B A nearest to ``change`` [out, in]; r = min(rank, out, in)."""
    from mergekit.architecture import WeightInfo
    from mergekit.graph import Task
    from mergekit.scripts.extract_lora import TaskVectorDecompositionTask

    task = TaskVectorDecompositionTask.model_construct(
        weight_info=WeightInfo(name="change"), input_task=Task, max_rank=rank
    )
    return task.execute(task_vector=change)


def _modules(base: Model) -> dict[str, str]:
    """Module path -> Linear, Embedding, Conv1D or other, from the architecture without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base.path))
    kinds = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        kinds[name] = kind if kind in ("Linear", "Embedding", "Conv1D") else "other"
    return kinds


def recipe_text(
    recipe: Recipe, base: Model, parents: Sequence[Parent], out: Path, output: str
) -> str | None:
    """mergekit's YAML with a head that says how to run it and what it cannot say; None where
    mergekit has no such merge."""
    head = [
        f"# Written by `axolotl unlearn merge` ({REFERENCES[recipe.method]}). By mergekit itself:"
    ]
    if recipe.space == "factors":
        zeros = str(parents[0].path / "zeros.safetensors")
        config = factor_merge.mergekit_config(recipe, parents, zeros)
        if config is None:
            return None
        head += [
            f"#   axolotl unlearn merge --parents {parents[0].path} --zeros {zeros}",
            f"#   mergekit-pytorch {out}/{RECIPE_FILE} OUT",
            "#   and then the steps at the top of mergekit_configs/factors-ties.yml.",
        ]
    else:
        adapters = [parent for parent in parents if isinstance(parent, Adapter)]
        names = [str(p.path / "merged" if isinstance(p, Adapter) else p.path) for p in parents]
        config = recipe.mergekit_config(str(base.path), names)
        random = f" --random-seed {recipe.seed}" if recipe.random else ""
        head.append(f"#   mergekit-yaml {out}/{RECIPE_FILE} OUT{random}")
        if adapters:
            head.append(
                "# after `axolotl merge-lora` of the adapters (it writes their merged/ folders)."
            )
        negated = [parent.path for parent in parents if parent.negated]
        if negated:
            head.append(
                "# Negated parents (their change turned round) must be written as models first:"
            )
        for path in negated:
            head.append(f"#   axolotl unlearn merge --method linear --parents negate:{path} ...")
        if recipe.random:
            head.append(
                "# mergekit draws other entries (we seed each tensor): merge.json repeats ours."
            )
        if output == "adapter":
            head.append(
                "# The result here is that merge factored by SVD: see energy_kept in merge.json."
            )
    return "\n".join(head) + "\n" + yaml.safe_dump(config, sort_keys=False)
