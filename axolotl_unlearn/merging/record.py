"""Which base a model was trained from, by content: what `check` compares before a merge."""

from __future__ import annotations

from pathlib import Path

from axolotl_unlearn.files import write_json
from axolotl_unlearn.merging.sources import Adapter, Model

RECORD = "unlearn_base.json"


def record_base(folder: str | Path, base: str | Path) -> Path:
    """Write which base an adapter or model was trained from, by content, into its folder.

    ``check`` compares this record strictly; without it the base is known by path only.
    """
    content = {"base": str(base), "sha256": Model(Path(base)).fingerprint}
    return write_json(Path(folder) / RECORD, content, indent=None)


def record_merge(folder: str | Path, base: str | Path, adapter: str | Path) -> Path:
    """`record_base` of a model with a merged adapter, which it names by content, too."""
    content = {
        "base": str(base),
        "sha256": Model(Path(base)).fingerprint,
        "adapter": str(adapter),
        "adapter_sha256": Adapter(Path(adapter)).fingerprint,
    }
    return write_json(Path(folder) / RECORD, content, indent=None)
