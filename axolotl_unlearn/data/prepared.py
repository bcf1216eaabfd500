"""Where Axolotl keeps tokenised rows: a folder named by everything that they depend on.

Axolotl itself keys them by paths and a few settings, so an edited file, another seed of its shuffle
or another version of this package would give the rows, or the order, of an earlier run.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.data.checks import ENTRY_KEYS, KEYS

LOG = logging.getLogger(__name__)

#: Settings of Axolotl that decide tokens, rows or their order.
SETTINGS = """
    base_model base_model_config revision_of_model tokenizer_config tokenizer_type
    tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common special_tokens tokens
    added_tokens_overrides chat_template chat_template_jinja chat_template_kwargs
    default_system_message train_on_inputs eot_tokens is_mistral_derived_model
    is_qwen_derived_model sequence_len eval_sequence_len excess_length_strategy min_sample_len
    shuffle_merged_datasets shuffle_before_merging_datasets seed
""".split()
_TOKENIZER_FILES = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab.*|merges\.txt|chat_template.*"
    r"|.*\.(model|tiktoken|jinja)"
)
_OURS = re.compile(r"unlearn-[0-9a-f]{16}")
_AXOLOTLS = re.compile(r"[0-9a-f]{32}")


def prepared_folder(cfg: dict[str, Any]) -> str:
    """The ``dataset_prepared_path`` for a config: what it names, and a folder of its key."""
    folder = Path(cfg.get("dataset_prepared_path") or "last_run_prepared")
    if _OURS.fullmatch(folder.name):  # a key of before, e.g. copied from the log
        folder = folder.parent
    return str(folder / f"unlearn-{content_key(cfg)}")


def is_prepared(path: Path) -> bool:
    """A real folder with the name that `prepared_folder` gives."""
    return bool(_OURS.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def drop_half_written(folder: Path) -> None:
    """Remove rows that a killed run has saved in part: Axolotl would read what is there and end."""

    def broken() -> list[Path]:
        folders = (path for path in folder.glob("*") if _AXOLOTLS.fullmatch(path.name))
        return [path for path in folders if path.is_dir() and not _is_whole(path)]

    if broken():
        from axolotl.utils.data.lock import LOCK_FILE_NAME
        from filelock import FileLock

        # A process that saves just now holds Axolotl's lock.
        with FileLock(str(folder / LOCK_FILE_NAME)):
            for path in broken():
                LOG.warning("%s was saved in part by a run that ended; it is made again.", path)
                shutil.rmtree(path)


def _is_whole(path: Path) -> bool:
    """Has the two files that ``datasets`` writes after the rows; an empty folder does no harm."""
    try:
        for name in ("state.json", "dataset_info.json"):
            json.loads((path / name).read_text("utf-8"))
    except (OSError, ValueError):
        return not any(path.iterdir())
    return True


def content_key(cfg: dict[str, Any]) -> str:
    """Hash of the local data files and of all that makes rows of them, 16 hex digits.

    Data that are not local count by their name and revision only.
    """
    digest = hashlib.blake2b(digest_size=8)
    for package in ("axolotl-unlearn", "axolotl", "transformers", "tokenizers"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    files = sorted(Path(__file__).parent.glob("*.py"))
    block = cfg.get("unlearn")
    data = parse_unlearn(block).data if block else None
    for key in KEYS:
        for entry in cfg.get(key) or []:
            known = {name: entry[name] for name in ENTRY_KEYS if entry.get(name) is not None}
            digest.update(f"{key} {sorted(known.items())}\n".encode())
            files += _data_files(entry)
    for key in SETTINGS:
        digest.update(f"{key} {cfg.get(key)!r}\n".encode())
    for key in ("base_model", "tokenizer_config"):
        folder = Path(str(cfg.get(key) or "/nowhere"))
        if folder.is_dir():
            files += sorted(p for p in folder.iterdir() if _TOKENIZER_FILES.fullmatch(p.name))
    jinja = str(cfg.get("chat_template_jinja") or "")
    if len(jinja) < 4096 and Path(jinja).is_file():
        files.append(Path(jinja))
    digest.update(data.model_dump_json().encode() if data else b"")
    if data and data.suppression and Path(data.suppression).is_file():
        files.append(Path(data.suppression))
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest()


def _data_files(entry: dict[str, Any]) -> list[Path]:
    """The local files an entry of ``datasets`` names: a file, all of a folder, ``data_files``."""
    path = Path(str(entry.get("path") or ""))
    named = entry.get("data_files") or []
    patterns = [named] if isinstance(named, str) else named
    # `datasets` resolves them against the working folder, or against the data folder.
    files = {f for p in patterns for f in glob.glob(str(p), recursive=True)}
    files |= {f for p in patterns for f in glob.glob(str(path / p), recursive=True)}
    files |= {str(path)} if path.is_file() else {str(p) for p in path.rglob("*") if path.name}
    return [Path(file) for file in sorted(files) if Path(file).is_file()]
