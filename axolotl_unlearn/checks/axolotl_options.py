"""What unlearning makes of Axolotl's own options: `axolotl_options.yml`, read once."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from functools import cache
from importlib import resources
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model

from axolotl_unlearn import versions
from axolotl_unlearn.data.records import short

#: Numbers that Axolotl takes as they are, by the range in which they mean something.
_RANGES = {
    Annotated[float, Field(gt=0, allow_inf_nan=False)]: """
        learning_rate embedding_lr embedding_lr_scale lr_div_factor loraplus_lr_ratio
        loraplus_lr_embedding adam_epsilon adam_epsilon2 dion_lr qgalore_scale num_epochs
        lora_alpha save_steps eval_steps loss_watchdog_threshold scaling_softmax_factor
    """,
    Annotated[float, Field(ge=0, allow_inf_nan=False)]: "weight_decay max_grad_norm val_set_size",
    Annotated[float, Field(ge=0, lt=1)]: """
        adam_beta1 adam_beta2 adam_beta3 dion_momentum lora_dropout
    """,
    Annotated[float, Field(gt=0, le=1)]: "dion_rank_fraction",
    Annotated[int, Field(ge=1)]: """
        dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap qgalore_proj_bits
        qgalore_proj_group_size qgalore_gamma_proj qgalore_queue_size jagged_restart_steps
        jagged_restart_warmup_steps jagged_restart_anneal_steps max_steps micro_batch_size
        eval_batch_size gradient_accumulation_steps batch_size pad_to_multiple_of lora_r
        saves_per_epoch evals_per_epoch save_total_limit early_stopping_patience
        loss_watchdog_patience logging_steps dataloader_prefetch_factor torch_empty_cache_steps
        ddp_timeout ddp_bucket_cap_mb dp_shard_size dp_replicate_size tiled_mlp_num_shards
        profiler_steps
    """,
    Annotated[float, Field(ge=0, le=1)]: """
        qgalore_cos_threshold warmup_ratio cosine_min_lr_ratio cosine_constant_lr_ratio
    """,
    Annotated[int, Field(ge=0)]: """
        warmup_steps min_sample_len dataset_num_proc dataset_processes dataloader_num_workers
        profiler_steps_start seed
    """,
    Annotated[int, Field(ge=2)]: "sequence_len eval_sequence_len",
    list[Annotated[int, Field(ge=0)]]: "peft_layers_to_transform",
    Annotated[int, Field(ge=1, le=2)]: "fsdp_version",
}
#: Keys of Axolotl that are looked into before Axolotl checks them.
_SHAPES = {
    str: """
        base_model base_model_config lora_model_dir adapter output_dir dataset_prepared_path
        lr_scheduler
    """,
    dict: "lr_scheduler_kwargs gradient_checkpointing_kwargs overrides_of_model_config",
    list[dict]: "pretraining_dataset",
    list[str]: "plugins unfrozen_parameters",
}
Numbers, Shapes = (
    create_model(
        "Keys", **{k: (kind | None, None) for kind, keys in kinds.items() for k in keys.split()}
    )
    for kinds in (_RANGES, _SHAPES)
)


@cache
def groups() -> list[dict[str, Any]]:
    """The groups of the file, in its order."""
    text = (resources.files("axolotl_unlearn.checks") / "axolotl_options.yml").read_text("utf-8")
    return yaml.safe_load(text)


def refused(cfg: dict[str, Any], rows: bool = False) -> list[str]:
    """A sentence for each option that is set and does not go with unlearning.

    Args:
        rows: whether rows are read by Axolotl's own types (``unlearn.data.rows``).
    """
    found = []
    for group in groups():
        if rows and group.get("unless") == "rows":
            continue
        values = group.get("values", {})
        for option in [*group["options"], *values] if group["effect"] == "refused" else ():
            value = cfg.get(option)
            size = value.get("size", 1) if isinstance(value, dict) else value
            is_small = isinstance(size, int) and size <= group.get("above", -1)
            if value and not is_small and value in values.get(option, [value]):
                cure = group.get("cure", "remove it")
                found.append(
                    f"`{option}: {value}` does not go with unlearning ({group['why']}); {cure}."
                )
    return found


def _installed() -> list[dict[str, Any]]:
    """The groups of options that the installed Axolotl reads."""
    return [group for group in groups() if versions.within(group.get("since"), group.get("until"))]


def noted(cfg: dict[str, Any]) -> dict[str, str]:
    """Options that are set and have no effect -> a sentence."""
    return {
        option: f"`{option}: {cfg[option]}` has no effect: {group['why']}."
        for group in _installed()
        for option in group["options"]
        if group["effect"] == "noted" and cfg.get(option)
    }


#: Other names that Axolotl's schema takes.
_ALIASES = ("model_config", "model_kwargs", "model_revision", "model_type")


def ignored(cfg: dict[str, Any]) -> list[str]:
    """Keys that Axolotl leaves unread without a word; those of other plugins are among them."""
    known = {option for group in _installed() for option in group["options"]}
    return [str(key) for key in cfg if key not in known.union(_ALIASES, ["unlearn"])]


def misplaced(cfg: dict[str, Any], ours: Collection[str]) -> list[str]:
    """A sentence for each ignored key that was meant as an option, or for our block (``ours``)."""
    known = [option for group in _installed() for option in group["options"]]
    others = {option: group for group in groups() for option in group["options"]}
    # Other plugins' keys are like Axolotl's own (`lm_eval_batch_size`).
    cutoff = 0.8 if len(cfg.get("plugins") or []) < 2 else 0.95
    found = []
    for key in ignored(cfg):
        # A text, slow to compare; or a place for YAML anchors, as `x-datasets`.
        if len(key) > 40 or key.startswith(("x-", "_", ".")):
            continue
        near = difflib.get_close_matches(key, [*known, "unlearn"], n=1, cutoff=cutoff)
        if key in ours:
            found.append(
                f"`{key}` would be ignored, it belongs into the block `unlearn:`; move it."
            )
        elif key in others and cfg[key] is None:  # `axolotl merge-lora` sets some so
            continue
        elif key in others and len(cfg.get("plugins") or []) < 2:
            found.append(
                f"`{key}` is an option of Axolotl {span(others[key])}; "
                f"{'.'.join(map(str, versions.axolotl()))} is installed and would ignore it; "
                "remove it."
            )
        elif near and key not in others:
            found.append(f"`{key}` is no option and would be ignored; did you mean `{near[0]}`?")
    return found


def span(group: dict[str, Any]) -> str:
    return f"from {group['since']} on" if "since" in group else f"up to {group['until']}"


def number_faults(cfg: dict[str, Any]) -> list[str]:
    """A sentence for each number outside its range."""
    return _faults(Numbers, cfg)


def shape_faults(cfg: dict[str, Any]) -> list[str]:
    """A sentence for each key that we read and that is no list, block or text as it should be."""
    return _faults(Shapes, cfg)


def _faults(kind: type[BaseModel], cfg: dict[str, Any]) -> list[str]:
    try:
        kind.model_validate({key: cfg.get(key) for key in kind.model_fields})
    except ValidationError as error:
        return [
            f"`{fault['loc'][0]}: {short(fault['input'])[1:-1]}`: {fault['msg'][0].lower()}"
            f"{fault['msg'][1:]}; correct it."
            for fault in error.errors()
        ]
    return []
