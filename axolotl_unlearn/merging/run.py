"""`axolotl unlearn merge`: checks, merges tensor by tensor, writes result and recipe."""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import replacing, write, write_json
from axolotl_unlearn.merging.checks import (
    check,
    check_output,
    check_room,
    initialisation_cosines,
)
from axolotl_unlearn.merging.factors import adapter_config, merge_factors, zeros_like
from axolotl_unlearn.merging.recipe import REFERENCES, Recipe
from axolotl_unlearn.merging.sources import (
    TOKENIZER_FILES,
    Adapter,
    Model,
    Parent,
    open_base,
    open_parent,
    read_json,
)
from axolotl_unlearn.merging.write import (
    FACTS_FILE,
    RECIPE_FILE,
    recipe_text,
    write_adapter,
    write_model,
)

OUTPUTS = ("model", "adapter")


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
    overwrite: bool = False,
    force: bool = False,
    log: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Merge adapters or full models that share a base; return the output folder.

    ``parents``: folders; ``negate:PATH`` turns a parent's change round. ``output``: ``model`` or
    ``adapter``; default is model for delta and adapter for factors.

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
    if output == "adapter" and space == "delta":
        raise UnlearnError(
            "A merge of full weights is no adapter: leave out --output adapter, or merge with "
            "--space factors."
        )
    check_output(out, overwrite=overwrite, inputs=[model.path, *(parent.path for parent in opened)])
    for warning in check(recipe, model, opened, force=force):
        log(f"Warning: {warning}")
    log(check_room(out, _disk(model, opened[0], output)))

    facts: dict = {
        "recipe": recipe.to_dict(),
        "reference": REFERENCES[recipe.method],
        "output": output,
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
        facts |= _write(partial, recipe, model, opened, output, progress)
        for file in TOKENIZER_FILES:
            if (model.path / file).exists():
                shutil.copy(model.path / file, partial / file)
        text = recipe_text(recipe, model, opened, out)
        if text is not None:
            write(partial / RECIPE_FILE, text)
        facts |= {
            "seconds": round(time.perf_counter() - started, 2),
            "versions": {name: version(name) for name in ("mergekit", "peft", "torch")},
        }
        write_json(partial / FACTS_FILE, facts, indent=2)
    except BaseException:
        shutil.rmtree(partial)
        raise
    # A kill in between leaves none rather than half of one.
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    return out


def _write(
    folder: Path,
    recipe: Recipe,
    base: Model,
    parents: Sequence[Parent],
    output: str,
    progress: Callable[[int, int], None],
) -> dict:
    """The weights of one merge; returns what merge.json says of them."""
    if recipe.space == "factors":
        done = itertools.count(1)
        total = len(parents[0].factors)
        merged = merge_factors(recipe, parents, lambda _: progress(next(done), total))
        config = adapter_config(parents[0].config, parents[0].rank)
        if output == "adapter":
            write_adapter(folder, merged, config)
        else:
            inner = folder / "factors"
            write_adapter(inner, merged, config)
            write_model(folder, Recipe(method="linear", weights=(1.0,)), base, [Adapter(inner)])
            shutil.rmtree(inner)
        return {"initialisation_cosine": initialisation_cosines(parents)}
    write_model(folder, recipe, base, parents, progress)
    return {}


def merge_from_recipe(path: str | Path, out: str | Path, *, force: bool = False, **options) -> Path:
    """Repeat the merge that a `merge.json` describes, with every random drop, on the same weights.

    Raises:
        UnlearnError: The base or a parent is not what was merged then (``force`` lets it pass).
    """
    facts, log = read_json(Path(path)), options.get("log", lambda line: None)
    for key in ("recipe", "base", "parents"):
        if key not in facts:
            raise UnlearnError(
                f"{path} has no {key!r}: give the merge.json that `axolotl unlearn merge` wrote."
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
        output=facts.get("output"),
        force=force or bool(facts.get("forced")),
        **facts["recipe"],
        **options,
    )


def write_zeros(parent: str | Path, path: str | Path) -> Path:
    """An adapter of zeros shaped like ``parent``: the base of factor merges by mergekit-pytorch."""
    from safetensors.torch import save_file

    adapter = open_parent(parent)
    if not isinstance(adapter, Adapter):
        raise UnlearnError(f"{parent} is a full model: --zeros needs a LoRA adapter.")
    path = Path(path)
    with replacing(path) as draft:
        save_file(zeros_like(adapter), draft, metadata={"format": "pt"})
    return path


def _known_hash(base: Model, limit: int = 4_000_000_000) -> str | None:
    """The base's hash when it is known or cheap: a factor merge reads nothing else of 28 GB."""
    stored = sum(file.stat().st_size for file in set(base.tensors.files.values()))
    if "scan" in base.tensors.__dict__ or stored <= limit:
        return base.fingerprint
    return None


def _disk(base: Model, first: Parent, output: str) -> int:
    """Bytes that the result takes, in float32."""
    written = first if output == "adapter" else base
    return 4 * sum(math.prod(shape) for shape, _ in written.tensors.layout.values())
