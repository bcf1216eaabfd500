"""What belongs beside results.json in a report: the audit and what attacks say."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.audit import audits, with_attacks
from axolotl_unlearn.metrics.results import (
    Attack,
    Results,
    attack_results,
    folder_of,
    load_results,
    read,
)
from axolotl_unlearn.metrics.verdict import sentence, told_by_attacks

#: Of a row of audit.jsonl, where the texts were kept.
TEXTS = ("prompt", "expected", "generated")


def find_inputs(
    results: Results | Mapping[str, Any],
    folder: str | Path,
    attacks: str | Path | None = None,
) -> dict[str, Any]:
    """``extras`` of `write_report`: the audit of the results, with texts that audit.jsonl of the
    folder holds; of the folder, and of `attacks`, one file an attack."""
    home, results = folder_of(folder), load_results(results)
    place = Path(attacks or home)
    attacked = attack_results(place)
    if attacks and not attacked:
        raise UnlearnError(
            f"--attacks {place}: no attack's file there; `axolotl-unlearn attack ... --out {place}`"
            " makes one.",
            code="report.no-attacks",
        )
    if place.resolve() != home.resolve():
        attacked = [*attack_results(home), *attacked]
    says: dict[str, list[str]] = {}  # of runs with several settings all
    for one in attacked:
        with suppress(UnlearnError):  # of a file that is not whole; the verdict says so
            file = read(Attack, one)
            says.setdefault(f"{file.attack} on {file.model}", []).append(sentence(file))
    lines = [{"model": m, **one} for m, each in audits(results.models).items() for one in each]
    lines = with_attacks(lines, told_by_attacks(results, attacked))
    return {
        "audit": _with_texts(lines, home / "audit.jsonl"),
        "attack_results": attacked,
        "attack_sentences": {name: " ".join(some) for name, some in says.items()},
    }


def _with_texts(lines: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The texts of a row alone are taken from the file."""
    kept = {}
    for line in read_json_lines(path) if path.is_file() else ():
        rows = line.get("rows")
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, Mapping):
                kept[str(line.get("model")), str(row.get("id"))] = row
    for line in lines:
        for row in line["rows"]:
            texts = kept.get((line["model"], row["id"]), {})
            row |= {key: str(texts[key]) for key in TEXTS if key in texts}
    return lines
