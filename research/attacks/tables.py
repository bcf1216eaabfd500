"""Tab-MIA: a row of a table, asked for in each encoding that it may have been learned in.

arXiv 2507.17259: what a model memorised of a row depends on how the row was written out. A text
that is one row in any of these encodings is read and written in all of them; the formats are those
of the paper's released code. Scored by Min-K% (k = 20 %), one of the paper's attacks.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from axolotl_unlearn.attacks.registry import Array, Target, attack
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.memorisation import min_k

Row = Mapping[str, str]


def _line(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


def _html(row: Row) -> str:
    lines = [
        "  <tr>\n" + "".join(f"    <td>{cell}</td>\n" for cell in cells) + "  </tr>\n"
        for cells in (row, row.values())
    ]
    return f"<table>\n{''.join(lines)}</table>"


def _markdown(row: Row) -> str:
    sizes = [max(3, len(name), len(value)) for name, value in row.items()]
    cells = [row.keys(), ["-" * size for size in sizes], row.values()]
    return "\n".join(
        "| " + " | ".join(c.ljust(size) for c, size in zip(line, sizes, strict=True)) + " |"
        for line in cells
    )


#: How a row is written, by the name of the encoding.
ENCODINGS: dict[str, Callable[[Row], str]] = {
    "json": lambda row: json.dumps([dict(row)], indent=4, ensure_ascii=False),
    "html": _html,
    "markdown": _markdown,
    "key_value": lambda row: " | ".join(f"{name}: {value}" for name, value in row.items()),
    "key_is_value": lambda row: ", ".join(f"{name} is {v}" for name, v in row.items()) + ".",
    "line": lambda row: f"{_line(list(row))}\n{_line(list(row.values()))}",
}


def read_row(text: str) -> dict[str, str]:
    """The row that a text in one of `ENCODINGS` holds (JSON also without the list around it).

    Raises:
        UnlearnError: It is none, or its encoding is ambiguous.
    """
    text = text.strip()
    cells: list[list[str]] = []
    if text[:1] in ("{", "["):
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            found = None
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
        if isinstance(found, dict) and found:
            return {str(name): str(value) for name, value in found.items()}
    elif text.startswith("<table>"):
        rows = re.findall(r"<tr>(.*?)</tr>", text, re.S)
        cells = [re.findall(r"<td>(.*?)</td>", row, re.S) for row in rows]
    elif text.startswith("|"):
        lines = [
            [c.strip() for c in line.strip().strip("|").split("|")] for line in text.split("\n")
        ]
        cells = [lines[0], *lines[2:]]
    elif "\n" in text:
        cells = list(csv.reader(io.StringIO(text)))
    else:
        pairs, cut = (text.split(" | "), ": ") if ": " in text else (text[:-1].split(", "), " is ")
        if all(cut in pair for pair in pairs) and (cut == ": " or text.endswith(".")):
            cells = list(zip(*(pair.split(cut, 1) for pair in pairs), strict=True))
    if len(cells) != 2 or len(cells[0]) != len(cells[1]) or len(set(cells[0])) != len(cells[0]):
        raise UnlearnError(
            "a text is not one row of a table in a known encoding (json, html, markdown, "
            "key_value, key_is_value, line with a header)."
        )
    return dict(zip(*cells, strict=True))


def _look(name: str, target: Target, texts: Sequence[str]) -> Array:
    rows = [read_row(str(text)) for text in texts]
    return np.array([min_k(facts) for facts in target.facts([ENCODINGS[name](r) for r in rows])])


for _name in ENCODINGS:
    attack(
        f"table_{_name}",
        "label log-probs",
        "1 forward",
        "Tab-MIA, arXiv 2507.17259, formats of its code; a markdown cell is always left-aligned",
        default=False,
    )(partial(_look, _name))
