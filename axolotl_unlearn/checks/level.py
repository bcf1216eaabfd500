"""What `match` and objectives that compare with held-out rows need."""

from __future__ import annotations

import os
from pathlib import Path

from axolotl_unlearn.checks.config import told
from axolotl_unlearn.config import UnlearnArgs
from axolotl_unlearn.objectives import OBJECTIVES


def level_faults(cfg: dict, args: UnlearnArgs) -> list[str]:
    """What `match` aims at, and what compares with held-out rows."""
    level, names = args.level, dict.fromkeys(entry.objective for entry in args.forget)
    matched = [e.reference or args.reference for e in args.forget if e.objective == "match"]
    before = [s.is_teacher or (s.mode == "cached" and level) for s in matched]
    faults = told(
        (not all(before),
         "`match` would aim at the starting model's own level, so nothing would be forgotten: give "
         "a teacher (`reference: {model: PATH}`), or `reference: cached` and held-out rows in "
         "`unlearn.level`."),
    )  # fmt: skip
    if level is None:
        return faults + [
            f"`{name}` compares with held-out rows: give `unlearn.level: {{heldout: FILE}}`."
            for name in names
            if OBJECTIVES[name].against_heldout
        ]
    return faults + told(
        (len(set(matched)) > 1,
         "`unlearn.level` reads one reference: give all `match` entries the same."),
        (not os.path.isfile(level.heldout),
         f"`unlearn.level.heldout: {level.heldout}` is no file; give rows of the same kinds as the "
         "forget rows that the model never saw."),
        (not matched,
         "`unlearn.level` is what `match` aims at, but no forget objective is `match`: add one or "
         "remove the block."),
        (level.certainty and "nckd" not in names,
         "`unlearn.level.certainty` sets the temperature of `nckd`, but no forget objective is "
         "`nckd`: add one or remove the key."),
    )  # fmt: skip


def level_notes(cfg: dict, args: UnlearnArgs) -> list[str]:
    """What a run towards a level can be expected to leave, or holds retained rows to."""
    notes = []
    matched = [e.reference or args.reference for e in args.forget if e.objective == "match"]
    if matched and not all(source.is_teacher for source in matched):
        notes.append(
            "without a model from before (`reference: cached`) attacks still tell what "
            "was forgotten: on a development seed AUCs of 0.74 (loss) to 0.89 (learned) remained, "
            "with a teacher 0.50 and 0.65 (docs/never-seen.md)."
        )
    elif matched:
        notes.append(
            "an attacker with the weights can still tell by gradients what was forgotten: on a "
            "development seed G-Drift had an AUC of 0.69 [0.55, 0.86], beside a retrained model "
            "0.49 (docs/never-seen.md)."
        )
    start = Path(str(cfg.get("base_model"))) / "merge.json"
    if args.teacher and args.original is None and os.path.isfile(start):
        notes.append(
            f"retained rows are held to `base_model: {cfg['base_model']}`, which is a merge: if it "
            "is the start halfway to the teacher, name the model before it as `unlearn.original`."
        )
    return notes
