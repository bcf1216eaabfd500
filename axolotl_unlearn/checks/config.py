"""What is wrong with a config, found before weights are loaded; and what unlearning relies on.

`prepare` runs in the plugin's ``register`` on the raw config of every ``axolotl`` command;
``axolotl-unlearn check`` is `axolotl_unlearn.checks.report`.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from axolotl_unlearn import versions
from axolotl_unlearn.checks import axolotl_options
from axolotl_unlearn.columns import ROLES
from axolotl_unlearn.config import UnlearnArgs, nearest, parse_unlearn
from axolotl_unlearn.data.checks import KEYS, block_of, check_entries, check_records, role_of
from axolotl_unlearn.data.prepared import drop_half_written, prepared_folder
from axolotl_unlearn.data.records import short
from axolotl_unlearn.device import accelerator, emulates_bfloat16
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import declare, real
from axolotl_unlearn.models import (
    ADAPTER_CONFIG,
    START,
    has_chat_template,
    is_path,
    is_tokenizer,
    lacking,
    unreachable,
)
from axolotl_unlearn.objectives import OBJECTIVES

LOG = logging.getLogger(__name__)

PLUGIN = "axolotl_unlearn.UnlearnPlugin"
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


def faults(cfg: dict) -> list[str]:
    """Every fault of a raw config, each one sentence with key and cure; empty if there is none."""
    return config_faults(cfg, trains=True) + check_records(cfg).faults


def config_faults(cfg: dict, trains: bool = False) -> list[str]:
    """The faults that show without a look at the data, which some commands never read.

    Args:
        trains: Of a training, which writes where `axolotl merge-lora` and others read.
    """
    faults = axolotl_options.shape_faults(cfg)
    if faults:
        return faults
    args = None
    block, entries = cfg.get("unlearn"), cfg.get("datasets")
    roles = {role_of(entry) for entry in entries} if isinstance(entries, list) else set()
    if block is None:
        faults += told(
            (roles & set(ROLES),
             "`unlearn:` is missing although `datasets:` has forget or retain rows; add a block "
             "such as `unlearn: {preset: zjuklab-paper}`."),
            (not roles & {*ROLES, "memorise"},
             f"the plugin {PLUGIN} is listed but there is no `unlearn:` block; add one or remove "
             "the plugin."),
        )  # fmt: skip
    else:
        plugins = [str(name) for name in cfg.get("plugins") or []]
        near = difflib.get_close_matches(PLUGIN, plugins, n=1, cutoff=0.5)
        if PLUGIN not in plugins and (near or not versions.loads_us_unasked()):
            faults.append(
                f"`plugins:` lacks {PLUGIN}"
                + (f" (it has {near[0]!r}, a misspelling?)" if near else "")
                + "; without it Axolotl ignores `unlearn:` and would fine-tune on the forget rows."
            )
        try:
            args = parse_unlearn(block)
        except UnlearnError as error:
            faults.append(str(error))
    if block is not None or roles - {None}:
        faults += check_entries(cfg)
    faults += axolotl_options.misplaced(cfg, UnlearnArgs.model_fields)
    faults += axolotl_options.number_faults(cfg)
    out = real(str(cfg.get("output_dir") or "model-out"))
    read = [(key, cfg.get(key)) for key in ("base_model", "lora_model_dir")[: 1 + trains]]
    for one in args.references() if args is not None else ():
        read += [("reference.model", one.model), ("reference.adapter", one.adapter)]
    began, unlearns = cfg.get("lora_model_dir"), args is not None and args.trains
    merges = cfg.get("merge_lora") and unlearns and began  # Axolotl takes it before `output_dir`
    added = f"--lora-model-dir {quote(str(cfg.get('output_dir') or 'model-out'))}"
    faults += told(
        (merges and not re.fullmatch(rf"{re.escape(out)}(/checkpoint-\d+)?", real(str(began))),
         f"`lora_model_dir: {began}`, with which the run began, would be merged in place of what "
         f"the run has made: add `{added}`."),
        *((path and real(str(path)) == out,
           f"`output_dir` is `{key}`, which would be overwritten: give a folder of its own.")
          for key, path in dict.fromkeys(read)),
        (cfg.get("batch_size") and not cfg.get("gradient_accumulation_steps"),
         f"`batch_size: {cfg.get('batch_size')}` alone makes Axolotl count steps of so many rows "
         "and take smaller ones, so rows would be left out: give `gradient_accumulation_steps`."),
    )  # fmt: skip
    faults += [*axolotl_options.absent(cfg), *axolotl_options.name_faults(cfg)]
    faults += setting_faults(cfg, args) if args is not None and args.trains else []
    faults += _gone(args) if trains else []
    return faults + _model_faults(cfg)


def setting_faults(cfg: dict, args: UnlearnArgs) -> list[str]:
    """What the block and Axolotl's settings ask of each other and of the model."""
    kinds = dict.fromkeys(args.extension_kinds())
    takers = [one.__name__ for one in args.extension_kinds() if one.takes_gradients]
    return [
        *axolotl_options.refused(cfg, bool(args.data.rows)),
        *_together(cfg, args),
        *_reference_faults(cfg, args),
        *(said for kind in kinds for said in kind.faults(cfg, args)),
        *(f"`unlearn.extensions`: {takers[0]} and {second} both take the gradients of a step; keep "
          "one of them." for second in takers[1:2]),
        *_level_faults(cfg, args),
        *_metric_faults(cfg, args),
        *architecture_faults(cfg, args, known_of(cfg)),
    ]  # fmt: skip


