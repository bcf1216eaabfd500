"""Faults are tested by their code; the words are tested once, where they name key and cure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from axolotl_unlearn.errors import UnlearnError


@contextmanager
def fails(code: str) -> Iterator[pytest.ExceptionInfo[UnlearnError]]:
    """Expect an `UnlearnError` of this code; the value has its sentence."""
    with pytest.raises(UnlearnError) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code!r}: {caught.value}"
