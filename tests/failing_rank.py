"""A plugin that fails in one of several processes, for test_performance_distributed."""

from __future__ import annotations

import os

from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

from axolotl_unlearn.errors import UnlearnError


class FailingPlugin(BasePlugin):
    def add_callbacks_post_trainer(self, cfg, trainer):
        class Fail(TrainerCallback):
            def on_step_end(self, *_, **__):
                if os.environ.get("RANK") == "1":
                    raise UnlearnError("process 1 has met a bad row.")

        return [Fail()]