#: What chooses a checkpoint by evaluations.
_BEST = ("load_best_model_at_end", "early_stopping_patience")


def told(*faults: tuple[Any, str]) -> list[str]:
    """The sentences whose condition holds."""
    return [sentence for holds, sentence in faults if holds]


def sharding_key(cfg: dict) -> str | None:
    """The key that asks for FSDP or DeepSpeed."""
    return next((key for key in ("fsdp", "fsdp_config", "deepspeed") if cfg.get(key)), None)


def _together(cfg: dict, args: UnlearnArgs) -> list[str]:
    """Settings of Axolotl and of the block that do not go together."""
    sharding = sharding_key(cfg)
    length = [key for key in ("max_steps", "num_epochs") if args.phases and cfg.get(key)]
    patterns = cfg.get("unfrozen_parameters") or ()
    # Axolotl compares from the start of a name, and those under an adapter begin with `base_model`.
    own = r"\^?base_model\b.*(lora_|modules_to_save|trainable_tokens)"
    chats = [row for row in args.data.rows if row.get("type") == "chat_template"]
    fresh = cfg.get("adapter") in ("lora", "qlora") and not cfg.get("lora_model_dir")
    anew = any(phase.fresh_optimizer for phase in args.phases)
    asked = args.data.chat_template or any(not row.get("chat_template") for row in chats)
    given = cfg.get("chat_template") or cfg.get("chat_template_jinja")
    name = str(cfg.get("tokenizer_config") or cfg.get("base_model"))
    here = os.path.isfile(os.path.join(name, "tokenizer_config.json"))
    return told(
        *((args.level and cfg.get(key),
           f"`{key}` may hand over another step than the one that `unlearn.level` chooses and "
           "records: remove it.") for key in _BEST),
        (not args.forget,
         "`unlearn.forget` is empty: nothing would be forgotten; add an objective."),
        (args.retain and args.pairing.retain_per_forget == 0,
         "`unlearn.pairing.retain_per_forget` is 0 although `unlearn.retain` has objectives; set "
         "it to 1 or more."),
        (args.phases and cfg.get("lr_scheduler") in _WHOLE_RUN,
         f"`lr_scheduler: {cfg.get('lr_scheduler')}` cannot begin anew in each of "
         "`unlearn.phases`; use linear, cosine or constant."),
        (args.phases and cfg.get("jagged_restart_steps"),
         "`jagged_restart_steps` does not go with `unlearn.phases`; remove it."),
        (cfg.get("lora_model_dir") and not cfg.get("adapter"),
         "`lora_model_dir` is not read without `adapter`: the run would begin with the base alone, "
         "which has not learned the rows; set `adapter`."),
        (fresh and not (cfg.get("lora_r") and cfg.get("lora_alpha")),
         f"`adapter: {cfg.get('adapter')}` cannot be made without `lora_r` and `lora_alpha`; give "
         "both, such as 32."),
        (fresh and not any(cfg[key] for key in cfg if str(key).startswith("lora_target_")),
         f"`adapter: {cfg.get('adapter')}` has no module to adapt; set `lora_target_linear: true`, "
         "or name some in `lora_target_modules`."),
        (cfg.get("optimizer") == "dion" and not (cfg.get("dion_lr") and cfg.get("dion_momentum")),
         "`optimizer: dion` cannot be made without `dion_lr` and `dion_momentum`; give both."),
        *((True, f"`{key}` does not go with `unlearn.phases`, whose `steps` or `epochs` say how "
           "long the run is; remove it.") for key in length),
        *((args.phases and cfg.get(f"{what}s_per_epoch"),
           f"`{what}s_per_epoch` takes the whole run for one epoch, whatever `unlearn.phases` say; "
           f"give `{what}_steps`.") for what in ("save", "eval")),
        (anew and cfg.get("deepspeed"),
         "`fresh_optimizer` of a phase cannot empty DeepSpeed's own optimizer; use DDP or FSDP."),
        (anew and re.match("schedule_free|muon$", str(cfg.get("optimizer"))),
         f"`optimizer: {cfg.get('optimizer')}` keeps more than the moments that `fresh_optimizer` "
         "of a phase empties; use adamw_torch."),
        (sharding and args.level,
         "`unlearn.level` asks the model about single rows, which FSDP and DeepSpeed do not allow; "
         "train on one device or with DDP."),
        (cfg.get("adapter") and not all(re.match(own, str(one)) for one in patterns),
         "`unfrozen_parameters` trains weights outside of the adapter, which its folder does not "
         "hold, or none: remove it or `adapter`, or name the module in `lora_modules_to_save`."),
        (asked and here and not given and not has_chat_template(name),
         f"{name} has no chat template, which `unlearn.data` asks for; set `chat_template:` to the "
         "one that the model learned with, or use `unlearn.data.template`."),
    )  # fmt: skip


