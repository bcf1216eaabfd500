"""What an exact training stands on, by digest: base, rows in their order, config, seed, versions.

`request new` writes them down. They are compared when a training starts and when its model is
handed over, so that nothing can be changed in between; the record has those of what was really
read, with which a third party can repeat the training (`axolotl_unlearn.requests.repeat`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.device import hardware
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.request import Request, digest
from axolotl_unlearn.requests.statement import canonical
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


def facts(config: Mapping[str, Any], parts: tuple[rows_of.Parts, rows_of.Parts]) -> dict[str, Any]:
    """``base``, ``rows``, ``config``, ``seed`` and ``versions``.

    Args:
        parts: Rows that are trained on and rows that are tested on, by entry.
    """
    settings = rows_of.settings(config)
    return {
        "base": base(str(config["base_model"]), config.get("revision_of_model")),
        "rows": of_rows(*parts),
        "config": hashlib.sha256(canonical(_plain([settings, _types(config)]))).hexdigest(),
        "seed": settings["seed"],
        "versions": installed(),
    }


def installed() -> dict[str, str]:
    """Versions of Python and of the packages that a training depends on."""
    return {"python": platform.python_version(), **versions()}


def known(request: Request) -> dict[str, Any]:
    """What `request new` has written down.

    Raises:
        UnlearnError: Nothing; an earlier version made the request.
    """
    if (found := request.facts.get("bound")) is None:
        raise UnlearnError(
            f"{request.folder} was made by an earlier version, which did not write down what its "
            "training stands on; make the request again.",
            code="requests.not-bound",
        )
    return found


def require(known: Mapping[str, Any], now: Mapping[str, Any], where: str, parts: str = "") -> None:
    """
    Args:
        parts: Those that are compared, of `NAMES`; default all.

    Raises:
        UnlearnError: The first that differs, by its name.
    """
    for part in parts.split() or NAMES:
        if known.get(part) != now.get(part):
            said = ", ".join(_differences(known.get(part), now.get(part)))
            raise UnlearnError(
                f"{where}: {NAMES[part]} is not what `request new` read ({said}); put it back, or "
                "make the request again.",
                code=f"requests.changed-{part}",
            )


def _differences(known: Any, now: Any) -> Iterable[str]:
    if isinstance(known, Mapping) and isinstance(now, Mapping):
        for name in sorted({*known, *now}):
            if known.get(name) != now.get(name):
                yield str(name)
    else:
        yield "its digest differs"


def base(name: str, revision: str | None = None) -> dict[str, Any]:
    """Digests of a model's weights, config and tokenizer; of one on the hub, of its copy in the
    cache, with the revision that it is of."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError

        try:  # nothing is fetched here
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
            revision = folder.name
        except (HFValidationError, OSError, ValueError):
            pass
    found = {
        path.name: digest(path)
        for pattern in ("*.safetensors", "*.bin", "*.json", "tokenizer.model", "*.jinja", "*.py")
        for path in sorted(folder.glob(pattern))
        if path.is_file() and path.name not in ("trainer_state.json", "training_args.bin")
    }
    return {"name": folder.name if Path(name).is_dir() else name, "revision": revision, **found}


def of_rows(train: rows_of.Parts, test: rows_of.Parts) -> dict[str, Any]:
    """SHA-256 over the rows in their order, with the number of their entry; and how many."""
    digests = {}
    for name, parts in (("train", train), ("test", test)):
        sha = hashlib.sha256()
        for number, part in enumerate(parts):
            for row in part:
                text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
                sha.update(f"{number} {text}\n".encode("utf-8", "surrogatepass"))
        digests[name] = sha.hexdigest()
    return digests | {"count": sum(map(len, train)), "tested": sum(map(len, test))}


def environment(threads: int, processes: int) -> dict[str, Any]:
    """Of a training: what else decides its last bit."""
    number = str(threads)
    set_ = {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
    given = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return {
        "threads": threads,
        "processes": processes,
        "device": hardware(),
        "environment": given | set_,
    }


def _types(config: Mapping[str, Any]) -> list[Any]:
    """How rows are read, without where they are."""
    keys = ("datasets", "test_datasets")
    return [rows_of.row_types(rows_of.entries(config, key)) for key in keys]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=str))
