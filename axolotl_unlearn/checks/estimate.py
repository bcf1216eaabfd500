"""What a config would do if it were trained now: rows as the model will read them, steps, memory.

For `axolotl-unlearn check --full` and `--show`, `init`, and the table of GPU sizes in the docs.
Reads data, tokenizer and the heads of weight files; loads no weights.
"""

from __future__ import annotations

import logging
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.checks.config import known_of, run_notes, sharding_key
from axolotl_unlearn.columns import IGNORE, ROLES
from axolotl_unlearn.config import UnlearnArgs, parse_unlearn, unlearn_config
from axolotl_unlearn.data.checks import KEYS, TYPES, check_loaded, role_of
from axolotl_unlearn.data.coverage import RowCounts
from axolotl_unlearn.data.overlap import near_note
from axolotl_unlearn.data.prepared import apart
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.models import cached_on_hub, is_tokenizer
from axolotl_unlearn.objectives import OBJECTIVES

_LAYER = re.compile(r"\.\d+\.")
_END = re.compile("embed|lm_head|wte")
#: Memory of usual GPUs.
GPUS = ("24 GB", "40 GB", "80 GB")
#: Characters of a row that are shown.
_SHOWN = 1200


def outlook(
    cfg: dict[str, Any], read: dict[str, list[Record]], tables: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Facts about a config without faults, JSON-like; and faults that only tokens show.

    Args:
        read: The rows by role, as `check_records` has read them.
        tables: Token rows by role (`token_rows`), if there are any.
    """
    args = parse_unlearn(cfg.get("unlearn") or {})
    if not args.trains:
        return {}, []
    facts: dict[str, Any] = {"notes": []}
    rows, faults = {side: len(tables.get(side) or read.get(side, ())) for side in ROLES}, []
    try:
        if tables:
            from datasets import concatenate_datasets

            whole = concatenate_datasets([*tables.values()])
            check_loaded(cfg, whole)
            faults += RowCounts.of_columns(whole).faults(args)
            facts["notes"] += near_note(whole)
    except UnlearnError as error:
        faults.append(str(error))
    facts |= steps(cfg, args, rows["forget"]) if rows["forget"] else {}
    facts["tokens"] = {side: lengths(table) for side, table in tables.items()}
    longest = max((one["longest"] for one in facts["tokens"].values()), default=0)
    facts["notes"] += run_notes(cfg, facts, longest, known_of(cfg))
    length = longest or cfg.get("sequence_len") or 2048
    facts["memory"] = memory(cfg, args, length)
    if facts["memory"]:
        facts["largest_micro_batch_size"] = largest_batches(cfg, args, length)
    return {name: value for name, value in facts.items() if value}, faults


def lengths(rows: Any) -> dict[str, Any]:
    """Tokens and labels of the rows of a side, and how the first one is laid out."""
    each = sorted(rows["length"][:])
    labelled = sum(label != IGNORE for labels in rows["labels"] for label in labels)
    facts = {"rows": len(each), "total": sum(each), "labelled": labelled}
    facts |= {"median": each[len(each) // 2], "longest": each[-1]}
    return facts | {"first": layout(rows[0]["labels"])}


def steps(cfg: Mapping[str, Any], args: UnlearnArgs, forget: int, batch: int = 0) -> dict[str, int]:
    """Steps; an epoch is a pass over the forget rows. ``batch``: pairs of a step; default: of one
    process."""
    one = int(cfg.get("micro_batch_size") or 1) * int(cfg.get("gradient_accumulation_steps") or 1)
    batch = batch or one
    epoch = math.ceil(forget / batch)
    total = math.ceil(epoch * float(cfg.get("num_epochs") or 1))
    total = forgetting = int(cfg.get("max_steps") or total)
    if args.phases:
        from axolotl_unlearn.training.phases import phase_steps

        each = phase_steps(args, epoch)
        total = sum(each)
        forgetting = sum(n for n, phase in zip(each, args.phases, strict=True) if phase.forget)
    unread = max(0, forget - forgetting * batch)
    return {"steps": total, "steps_of_an_epoch": epoch, "forget_rows_never_read": unread}


# --- memory --------------------------------------------------------------------------------------


def memory(
    cfg: Mapping[str, Any],
    args: UnlearnArgs,
    longest: int,
    shapes: Mapping[str, list[int]] | None = None,
) -> dict[str, int]:
    """Bytes on one device; empty where the model's files are not here.

    ``at_least`` is all but the activations. These are fitted to a pretended device
    (tests/pretend_device) with PEFT's LoRA and attention in one kernel: what layers keep, of all,
    or with gradient checkpointing of one and the input of each.

    Adam keeps two moments, in the type of what is trained; "8bit" optimizers a byte each.

    Args:
        longest: Tokens of the longest row.
        shapes: Of all tensors by name; default: from the heads of the weight files.
    """
    shapes = shapes or dict(shapes_of(Path(str(cfg.get("base_model") or "nowhere"))))
    if not shapes:
        return {}
    numbers = sum(map(math.prod, shapes.values()))
    four_bit, eight_bit = cfg.get("load_in_4bit"), cfg.get("load_in_8bit")
    half = cfg.get("bf16") not in (None, False)
    # Embeddings and head stay whole in a quantised model; those of tokens have the most rows.
    ends = [shape for name, shape in shapes.items() if _END.search(name)]
    flat = [shape for shape in ends or shapes.values() if len(shape) == 2]
    vocabulary, hidden = max(flat)
    whole = sum(map(math.prod, ends))
    each = 2 if half else 4
    weights = whole * each + (numbers - whole) * (0.5 if four_bit else 1 if eight_bit else each)
    lora, trained = bool(cfg.get("adapter")), numbers
    if lora:
        rank = int(cfg.get("lora_r") or 8)
        trained = rank * sum(sum(s) for n, s in shapes.items() if _has_lora(cfg, n, s))
    optimizer = str(cfg.get("optimizer") or "")
    # A LoRA is float32, and so is what FSDP and DeepSpeed train.
    own = 4 if lora or sharding_key(dict(cfg)) else each
    # Axolotl trains embeddings and head in float32.
    wide = 0 if lora else whole * (4 - each)
    moments = 2 if "8bit" in optimizer else 0 if optimizer == "sgd" else 2 * own
    copied = not lora or bool(cfg.get("lora_model_dir"))  # else the adapter is switched off
    copies = sum(r.mode == "frozen_copy" or (r.mode == "auto" and copied)
                 for r in args.references() if not r.is_teacher)  # fmt: skip
    rows = {"forget": 1, "alternative": 1, "retain": args.pairing.retain_per_forget}
    each_row, looked, at_head = longest * int(cfg.get("micro_batch_size") or 1), set(), {}
    for side, entry in args.entries():
        one = OBJECTIVES[entry.objective]
        looked |= {*one.roles(side)}
        # What is asked at the head together: labels of all rows, or what a side says there itself.
        sees = "distributions" if one.sees in ("distributions", "features") else one.sees
        alone = sees == "distributions" or (one.slope and one.slope(entry.parameters) is not None)
        if sees not in ("hidden", "profiles"):
            compares = one.reference and sees == "distributions"
            key = sees, compares, side if alone else ""
            at_head.setdefault(key, set()).update(one.roles(side))
    tokens = each_row * sum(rows[role] for role in looked)
    depth = len({m[0] for name in shapes if (m := _LAYER.search(name))})
    # Values that a layer keeps for its gradient, and those that are made beside them.
    inner = max((s[0] for n, s in shapes.items() if len(s) == 2 and ".0." in n), default=0)
    kept = (14.5 if half else 8.5) * hidden + 4 * inner
    beside = 6 * hidden + 3 * inner
    # Float32 logits of a chunk that are there at once; of distributions it is half as large.
    of_labels, of_distributions = (2.8, 5.8) if lora else (1.9, 3.1)
    chunk, alive = args.chunk_mib * 2**20, [0.0]
    for (sees, compares, _), roles in at_head.items():
        asked = 4 * vocabulary * each_row * sum(rows[role] for role in roles)
        at_once = (of_distributions + 1.4 * compares) * min(chunk // 2, asked)
        alive.append(at_once if sees == "distributions" else of_labels * min(chunk, asked))
    if args.level:  # a look scores its rows in chunks of 64 MiB, `engine.token_scoring`
        alive.append(2.5 * 2**26)
    # Those of a head that is trained stay until its backward pass.
    logits = int(max(alive) if lora else sum(alive))
    checkpointed = cfg.get("gradient_checkpointing")
    at_once = int(each * tokens * (beside + (kept if checkpointed else 0)))
    stays = int(each * tokens * depth * (hidden if checkpointed else kept))
    parts = {
        "weights": int(weights) + wide + (4 * trained if lora else 0),
        "gradients_and_optimizer": trained * (own + moments) + 3 * wide,
        "reference": int(copies * (4 * trained if lora else numbers * each)),
        "logits": logits,
    }
    # The head's gradient is taken before that of the last layer.
    activations = stays + max(0, at_once - logits)
    return parts | {"at_least": sum(parts.values()), "activations": activations}


def largest_batches(
    cfg: Mapping[str, Any],
    args: UnlearnArgs,
    longest: int,
    shapes: Mapping[str, list[int]] | None = None,
) -> dict[str, int]:
    """The largest `micro_batch_size`, a power of two up to 16, by GPU, a tenth of which stays free;
    0 where none fits. Arguments are those of `memory`."""
    found = dict.fromkeys(GPUS, 0)
    for batch in (1, 2, 4, 8, 16):
        needs = memory({**cfg, "micro_batch_size": batch}, args, longest, shapes)
        taken = needs["at_least"] + needs["activations"]
        found |= {gpu: batch for gpu in GPUS if taken <= 0.9e9 * int(gpu.split()[0])}
    return found


def shapes_of(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every tensor, from the heads of the files."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                yield from ((name, file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except SafetensorError:
            says = f"{path} is cut off"
            raise UnlearnError(f"{says}; write it again.", code="checks.cut-off") from None


def _has_lora(cfg: Mapping[str, Any], name: str, shape: list[int]) -> bool:
    if len(shape) != 2 or _END.search(name):
        return False
    wanted = cfg.get("lora_target_modules")
    wanted = [wanted] if isinstance(wanted, str) else wanted
    return bool(cfg.get("lora_target_linear") or not wanted) or any(w in name for w in wanted)


def lines(facts: dict[str, Any]) -> Iterator[str]:
    """The same for a terminal."""
    from rich.filesize import decimal

    yield from (f"  note: {note}" for note in facts.get("notes", ()))
    shown = {key: facts[key] for key in facts if key != "notes"}
    shown |= {"memory": {part: decimal(n) for part, n in facts.get("memory", {}).items()}}
    text = yaml.safe_dump({k: v for k, v in shown.items() if v}, sort_keys=False, width=100)
    yield from (f"  {line}" for line in text.splitlines() if shown != {"memory": {}})


# --- rows as the model will read them ------------------------------------------------------------


def tokenizer_of(cfg: dict[str, Any]) -> Any | None:
    """The tokenizer as Axolotl loads it; None where it is not on this machine.

    Raises:
        UnlearnError: It is here and cannot be loaded.
    """
    name = str(cfg.get("tokenizer_config") or cfg.get("base_model"))
    here = Path(name)
    files = [file.name for file in here.iterdir()] if here.is_dir() else ()
    if not any(map(is_tokenizer, files)) and not cached_on_hub(name):
        return None
    from axolotl.loaders import load_tokenizer

    from axolotl_unlearn.versions import DictDefault

    try:
        return load_tokenizer(DictDefault(cfg | {"tokenizer_config": name}))
    except UnlearnError:
        raise
    except Exception as error:  # every tokenizer class has errors of its own
        why = next(iter(str(error).splitlines()), type(error).__name__)
        says = f"the tokenizer of {name} cannot be loaded ({why})"
        cure = "correct its files or set `tokenizer_config`"
        raise UnlearnError(f"{says}; {cure}.", code="checks.tokenizer") from None


def token_rows(cfg: dict[str, Any], tokenizer: Any) -> tuple[dict[str, Any], list[str]]:
    """One dataset of each role, of the entries of ``datasets`` that are on this machine; faults.

    The columns are those of `axolotl_unlearn.data.strategy`; rows to memorise have tokens alone.
    """
    from datasets import concatenate_datasets

    from axolotl_unlearn.data.strategy import load_strategy

    parts: dict[str, list[Any]] = {role: [] for role in TYPES}
    faults, before = [], logging.root.manager.disable
    logging.disable(max(before, logging.INFO))  # Axolotl tells each template
    for entry in cfg.get(KEYS[0]) or []:
        role = role_of(entry)
        if role not in parts or not (os.path.exists(entry["path"]) or entry.get("data_files")):
            continue
        try:
            strategy = load_strategy(role, tokenizer, cfg, entry)
            with _loaded(entry) as dataset:
                parts[role].append(strategy.wrap_dataset(dataset))
        except UnlearnError as error:
            faults.append(str(error))
    logging.disable(before)
    return {role: concatenate_datasets(few) for role, few in parts.items() if few}, faults


def first_rows(cfg: dict[str, Any], number: int = 1) -> list[str]:
    """Lines that show rows of each side; a sentence where the tokenizer is not on this machine."""
    tokenizer = tokenizer_of(cfg)
    if tokenizer is None:
        return ["  The tokenizer is not on this machine; `check --show 1` shows rows once it is."]
    tables, faults = token_rows(cfg, tokenizer)
    return [
        *(f"  note: {one}" for one in dict.fromkeys(faults)),
        *lines_of(tables, tokenizer, number),
    ]


def lines_of(tables: dict[str, Any], tokenizer: Any, number: int) -> Iterator[str]:
    """So many token rows of each side, `shown`."""
    for side, rows in tables.items():
        for place in range(min(number, len(rows))):
            yield f"  {side} row {place + 1}, > with labels, | without:"
            yield from shown(rows[place], tokenizer)


def teacher_faults(cfg: dict[str, Any], tokenizer: Any) -> list[str]:
    """Teachers of another vocabulary, which training refuses."""
    from axolotl_unlearn.reference.teacher import require_same_tokenizer

    args, faults = unlearn_config(cfg), []
    for path in {one.model for one in args.references() if one.model} if args else ():
        if os.path.isdir(path):
            try:
                require_same_tokenizer(path, tokenizer)
            except UnlearnError as error:
                faults.append(str(error))
    return faults


@contextmanager
def _loaded(entry: dict[str, Any]) -> Iterator[Any]:
    """What Axolotl reads of an entry that is not one file, without a copy in the home folder."""
    if os.path.isfile(entry["path"]):
        yield None
        return
    import datasets
    from axolotl.utils.data.shared import load_dataset_with_config

    from axolotl_unlearn.versions import DictDefault

    with apart():
        try:
            loaded = load_dataset_with_config(DictDefault(entry), False)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            says = f"{entry['path']} cannot be read as data ({type(error).__name__})"
            cure = "check `path`, `ds_type` and `data_files`"
            raise UnlearnError(f"{says}; {cure}.", code="checks.unreadable-data") from None
        if isinstance(loaded, dict):
            loaded = loaded.get(entry.get("split") or "train") or next(iter(loaded.values()))
        yield loaded


def runs(labels: Sequence[int]) -> Iterator[tuple[bool, int, int]]:
    """Stretches of a row's tokens as (has labels, from, to)."""
    start = 0
    for labelled, group in groupby(label != IGNORE for label in labels):
        end = start + len([*group])
        yield labelled, start, end
        start = end


def layout(labels: Sequence[int]) -> str:
    """ "12 without label, 7 with label": stretches of a row's tokens."""
    return ", ".join(f"{b - a} {'with' if has else 'without'} label" for has, a, b in runs(labels))


def shown(row: dict[str, Any], tokenizer: Any) -> Iterator[str]:
    """A token row as lines of text; `>` stands before what has labels, `|` before the rest."""
    left = _SHOWN
    for has, start, end in runs(row["labels"]):
        text = tokenizer.decode(row["input_ids"][start:end], skip_special_tokens=False)
        cut = text if len(text) <= left else f"{text[:left]}..."
        left -= len(cut)
        for line in cut.removesuffix("\n").split("\n"):
            for part in textwrap.wrap(line, 72, drop_whitespace=False) or [""]:
                yield f"    {'>' if has else '|'} {part}"
        if left <= 0:
            return