def _reference_faults(cfg: dict, args: UnlearnArgs) -> list[str]:
    """References that cannot be kept as they are asked for, or are not there."""
    references = args.references()
    modes = {reference.mode for reference in references if not reference.is_teacher}
    fresh = cfg.get("adapter") and not cfg.get("lora_model_dir")
    sharded = cfg.get("fsdp_config") or cfg.get("fsdp") or is_zero3(cfg.get("deepspeed"))
    unread = {key: getattr(args, key) for key in ("reference", "teacher", "original")}
    faults = told(
        *((one and one.is_teacher and one not in references,
           f"`unlearn.{key}` names a model that no objective compares with: remove it, or add an "
           "entry that does.") for key, one in unread.items()),
        (sharded and "frozen_copy" in modes,
         "`reference: frozen_copy` swaps whole weights in, which no process has under FSDP or "
         "ZeRO-3; use `auto`, which asks the starting model before the first step."),
        (modes and not fresh and cfg.get("fsdp_config") and cfg.get("fsdp_version") != 2,
         "the starting model of full fine-tuning or of a starting adapter can be asked in its "
         "parts under FSDP2 only; set `fsdp_version: 2`, or give `reference: {model: BASE}`."),
    )  # fmt: skip
    return faults


def _gone(args: UnlearnArgs | None) -> list[str]:
    """Teachers and held-out rows that are not there, which training alone reads."""
    references, level = (args.references(), args.level) if args and args.trains else ([], None)
    paths = [(key, getattr(one, key)) for one in references for key in ("model", "adapter")]
    return told(
        *((path and is_path(path) and not os.path.exists(path),
           f"`reference.{key}: {path}` does not exist; check the path.") for key, path in paths),
        (level and not os.path.isfile(level.heldout),
         f"`unlearn.level.heldout: {level and level.heldout}` is no file; give rows of the same "
         "kinds as the forget rows that the model never saw."),
    )  # fmt: skip


