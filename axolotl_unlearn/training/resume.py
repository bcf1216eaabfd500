"""Which checkpoint a run goes on from: the last whole one.

A run that is killed while it saves leaves a folder that looks like a checkpoint. Axolotl would take
it, since its number is the highest.
"""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from axolotl_unlearn.errors import UnlearnError

LOG = logging.getLogger(__name__)

STATE = "trainer_state.json"  # what Trainer writes last
_WEIGHTS = ("*.safetensors", "pytorch_model*", "adapter_model*", "global_step*")
_OPTIMIZER = ("optimizer*", "global_step*", "pytorch_model_fsdp*")


def choose_checkpoint(cfg: Any) -> None:
    """Set ``resume_from_checkpoint`` to the last whole checkpoint, if the run is to go on from one.

    Raises:
        UnlearnError: The checkpoint that the config names is cut off or has no optimizer.
    """
    named = cfg.get("resume_from_checkpoint")
    if isinstance(named, str) and named:
        broken = why_broken(Path(named)) if Path(named).is_dir() else None
        if broken:
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


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run by their step, half ones too."""
    folders = (p for p in folder.glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit())
    return sorted(folders, key=lambda p: int(p.name.rpartition("-")[2]))


def why_broken(folder: Path) -> str | None:
    """What a checkpoint lacks, as the end of a sentence; None if it is whole."""
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
