"""Where Axolotl keeps tokenised rows: a folder named by everything that they depend on.

Axolotl itself keys them by paths and a few settings, so an edited file, another seed of its shuffle
or another version of this package would give the rows, or the order, of an earlier run.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from axolotl_unlearn.config import parse_unlearn
from axolotl_unlearn.data.checks import KEYS
from axolotl_unlearn.data.near import strings
from axolotl_unlearn.data.suppression import KEY

LOG = logging.getLogger(__name__)

#: Settings of Axolotl that decide tokens, rows or their order.
SETTINGS = """
    base_model base_model_config revision_of_model tokenizer_config tokenizer_type
    tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common special_tokens tokens
    added_tokens_overrides chat_template chat_template_jinja chat_template_kwargs
    default_system_message train_on_inputs eot_tokens role_boundaries is_mistral_derived_model
    is_qwen_derived_model sequence_len eval_sequence_len excess_length_strategy min_sample_len
    shuffle_merged_datasets shuffle_before_merging_datasets seed trust_remote_code
""".split()
_TOKENIZER_FILES = re.compile(
    r"tokeni[sz].*|special_tokens_map\.json|added_tokens\.json|vocab.*|merges\.txt|config\.json"
    r"|tekken.*|chat_template.*|.*\.(model|tiktoken|jinja|py)"
)
#: Bytes from which a file beside a strategy's code is no template of it.
_LARGE = 2**24
_OURS = re.compile(r"unlearn-[0-9a-f]{16}")
_AXOLOTLS = re.compile(r"[0-9a-f]{32}")


@contextmanager
def apart() -> Iterator[None]:
    """Hugging Face ``datasets`` leaves no copy of the texts that it reads in the home folder."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = before


def prepared_folder(cfg: dict[str, Any]) -> str:
    """The ``dataset_prepared_path`` for a config: what it names, and a folder of its key."""
    folder = Path(cfg.get("dataset_prepared_path") or "last_run_prepared")
    if is_ours(folder):  # a key of before, e.g. copied from the log
        folder = folder.parent
    return str(folder / f"unlearn-{content_key(cfg)}")


def is_ours(path: Path) -> bool:
    """It has a name that `prepared_folder` gives."""
    return bool(_OURS.fullmatch(path.name))


def is_prepared(path: Path) -> bool:
    """A real folder with such a name."""
    return is_ours(path) and path.is_dir() and not path.is_symlink()


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
    """Hash of all that makes rows, 16 hex digits: see `inputs`."""
    digest = hashlib.blake2b(digest_size=8)
    settings, files = inputs(cfg)
    digest.update("\n".join(settings).encode("utf-8", "surrogatepass"))
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest()


def inputs(cfg: dict[str, Any]) -> tuple[list[str], list[Path]]:
    """What the rows of a config depend on: settings as texts, and files by their content.

    Versions, options, the entries of the data with all files that they name, our code, the
    tokenizer, templates, the list of deleted rows, and the code of a type that is not Axolotl's.
    Data on a hub count by name, revision and what the cache holds of the tokenizer.
    """
    packages = ("axolotl-unlearn", "axolotl", "transformers", "tokenizers", "datasets", "jinja2")
    settings = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    ours = Path(__file__).parent
    files = [*sorted(ours.glob("*.py")), ours.parent / "columns.py", ours.parent / "normal_form.py"]
    entries = [entry for key in KEYS for entry in cfg.get(key) or []]
    # Whole entries: in a run that only memorises, other types may stand beside ours.
    settings.append(json.dumps([cfg.get(key) for key in (*KEYS, *SETTINGS)], default=str))
    files += [file for entry in entries for file in _data_files(entry)]
    for key in ("base_model", "base_model_config", "tokenizer_config"):
        files += _tokenizer_of(str(cfg.get(key) or "nowhere"), cfg.get("revision_of_model"))
    named = [cfg.get("chat_template_jinja")]
    if cfg.get("unlearn"):
        data = parse_unlearn(cfg["unlearn"]).data
        settings.append(data.model_dump_json())
        entries += data.rows
        if data.suppression:
            named += [data.suppression, str(Path(data.suppression).with_name(KEY))]
    for entry in entries:
        named += strings(entry)
        files += source_files(entry["type"]) if isinstance(entry.get("type"), str) else []
    files += [Path(name) for name in named if name and len(name) < 4096 and os.path.isfile(name)]
    return settings, [*dict.fromkeys(files)]


def _tokenizer_of(name: str, revision: str | None) -> list[Path]:
    folder = Path(name)
    if not folder.is_dir():
        from axolotl_unlearn.models import cached_on_hub

        folder = cached_on_hub(name, revision) or folder
    return tokenizer_files(folder)


def tokenizer_files(folder: Path) -> list[Path]:
    """What of a model's folder decides its tokens: tokenizer, templates, config and code."""
    found = [path for path in folder.glob("*") if _TOKENIZER_FILES.fullmatch(path.name)]
    return sorted(p for p in [*found, *folder.glob("additional_chat_templates/*")] if p.is_file())


def source_files(kind: str) -> list[Path]:
    """The files of a dataset type that is not Axolotl's: its package with all that lies in it, and
    the modules that it imports from outside of installed packages, which count by their version."""
    top = kind.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top not in ("axolotl", "axolotl_unlearn") else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.has_location:
        return []  # Axolotl's own types, or none
    installed = tuple(os.path.realpath(sysconfig.get_path(n)) for n in ("stdlib", "purelib"))
    finder = ModuleFinder([p for p in sys.path if not os.path.realpath(p).startswith(installed)])
    found, names = set(), [kind]
    for root in map(Path, spec.submodule_search_locations or ()):
        found |= {path for path in root.rglob("*") if path.suffix != ".pyc"}
        ways = (path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py"))
        names += [".".join(way.parts).removesuffix(".__init__") for way in ways]
    for name in names:
        with suppress(ImportError, SyntaxError, ValueError):  # the last part may be a function
            finder.import_hook(name)
    found |= {Path(module.__file__) for module in finder.modules.values() if module.__file__}
    found |= {Path(spec.origin)} if spec.origin else set()
    return sorted(path for path in found if path.is_file() and path.stat().st_size < _LARGE)


def _data_files(entry: Mapping[str, Any]) -> list[Path]:
    """The local files an entry of ``datasets`` names: a file, all of a folder, ``data_files``."""
    path = Path(str(entry.get("path") or ""))
    patterns = [*strings(entry.get("data_files") or [])]
    # `datasets` resolves them against the working folder, or against the data folder.
    files = {f for p in patterns for f in glob.glob(p, recursive=True)}
    files |= {f for p in patterns for f in glob.glob(str(path / p), recursive=True)}
    if path.is_file():
        files.add(str(path))
    elif path.name:  # linked folders, too
        files.update(glob.glob(str(path / "**"), recursive=True, include_hidden=True))
    return [Path(file) for file in sorted(files) if os.path.isfile(file)]
