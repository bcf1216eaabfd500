"""What a config would do if it were trained now: tokens, overlap, steps, forwards, memory.

For `axolotl-unlearn check`. Reads data, tokenizer and the heads of weight files; loads no weights.
Texts are in nothing of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from axolotl_unlearn.checks.config import warmup_note
from axolotl_unlearn.checks.rendered import layout
from axolotl_unlearn.columns import DOCUMENT, IGNORE, ROLES, pair_number
from axolotl_unlearn.config import UnlearnArgs, parse_unlearn
from axolotl_unlearn.data.checks import check_columns, check_loaded
from axolotl_unlearn.data.overlap import near_rows
from axolotl_unlearn.data.records import Record, read_records
from axolotl_unlearn.data.validation import held_out
from axolotl_unlearn.errors import UnlearnError

#: Adam: two moments in float32; optimizers with "8bit" in their name keep a byte each.
_MOMENTS = 8


def outlook(
    cfg: dict[str, Any], read: dict[str, list[Record]], tables: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Facts about a config without faults, JSON-like; and faults that only tokens show.

    Args:
        read: The rows by role, as `check_records` has read them.
        tables: Token rows by role (`axolotl_unlearn.checks.rendered.token_rows`), if there are any.
    """
    args = parse_unlearn(cfg.get("unlearn") or {})
    if not args.trains:
        return {}, []
    facts: dict[str, Any] = {}
    rows, faults = {side: len(tables.get(side) or read.get(side, ())) for side in ROLES}, []
    documents = [pair_number(record.document) for record in read.get("retain", ())]
    if tables:
        from datasets import concatenate_datasets

        whole = concatenate_datasets([*tables.values()])
        try:
            check_loaded(cfg, whole)
            check_columns(args, whole)
        except UnlearnError as error:
            faults.append(str(error))
        if near := near_rows(whole):
            facts["near_duplicates"] = {"rows": near[0], "of": near[1]}
        documents = tables["retain"][DOCUMENT][:] if "retain" in tables else documents
    if size := cfg.get("val_set_size"):
        seed = 42 if cfg.get("seed") is None else cfg["seed"]
        try:
            rows["retain"] -= int(held_out(documents, size, sum(rows.values()), seed).sum())
        except UnlearnError as error:
            faults.append(str(error))
    facts["plan"] = plan(cfg, args, rows)
    facts["notes"] = warmup_note(cfg, facts["plan"].get("steps", 0))
    facts["tokens"] = {side: lengths(table) for side, table in tables.items()}
    longest = [one["longest"] for one in facts["tokens"].values()]
    facts["memory"] = memory(cfg, args, max(longest, default=cfg.get("sequence_len") or 2048))
    return {name: value for name, value in facts.items() if value}, faults


