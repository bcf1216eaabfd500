"""A starting model whose weights are in parts is asked in its wrappers, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from axolotl_unlearn.config import ReferenceArgs
from axolotl_unlearn.reference.start import FrozenCopy


class AskSharded(TrainerCallback):
    """A resumed run, whose weights have moved, reads what the starting model said.

    Args:
        references: The starting models; ``out``: folder of the run.
        ask: ``(source, reference)``, about all rows.
    """

    def __init__(
        self,
        references: Mapping[ReferenceArgs, FrozenCopy],
        out: Path,
        ask: Callable[..., None],
    ) -> None:
        self.references, self.out, self.ask = references, out, ask

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for number, (source, reference) in enumerate(self.references.items()):
            path = self.out / "reference" / f"start-{number}.safetensors"
            if state.global_step:
                reference.load_start(path, args.device, args.process_index)
                continue
            self.ask(source, reference)
            if state.is_world_process_zero:
                reference.save_start(path)
