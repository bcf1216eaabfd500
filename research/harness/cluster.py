"""A cluster of Ray for the tasks of a job."""

from __future__ import annotations

import os
from typing import Any

from axolotl_unlearn.errors import UnlearnError


def connect(address: str) -> Any:
    """Ray, with a cluster, or an UnlearnError; "local" is this machine."""
    try:
        import ray
    except ImportError:
        raise UnlearnError(
            "`--ray` needs Ray, which is not installed: `pip install ray`, or leave out `--ray`."
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(None if address == "local" else address, log_to_driver=False)
        except Exception as error:  # a plain one where the machine is too busy
            why = str(error).partition("\n")[0]
            raise UnlearnError(f"`--ray {address}`: no cluster answers ({why}).") from None
    return ray


def along() -> dict[str, str]:
    """What of the environment goes to the workers; keys do not."""
    names = ("HF_", "AXOLOTL_", "OMP_", "TOKENIZERS_", "UNLEARN_", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}
