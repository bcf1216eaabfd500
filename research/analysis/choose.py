"""Which models of an evaluation keep a stated risk: ``python -m research choose``.

After FROC (arXiv 2512.13337), which chooses among configurations under a risk budget. How the paper
calibrates its risk (CUR) was not found, so the control is Learn then Test (arXiv 2110.01052), which
holds for any set of models and any bounded loss: Hoeffding-Bentkus p-values, corrected by Holm.
FROC's own score is in `research.analysis.froc`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.intervals import holm

CONTROLS = (
    "Valid: over documents like these, extraction strength is on average at most {risk:g} above "
    "the retrained model's; the chance that any model is called valid wrongly is at most {delta:g},"
    " if documents are independent. It says nothing of a single document, of membership, of other "
    "prompts, or of what a little training brings back."
)


def above_p(values: Sequence[float], bound: float) -> float:
    """p of "the mean of losses in [0, 1] is above the bound" (Hoeffding and Bentkus together)."""
    n, mean = len(values), float(np.mean(values))
    if mean >= bound:
        return 1.0
    kl = (1 - mean) * math.log((1 - mean) / (1 - bound))
    kl += mean * math.log(mean / bound) if mean else 0.0
    bentkus = math.e * float(binom.cdf(math.ceil(n * mean - 1e-9), n, bound))
    return min(1.0, math.exp(-n * kl), bentkus)


def risks(folder: Path) -> dict[str, list[float]]:
    """Of each candidate, document by document: how far its extraction strength is above the
    retrained model's, at least 0.

    Raises:
        UnlearnError: No audit of forgotten documents, or none beside a retrained model.
    """
    path = folder / "audit.jsonl"
    if not path.is_file():
        raise UnlearnError(f"{folder} has no audit.jsonl: give a folder of `axolotl-unlearn eval`.")
    found: dict[str, list[float]] = {}
    for line in read_json_lines(path):
        told, floor = line.get("extraction_strength"), line.get("retrained") or {}
        if not all(isinstance(x, float) for x in (told, floor.get("extraction_strength"))):
            raise UnlearnError(
                f"{path} has no extraction strength of each document beside a retrained model's; "
                "evaluate with one (`retrained=FOLDER`)."
            )
        found.setdefault(line["model"], []).append(max(0.0, told - floor["extraction_strength"]))
    if not found:
        raise UnlearnError(f"{path} is empty: evaluate at least one candidate.")
    return found


def chosen(
    found: Mapping[str, Sequence[float]],
    kept: Mapping[str, float | None],
    risk: float,
    delta: float = 0.05,
) -> dict[str, dict[str, Any]]:
    """Each model's mean risk, corrected p and whether it is valid; of the valid ones that which
    ``kept`` most first."""
    p_values = holm([above_p(values, risk) for values in found.values()])
    rows = {
        name: {
            "valid": bool(p <= delta), "risk": float(np.mean(values)), "documents": len(values),
            "p": float(p), "kept": kept.get(name),
        }
        for (name, values), p in zip(found.items(), p_values, strict=True)
    }  # fmt: skip
    order = sorted(rows, key=lambda name: (not rows[name]["valid"], -(rows[name]["kept"] or 0.0)))
    return {name: rows[name] for name in order}
