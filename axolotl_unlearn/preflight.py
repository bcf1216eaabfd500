"""What is wrong with a config, found before weights are loaded; and what unlearning relies on.

`prepare` runs in the plugin's ``register`` on the raw config of every ``axolotl`` command;
`faults` gathers everything at once for ``axolotl unlearn check``.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from axolotl_unlearn.args import UnlearnArgs, parse_unlearn
from axolotl_unlearn.errors import UnlearnError

LOG = logging.getLogger(__name__)

PLUGIN = "axolotl_unlearn.UnlearnPlugin"
PREFIX = "axolotl_unlearn.data."
ROLES = ("forget", "retain", "memorise")
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")

#: Config keys that break per-sequence sums or hide logits or rows, with the reason.
_REFUSED = {
    "sample_packing": "packed sequences lose their per-sequence log-probs",
    "eval_sample_packing": "packed sequences lose their per-sequence log-probs",
    "batch_flattening": "flattened batches lose their per-sequence log-probs",
    "pretraining_dataset": "rows must be labelled forget or retain; use `datasets:`",
    "rl": "unlearning is not one of Axolotl's RL trainers",
    "neftune_noise_alpha": "noise on the embeddings makes policy and reference incomparable",
    "orpo_alpha": "the objectives are those of `unlearn:`",
    "curriculum_sampling": "the order comes from the pairing",
    "train_on_inputs": "labels are set by unlearn.data.labels",
    "streaming": "forget and retain rows are paired, which needs their number",
}

#: Where a missing base model comes from, by the folder the examples use.
_MAKERS = {
    "out/memorised": "axolotl train examples/memorise.yml",
    "out/demo/memorised": "axolotl unlearn demo",
    "out/real/smollm2": "axolotl unlearn demo-real",
    "out/real/memorised": "axolotl unlearn demo-real",
}


def dataset_roles(cfg: dict, key: str = "datasets") -> list[str | None]:
    """Role of each ``datasets`` entry: forget, retain, memorise, or None for a foreign type."""
    roles = []
    for entry in cfg.get(key) or []:
        kind = entry.get("type") if isinstance(entry, dict) else None
        name = kind.removeprefix(PREFIX) if isinstance(kind, str) else ""
        roles.append(name if isinstance(kind, str) and kind.startswith(PREFIX) else None)
    return roles


def faults(cfg: dict) -> list[str]:
    """Every fault of a raw config, each one sentence with key and cure; empty if there is none."""
    found: list[str] = []
    args = None
    block = cfg.get("unlearn")
    roles = dataset_roles(cfg)
    if block is None:
        if any(role in ("forget", "retain") for role in roles):
            found.append(
                "`unlearn:` is missing although `datasets:` has forget or retain rows; add a block "
                "such as `unlearn: {preset: zjuklab-paper}`."
            )
        elif "memorise" not in roles:
            found.append(
                "the plugin axolotl_unlearn.UnlearnPlugin is listed but there is no `unlearn:` "
                "block; add one or remove the plugin."
            )
    else:
        plugins = cfg.get("plugins") or []
        if PLUGIN not in plugins:
            near = difflib.get_close_matches(PLUGIN, [str(p) for p in plugins], n=1, cutoff=0.5)
            found.append(
                f"`plugins:` lacks {PLUGIN}"
                + (f" (it has {near[0]!r}, a misspelling?)" if near else "")
                + "; without it Axolotl ignores `unlearn:` and would fine-tune on the forget rows."
            )
        try:
            args = parse_unlearn(block)
        except UnlearnError as error:
            found.append(str(error))
    found += _dataset_faults(cfg, roles, args)
    found += _setting_faults(cfg, args)
    found += _model_faults(cfg)
    if args is not None and not found:
        from axolotl_unlearn.data.checks import check_files

        found += check_files(cfg)
    return found


def _dataset_faults(cfg: dict, roles: list, args: UnlearnArgs | None) -> list[str]:
    found = []
    entries = cfg.get("datasets") or []
    for number, (entry, role) in enumerate(zip(entries, roles, strict=True)):
        if role not in ROLES and (args is None or args.trains):
            kind = entry.get("type") if isinstance(entry, dict) else entry
            found.append(
                f"`datasets[{number}].type` is {kind!r}, which has no role in unlearning; use "
                f"{PREFIX}forget or {PREFIX}retain."
            )
    if args is None or not args.trains:
        if args is not None and any(role in ("forget", "retain") for role in roles):
            found.append(
                "`unlearn:` names no objective; add `forget:` and `retain:`, or a `preset:`."
            )
        return found
    if "memorise" in roles:
        found.append(
            f"`datasets` mixes {PREFIX}memorise with unlearning; memorise in a run of its own."
        )
    for side, objectives in (("forget", args.forget), ("retain", args.retain)):
        if objectives and side not in roles:
            found.append(
                f"`unlearn.{side}` has objectives but no dataset has `type: {PREFIX}{side}`; "
                "add one."
            )
        if not objectives and side in roles:
            found.append(
                f"a dataset has `type: {PREFIX}{side}` but `unlearn.{side}` has no objective, so "
                "its rows would not be used; add an objective or remove the dataset."
            )
    if not args.forget:
        found.append("`unlearn.forget` is empty: nothing would be forgotten; add an objective.")
    if args.retain and args.pairing.retain_per_forget == 0:
        found.append(
            "`unlearn.pairing.retain_per_forget` is 0 although `unlearn.retain` has objectives; "
            "set it to 1 or more."
        )
    return found


def _setting_faults(cfg: dict, args: UnlearnArgs | None) -> list[str]:
    if args is None or not args.trains:
        return []
    found = [
        f"`{key}: {cfg.get(key)}` does not go with unlearning ({why}); remove it."
        for key, why in _REFUSED.items()
        if cfg.get(key)
    ]
    if cfg.get("val_set_size"):
        found.append(
            "`val_set_size` cuts forget and retain rows at random; use `test_datasets:` with the "
            "types axolotl_unlearn.data.forget and .retain."
        )
    if cfg.get("remove_unused_columns"):
        found.append("`remove_unused_columns: true` drops the role of the rows; remove it.")
    references = args.references()
    modes = {reference.mode for reference in references if not reference.is_teacher}
    if "adapter_off" in modes and (not cfg.get("adapter") or cfg.get("lora_model_dir")):
        found.append(
            "`unlearn.reference: adapter_off` needs a fresh adapter; use `auto` or `frozen_copy`."
        )
    sharded = (
        cfg.get("fsdp_config") or cfg.get("fsdp") or "zero3" in str(cfg.get("deepspeed") or "")
    )
    fresh = cfg.get("adapter") and not cfg.get("lora_model_dir")
    if sharded and modes and (not fresh or "frozen_copy" in modes):
        found.append(
            "full fine-tuning or a starting adapter under FSDP or ZeRO-3 has no reference that "
            "stays sharded; use a fresh `adapter: lora` (reference by adapter off) or DDP."
        )
    for reference in references:
        if sharded and reference.adapter and not reference.model:
            found.append(
                f"`reference: {{adapter: {reference.adapter}}}` cannot be switched in under FSDP "
                "or ZeRO-3; give `{model: BASE, adapter: PATH}`, which is loaded beside the policy."
            )
        for key in ("model", "adapter"):
            path = getattr(reference, key)
            if path and _is_local(path) and not Path(path).exists():
                found.append(f"`reference.{key}: {path}` does not exist; check the path.")
    return found


def _model_faults(cfg: dict) -> list[str]:
    found = []
    for key in ("base_model", "lora_model_dir"):
        path = cfg.get(key)
        if not isinstance(path, str) or not _is_local(path) or Path(path).exists():
            continue
        maker = _MAKERS.get(path.rstrip("/").removeprefix("./"))
        cure = f"run `{maker}` first" if maker else "check the path, relative to where you started"
        found.append(f"`{key}: {path}` does not exist; {cure}.")
    return found


def _is_local(path: str) -> bool:
    """A path rather than a hub name: explicit, or in a folder that is there or that we make."""
    return path.startswith((".", "/", "~", "out/", "examples/")) or path.count("/") > 1


def prepare(cfg: dict) -> None:
    """Check a raw config and set what unlearning relies on, in place.

    Raises:
        UnlearnError: The first lines of `faults`, joined.
    """
    block = cfg.get("unlearn")
    if isinstance(block, dict) and block.get("demo_data"):
        make_demo_data(block["demo_data"])
    found = faults(cfg)
    if found:
        raise UnlearnError(" ".join(found))
    _cpu_settings(cfg)
    # Axolotl keys its cache of tokenised data by path and a few settings, not by content.
    folder = Path(cfg.get("dataset_prepared_path") or "last_run_prepared")
    if not folder.name.startswith("unlearn-"):
        cfg["dataset_prepared_path"] = str(folder / f"unlearn-{content_key(cfg)}")
    args = None if block is None else parse_unlearn(block)
    if args is None or not args.trains:
        return
    if args.preset:
        LOG.info("preset %s is short for\n%s", args.preset, args.expanded())
    cfg["remove_unused_columns"] = False
    for kernel in LORA_KERNELS:
        # Switched on by themselves even where they fail; they also bypass `disable_adapter`.
        if cfg.get(kernel) is None:
            cfg[kernel] = False
    if cfg.get("gradient_checkpointing") and not cfg.get("gradient_checkpointing_kwargs"):
        cfg["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if cfg.get("seed") is None:
        cfg["seed"] = 42
    if cfg.get("pad_to_sequence_len") is None:
        cfg["pad_to_sequence_len"] = False  # else batches are padded to a multiple of 64


def make_demo_data(folder: str) -> None:
    """Make the embedded data if the folder has none (an example's first run)."""
    if not (Path(folder) / "manifest.json").exists():
        from axolotl_unlearn.demo.generate import make_data

        make_data(Path(folder))


def content_key(cfg: dict) -> str:
    """Hash of the data files' content and of everything that shapes their tokens."""
    digest = hashlib.blake2b(digest_size=8)
    for key in ("datasets", "test_datasets"):
        for entry in cfg.get(key) or []:
            path = Path(str(entry.get("path", "")))
            digest.update(repr(sorted(entry.items(), key=lambda kv: kv[0])).encode())
            for file in [path] if path.is_file() else sorted(path.rglob("*.jsonl*")):
                digest.update(file.read_bytes())
    for key in (
        "base_model",
        "tokenizer_config",
        "sequence_len",
        "special_tokens",
        "chat_template",
    ):
        digest.update(repr(cfg.get(key)).encode())
    block = cfg.get("unlearn")
    digest.update(parse_unlearn(block).data.model_dump_json().encode() if block else b"")
    return digest.hexdigest()


def _cpu_settings(cfg: dict[str, Any]) -> None:
    """Without a GPU, Axolotl needs to be told; several processes would else train apart."""
    import torch

    if torch.cuda.is_available() or torch.backends.mps.is_available():
        return
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    defaults = {
        "device_map": {"": "cpu"},
        "dataloader_pin_memory": False,
        "fp16": False,
        "bf16": "auto",
        **dict.fromkeys(LORA_KERNELS, False),  # Triton kernels, switched on by themselves
    }
    for key, value in defaults.items():
        if cfg.get(key) is None:
            cfg[key] = value


def check_config(path: Path) -> tuple[list[str], list[str]]:
    """Faults of a config file, and lines that say what the run would do.

    Raises:
        UnlearnError: If the file cannot be read at all.
    """
    import yaml

    if not path.is_file():
        raise UnlearnError(f"{path} does not exist; give the path of an Axolotl config.")
    try:
        cfg = yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise UnlearnError(f"{path}{line}: not valid YAML ({error.problem}).") from None
    if not isinstance(cfg, dict):
        raise UnlearnError(f"{path} holds no keys; start from a copy of examples/npo_over.yml.")
    if not cfg.get("unlearn") and "memorise" not in dataset_roles(cfg):
        return [f"{path} has no `unlearn:` block; add one, e.g. `unlearn: {{preset: ...}}`."], []
    block = cfg.get("unlearn")
    if isinstance(block, dict) and block.get("demo_data"):
        make_demo_data(block["demo_data"])
    found = faults(cfg)
    return found, [] if found else summary(cfg)


def summary(cfg: dict) -> list[str]:
    """What a faultless config would do, in a few lines."""
    from axolotl_unlearn.engine.entries import describe, make_entries

    args = parse_unlearn(cfg["unlearn"]) if cfg.get("unlearn") else None
    if args is None or not args.trains:
        return ["memorises; no objective of unlearning"]
    lines = [f"preset {args.preset} is short for", args.expanded()] if args.preset else []
    for entry in describe(make_entries(args.entries())):
        extra = ", ".join(
            f"{k}={v}" for k, v in entry.items() if k not in ("name", "weight", "unit", "source")
        )
        lines.append(
            f"  {entry['name']:<24} weight {entry['weight']:g}, mean over {entry['unit']}s"
            + (f", {extra}" if extra else "")
            + f"  [{entry['source']}]"
        )
    return lines
