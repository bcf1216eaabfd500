"""The hooks by which Axolotl meets us; the work is done elsewhere."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from axolotl.integrations.base import BasePlugin

from axolotl_unlearn.config import nearest, unlearn_config
from axolotl_unlearn.device import accelerator
from axolotl_unlearn.errors import UnlearnError, exit_with_sentence, show_as_sentences

if TYPE_CHECKING:
    from axolotl.common.datasets import TrainDatasetMeta

    from axolotl_unlearn.config import UnlearnArgs
    from axolotl_unlearn.versions import DictDefault

LOG = logging.getLogger(__name__)


class UnlearnPlugin(BasePlugin):
    """Add ``plugins: [axolotl_unlearn.UnlearnPlugin]`` and an ``unlearn:`` block to a config.

    Axolotl 0.21 loads it in every run of an environment that has this package: without the block
    and without rows of our types, no hook does anything.
    """

    #: The config as it was given, before Axolotl has filled in its defaults.
    given: Mapping[str, Any] = MappingProxyType({})

    @exit_with_sentence()
    def register(self, cfg: dict) -> None:
        """Check the raw config before anything is loaded, and set what unlearning relies on.

        Every command of Axolotl comes here, also those that read no data (`merge-lora`).
        """
        if not _concerns_us(cfg):
            return
        from axolotl_unlearn.checks.config import prepare

        show_as_sentences()
        filled = cfg.get("use_ray") and "RANK" in os.environ  # a worker's, from its driver
        self.given = {} if filled else dict(cfg)
        prepare(cfg)

    def get_input_args(self) -> str:
        return "axolotl_unlearn.config.UnlearnPluginArgs"

    def get_training_args(self, cfg: DictDefault) -> dict[str, Any] | None:
        if not _concerns_us(cfg):
            return None
        arguments: dict[str, Any] = {}
        if accelerator() is None:
            arguments["use_cpu"] = True  # else `bf16: true` is refused
        if _trains(cfg):
            arguments["remove_unused_columns"] = False  # role, kind, task must reach the trainer
            arguments["dataloader_drop_last"] = False  # every row is used
            if cfg.greater_is_better is not None:  # Axolotl drops a `false`
                arguments["greater_is_better"] = cfg.greater_is_better
        return arguments

    def pre_model_load(self, cfg: DictDefault) -> None:
        if not _concerns_us(cfg):
            return
        from transformers import set_seed

        from axolotl_unlearn.checks.config import untrainable

        if lacks := untrainable(cfg):
            raise UnlearnError(lacks, code="checks.untrainable-base")

        # A fresh LoRA (and `reinit_weights`) is drawn from the global generator, which Axolotl
        # does not seed; both parents of a factor-wise merge must start from the same draw.
        set_seed(cfg.seed if cfg.seed is not None else 42)
        if _trains(cfg):
            _check_layers(cfg)
            _check_teachers(cfg)

    def pre_lora_load(self, cfg: DictDefault, model: Any) -> None:
        if _trains(cfg):
            _check_names(cfg, model)

    def post_trainer_create(self, cfg: DictDefault, trainer: Any) -> None:
        """The last moment to see that it is ours that will train."""
        if not _trains(cfg):
            return
        from axolotl_unlearn.training.trainer import UnlearnTrainer

        if not isinstance(trainer, UnlearnTrainer):
            kind = type(trainer)
            raise UnlearnError(
                f"Axolotl built the trainer {kind.__module__}.{kind.__qualname__} instead of ours, "
                "which would fine-tune on the forget rows; remove the plugin or setting that asks "
                "for it."
            )
        started = os.environ.get("WORLD_SIZE", "1")
        if str(trainer.args.world_size) != started:
            raise UnlearnError(
                f"{started} processes were started, but {trainer.args.world_size} train together: "
                "start them by torchrun, with ACCELERATE_USE_CPU=true where there is no GPU."
            )
        _check_trained(unlearn_config(cfg), trainer.model)
        _check_groups(cfg, trainer)

    def post_train(self, cfg: DictDefault, model: Any) -> None:
        """Record the base by content, so that a merge of models from other bases is refused."""
        # Axolotl has left the process group by now; under DeepSpeed to ask it for a rank fails.
        first = os.environ.get("RANK", "0") == "0"
        if _trains(cfg) and first and Path(cfg.base_model).is_dir():
            from axolotl_unlearn.merging import record_base

            record_base(cfg.output_dir, cfg.base_model)

    @exit_with_sentence()
    def post_lora_merge(self, cfg: DictDefault, adapter_path: str, output_path: str) -> None:
        """Record base and adapter by content in the merged folder.

        Axolotl calls it from 0.21 on.
        """
        if _trains(cfg) and Path(cfg.base_model).is_dir():
            from axolotl_unlearn.merging import record_base

            record_base(output_path, cfg.base_model, adapter_path)

    @exit_with_sentence()
    def load_datasets(self, cfg: DictDefault, preprocess: bool = False) -> TrainDatasetMeta | None:
        """Check the data, let Axolotl read them, and count steps in pairs; weights come later."""
        if not _concerns_us(cfg):
            return None
        from axolotl_unlearn.checks.config import prepare_data

        _stay_on_cpu(cfg)
        prepare_data(cfg, self.given)
        if cfg.resume_from_checkpoint or cfg.auto_resume_from_checkpoints:
            from axolotl_unlearn.training.resume import choose_checkpoint

            choose_checkpoint(cfg)
        if not _trains(cfg):
            return None
        _refuse_other_trainers(cfg)
        if not preprocess:
            _refuse_on_cpu(cfg)
        from axolotl.common.datasets import load_datasets
        from axolotl.loaders.utils import load_model_config

        from axolotl_unlearn.checks.config import run_notes
        from axolotl_unlearn.checks.estimate import steps
        from axolotl_unlearn.data.checks import check_columns, check_loaded
        from axolotl_unlearn.data.pairing import PairedDataset

        meta = load_datasets(cfg=cfg)
        check_loaded(cfg, meta.train_dataset, meta.eval_dataset)
        if preprocess:
            return None  # Axolotl reads what is prepared now, and shows what it was asked to
        args = unlearn_config(cfg)
        notes = check_columns(args, meta.train_dataset)
        pairs = PairedDataset(
            meta.train_dataset,
            seed=0,
            retain_per_forget=args.pairing.retain_per_forget if args.retain else 0,
            alternatives="alternative" in args.roles(),
        )
        # Axolotl counted single rows; a step is made of pairs.
        plan = steps(cfg, args, len(pairs), cfg.batch_size)
        meta.total_num_steps = plan["steps"]
        known = load_model_config(cfg).get_text_config().to_dict()
        for note in notes + run_notes(cfg, plan, max(meta.train_dataset["length"][:]), known):
            LOG.warning(note)
        return meta

    def get_collator_cls_and_kwargs(self, cfg: DictDefault, is_eval: bool = False):
        if not _trains(cfg):
            return None
        from axolotl_unlearn.data.collator import PairCollator

        return PairCollator, {}

    def get_trainer_cls(self, cfg: DictDefault):
        if not _trains(cfg):
            return None
        from axolotl_unlearn.training.trainer import UnlearnTrainer

        return UnlearnTrainer


def _concerns_us(cfg: Any) -> bool:
    """Whether a config has our block, rows of our types, or names us and misspells the block."""
    entries = [*(cfg.get("datasets") or []), *(cfg.get("test_datasets") or [])]
    types = [str(entry.get("type")) for entry in entries if isinstance(entry, dict)]
    if cfg.get("unlearn") is not None or any(t.startswith("axolotl_unlearn.") for t in types):
        return True
    named = "axolotl_unlearn.UnlearnPlugin" in (cfg.get("plugins") or [])
    return named and bool(difflib.get_close_matches("unlearn", map(str, cfg), n=1, cutoff=0.8))


def _refuse_other_trainers(cfg: DictDefault) -> None:
    """Axolotl takes the trainer of the first plugin that has one and forgets the others."""
    from axolotl.integrations.base import PluginManager

    for name, plugin in PluginManager.get_instance().plugins.items():
        if not isinstance(plugin, UnlearnPlugin) and plugin.get_trainer_cls(cfg) is not None:
            raise UnlearnError(
                f"the plugin {name} brings a trainer of its own, and a run has only one; with "
                "`unlearn:` remove it from `plugins:`."
            )


def _stay_on_cpu(cfg: DictDefault) -> None:
    """With several processes Axolotl maps each one's model to an accelerator, present or not; this
    hook comes after that and before the model is loaded."""
    devices = cfg.device_map.values() if isinstance(cfg.device_map, dict) else ()
    if accelerator() is None and any(isinstance(d, int) for d in devices):
        cfg.device_map = {"": "cpu"}


def _refuse_on_cpu(cfg: DictDefault) -> None:
    """Accelerate would leave DeepSpeed out and go on with DDP, or fail at ZeRO-3's empty weights;
    Axolotl puts the parts of FSDP2 on an accelerator, PEFT the weights that LoftQ quantises."""
    keys = ("deepspeed", "fsdp_config", "fsdp", "activation_offloading", "profiler_steps")
    asked = [key for key in keys if cfg[key]]
    asked += ["peft.loftq_config"] * bool((cfg.peft or {}).get("loftq_config"))
    if asked and accelerator() is None:
        raise UnlearnError(f"`{asked[0]}` needs a GPU, and this machine has none: remove it.")


def _check_layers(cfg: DictDefault) -> None:
    """As `check` does for a model in a folder, also for one of the hub, before its weights."""
    from axolotl.loaders.utils import load_model_config

    from axolotl_unlearn.checks.config import architecture_faults
    from axolotl_unlearn.objectives import OBJECTIVES

    whole = load_model_config(cfg)
    config = whole.get_text_config()
    overrides = cfg.overrides_of_model_config or {}
    if overrides:
        own = load_model_config(type(cfg)({**cfg, "overrides_of_model_config": {}}))
        for key in overrides:
            if not any(hasattr(one, key) for one in (own, own.get_text_config())):
                LOG.warning("`overrides_of_model_config`: %r is no setting of this model.", key)
    if getattr(config, "output_router_logits", False):
        LOG.warning(
            "this model's router has a loss of its own (`output_router_logits`), which this run "
            "leaves out: experts may be used less evenly; say so by `overrides_of_model_config: "
            "{output_router_logits: false}`."
        )
    noise = "drop(out)?(_prob|_rate)?$|jitter_noise$"
    drops = {k: v for k, v in vars(config).items() if re.search(noise, k)}
    drops = {k: v for k, v in drops.items() if v and not re.match("classifier|summary", k)}
    if drops and any(OBJECTIVES[e.objective].reference for _, e in unlearn_config(cfg).entries()):
        LOG.warning(
            "this model trains with dropout or noise (%s), so what is compared with the reference "
            "is noisy from the first step on; set it to 0 by `overrides_of_model_config`.",
            ", ".join(f"{key}: {value}" for key, value in drops.items()),
        )
    known = {"model_type": config.model_type}
    known["num_hidden_layers"] = getattr(config, "num_hidden_layers", None)
    known["tie_word_embeddings"] = any(
        getattr(one, "tie_word_embeddings", None) for one in (whole, config)
    )
    if faults := architecture_faults(cfg, unlearn_config(cfg), known | overrides):
        raise UnlearnError(" ".join(faults))


def _check_names(cfg: DictDefault, model: Any) -> None:
    """PEFT leaves names of a list out that the model lacks, if it has one of them; a text is a
    pattern of whole names."""
    if not cfg.adapter or cfg.lora_model_dir:
        return
    names = [name for of in (model.named_modules, model.named_parameters) for name, _ in of()]
    for key in ("lora_target_modules", "lora_modules_to_save", "lora_target_parameters"):
        whole = isinstance(cfg[key], str)
        for given in [cfg[key]] if whole else cfg[key] or ():
            pattern = given if whole else rf"(.*\.)?{re.escape(str(given))}"
            if given != "all-linear" and not any(re.fullmatch(pattern, name) for name in names):
                near = nearest(given, {name.rpartition(".")[2] for name in names})
                raise UnlearnError(
                    f"`{key}` has {given!r}, which this model lacks, so nothing there would be "
                    f"trained; correct or remove it{near}.",
                    code="training.no-module",
                )


def _check_trained(args: UnlearnArgs, model: Any) -> None:
    """As `check` does by the config: an objective at a layer needs trained weights up to there."""
    from axolotl_unlearn.objectives import OBJECTIVES

    if not any(OBJECTIVES[entry.objective].sees == "hidden" for _, entry in args.entries()):
        return
    from axolotl_unlearn.checks.config import architecture_faults
    from axolotl_unlearn.engine.layers import decoder_layers

    parts = [model.get_input_embeddings(), *decoder_layers(model)]
    trained = [any(p.requires_grad for p in part.parameters()) for part in parts]
    lowest = trained.index(True) - 1 if any(trained) else len(parts)
    if faults := architecture_faults({}, args, {}, lowest):
        raise UnlearnError(" ".join(faults))


def _check_groups(cfg: DictDefault, trainer: Any) -> None:
    """Axolotl looks for names of modules in those of weights, and takes one that is in none; norms,
    biases, embeddings and heads have groups of their own, whatever `lr_groups` say."""
    if not (cfg.lr_groups or cfg.embedding_lr or cfg.embedding_lr_scale):
        return
    common = {"lr": trainer.args.learning_rate}
    groups = trainer.create_optimizer_grouped_parameters(trainer.model, common)
    rates = {id(weight): group["lr"] for group in groups for weight in group["params"]}
    named = [(name, rates.get(id(weight))) for name, weight in trainer.model.named_parameters()]
    for group in cfg.lr_groups or ():
        for given in group["modules"]:
            if not any(given in name and rate == group["lr"] for name, rate in named):
                raise UnlearnError(
                    f"`lr_groups` has {given!r}, whose rate no weight would get: none that is "
                    "trained has that name, or norms, biases and embeddings alone; correct it.",
                    code="training.no-module",
                )
    rate = common["lr"] * (cfg.embedding_lr_scale or 0) or cfg.embedding_lr
    if rate and rate not in rates.values():
        LOG.warning("`embedding_lr`, or its scale, does nothing: no embedding or head is trained.")


def _check_teachers(cfg: DictDefault) -> None:
    """A teacher must have the policy's tokenizer, or be an adapter of its base."""
    teachers = [one for one in unlearn_config(cfg).references() if one.is_teacher]
    if not teachers:
        return
    from axolotl.loaders import load_tokenizer

    from axolotl_unlearn.reference.teacher import require_same_base, require_same_tokenizer

    tokenizer, trust = load_tokenizer(cfg), bool(cfg.trust_remote_code)
    for teacher in teachers:
        if teacher.model:
            require_same_tokenizer(teacher.model, tokenizer, trust_remote_code=trust)
        else:
            require_same_base(teacher.adapter, cfg.base_model)


def _trains(cfg: Any) -> bool:
    args = unlearn_config(cfg)
    return args is not None and args.trains
