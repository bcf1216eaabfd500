"""What an exact training stands on, by digest: base, rows in their order, config, seed, versions.

`request new` writes them down. They are compared when a training starts and when its model is
handed over, so that nothing can be changed in between; the record has those of what was really
read, with which a third party can repeat the training (`axolotl_unlearn.requests.ways.retrain`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.prepared import tokenizer_files
from axolotl_unlearn.device import hardware
from axolotl_unlearn.models import cached_on_hub
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.request import digest, fault
from axolotl_unlearn.store import versions

#: Of the environment, what may change the order of sums.
ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
#: How a sentence calls each part.
NAMES = {
    "base": "the base model",
    "rows": "the rows of `datasets` or `test_datasets`",
    "config": "the config",
    "versions": "a package",
}
#: All but the rows, which take longer to read.
QUICK = ("base", "config", "versions")


def facts(config: Mapping[str, Any], sides: rows_of.Sides | None = None) -> dict[str, Any]:
    """``base``, ``rows`` if they are given, ``config``, ``seed`` and ``versions``."""
    settings = rows_of.settings(config)
    types = [rows_of.row_types(rows_of.entries(config, k)) for k in ("datasets", "test_datasets")]
    text = json.dumps([settings, types], sort_keys=True, default=str)
    return {
        "base": base(str(config["base_model"]), config.get("revision_of_model"))
        | elsewhere(config),
        "rows": sides and of_rows(sides),
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "seed": settings["seed"],
        "versions": {"python": platform.python_version(), **versions()},
    }


def require(
    known: Mapping[str, Any] | None,
    now: Mapping[str, Any],
    where: Any,
    parts: Iterable[str] = NAMES,
) -> None:
    """
    Args:
        known: What `request new` has written down.
        parts: Those that are compared, of `NAMES`.

    Raises:
        UnlearnError: The first that differs, by its name; or nothing was written down.
    """
    if known is None:
        says = f"{where} was made by an earlier version, which did not write down what its training"
        raise fault("requests.not-bound", f"{says} stands on; make the request again.")
    for part in parts:
        before, after = known.get(part), now.get(part)
        if before != after:
            said = "its digest differs"
            if isinstance(before, Mapping) and isinstance(after, Mapping):
                keys = sorted({*before, *after})
                said = ", ".join(key for key in keys if before.get(key) != after.get(key))
            says = f"{where}: {NAMES[part]} is not what `request new` read ({said})"
            cure = "put it back, or make the request again"
            raise fault(f"requests.changed-{part}", f"{says}; {cure}.")


def base(name: str, revision: str | None = None) -> dict[str, Any]:
    """Digests of a model's weights, config and tokenizer; of one on the hub, of its copy in the
    cache, with the revision that it is of."""
    folder, here = Path(name), os.path.isdir(name)
    if not here and (cached := cached_on_hub(name, revision)):
        folder, revision = cached, cached.name
    others = (path for kind in ("*.safetensors", "*.bin", "*.json") for path in folder.glob(kind))
    found = {
        path.relative_to(folder).as_posix(): digest(path)
        for path in sorted({*tokenizer_files(folder), *others})
        if path.is_file() and path.name not in ("trainer_state.json", "training_args.bin")
    }
    return {"name": folder.name if here else name, "revision": revision, **found}


def elsewhere(config: Mapping[str, Any]) -> dict[str, Any]:
    """Digests of what the config names beside base and rows: a tokenizer of another model, files
    (chat templates, settings of DeepSpeed)."""
    named, found = dict(rows_of.settings(config)), dict[str, Any]()
    for side in ("datasets", "test_datasets"):
        for number, entry in enumerate(rows_of.row_types(rows_of.entries(config, side))):
            named |= {f"{side}[{number}].{key}": value for key, value in entry.items()}
    for key, place in named.items():
        if isinstance(place, str) and os.path.isfile(place):
            found[key] = digest(Path(place))
        elif place and key in ("tokenizer_config", "base_model_config"):
            found[key] = base(str(place), config.get("revision_of_model"))
    return found


def of_rows(sides: rows_of.Sides) -> dict[str, Any]:
    """SHA-256 over the rows in their order, with the number of their entry; and how many."""
    digests: dict[str, Any] = {}
    for side, parts in sides.items():
        sha = hashlib.sha256()
        for number, part in enumerate(parts):
            for row in part:
                text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
                sha.update(f"{number} {text}\n".encode("utf-8", "surrogatepass"))
        digests[side] = sha.hexdigest()
    counts = {"count": sides["train"], "tested": sides["test"]}
    return digests | {name: sum(map(len, parts)) for name, parts in counts.items()}


def environment(threads: int, processes: int) -> dict[str, Any]:
    """Of a training: what else decides its last bit."""
    given = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    given |= dict.fromkeys(ENVIRONMENT[:2], str(threads))
    return {"threads": threads, "processes": processes, "device": hardware(), "environment": given}
