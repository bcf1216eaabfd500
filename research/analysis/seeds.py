"""Values over seeds: mean, interval, and how tables write them."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.store import versions

#: ``{"columns": [...], "rows": [[...]]}`` of text.
Table = dict[str, list]


def interval_over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95 % interval over seeds (Student's t); nan for one seed."""
    from scipy.stats import t

    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return mean, float(t.ppf(0.975, len(values) - 1)) * error


def smallest_difference(values: Sequence[float]) -> float:
    """From which mean on a t-test (5 %) of so many seeds, scattered like these, finds it in 4 of 5."""
    from scipy.special import nctdtrinc, stdtrit

    free = len(values) - 1
    shift = nctdtrinc(free, 0.2, stdtrit(free, 0.975))
    return float(shift) * statistics.stdev(values) / math.sqrt(len(values))


def with_half_width(value: tuple[float, float], sign: bool = False) -> str:
    mean, half = value
    shown = f"{mean:+.3f}" if sign else f"{mean:.3f}"
    return shown if math.isnan(half) else f"{shown} ± {half:.3f}"


def markdown(table: Table) -> str:
    """A table as markdown, with its last line end."""
    lines = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def facts(command: str) -> dict[str, Any]:
    """What makes results comparable: command, versions, machine."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    machine = {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system()}
    found = {"python": platform.python_version(), **versions()}
    return {"command": command, "versions": found, "machine": machine}
