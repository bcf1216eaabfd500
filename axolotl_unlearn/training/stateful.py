"""Extensions with a state in each checkpoint."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.trainer_callback import ExportableState

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.extensions import Extension


class Stateful(Extension, ExportableState):
    """The attributes named in ``kept`` are a part of each checkpoint; JSON keeps every bit."""

    kept: ClassVar[tuple[str, ...]]

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"args": {}, "attributes": {name: getattr(self, name) for name in self.kept}}

    def on_train_begin(self, args, state, control, **_: Any) -> None:
        """On resume the state of the checkpoint is there, else that of the trainer's making.

        Raises:
            UnlearnError: The checkpoint is of a run without this.
        """
        saved = (state.stateful_callbacks or {}).get(type(self).__name__)
        if saved is None and state.global_step:
            raise UnlearnError(
                f"the checkpoint of step {state.global_step} holds nothing of "
                f"{type(self).__name__}, which this config needs from the first step on; start the "
                "run again from its beginning."
            )
        vars(self).update(saved["attributes"] if saved else {})