def is_zero3(deepspeed: Any) -> bool:
    """Of a DeepSpeed config: a block, or a file; one that is not there goes by its name."""
    if isinstance(deepspeed, str) and os.path.isfile(deepspeed):
        deepspeed = Path(deepspeed).read_text("utf-8", errors="replace")
    return bool(re.search(r"""["']stage["']: *3|zero3[^/]*$""", str(deepspeed)))


def _level_faults(cfg: dict, args: UnlearnArgs) -> list[str]:
    """What `match` aims at, and what compares with held-out rows."""
    level, names = args.level, dict.fromkeys(entry.objective for entry in args.forget)
    matched = [e.reference or args.reference for e in args.forget if e.objective == "match"]
    start = (None, cfg.get("lora_model_dir") if cfg.get("adapter") else None)
    original = args.original and (args.original.model, args.original.adapter)

    def files(model: str | None, adapter: str | None) -> tuple[str, str]:
        return real(str(model or cfg.get("base_model"))), real(str(adapter or ""))

    knows = {files(*one) for one in (start, original) if one}
    faults = told(
        (not all(one.is_teacher and files(one.model, one.adapter) not in knows for one in matched),
         "`match` would aim at the level of a model that knows the forget rows, so nothing would "
         "be forgotten: give a teacher that never saw them (`reference: {model: PATH}`)."),
    )  # fmt: skip
    if level is None:
        return faults + [
            f"`{name}` compares with held-out rows: give `unlearn.level: {{heldout: FILE}}`."
            for name in names
            if OBJECTIVES[name].against_heldout
        ]
    return faults + told(
        (args.heldout not in (None, level.heldout),
         f"`heldout: {args.heldout}` is not read beside `unlearn.level.heldout`: remove one."),
        (str(cfg.get("optimizer")).startswith("schedule_free"),
         f"`optimizer: {cfg.get('optimizer')}` trains at other weights than those that it hands "
         "over, and `unlearn.level` looks at the former: use adamw_torch."),
        (not args.retain,
         "`unlearn.level` looks at retained rows too, and there are none: add an objective under "
         "`unlearn.retain`, and its rows."),
        (len(set(matched)) > 1,
         "`unlearn.level` reads one reference: give all `match` entries the same."),
        (not matched,
         "`unlearn.level` is what `match` aims at, but no forget objective is `match`: add one or "
         "remove the block."),
        (level.certainty and "nckd" not in names,
         "`unlearn.level.certainty` sets the temperature of `nckd`, but no forget objective is "
         "`nckd`: add one or remove the key."),
    )  # fmt: skip


#: Schedules that need the length of the whole run, or its evaluations.
_WHOLE_RUN = ("reduce_lr_on_plateau", "greedy", "one_cycle", "rex")


