"""What attacks write: one JSON file each, resumable."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from axolotl_unlearn.attacks.probes import MEASURES, Scores
from axolotl_unlearn.attacks.target import AttackTarget, bound_to
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.evaluation.sets import data_digests
from axolotl_unlearn.files import write_json
from axolotl_unlearn.report.terminal import grid
from axolotl_unlearn.store import Store, content_key, versions

SCHEMA = 1


def stored(
    store: Store, of: AttackTarget, records: Sequence[Record], how: Any, make: Callable[[], Scores]
) -> Scores:
    """The scores that the store knows, or those that ``make`` computes now, so that an interrupted
    attack goes on where it was."""
    key = scores_key(of.identity, rows_digest(records), how)
    if (known := store.get(key)) is None:
        store.put(key, known := asdict(make()))
    return Scores(**known)


def scores_key(*facts: Any) -> str:
    """Of scores: weights, rows, settings, versions; nothing stale is ever reused."""
    return content_key("attack", *facts, versions())


def rows_digest(records: Sequence[Record]) -> str:
    return content_key([(r.id, r.cluster, r.input, r.output, r.kind) for r in records])


def figures_row(
    variant: str, scores: Scores, before: Scores, control: Scores | None = None
) -> dict[str, Any]:
    """One line of an attack's result, beside the same probes ``before`` the attack and the same
    attack on the ``control``."""
    row = {
        "variant": variant,
        **scores.figures(),
        "before": before.only(scores.ids).figures(),
        "gain": scores.minus(before),
    }
    if control is not None:
        row["control"] = control.figures()
        row["above_control"] = scores.minus(control)
    return row


def result_of(
    attack: str,
    title: str,
    subject: AttackTarget,
    control: AttackTarget | None,
    rows: Sequence[Mapping[str, Any]],
    **more: Any,
) -> dict[str, Any]:
    """What an attack's file holds; ``limit`` too where rows have no input to ask with."""
    names = {"model": subject.name, "control": control.name if control else None}
    asked = sum(bool(record.input.strip()) for record in subject.records)
    more |= {"limit": asked} if asked < len(subject.records) else {}
    names |= bound_to(subject.spec, control.spec if control else None)
    names["max_new_tokens"] = subject.max_new_tokens
    return {"attack": attack, "title": title, **names, "rows": list(rows), **more}


def save(out: Path, result: Mapping[str, Any]) -> Path:
    """Write ``<attack>-<model>.json`` (of relearning on other rows than retained ones with their
    source), with digests of the forget file. What another run has found there stays: with other
    settings, weights or data the name has their digest."""
    name = result["attack"]
    if (source := result.get("source", "retain")) != "retain":
        name += f"-{safe_name(source)}"
    bound = {"data": data_digests(result["data_dir"], ("forget",))} if "data_dir" in result else {}
    made = {"schema": SCHEMA, **bound, **result}
    how, path = _how(made), out / f"{name}-{safe_name(result['model'])}.json"
    with suppress(OSError, ValueError, AttributeError, TypeError):  # of half a file
        # An older file says nothing of its tokens; it shows nothing, so it need not stay.
        tokens = {key: how[key] for key in how.keys() & {"max_new_tokens"}}
        if tokens | _how(json.loads(path.read_text("utf-8"))) != how:
            path = path.with_name(f"{path.stem}-{content_key(how)[:8]}.json")
    return write_json(path, made, private=True)


#: Of a file, what was found; all else is how.
_FOUND = {"rows", "tests", "documents", "sentence", "status", "missing", "reasons", "blind",
          "skipped", "title"}  # fmt: skip


def _how(file: Mapping[str, Any]) -> dict[str, Any]:
    """What a file's figures are of."""
    made = [row["variant"] for row in file.get("rows", ())] + [*file.get("tests", ())]
    how = {key: one for key, one in file.items() if key not in _FOUND} | {"made": sorted(made)}
    return json.loads(json.dumps(how, default=str))


def safe_name(name: str) -> str:
    """The name with only what file systems take."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def table(result: Mapping[str, Any]) -> Any:
    """The result as a rich table that fits 80 columns: a line for each variant and measure."""
    headings = ["before", "after", "gain"]
    if any("above_control" in row for row in result["rows"]):
        headings.append("above\ncontrol")
    title = f"{result['title']}: {result['model']} (n {result['rows'][0]['n']} rows)"
    made = grid(title, headings, "variant", "measure")
    for row in result["rows"]:
        for measure in MEASURES:
            gain, above = row["gain"][measure], row.get("above_control", {}).get(measure)
            shown = _with_interval(gain, "+")
            cells = [
                row["variant"] if measure == MEASURES[0] else "",
                measure,
                _with_interval(row["before"][measure]),
                _with_interval(row[measure]),
                Text(shown, "red" if gain["low"] > 0 else ""),
                _with_interval(above, "+") if above else "n/a",
            ]
            made.add_row(*cells[: 2 + len(headings)], end_section=measure == MEASURES[-1])
    made.caption = "Below each figure its 95 % interval over documents."
    return made


def _with_interval(figure: Mapping[str, float], sign: str = "") -> str:
    """Two lines: the figure, and its interval."""
    low, high = (f"{figure[end]:.2f}" for end in ("low", "high"))
    return f"{figure['value']:{sign}.3f}\n{low}{', ' if sign else '-'}{high}"
