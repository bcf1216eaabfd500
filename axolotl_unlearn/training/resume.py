"""Which checkpoint a run goes on from: the last whole one; and what a run says that blew up.

A run that is killed while it saves leaves a folder that looks like a checkpoint. Axolotl would take
it, since its number is the highest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors import SafetensorError, safe_open

from axolotl_unlearn.columns import FACTS, ROLES
from axolotl_unlearn.config import UnlearnArgs
from axolotl_unlearn.data.checks import block_of, records_of, role_of
from axolotl_unlearn.data.records import short
from axolotl_unlearn.engine.batch import Batch
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.store import content_key, file_digest

LOG = logging.getLogger(__name__)

#: In a checkpoint, beside what references remember: `made_of` its run.
MADE_OF = "made-of.json"
STATE = "trainer_state.json"  # what Trainer writes last
#: Rows that a run names which ends.
MOST_ROWS = 8
#: Settings of another model or of other trained weights, and those that an optimizer's state
#: holds, so that a new value would do nothing.
_SETTINGS = """
    revision_of_model adapter lora_r lora_alpha lora_rank_pattern lora_alpha_pattern
    peft_use_rslora peft_use_dora peft_init_lora_weights lora_target_modules lora_target_linear
    lora_target_parameters lora_modules_to_save peft_layers_to_transform
    peft_trainable_token_indices unfrozen_parameters load_in_4bit load_in_8bit
    overrides_of_model_config optimizer optim_args learning_rate weight_decay dion_lr
    dion_momentum dion_rank_fraction dion_rank_multiple_of adam_beta1 adam_beta2 adam_beta3
    adam_epsilon adam_epsilon2 embedding_lr embedding_lr_scale lr_groups loraplus_lr_ratio
    loraplus_lr_embedding
""".split()
_WEIGHTS = ("*.safetensors", "pytorch_model*", "adapter_model*", "global_step*")
_OPTIMIZER = ("optimizer*", "global_step*", "pytorch_model_fsdp*")


def choose_checkpoint(cfg: Any) -> None:
    """Set ``resume_from_checkpoint`` to the last whole checkpoint, if the run is to go on from one.

    Raises:
        UnlearnError: The checkpoint that the config names is missing, cut off, or has no optimizer.
    """
    named = cfg.get("resume_from_checkpoint")
    if isinstance(named, str) and named:
        if broken := why_broken(Path(named)):
            others = [p for p in checkpoints(Path(named).parent) if why_broken(p) is None]
            cure = f"use {others[-1]}" if others else "remove the key to start afresh"
            raise UnlearnError(f"`resume_from_checkpoint: {named}` {broken}; {cure}.")
        return
    if not cfg.get("auto_resume_from_checkpoints"):
        return
    left_out = []
    for path in reversed(checkpoints(Path(str(cfg.get("output_dir"))))):
        broken = why_broken(path)
        if broken is None:
            cfg["resume_from_checkpoint"] = str(path)
            break
        left_out.append(f"{path} {broken} and is left out")
    else:
        cfg["auto_resume_from_checkpoints"] = False
    if left_out:
        begin = cfg.get("resume_from_checkpoint") or "the start"
        LOG.warning("%s; going on from %s.", "; ".join(left_out), begin)


def made_of(cfg: Any, args: UnlearnArgs, rows: Dataset, batch: int) -> dict[str, str]:
    """Digests of what a run is made of, by the key that says it.

    A run that goes on may differ in all else: how long it is, its schedule, how often it logs,
    saves and evaluates, and how a batch is cut into micro-batches and processes.

    Args:
        batch: Pairs of an optimizer step.
    """
    digest = hashlib.sha256()
    for name in ("input_ids", "labels", *FACTS[:3]):
        digest.update(json.dumps(list(rows[name][:])).encode())
    starts = _content(cfg.get("base_model"))
    if cfg.get("lora_model_dir"):
        starts += _content(cfg.get("lora_model_dir"))
    references = [_content(path) for r in args.references() for path in (r.model, r.adapter)]
    without = {"audit", "chunk_mib", "reference_gib", "preset", "data"}
    block = args.model_dump(mode="json", exclude=without, exclude_unset=True)
    # Two schedules keep in their state how long the run is; a longer one would train at rate 0.
    kept = ("lr_scheduler", "max_steps", "num_epochs")
    kept = [cfg.get(key) for key in kept] if cfg.get("lr_scheduler") in ("rex", "one_cycle") else []
    return {
        "datasets": digest.hexdigest(),
        "base_model": content_key(starts),
        "unlearn": content_key(block),
        "seed": content_key(cfg.get("seed"), cfg.get("data_seed")),
        "micro_batch_size": str(batch),
        "lr_scheduler": content_key(*kept),
        "unlearn.reference": content_key(references),
        "unlearn.level.heldout": content_key(_content(args.level and args.level.heldout)),
        **_code(args),
        **{key: content_key(cfg.get(key) or None) for key in _SETTINGS},
    }


def _code(args: UnlearnArgs) -> dict[str, str]:
    """Digests of the modules of extensions, and of those that they have loaded of their package."""
    names = [one.extension.partition(":")[0] for one in args.extensions]
    packages = tuple(f"{name.rpartition('.')[0] or name}." for name in names)
    return {
        f"unlearn.extensions: {name}": file_digest(Path(one.__file__))
        for name, one in [*sys.modules.items()]
        if f"{name}.".startswith(packages) and getattr(one, "__file__", None)
    }


def _content(path: str | None) -> list[str]:
    """Digests of a file, or of a folder's weights and config; the name of what is not here."""
    if not path or Path(path).is_file():
        return [file_digest(Path(path))] if path else []
    patterns = ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin", "*config.json")
    files = sorted(file for pattern in patterns for file in Path(path).glob(pattern))
    return [file_digest(file) for file in files] or [str(path)]


