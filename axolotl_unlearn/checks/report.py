"""What ``axolotl-unlearn check`` says of a config: its faults, or what the run would do."""

from __future__ import annotations

import copy
import difflib
import logging
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from axolotl_unlearn.checks import axolotl_options
from axolotl_unlearn.checks.config import config_faults, setting_notes, untrainable
from axolotl_unlearn.config import ObjectiveArgs, parse_unlearn
from axolotl_unlearn.config.reading import read_config
from axolotl_unlearn.data.checks import check_records, role_of
from axolotl_unlearn.data.coverage import RowCounts
from axolotl_unlearn.data.records import short
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.objectives import OBJECTIVES


def check(
    path: Path, full: bool = False, show: int = 0
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Faults of a config file; without one, lines that say what the run would do, and facts.

    Args:
        full: Also what tokens, Axolotl's own checks and the heads of weight files show.
        show: Rows of each side that the lines hold as the model will read them.

    Raises:
        UnlearnError: The file cannot be read at all.
    """
    cfg = read_config(path)
    entries = cfg["datasets"] if isinstance(cfg.get("datasets"), list) else []
    if not cfg.get("unlearn") and "memorise" not in map(role_of, entries):
        near = difflib.get_close_matches("unlearn", map(str, cfg), n=1, cutoff=0.7)
        cure = "add `unlearn: {preset: ...}`; `axolotl-unlearn request new` takes fine-tuning runs."
        cure = f"did you mean `{near[0]}` to be it?" if near else cure
        return [f"{path} has no `unlearn:` block; {cure}"], [], {}
    lacks = untrainable(cfg)
    checked = check_records(cfg)
    faults = [*config_faults(cfg, trains=True), *[lacks] * bool(lacks), *checked.faults]
    if faults:
        return faults, [], {}
    lines, facts = summary(cfg, checked.counts), {}
    unread = ", ".join(f"`{short(key)[1:-1]}`" for key in axolotl_options.ignored(cfg))
    what = "no option of Axolotl, read by other plugins at most"
    data = (cfg.get("unlearn") or {}).get("data") or {}
    untried = (data.get("rows") or data.get("chat_template")) and not (full or show)
    how = "whether the template renders the rows was not tried; `--full` or `--show 1` does."
    notes = [f"{what}: {unread}"] * bool(unread) + checked.notes + [how] * bool(untried)
    lines += [f"  note: {one}" for one in notes]
    try:
        if cfg.get("resume_from_checkpoint"):
            from axolotl_unlearn.training.resume import choose_checkpoint

            choose_checkpoint(cfg)
        if full or show:
            from axolotl_unlearn.checks import estimate

            tokenizer, tables = estimate.tokenizer_of(cfg), {}
            if tokenizer is not None:
                tables, faults = estimate.token_rows(cfg, tokenizer)
                faults += estimate.teacher_faults(cfg, tokenizer)
            else:
                lines.append("  note: the tokenizer is not on this machine: no tokens were made.")
            lines += estimate.lines_of(tables, tokenizer, show)
        if full and not faults:
            facts, faults = estimate.outlook(cfg, checked.sides, tables)
            faults += axolotl_faults(copy.deepcopy(cfg)) + objective_faults(cfg)
            lines += estimate.lines(facts)
    except UnlearnError as error:
        faults.append(str(error))
    return faults, lines, facts


def objective_faults(cfg: dict) -> list[str]:
    """What objectives of the user's own return of made-up scores."""
    from axolotl_unlearn.engine.views import tried

    faults = []
    for _, entry in parse_unlearn(cfg.get("unlearn") or {}).entries():
        own = OBJECTIVES[entry.objective]
        if own.function.__module__.startswith("axolotl_unlearn.") or own.against_heldout:
            continue
        try:
            tried(entry)
        except UnlearnError as error:
            faults.append(str(error))
        except Exception as error:  # of code of the user's
            faults.append(
                f"objective {own.name}: its function fails on made-up scores "
                f"({type(error).__name__}: {error}); see docs/add-objective.md."
            )
    return faults


def axolotl_faults(cfg: dict) -> list[str]:
    """What Axolotl itself finds wrong, as `axolotl train` would."""
    from axolotl.cli.config import gpu_capabilities, prepare_plugins
    from axolotl.utils.config import validate_config
    from pydantic import ValidationError

    from axolotl_unlearn.versions import DictDefault

    cfg = DictDefault(cfg)
    capabilities, environment = gpu_capabilities()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what it logs is said when it trains
    try:
        prepare_plugins(cfg)
        validate_config(cfg, capabilities=capabilities, env_capabilities=environment)
    except ValidationError as error:
        return [
            f"Axolotl refuses `{'.'.join(map(str, fault['loc'])) or 'the config'}`: {fault['msg']}."
            for fault in error.errors()
        ]
    except Exception as error:  # its validators meet what they do not expect
        return [f"Axolotl refuses the config: {error} ({type(error).__name__})."]
    finally:
        logging.disable(before)
    return []


def summary(cfg: dict, counts: RowCounts) -> list[str]:
    """What a faultless config would do, in a few lines."""
    args = parse_unlearn(cfg["unlearn"]) if cfg.get("unlearn") else None
    if args is None or not args.trains:
        return ["memorises; no objective of unlearning"]
    lines = [f"preset {args.preset} is short for"] if args.preset else []
    lines += args.expanded().splitlines() if args.preset else []
    for number, phase in enumerate(args.phases or [args], 1):
        if args.phases:
            lines.append(f"phase {number}{_keys(phase, 'forget', 'retain')}:")
        lines += [_line(side, entry, counts) for side, entry in phase.entries()]
    notes = [*axolotl_options.noted(cfg).values(), *counts.notes(args), *setting_notes(cfg)]
    return lines + [f"  note: {note}" for note in notes]


def _keys(block: BaseModel, *without: str) -> str:
    """What a config says in a block."""
    given = block.model_dump(exclude_unset=True, exclude_none=True, exclude={*without})
    return "".join(f", {key}={value}" for key, value in given.items())


def _line(side: str, entry: ObjectiveArgs, counts: RowCounts) -> str:
    """One objective of a config."""
    known = OBJECTIVES[entry.objective]
    extra = _keys(entry, "objective", "weight", "reference")
    rows = counts.of_entry(side, entry)
    unit = known.unit(entry.parameters)
    return (
        f"  {side}/{entry.objective:<{24 - len(side)}} weight {entry.weight:g}, mean over "
        f"{unit}{'e' * (unit == 'batch')}s{extra}{f', for {rows} rows' if rows else ''}"
        f"  [{known.source}]"
    )