def lengths(rows: Any) -> dict[str, Any]:
    """Tokens and labels of the rows of a side, and how the first one is laid out."""
    each = sorted(rows["length"][:])
    labelled = sum(
        int((part.flatten().to_numpy() != IGNORE).sum())
        for part in rows.data.column("labels").chunks
    )
    facts = {"rows": len(each), "total": sum(each), "labelled": labelled}
    facts |= {"median": each[len(each) // 2], "longest": each[-1]}
    return facts | {"first": layout(rows[0]["labels"])}


# --- steps ---------------------------------------------------------------------------------------


def plan(cfg: dict[str, Any], args: UnlearnArgs, rows: dict[str, int]) -> dict[str, Any]:
    """Steps on one process, where the reference comes from, and forwards of a step."""
    facts: dict[str, Any] = {"objectives": [f"{s}/{e.objective}" for s, e in args.entries()]}
    batch = int(cfg.get("micro_batch_size") or 1)
    cuts = int(cfg.get("gradient_accumulation_steps") or 1)
    if rows["forget"] and (rows["retain"] or not args.retain):
        beside = args.pairing.retain_per_forget if args.retain else 0
        pairs = rows["forget"]  # of an epoch
        epoch = math.ceil(pairs / (batch * cuts))
        total = math.ceil(epoch * float(cfg.get("num_epochs") or 1))
        if args.phases:
            from axolotl_unlearn.training.phases import phase_steps

            total = sum(phase_steps(args, epoch))
        steps = min(cfg.get("max_steps") or total, total)
        facts |= {"steps": steps, "steps_of_an_epoch": epoch}
        if args.level:
            read = math.ceil(pairs * steps / epoch) * (1 + beside)
            facts["level"] = {"rows_of_steps": read, **looks(args, rows, steps)}
    references = args.references()
    facts["reference"] = [
        r.model or r.adapter or (_mode(cfg) if r.mode == "auto" else r.mode) for r in references
    ]
    before = [r.mode == "cached" or r.is_teacher for r in references]
    facts["forwards_of_a_step"] = {
        "with_gradient": cuts,
        "of_references": f"up to {cuts * before.count(False)}" if False in before else 0,
    }
    return facts


def looks(args: UnlearnArgs, rows: dict[str, int], steps: int) -> dict[str, int]:
    """What `unlearn.level` reads beside the steps: at most, since the run may end by itself."""
    from axolotl_unlearn.training.level import RETAIN_ROWS, looks_every

    unseen = read_records(args.level.heldout, args.data.fields, kind=args.data.default_kind)
    most = len(unseen) if args.level.per_document else args.level.rows
    heldout = sum(min(n, most) for n in Counter((r.kind, r.task) for r in unseen).values())
    kept = -(-rows["retain"] // max(1, rows["retain"] // RETAIN_ROWS)) * args.level.stop
    return {
        "looks": 1 + math.ceil(steps / (args.level.every or looks_every(steps))),
        "rows_of_a_look": rows["forget"] + heldout + kept,
        "rows_asked_before": rows["forget"] + heldout,
    }


def _mode(cfg: dict[str, Any]) -> str:
    fresh = cfg.get("adapter") and not cfg.get("lora_model_dir")
    return "adapter_off" if fresh else "frozen_copy"


# --- memory --------------------------------------------------------------------------------------


def memory(cfg: dict[str, Any], args: UnlearnArgs, longest: int) -> dict[str, int]:
    """Bytes on one device before activations; empty where the model's files are not here.

    Args:
        longest: Tokens of the longest row: of how many logits are computed at once.
    """
    shapes = dict(shapes_of(Path(str(cfg.get("base_model") or "nowhere"))))
    if not shapes:
        return {}
    numbers = sum(map(math.prod, shapes.values()))
    four_bit, eight_bit = cfg.get("load_in_4bit"), cfg.get("load_in_8bit")
    each = 0.5 if four_bit else 1 if eight_bit else 4 if cfg.get("bf16") in (None, False) else 2
    trained = numbers
    if cfg.get("adapter"):
        rank = int(cfg.get("lora_r") or 8)
        trained = rank * sum(sum(s) for n, s in shapes.items() if _has_lora(cfg, n, s))
    optimizer = str(cfg.get("optimizer") or "")
    moments = 2 if "8bit" in optimizer else 0 if optimizer == "sgd" else _MOMENTS
    copies = sum(r.mode == "frozen_copy" or (r.mode == "auto" and _mode(cfg) == "frozen_copy")
                 for r in args.references() if not r.is_teacher)  # fmt: skip
    rows = int(cfg.get("micro_batch_size") or 1)
    rows *= 1 + (args.pairing.retain_per_forget if args.retain else 0)
    # The matrix with the most rows: embeddings or head.
    vocabulary = max(shape[0] for shape in shapes.values())
    parts = {
        "weights": int(numbers * each) + (4 * trained if cfg.get("adapter") else 0),
        "gradients_and_optimizer": trained * (4 + moments),
        "reference": int(copies * (4 * trained if cfg.get("adapter") else numbers * each)),
        "logits": 3 * min(args.chunk_mib * 2**20, rows * longest * vocabulary * 4),
    }
    return parts | {"at_least": sum(parts.values())}


def shapes_of(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every tensor, from the heads of the files."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                yield from ((name, file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except SafetensorError:
            raise UnlearnError(
                f"{path} is cut off; write it again.", code="checks.cut-off"
            ) from None


def _has_lora(cfg: dict[str, Any], name: str, shape: list[int]) -> bool:
    if len(shape) != 2 or "embed" in name or "lm_head" in name:
        return False
    wanted = cfg.get("lora_target_modules")
    wanted = [wanted] if isinstance(wanted, str) else wanted
    return bool(cfg.get("lora_target_linear") or not wanted) or any(w in name for w in wanted)


# --- in words ------------------------------------------------------------------------------------


def lines(facts: dict[str, Any]) -> Iterator[str]:
    """The same for a terminal."""
    from rich.filesize import decimal

    if not facts:
        return
    yield from (f"  note: {note}" for note in facts.get("notes", ()))
    shown = {key: facts[key] for key in facts if key != "notes"}
    shown |= {"memory": {part: decimal(n) for part, n in facts.get("memory", {}).items()}}
    text = yaml.safe_dump({k: v for k, v in shown.items() if v}, sort_keys=False, width=100)
    yield from (f"  {line}" for line in text.splitlines())
    near = facts.get("near_duplicates", {})
    if near.get("rows"):
        yield (
            f"  note: {near['rows']} of {near['of']} retain rows hardly differ from forget rows, "
            "so what is forgotten would be kept."
        )
