"""While a run trains: which rows broke it, and whether the model is falling apart.

`blown_up` is asked once, when a loss or a gradient is no longer finite; `CollapseWatch` looks at
the retain loss and at a few answers every so often (`unlearn.watch`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axolotl_unlearn.columns import IGNORE, ROLES
from axolotl_unlearn.data.checks import block_of, records_of, role_of
from axolotl_unlearn.data.records import short
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.training.extensions import Extension
from axolotl_unlearn.training.resume import checkpoints

LOG = logging.getLogger(__name__)

MOST_ROWS = 8
SIDES = {number: side for side, number in ROLES.items()}


def blown_up(trainer: Any, what: str, model: nn.Module) -> UnlearnError:
    """The sentence with which a run ends: step, ids of the rows, objective, and what is kept.

    In one process each row is tried by itself under each objective: which has a loss or gradient
    that is not finite? If none does it alone, or processes would wait for each other, all rows of
    the step are named. All gradients of the model are lost.
    """
    entries = trainer._phase(training=True).entries if trainer.args.world_size == 1 else ()
    everyone, broken, parts, places = [], [], [], []
    for batch in map(trainer._prepare_inputs, trainer._step_batches):
        for number in range(len(batch["role"])):
            one = {key: value[number : number + 1] for key, value in batch.items()}
            row = SIDES[int(one["role"])], int(one["row"]) if "row" in one else -1
            everyone.append(row)
            for entry in entries:
                if entry.side != row[0]:
                    continue
                place = _broken_at(model, trainer.loss_of(model, one, entry))
                if place is not None:
                    broken.append(row)
                    parts.append(entry.name)
                    places.append(place)
    model.zero_grad(set_to_none=True)
    rows, names = dict.fromkeys(broken or everyone), []
    for side in ROLES:
        numbers = [number for where, number in rows if where == side]
        names += [f"{side} {name}" for name in names_of_rows(trainer.axolotl_cfg, side, numbers)]
    more = f" and {len(names) - MOST_ROWS} more" if len(names) > MOST_ROWS else ""
    by = f", by {', '.join(dict.fromkeys(parts))}" if parts else ""
    at = next((f", first at {place}" for place in places if place), "")
    kept = checkpoints(Path(trainer.args.output_dir))
    last = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
    return UnlearnError(
        f"{what} at step {trainer.state.global_step}{by}{at} (rows: "
        f"{', '.join(names[:MOST_ROWS])}{more}). This step changed nothing; {last}. Lower "
        "learning_rate or weight, look at these rows, or check the weights of base_model for NaN."
    )


def _broken_at(model: nn.Module, loss: Tensor) -> str | None:
    """The parameter whose gradient is not finite, or "" for the loss itself; None: all is."""
    if not torch.isfinite(loss):
        return ""
    model.zero_grad(set_to_none=True)
    loss.backward()
    graded = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return next((name for name, grad in graded if not torch.isfinite(grad).all()), None)


def names_of_rows(cfg: dict[str, Any], side: str, numbers: Iterable[int]) -> list[str]:
    """What to call the rows with these places in their file: ids where one file has the side."""
    entries = [e for e in cfg.get("datasets") or [] if role_of(e) == side]
    args = block_of(cfg)
    names: list[str] = []
    if args is not None and len(entries) == 1 and os.path.isfile(entries[0]["path"]):
        with suppress(UnlearnError):  # the file has changed since
            names = [row.id for row in records_of(entries[0], args.data)]
    return [short(names[n]) if 0 <= n < len(names) else f"row {n}" for n in numbers]


class CollapseWatch(Extension):
    """Warns, or ends the run, when retained rows are lost or answers go in circles.

    Args:
        watch: `axolotl_unlearn.config.mechanisms.WatchArgs`.
        rows: Retain rows (``input_ids``, ``labels``) whose prompts are continued.
    """

    def __init__(self, watch: Any, rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> None:
        self.watch, self.rows, self.tokenizer = watch, rows, tokenizer

    @classmethod
    def of(cls, trainer: Any) -> CollapseWatch:
        watch = trainer.unlearn_args.watch
        return cls(watch, trainer.rows_with_role("retain", watch.rows), trainer.processing_class)

    def seen(self, what: str, step: int, control: Any) -> None:
        stops = self.watch.then == "stop"
        LOG.warning("step %d: %s; %s.", step, what, "the run ends" if stops else "it goes on")
        control.should_training_stop = control.should_training_stop or stops
        control.should_save = control.should_save or stops

    def on_log(self, args, state, control, logs=None, **_):
        limit, loss = self.watch.retain_nll, (logs or {}).get("retain_nll")
        if limit is not None and loss is not None and loss > limit:
            self.seen(f"the retain NLL is {loss:.2f}, over {limit:g}", state.global_step, control)
        return control

    def on_step_end(self, args, state, control, model=None, **_):
        limit = self.watch.repetition
        if limit is None or state.global_step % self.watch.every or not self.rows:
            return control
        share = sum(map(self.loops, self.answers(model))) / len(self.rows)
        if share > limit:
            said = f"{share:.0%} of {len(self.rows)} answers to retain prompts go in circles"
            self.seen(said, state.global_step, control)
        return control

    @staticmethod
    def loops(answer: str) -> bool:
        """The rule of the collapse report (`metrics.fluency`)."""
        from axolotl_unlearn.metrics.fluency import repetition

        return repetition(answer).broken

    @torch.no_grad()
    def answers(self, model: nn.Module) -> list[str]:
        """Greedy continuations of the rows' prompts."""
        was_training, device = model.training, next(model.parameters()).device
        model.eval()
        texts = []
        for row in self.rows:
            labels = list(row["labels"])
            known = next((i for i, x in enumerate(labels) if x != IGNORE), 1) or 1
            prompt = torch.tensor([list(row["input_ids"])[:known]], device=device)
            out = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.watch.tokens,
                do_sample=False,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
            )
            texts.append(self.tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True))
        model.train(was_training)
        return texts
