"""UnlearnTrainer: pairs forget and retain rows, asks the engine, weighs and logs the parts."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from axolotl.core.trainers.base import AxolotlTrainer
from huggingface_hub import ModelCardData
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from axolotl_unlearn.columns import NOBODYS, ROLES
from axolotl_unlearn.config import ReferenceArgs, UnlearnArgs, unlearn_config
from axolotl_unlearn.data.pairing import PairedDataset, PairSampler
from axolotl_unlearn.device import accelerator, exact_dtype, may_be_pinned
from axolotl_unlearn.engine.batch import Batch
from axolotl_unlearn.engine.head_losses import ChunkPlan
from axolotl_unlearn.engine.layers import freeze_after
from axolotl_unlearn.engine.step import StepLoss, step_loss
from axolotl_unlearn.engine.views import Entry, unit_counts
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import declare, real, write, write_json
from axolotl_unlearn.objectives import OBJECTIVES
from axolotl_unlearn.reference.base import (
    Reference,
    asks_for_logits,
    precompute,
    require_same_sizes,
)
from axolotl_unlearn.reference.sharded import anyone
from axolotl_unlearn.reference.start import (
    FrozenCopy,
    adapter_changes_model,
    check_trained,
    make_reference,
)
from axolotl_unlearn.reference.teacher import Teacher
from axolotl_unlearn.training.extensions import Extension, Run, make_extensions
from axolotl_unlearn.training.phases import (
    Phase,
    make_phases,
    phase_at,
    restarting,
)
from axolotl_unlearn.training.resume import MADE_OF, blown_up, made_of, require_same

LOG = logging.getLogger(__name__)
#: Folder of a checkpoint: how many answers each reference has, and what extensions write.
REMEMBERED = "remembered"
CARD = (
    "It was made from its base model by axolotl-unlearn, which lowers what a model shows of some "
    "documents. It is no proof that they left no trace."
)


class UnlearnTrainer(AxolotlTrainer):
    """One ``compute_loss`` for every objective.

    Axolotl makes the trainer, and gives it the config afterwards (`axolotl_cfg`).

    Attributes:
        unlearn_args: The config's block.
        references: What entries compare with, as it was before any weight moved.
        extensions: Of the run, from `train` on.
    """

    unlearn_args: UnlearnArgs
    references: Mapping[ReferenceArgs, Reference]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extensions: Sequence[Extension] = ()
        self._step_batches: list[Batch] = []
        self._step_counts: Tensor | None = None
        self._evaluated: dict[str, tuple[float, float]] = {}
        self._meters: dict[str, dict[str, list]] = {
            phase: defaultdict(lambda: [0.0, 0.0]) for phase in ("train", "eval")
        }
        # With True, Trainer would skip the division by the accumulation steps that
        # `_losses` counts on (and a constant loss of 3 would be logged as 6).
        self.model_accepts_loss_kwargs = False
        # It reads the loss twice a micro-batch; one that is not finite ends the run (below).
        self.args.logging_nan_inf_filter = False
        if self.args.dataloader_pin_memory and may_be_pinned(self.args.device):
            self.accelerator.dataloader_config.non_blocking = True

    @AxolotlTrainer.axolotl_cfg.setter
    def axolotl_cfg(self, cfg: Any) -> None:
        """Take references: the weights are still those of the start, also where a run goes on."""
        self._axolotl_cfg = cfg
        self.unlearn_args = args = unlearn_config(cfg)
        self.chunk_plan = ChunkPlan(mib=args.chunk_mib)
        reductions = [entry.parameters.get("reduction") for _, entry in args.entries()]
        many = self.args.world_size
        parts = many * self.args.gradient_accumulation_steps
        for asked, count, of, what in (
            ("batch_token_mean" in reductions, parts, "micro-batches",
             "`reduction: batch_token_mean` is a mean over a micro-batch"),
            (cfg.lora_dropout, many, "processes", "`lora_dropout` draws in each process by itself"),
        ):  # fmt: skip
            if asked and count > 1:
                LOG.warning("%s: the update on %d %s is not that of one.", what, count, of)
        entries = [entry for _, entry in args.entries()]
        if all(OBJECTIVES[entry.objective].sees == "hidden" for entry in entries):
            freeze_after(self.model, max(entry.parameter("layer") for entry in entries))
        check_trained(self.model)
        self.references = {source: self._make_reference(source) for source in args.references()}
        for reference in self.references.values():
            reference.plan = self.chunk_plan

    # -- phases ------------------------------------------------------------------------------

    @cached_property
    def phases(self) -> list[Phase]:
        """The phases of the run, at least one; known once its number of steps is."""
        args = self.args
        rows = self.train_dataset
        pairs = len(self._pairs(rows, training=True)) if rows is not None else 0
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        epoch = math.ceil(pairs / batch)
        total = args.max_steps if args.max_steps > 0 else math.ceil(epoch * args.num_train_epochs)
        peak = args.learning_rate
        return make_phases(
            self.unlearn_args, total=total, steps_per_epoch=epoch, learning_rate=peak
        )

    def _phase(self, *, training: bool) -> Phase:
        """That of the step under way; in an evaluation, of the last step done."""
        step = self.state.global_step
        return phase_at(self.phases, step if training else max(step - 1, 0))

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler:
        """With phases, the configured schedule for each of them by itself."""
        if self.lr_scheduler is not None or not self.unlearn_args.phases:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.warmup_steps
        configured = super().create_scheduler

        def schedule_of(stand_in: torch.optim.Optimizer, steps: int) -> LRScheduler:
            if warmup >= 1:  # Axolotl counted it over the whole run
                self.args.warmup_steps = int(warmup * steps / num_training_steps)
            try:
                return configured(steps, stand_in)
            finally:
                self.args.warmup_steps, self.lr_scheduler = warmup, None

        self.lr_scheduler = restarting(optimizer or self.optimizer, self.phases, schedule_of)
        return self.lr_scheduler

    # -- reference ---------------------------------------------------------------------------

    def _make_reference(self, source: ReferenceArgs) -> Reference:
        if source.is_teacher:
            cfg = self.axolotl_cfg
            own = {}
            if source.model is None:  # what the config says of base_model
                own = {"revision": cfg.revision_of_model} if cfg.revision_of_model else {}
                own |= cfg.overrides_of_model_config or {}
            return Teacher(
                source.model or cfg.base_model,
                source.adapter,
                self.args.device,
                trust_remote_code=bool(cfg.trust_remote_code),
                **own,
            )
        changes = adapter_changes_model(self.model)
        if self.args.world_size > 1:  # the first process alone may have the weights
            changes = anyone(changes, self.args.device)
        return make_reference(
            source.mode,
            self.model,
            starting_adapter=bool(self.axolotl_cfg.lora_model_dir) or changes,
            will_precompute=self._precomputes(source),
            sharded=self.is_fsdp_enabled or is_deepspeed_zero3_enabled(),
        )

    def _precomputes(self, source: ReferenceArgs) -> bool:
        """Before the model is wrapped. One that will be sharded cannot run there: without its
        adapter, rows are remembered as they come; `_ask_in_parts` is for the others."""
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return source.is_teacher or (source.mode == "cached" and not sharded)

    def train(self, *args: Any, **kwargs: Any):
        """Ask a teacher, and a ``cached`` reference, about all rows before a weight moves."""
        given = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        resumed = Path(given, REMEMBERED) if isinstance(given, str) else None
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        self._made_of = made_of(
            self.axolotl_cfg, self.unlearn_args, self.train_dataset, batch * self.args.world_size
        )
        if resumed:
            require_same(resumed, self._made_of)
        run = self._run()
        self.extensions = make_extensions(self.unlearn_args, run)
        if self.is_fsdp_enabled or is_deepspeed_zero3_enabled():
            first = TrainerCallback()
            first.on_train_begin = lambda *_, **__: self._ask_in_parts()
            self.add_callback(first)
        for source, reference in self.references.items():
            if self._precomputes(source) and not reference.complete:
                self._ask(source, reference)
        self._keep_answers(resumed)
        for one in self.extensions:
            self.add_callback(one)
            one.on_start(run, resumed)
        output = super().train(*args, **kwargs)
        if not (self.args.load_best_model_at_end and self.state.best_model_checkpoint):
            self._as_meant(True)
        return output

    def _run(self) -> Run:
        return Run(
            args=self.unlearn_args,
            cfg=self.axolotl_cfg,
            phases=self.phases,
            rows=self.train_dataset,
            tokenizer=self.processing_class,
            model=self.accelerator.unwrap_model(self.model),
            references=self.references,
            device=self.args.device,
            rank=self.args.process_index,
            out=Path(self.args.output_dir),
            log=self.log,
            reduce=partial(self.accelerator.reduce, reduction="sum"),
            collate=self.data_collator,
            batches=self._all_batches,
            losses=self._losses_by_side,
            loss_of=lambda model, rows, entry: (
                self._run_step(model, self._prepare_inputs(rows), [entry]).total
            ),
            optimizer=lambda: self.optimizer,
        )

    def _ask(
        self, source: ReferenceArgs, reference: Reference, wrapped: nn.Module | None = None
    ) -> None:
        """A reference about all rows; ``wrapped``: the policy in its wrappers, if in parts."""
        # By phase, since what is asked about a row is the union over the entries of a step.
        asking = [[e for e in phase.entries if e.source == source] for phase in self.phases]
        sets = [self.train_dataset, self.eval_dataset, *(x.also_asked for x in self.extensions)]
        sets = [rows for rows in sets if rows is not None]
        out, part = Path(self.args.output_dir), self.args.process_index
        by_logits = any(map(asks_for_logits, asking))
        by_states = any(e.objective.sees == "hidden" for entries in asking for e in entries)
        with self.accelerator.autocast(), reference.opened(self.model) as model:
            require_same_sizes(model, self.model, by_logits, by_states)
            for entries in filter(None, asking):
                batches, total = self._all_rows(sets, wrapped is not None)
                precompute(
                    reference,
                    wrapped or model,
                    batches,
                    entries,
                    declare(out, out / "reference", "log-probs", folder=True),
                    unwrapped=model,
                    precision=f"{self.accelerator.mixed_precision} {self.args.device.type}",
                    part=part,
                    total=total,
                    progress=part == 0,
                )
            self.accelerator.wait_for_everyone()
            reference.refresh()
            reference.release(model, keep_head=by_logits)

    def _ask_in_parts(self) -> None:
        """Starting models whose weights are in parts, in their wrappers before the first step; a
        resumed run, whose weights have moved, reads what they said."""
        asked = [(s, r) for s, r in self.references.items() if isinstance(r, FrozenCopy)]
        for number, (source, reference) in enumerate(asked):
            path = Path(self.args.output_dir) / "reference" / f"start-{number}.safetensors"
            if self.state.global_step:
                reference.load_start(path, self.args.device, self.args.process_index)
                continue
            self._ask(source, reference, wrapped=self.model_wrapped)
            if self.is_world_process_zero():
                reference.save_start(path)

    def _all_rows(self, sets: Sequence[Dataset], equal: bool) -> tuple[Iterator[Batch], int]:
        """This process's share of all rows in batches of similar length, and their number;
        ``equal``: as many in every process, some of them twice."""
        size = max(8, self.args.per_device_train_batch_size)
        chunks = []
        for rows in sets:
            order = sorted(range(len(rows)), key=rows["length"][:].__getitem__)
            chunks += [(rows, order[i : i + size]) for i in range(0, len(order), size)]
        if equal:
            chunks += islice(cycle(tuple(chunks)), -len(chunks) % self.args.world_size)
        mine = chunks[self.args.process_index :: self.args.world_size]
        loaded = (
            self._prepare_inputs(self.data_collator([rows[i] for i in chosen]))
            for rows, chosen in mine
        )
        return loaded, len(mine)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """With what references remember, so that a resumed run goes on bit by bit."""
        out = Path(self._get_output_dir(trial=trial))
        folder = out / f"checkpoint-{self.state.global_step}" / REMEMBERED
        for number, reference in enumerate(self.references.values()):
            if not reference.complete:
                name = f"reference-{number}-{self.args.process_index}.json"
                write_json(folder / name, reference.count)
        for one in self.extensions:
            one.on_checkpoint(out, folder)
        if self.is_world_process_zero():
            write_json(folder / MADE_OF, self._made_of)
        self._as_meant(True)
        super()._save_checkpoint(model, trial)
        self._as_meant(False)

    def _as_meant(self, done: bool) -> None:
        """Schedule-free optimizers train at other weights than those that they mean: what is saved
        and handed over is the latter."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        switch = getattr(optimizer, "eval" if done else "train", None)
        if callable(switch):
            switch()

    def _keep_answers(self, resumed: Path | None) -> None:
        """In files beside the run; ``resumed``: where `_save_checkpoint` wrote how many it had."""
        seen = {
            entry.source
            for phase in self.phases
            for entry in phase.entries
            if entry.objective.sees in ("distributions", "hidden")
        }
        out, part = Path(self.args.output_dir), self.args.process_index
        for number, (source, reference) in enumerate(self.references.items()):
            if reference.complete:
                continue
            gib = math.inf if source.mode == "cached" else self.unlearn_args.reference_gib
            own = declare(out, out / "reference", "log-probs", folder=True) / f"run-{number}"
            known = 0
            if resumed and (counts := resumed / f"reference-{number}-{part}.json").is_file():
                known = json.loads(counts.read_text("utf-8"))
                known = sum(known.values()) if isinstance(known, dict) else known  # of older code
                if resumed.parents[1].resolve() != out.resolve():
                    own.mkdir(exist_ok=True)
                    for file in resumed.parents[1].glob(f"reference/{own.name}/*-{part}.bin"):
                        shutil.copy(file, own)
            reference.keep_for_run(own, gib if source in seen else 0, part, known)

    def evaluate(self, *args: Any, **kwargs: Any):
        """Within a run: a model that has just been loaded would be its own reference."""
        if not self.is_in_train:
            raise UnlearnError(
                "`axolotl evaluate` would compare the model with itself (log-ratio and KL are 0 "
                "whatever was forgotten): score the trained model by `axolotl-unlearn eval`, or "
                "give `test_datasets` to `axolotl train`."
            )
        found = super().evaluate(*args, **kwargs)
        metric = self.args.metric_for_best_model or "loss"
        if "eval_" + metric.removeprefix("eval_") not in found:
            raise UnlearnError(
                f"`metric_for_best_model: {metric}` is no number of this evaluation: no row of "
                "`test_datasets` is for it; add some, or name another.",
                code="training.no-metric",
            )
        return found

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any):
        """The loss is the weighted sum of the parts, each over all units, however rows were cut
        into batches; checkpoints are chosen by it. Trainer's is a mean of the batches' means."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._evaluated, phase = self._gathered("eval"), self._phase(training=False)
        parts = [self._evaluated.get(entry.name, (0.0, 0.0)) for entry in phase.entries]
        weighed = zip(self._weigh(phase), parts, strict=True)
        loss = sum(weight * total / max(count, 1) for weight, (total, count) in weighed)
        output.metrics[f"{metric_key_prefix}_loss"] = loss
        return output

    # -- pairs -------------------------------------------------------------------------------

    def _pairs(self, rows: Dataset, training: bool) -> PairedDataset:
        retain = self.unlearn_args.pairing.retain_per_forget
        return PairedDataset(
            rows,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            retain_per_forget=retain if self.unlearn_args.retain else 0,
            shuffle=training,
            alternatives="alternative" in self.unlearn_args.roles(),
        )

    def _all_batches(self) -> list[Batch]:
        """`Run.batches`: before the first step, as one step of its own."""
        pairs = self._pairs(self.train_dataset, training=True)
        size, first = self._train_batch_size, self.args.process_index
        places = range(first, len(pairs), self.args.world_size)
        batches = [
            self.data_collator([pairs[i] for i in places[k : k + size]])
            for k in range(0, len(places), size)
        ]
        self.current_gradient_accumulation_steps = 1
        self._count_units(batches, self.phases[0].entries)
        return batches

    def get_train_dataloader(self) -> DataLoader:
        adapter = self.axolotl_cfg.lora_model_dir
        if adapter and real(str(adapter)) == real(str(self.args.output_dir)):
            raise UnlearnError(
                "`output_dir` is `lora_model_dir`, which would be overwritten: give a folder of "
                "its own.",
                code="training.overwrites",
            )
        return self._get_dataloader(
            dataset=self._pairs(self.train_dataset, training=True),
            description="Training",
            batch_size=self._train_batch_size,
            sampler_fn=self._sampler(self._train_batch_size),
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._get_dataloader(
            dataset=self._pairs(rows, training=False),
            description="Evaluation",
            batch_size=self.args.eval_batch_size,
            sampler_fn=self._sampler(self.args.eval_batch_size),
        )

    def _sampler(self, batch: int) -> Callable[[PairedDataset], PairSampler]:
        return partial(PairSampler, together=batch * self.args.world_size)

    def create_model_card(self, *_, **__) -> None:
        """Of our own: Axolotl's has the config and its paths, which may name a person."""
        if not self.is_world_process_zero():
            return
        out, base = Path(self.args.output_dir), str(self.axolotl_cfg.base_model)
        library = "peft" if hasattr(self.model, "disable_adapter") else "transformers"
        facts = ModelCardData(
            base_model=None if Path(base).exists() else base,
            library_name=library,
            tags=["axolotl", "axolotl-unlearn"],
        )
        write(out / "README.md", f"---\n{facts}\n---\n\n# {out.name}\n\n{CARD}\n")

    # -- loss --------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """Also count the units of the whole optimizer step, over all processes.

        Sums divided by these counts give the same update however the step is cut into
        micro-batches and processes.
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = [Batch.of(batch) for batch in batches]
        self._step_counts, self._step_batches = None, batches
        for one in self.extensions:
            one.on_batch(batches)
        if batches:
            phase = self._phase(training=True)
            entries = phase.entries
            if phase.fresh_optimizer and 0 < phase.start == self.state.global_step:
                # As a new optimizer of the same weights: AILS-NTUA's recipes make one for every
                # chunk and phase (arXiv 2503.02443, released code).
                getattr(self.optimizer, "optimizer", self.optimizer).state.clear()
            self._count_units(batches, entries)
        return batches, items

    def _count_units(self, batches: Sequence[Batch], entries: Sequence[Entry]) -> None:
        """Of the micro-batches of a step, over all processes."""
        counts = sum(
            unit_counts(entries, self._marked(batch)).to(self.args.device) for batch in batches
        )
        if self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        self._step_counts = counts

    def _prepare_inputs(self, inputs: dict[str, Any]) -> Batch:
        batch = Batch.of(inputs)
        return Batch(super()._prepare_inputs(dict(batch)), batch.host)

    def _marked(self, batch: Batch) -> Batch:
        """The batch as extensions see it (rows left out, rows' weights)."""
        for one in self.extensions:
            batch = one.on_rows(batch)
        return batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = sum(self._losses(model, inputs).values())
        return (loss, {"loss": loss.detach()}) if return_outputs else loss

    def _losses(
        self,
        model: nn.Module,
        batch: Batch,
        sides: set[str] | None = None,
        counted: bool = True,
    ) -> dict[str, Tensor]:
        """Weighted objectives of either side (or ``sides``) for one micro-batch, as a part of its
        step; ``counted``: whether it counts for what is logged, and for extensions."""
        training = model.training
        phase = self._phase(training=training)
        weights, counts = self._weigh(phase), self._step_counts
        if sides is not None and sides != phase.sides:
            chosen = [i for i, entry in enumerate(phase.entries) if entry.side in sides]
            phase = replace(phase, entries=tuple(phase.entries[i] for i in chosen))
            weights, counts = [weights[i] for i in chosen], counts[chosen]
        batch = self._marked(self._rows_of(phase, batch))
        # Trainer divides by the accumulation steps and DDP averages over processes; both are
        # undone here, since the counts are those of the whole step.
        scale = self.current_gradient_accumulation_steps * self.args.world_size if training else 1
        result = self._run_step(
            model,
            batch,
            phase.entries,
            weights=weights,
            counts=counts if training else unit_counts(phase.entries, batch),
            scale=scale,
        )
        if counted:
            meters = self._meters["train" if training else "eval"]
            for name, (value, count) in result.parts.items():
                meters[name][0] += value
                meters[name][1] += count
            for one in self.extensions if training else ():
                one.on_losses(phase.entries, result.parts, counts)
        return result.losses

    def _weigh(self, phase: Phase) -> Sequence[float]:
        weights: Sequence[float] = [entry.args.weight for entry in phase.entries]
        for one in self.extensions:
            weights = one.on_weights(phase.entries, weights)
        return weights

    def _run_step(
        self, model: nn.Module, batch: Batch, entries: Sequence[Entry], **options: Any
    ) -> StepLoss:
        references: dict[str, Any] = {}  # what answers as a `Reference` does
        for entry in entries:
            answers = None if entry.source is None else self.references[entry.source]
            for one in self.extensions:
                answers = one.on_compared(entry, answers)
            references[entry.name] = answers
        return step_loss(
            model,
            batch,
            entries,
            reference=references,
            unwrapped=self.accelerator.unwrap_model(model, keep_torch_compile=False),
            plan=self.chunk_plan,
            **options,
        )

    def _losses_by_side(
        self, model: nn.Module, batch: Batch, sides: set[str] | None = None, counted: bool = True
    ) -> dict[str, Tensor]:
        """`Run.losses`: gradients are taken from the graph, so DDP has nothing to reduce."""
        batch, scaler = self._prepare_inputs(batch), self.accelerator.scaler
        with self.accelerator.no_sync(model), self.compute_loss_context_manager():
            losses = self._losses(model, batch, sides, counted)
        losses = {s: x / self.current_gradient_accumulation_steps for s, x in losses.items()}
        return losses if scaler is None else {s: scaler.scale(x) for s, x in losses.items()}

    def _rows_of(self, phase: Phase, batch: Batch) -> Batch:
        """The rows that the objectives are for."""
        roles = batch.on_host("role")
        if (roles == NOBODYS).all():  # it fills the epoch's last batch of some process
            return batch
        kept = np.isin(roles, [ROLES[role] for role in phase.roles])
        return batch if kept.all() else batch.rows(kept)

    # -- gradients ---------------------------------------------------------------------------

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        """The loss is read after the backward pass, which the host would else start late."""
        batch = self._prepare_inputs(inputs)
        own = [one for one in self.extensions if one.takes_gradients]
        if own:
            model.train()
            loss = own[0].backward(model, batch, last=self.accelerator.sync_gradients)
        else:
            loss = super().training_step(model, batch, num_items_in_batch)
        if not torch.isfinite(loss):
            raise self._blown_up(f"the loss is {loss.item()}")
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        """Not finite, it would end in the weights; the scaler of fp16 skips such steps itself."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scales = self.accelerator.scaler is not None
        if norm is not None and not scales and not math.isfinite(norm):
            raise self._blown_up(f"the gradient is {float(norm)}")
        return norm

    def _blown_up(self, what: str) -> UnlearnError:
        out = Path(self.args.output_dir)
        return blown_up(what, self.state.global_step, self._step_batches, self.axolotl_cfg, out)

    # -- log ---------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts, averaged over all micro-batches and processes since the last log."""
        phase = "train" if "loss" in logs else "eval" if "eval_loss" in logs else None
        if phase:
            parts = self._gathered("train") if phase == "train" else self._evaluated
            prefix = "eval_" if phase == "eval" else ""
            for name, (total, count) in sorted(parts.items()):
                if count:
                    logs[prefix + name] = round(total / count, 6)
            for one in self.extensions if phase == "train" else ():
                logs |= one.logged()
            if len(self.phases) > 1:
                phase = self._phase(training=False)
                logs[prefix + "phase"] = 1 + self.phases.index(phase)
        super().log(_Logs(logs), start_time)

    def _gathered(self, phase: str) -> dict[str, tuple[float, float]]:
        """Sum and count of each part since the last time, over processes."""
        meters, device = self._meters[phase], self.args.device
        numbers = [
            torch.as_tensor(x, dtype=exact_dtype(device), device=device)
            for pair in meters.values()
            for x in pair
        ]
        values = iter(torch.stack(numbers).tolist() if numbers else [])  # one copy from the device
        local = {name: (next(values), next(values)) for name in meters}
        meters.clear()
        found: dict[str, tuple[float, float]] = {}
        for part in gather_object([local]) if self.args.world_size > 1 else [local]:
            for name, (total, count) in part.items():
                before = found.get(name, (0.0, 0.0))
                found[name] = before[0] + total, before[1] + count
        return found


class _Logs(dict):
    """Refuses what the base trainer adds without meaning: the exp of this loss, and GPU memory
    where there is no GPU."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key in ("ppl", "eval_ppl"):
            return
        if key.startswith("memory/") and accelerator() is None:
            return
        super().__setitem__(key, value)