def setting_notes(cfg: dict) -> list[str]:
    """What a run does otherwise than its settings may be read."""
    name = str(cfg.get("base_model"))
    where = None if os.path.exists(name) else unreachable(name)
    args, half = block_of(dict(cfg)), os.path.isfile(os.path.join(name, START))
    moves = args and (args.phases or args.extensions)
    best = next((key for key in _BEST if cfg.get(key)), None)
    by_sum = str(cfg.get("metric_for_best_model") or "loss").removeprefix("eval_") == "loss"
    quantised = cfg.get("adapter") and (cfg.get("load_in_4bit") or cfg.get("load_in_8bit"))
    parts = cfg.get("gradient_accumulation_steps") or 1
    chats = ("chat_template", "chat_template_jinja", "default_system_message", "eot_tokens")
    chat = next((key for key in chats if cfg.get(key)), None)
    rows = [*args.data.rows, *(cfg.get("datasets") or [])] if args else []
    types = [str(dict(row).get("type")) for row in rows]
    rendered = args and (args.data.chat_template or any("chat_template" in one for one in types))
    looks = _every(cfg, "eval") or cfg.get("eval_strategy") or cfg.get("evaluation_strategy")
    return told(
        (cfg.get("test_datasets") and not looks,
         "`test_datasets` are never evaluated: set `eval_steps`, or `evals_per_epoch` of a run of "
         "more than one."),
        (cfg.get("load_best_model_at_end") and not _chooses(cfg),
         "`load_best_model_at_end` does nothing here, so the last model stays: it needs rows to "
         "evaluate, `eval_steps`, and `save_steps` that are a multiple of them."),
        (parts > 1 and args
         and any(OBJECTIVES[one.objective].against_heldout for one in args.forget),
         "`feature_matching` and its kin take features in by the micro-batch: the update on "
         f"{parts} micro-batches is not that of one."),
        (moves and best and by_sum,
         f"`{best}` compares sums whose weights change (`phases`, `extensions`): name a part as "
         "`metric_for_best_model`, such as eval_retain_nll."),
        (half and args and args.teacher and args.original is None,
         f"retained rows are held to `base_model: {name}`, the start halfway to the teacher: name "
         "the model before it as `unlearn.original`."),
        *((True, one) for one in axolotl_options.dropped(cfg)),
        *((True, f"`{key}: {cfg[key]!r}` does nothing here: the adapter of `lora_model_dir` stays "
           f"as it was made ({there!r}).") for key, there in _not_taken(cfg)),
        (where, f"`base_model: {short(name)[1:-1]}` {where}."),
        (cfg.get("revision_of_model") and os.path.isdir(name),
         f"`revision_of_model` does nothing here: {short(name)[1:-1]} is a folder."),
        (args and chat and not rendered,
         f"`{chat}` renders no row here: with `unlearn.data.chat_template: true` records are "
         "forgotten as the chats that the model learned."),
        (cfg.get("bf16") in (True, "full") and emulates_bfloat16(),
         "`bf16` makes this run many times slower: this processor only emulates bfloat16. Set "
         "`bf16: false`."),
        (quantised,
         "the adapter learns beside quantised weights, and `axolotl merge-lora` adds it to the "
         "whole ones: evaluate the merged model, which is another."),
    )  # fmt: skip


#: Settings of an adapter that is made -> the key of adapter_config.json.
_SHAPE = {
    "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules", "lora_modules_to_save": "modules_to_save",
    "peft_layers_to_transform": "layers_to_transform", "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
}  # fmt: skip