def require_same(folder: Path, now: Mapping[str, str]) -> None:
    """Raise if the run whose checkpoint wrote ``folder`` was made of anything else.

    Raises:
        UnlearnError: Names the keys.
    """
    file = folder / MADE_OF
    if not file.is_file():
        LOG.warning("%s is missing: whether the run goes on with its own rows is not known.", file)
        return
    before = json.loads(file.read_text("utf-8"))
    differ = [f"`{key}`" for key in now if before.get(key, now[key]) != now[key]]
    if differ:
        raise UnlearnError(
            f"the checkpoint {folder.parent} is of a run with another {', '.join(differ)}: the "
            "steps that were done would not be done for this one. Go on with the config of that "
            "run, or start anew: remove `resume_from_checkpoint` and give a new `output_dir`.",
            code="resume.made-of",
        )


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run by their step, half ones too."""
    folders = (p for p in folder.glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit())
    return sorted(folders, key=lambda p: int(p.name.rpartition("-")[2]))


def why_broken(folder: Path) -> str | None:
    """What a checkpoint lacks, as the end of a sentence; None if it is whole."""
    if not folder.is_dir():
        return "does not exist"
    if not (folder / STATE).is_file():
        return f"was cut off while it was written ({STATE} is missing)"
    for patterns, what in ((_WEIGHTS, "weights"), (_OPTIMIZER, "optimizer (`save_only_model`?)")):
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            return f"has no {what}"
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not _is_whole(path):
            return f"was cut off while it was written ({path.relative_to(folder)})"
    return None


def _is_whole(path: Path) -> bool:
    """As far as its end tells; bytes in the middle are the disk's affair."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return True
        if path.suffix in (".pt", ".pth", ".bin"):
            with path.open("rb") as file:
                zipped = file.read(2) in (b"PK", b"P", b"")
            return not zipped or zipfile.is_zipfile(path)
        if path.suffix == ".json":
            content = json.loads(path.read_text("utf-8"))
            if path.name.endswith(".index.json"):
                return all((path.parent / s).is_file() for s in content["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return False
    return True


def blown_up(
    what: str, step: int, batches: Sequence[Batch], cfg: Mapping[str, Any], out: Path
) -> UnlearnError:
    """The sentence with which a run ends whose loss or gradient is no longer finite: step, ids of
    its rows, and what is kept.

    Args:
        batches: Of the step, of this process.
    """
    names = []
    for side, role in ROLES.items():
        own = (one.on_host("row")[one.on_host("role") == role].tolist() for one in batches)
        numbers = dict.fromkeys(number for some in own for number in some)
        names += [f"{side} {name}" for name in names_of_rows(cfg, side, numbers)]
    more = f" and {len(names) - MOST_ROWS} more" if len(names) > MOST_ROWS else ""
    kept = checkpoints(out)
    last = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
    return UnlearnError(
        f"{what} at step {step} (rows: {', '.join(names[:MOST_ROWS])}{more}). This step changed "
        f"nothing; {last}. Lower learning_rate or weight, look at these rows, or check the weights "
        "of base_model for NaN.",
        code="training.not-finite",
    )


def names_of_rows(cfg: Mapping[str, Any], side: str, numbers: Iterable[int]) -> list[str]:
    """What to call the rows with these places in their file: ids where one file has the side."""
    entries = [e for e in cfg.get("datasets") or [] if role_of(e) == side]
    args = block_of(cfg)
    names: list[str] = []
    if args is not None and len(entries) == 1 and os.path.isfile(entries[0]["path"]):
        with suppress(UnlearnError):  # the file has changed since
            names = [row.id for row in records_of(entries[0], args.data)]
    return [short(names[n]) if 0 <= n < len(names) else f"row {n}" for n in numbers]
