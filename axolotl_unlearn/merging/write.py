"""What a merge writes: a full model, an adapter, and the recipe for mergekit itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from torch import Tensor

from axolotl_unlearn.files import replacing, write_json
from axolotl_unlearn.merging import factors as factor_merge
from axolotl_unlearn.merging.methods import merge_delta
from axolotl_unlearn.merging.recipe import REFERENCES, Recipe
from axolotl_unlearn.merging.sources import Adapter, Model, Parent

SHARD = 1_000_000_000  # bytes; mergekit's writer holds one shard in memory
RECIPE_FILE = "mergekit_config.yml"
FACTS_FILE = "merge.json"

Progress = Callable[[int, int], None]


def write_model(
    folder: Path,
    recipe: Recipe,
    base: Model,
    parents: Sequence[Parent],
    progress: Progress = lambda done, total: None,
) -> None:
    """The merged full model in float32, one tensor at a time.

    Tensors that no parent touches, and buffers that are not floating point, are the base's own.
    """
    from mergekit.io.tensor_writer import TensorWriter

    writer = TensorWriter(str(folder), max_shard_size=SHARD)
    for done, name in enumerate(base.tensors, 1):
        own = base.tensors[name]
        if own.is_floating_point():
            own = own.float()
            if any(parent.touches(name) for parent in parents):
                own = merge_delta(recipe, name, own, [one.weight(name, own) for one in parents])
        writer.save_tensor(name, own, clone=False)
        progress(done, len(base.tensors))
    writer.finalize()
    config = {key: value for key, value in base.config.items() if key != "torch_dtype"}
    write_json(folder / "config.json", config | {"dtype": "float32"}, indent=2)


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: dict) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(folder / "adapter_model.safetensors") as draft:
        save_file(tensors, draft, metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", config, indent=2)


def recipe_text(recipe: Recipe, base: Model, parents: Sequence[Parent], out: Path) -> str | None:
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
    return "\n".join(head) + "\n" + yaml.safe_dump(config, sort_keys=False)