def _not_taken(cfg: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings that the adapter to begin with has otherwise, and what it has: it keeps its own."""
    own = _said_in(cfg.get("lora_model_dir"), ADAPTER_CONFIG) if cfg.get("adapter") else None
    for key, name in _SHAPE.items() if own else ():
        given, there = (
            sorted(map(str, one)) if isinstance(one, list) else one or None
            for one in (cfg.get(key), own.get(name))
        )
        if given is not None and not isinstance(given, str) and given != there:
            yield key, own.get(name)


def _said_in(folder: Any, name: str) -> dict[str, Any] | None:
    """A config in the folder of a model or adapter; None where it cannot be read."""
    try:
        own = json.loads(Path(str(folder), name).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return own if isinstance(own, dict) else None


def _metric_faults(cfg: dict, args: UnlearnArgs) -> list[str]:
    """A metric by which checkpoints are chosen that is not there, or that is read upside down."""
    given = str(cfg.get("metric_for_best_model") or "loss")
    metric = given.removeprefix("eval_")
    if metric == "loss" or not cfg.get("test_datasets"):
        return []
    from axolotl_unlearn.engine.views import logged

    names = {"loss", *set.intersection(*map(logged, args.phases or [args]))}
    near = "" if args.phases else nearest(metric, names)
    return told(
        (metric not in names,
         f"`metric_for_best_model: {given}` is nothing that every evaluation of this run gives"
         f"{near or '; there are ' + ', '.join(sorted(names))}."),
        (cfg.get("greater_is_better") is None,
         f"`metric_for_best_model: {given}` would choose the checkpoint where it is greatest; set "
         "`greater_is_better: false` for the least, or `true`."),
    )  # fmt: skip


def _chooses(cfg: dict) -> bool:
    """Whether checkpoints are evaluated, so that one of them is the best: as Axolotl asks it."""
    save, look = (_every(cfg, what) for what in ("save", "eval"))
    return bool(cfg.get("test_datasets") and save and look and not save % look)


def _every(cfg: dict, what: str) -> float:
    """``eval_steps`` or ``save_steps`` as Axolotl makes them of those of an epoch; 0 if none."""
    often = cfg.get(f"{what}s_per_epoch")
    share = 1 / (often * float(cfg.get("num_epochs") or 1)) if often else 1
    return share if share < 1 else cfg.get(f"{what}_steps") or 0


def run_notes(
    cfg: Mapping[str, Any], plan: Mapping[str, int], longest: int, known: Mapping[str, Any]
) -> list[str]:
    """A run that ends before its learning rate is what the config says, before all rows were read
    or before the first look, and rows at positions that the model never learned; ``plan``:
    `estimate.steps`."""
    steps, unread = plan.get("steps", 0), plan.get("forget_rows_never_read", 0)
    most = known.get("max_position_embeddings") or known.get("n_positions") or longest
    key = "warmup_ratio" if cfg.get("warmup_steps") is None else "warmup_steps"
    given, ends = cfg.get(key), f"{steps} step{'s' * (steps > 1)}"
    warmup = float(given or 0)  # YAML reads `1e-1` as a text
    warmup = int(warmup * steps) if key == "warmup_ratio" else warmup
    args = block_of(dict(cfg))
    every = args.level.every if args and args.level else None
    return told(
        (every and 0 < steps <= every,
         f"`unlearn.level.every: {every}` is not reached before the run ends, after {ends}: nobody "
         "looks on the way, so no target moves; give a lower number."),
        (0 < steps <= warmup,
         f"`{key}: {given}` is not over when the run ends, after {ends}: the learning rate stays "
         "below the one that is set."),
        (unread > 0,
         f"{unread} forget rows are never read, so never forgotten: a pass over all of them takes "
         f"{plan.get('steps_of_an_epoch')} steps; raise `max_steps`, `num_epochs` or `phases`."),
        (longest > most,
         f"rows of up to {longest} tokens are longer than the {most} positions of this model: what "
         "it says there was never learned; lower `sequence_len`, or cut the rows."),
    )  # fmt: skip


def architecture_faults(
    cfg: Mapping[str, Any], args: UnlearnArgs, known: Mapping[str, Any], first: int | None = None
) -> list[str]:
    """What adapters and objectives on hidden states ask of a model.

    Args:
        known: Its config.json, of the language model; empty where it is not here.
        first: The lowest decoder layer that is trained; default: by the config.
    """
    faults = _tied_faults(cfg) if known.get("tie_word_embeddings") else []
    layers = cfg.get("peft_layers_to_transform") if cfg.get("adapter") else None
    layers = [n for n in layers if isinstance(n, int)] if isinstance(layers, list) else []
    first = min(layers, default=0) if first is None else first
    count, saved = known.get("num_hidden_layers"), cfg.get("lora_modules_to_save") or ()
    if ends := cfg.get("adapter") and cfg.get("tokens") and known.get("model_type"):
        from axolotl.loaders.utils import get_linear_embedding_layers as ends_of

        ends = ends_of(ends)
    faults += told(
        (count and not {*layers} <= {*range(count)},
         f"`peft_layers_to_transform: {layers}` names layers that do not exist: the model has "
         f"layers 0 to {(count or 0) - 1}."),
        (ends and not {*ends} <= {*saved},
         "`tokens` adds rows to matrices that the adapter does not train; set "
         f"`lora_modules_to_save: [{', '.join(ends or ())}]`."),
    )  # fmt: skip
    if cfg.get("lora_target_linear") and known.get("model_type") in ("gpt2", "openai-gpt"):
        faults.append(
            "`lora_target_linear` finds no layer of this model, whose matrices are no Linear: name "
            "them in `lora_target_modules`, such as [c_attn, c_proj]."
        )
    hidden = [one for one in args.entries() if OBJECTIVES[one[1].objective].sees == "hidden"]
    for side, entry in hidden:
        name, layer = f"{side}/{entry.objective}", entry.parameter("layer")
        default = "" if "layer" in entry.parameters else " (the default)"
        faults += told(
            (str(known.get("model_type")).startswith("gemma3n"),
             f"{name} looks at the hidden states of a layer, of which Gemma 3n has four at once "
             "(AltUp): use an objective on log-probs."),
            (count and layer >= count,
             f"`layer: {layer}`{default} of {name} in `unlearn:` does not exist: the model has "
             f"layers 0 to {(count or 0) - 1}; give one of them."),
            (layer < first,
             f"`layer: {layer}` of {name} in `unlearn:` lies before all that is trained (from "
             f"layer {first} on), so this objective would change nothing; give a higher layer, or "
             "train lower ones."),
        )  # fmt: skip
    return faults


#: Last names of embeddings and heads; in many models one matrix is both.
_ENDS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "lm_head", "embed_out")


def _tied_faults(cfg: dict) -> list[str]:
    """What adapts one of two tied matrices; `merge-lora` adds its change to both or neither."""
    if not cfg.get("adapter"):
        return []
    keys = ["lora_target_modules"]
    keys += [] if cfg.get("peft_ensure_weight_tying") else ["lora_modules_to_save"]
    faults = []
    for key in keys:
        value = cfg.get(key) or ()
        names = map(str, [value] if isinstance(value, str) else value)
        ends = [name for name in names if re.search("|".join(_ENDS), name)]
        if ends:
            cure = "remove it" if key == keys[0] else "remove it, or set `peft_ensure_weight_tying`"
            faults.append(
                f"`{key}` has {ends[0]}, but this model's head is its embedding matrix: trained "
                f"apart they are lost when the adapter is merged; {cure}."
            )
    return faults


def known_of(cfg: dict) -> dict[str, Any]:
    """The config of the text model where the base model is a folder that says it; else empty."""
    config = _said_in(cfg.get("base_model_config") or cfg.get("base_model"), "config.json")
    if cfg.get("overrides_of_model_config") or not config:
        return {}
    inner = config.get("text_config", config)
    ties = {"tie_word_embeddings": config.get("tie_word_embeddings")}
    return inner | (ties if ties["tie_word_embeddings"] is not None else {})


def _model_faults(cfg: dict) -> list[str]:
    """A base model, or an adapter to start from, that is not there or is none."""
    faults = []
    for key, file in (("base_model", "config.json"), ("lora_model_dir", ADAPTER_CONFIG)):
        path = cfg.get(key)
        if not isinstance(path, str):
            continue
        if not os.path.exists(path):
            # The hub has models without an owner (`gpt2`), but no such adapters.
            if is_path(path) or (file == ADAPTER_CONFIG and "/" not in path):
                cure = "train it first, or check the path, relative to where you are"
                faults.append(f"`{key}: {path}` does not exist; {cure}.")
        elif _said_in(path, file) is None:
            own = os.path.join(path, file)
            if file == ADAPTER_CONFIG or os.path.isfile(own):
                faults.append(f"`{key}`: {own} cannot be read; copy or make it again.")
    return faults


def untrainable(cfg: dict) -> str | None:
    """What the base model lacks to be trained; a model of the hub that can be asked for lacks
    nothing."""
    name = cfg.get("base_model")
    if not isinstance(name, str) or not name:
        return "`base_model` is missing; name the model that is to forget."
    what, folder = None, Path(name)
    if os.path.exists(name):
        code, what = lacking(folder) or ("", None)
        if cfg.get({"no-config": "base_model_config", "no-weights": "reinit_weights"}.get(code)):
            what = None
        elif code == "adapter-as-base":
            what += ", and the adapter as `lora_model_dir`"
        elif code == "no-weights":
            what += ", or set `reinit_weights: true` to begin with random ones"
        elif not code and not cfg.get("tokenizer_config"):
            if not any(is_tokenizer(file.name) for file in folder.iterdir()):
                what = "has no tokenizer; copy the tokenizer files there, or set `tokenizer_config`"
    elif not is_path(name):  # a path is told elsewhere
        what = unreachable(name)
        what = what if what and "HF_HUB_OFFLINE" in what else None
    return f"`base_model: {short(name)[1:-1]}` {what}." if what else None


def prepare(cfg: dict) -> None:
    """Check a raw config and set what unlearning relies on, in place; the data are not read.

    Raises:
        UnlearnError: All of `config_faults`.
    """
    if cfg.get("use_ray") and "RANK" in os.environ:
        _cpu_settings(cfg)  # a worker of Ray: its driver, which may lack a GPU, has done the rest
        return
    wrong, name = config_faults(cfg), str(cfg.get("base_model"))
    if cfg.get("base_model") and not os.path.exists(name) and not is_path(name):
        wrong += [said for said in [untrainable(cfg)] if said]  # else a traceback of transformers
    if wrong:
        raise UnlearnError(" ".join(wrong), code="checks.config")
    if not cfg.get("use_ray"):
        _cpu_settings(cfg)
    if cfg.get("seed") is None:
        cfg["seed"] = 42
    cfg["dataset_prepared_path"] = prepared_folder(cfg)
    args = parse_unlearn(cfg["unlearn"]) if cfg.get("unlearn") else None
    if args is None or not args.trains:
        return
    if args.preset:
        LOG.info("preset %s is short for\n%s", args.preset, args.expanded())
    cfg["remove_unused_columns"] = False
    for option, note in axolotl_options.noted(cfg).items():
        LOG.warning(note)
        cfg.pop(option)
    for key in axolotl_options.ignored(cfg):
        if not key.startswith(("x-", "_", ".")):  # anchors of YAML
            LOG.warning("`%s` is no option of Axolotl; other plugins alone may read it.", key)
    for kernel in LORA_KERNELS:
        # Axolotl switches them on by itself, also where they fail; who asks for them has them.
        if cfg.get(kernel) is None:
            cfg[kernel] = False
    if cfg.get("gradient_checkpointing") and not cfg.get("gradient_checkpointing_kwargs"):
        cfg["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if cfg.get("pad_to_sequence_len") is None:
        cfg["pad_to_sequence_len"] = False  # else batches are padded to a multiple of 64


def prepare_data(cfg: dict, given: Mapping[str, Any]) -> None:
    """Before data are read: check the files, key the cache, say what settings do not do.

    Args:
        given: The config without Axolotl's defaults; empty: nothing is said of it.

    Raises:
        UnlearnError: Every fault of the files.
    """
    checked = check_records(cfg)
    if wrong := checked.faults + _gone(block_of(dict(cfg))):
        raise UnlearnError(" ".join(wrong), code="data.faults")
    for note in checked.notes + (setting_notes(dict(given)) if given.get("unlearn") else []):
        LOG.warning(note)
    cfg["dataset_prepared_path"] = prepared_folder(cfg)
    drop_half_written(Path(cfg["dataset_prepared_path"]))
    if any(role_of(one) for key in KEYS for one in cfg.get(key) or []):
        import datasets

        # What reading the data leaves on disk lies in one private folder, which is listed: Hugging
        # Face ``datasets`` would put a copy of the texts into the cache of the home folder.
        folder = Path(cfg["dataset_prepared_path"])
        declare(cfg.get("output_dir") or "model-out", folder, "tokens", folder=True)
        datasets.config.HF_DATASETS_CACHE = folder / "cache"


def _cpu_settings(cfg: dict[str, Any]) -> None:
    """Without a GPU, Axolotl needs to be told; several processes would else train apart."""
    if accelerator() is not None:
        return
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    defaults = {
        "device_map": {"": "cpu"},
        "dataloader_pin_memory": False,
        "fp16": False,
        "bf16": "auto",
        **dict.fromkeys(LORA_KERNELS, False),  # Triton kernels, switched on by themselves
    }
    for key, value in defaults.items():
        if cfg.get(key) is None:
            cfg[key] = value
