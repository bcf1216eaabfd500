"""Write the numbers of the pages from their committed data: `make docs-tables`.

    python research/tables.py            fill the pages anew
    python research/tables.py --check    exit code 1 if a page differs from its data

A page marks what is written here:

    <!-- table FILE KEY [COLUMN, ...] [| ROW, ...] -->   a table of research/results/FILE.json
    <!-- end -->
    <!--= FILE KEY ROW COLUMN -->.921<!--/-->   one cell of it

ROW is the beginning of a row, its first cells joined by " / "; COLUMN that of a column's name. A file
holds ``tables`` (columns and rows of text) beside the figures that they were made of, the command and
the versions; a file ``{"of": "../benchmarks/results.json"}`` is a table of `make bench`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from research.analysis.seeds import Table, markdown

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    ROOT / "examples" / "smollm2" / "CARDS.md",
    ROOT / "research" / "README.md",
    ROOT / "axolotl_unlearn" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "research" / "notebook").glob("*.md")),
)
TABLE = re.compile(r"(<!-- table (\S+) (\S+)(?: ([^>]*?))? -->\n).*?(<!-- end -->)", re.S)
CELL = re.compile(r"(<!--= (\S+) (\S+) (.+?) (\S+) -->)[^<]*(<!--/-->)")


@cache
def tables(file: str) -> dict[str, Table]:
    """All tables of a data file."""
    path = RESULTS / f"{file}.json"
    if not path.is_file():
        sys.exit(f"{path} does not exist.")
    content = json.loads(path.read_text("utf-8"))
    return content["tables"] if "tables" in content else of_benchmark(content)


def of_benchmark(content: dict[str, Any]) -> dict[str, Table]:
    """What a step costs beside other ways (`make bench`, `make bench-gpu`)."""
    made = json.loads((RESULTS / content["of"]).read_text("utf-8"))
    if "gpu" in made:
        return {"steps": of_gpu(made)}

    rows = []
    for plan, ratio, name in (
        ("step", "ours / zjuklab", "ZJUKLAB's (second model, padded to 256, retain rows twice)"),
        ("step", "ours / framework", "the framework's (second model, sides apart, whole logits)"),
        ("step", "ours / finetune", "plain LoRA fine-tuning on the same padded rows"),
        ("step", "ours / trl", "TRL's SFT trainer with `padding_free`"),
        ("step", "ours / finetune_packed", "plain LoRA fine-tuning with packed rows"),
        ("step", "ours_first_epoch / finetune_packed", "the same, first epoch"),
        ("step_document", "ours / finetune_packed", "the same, labels on whole documents"),
        ("step", "ours_npo_nll / finetune_packed", "packed fine-tuning, ours without KL"),
    ):
        if one := made.get(plan, {}).get("ratios", {}).get(ratio):
            rows.append([name, *(f"{one[key]:.2f}" for key in ("time", "cpu_time", "memory"))])
    first = "our step (NPO + NLL + KL, adapter off; second epoch on) against"
    columns = [first, "time", "processor time", "memory"]
    return {"speed-and-memory": {"columns": columns, "rows": rows}}


def of_gpu(made: dict[str, Any]) -> Table:
    """A row a step; its cost by the seconds of the GPU, where those are missing by the clock's."""
    names = {
        "finetune_packed": "packed fine-tuning",
        "first_epoch": "ours, first epoch",
        "later_epochs": "ours, later epochs",
        "cached": "ours, `reference: cached`",
        "match": "`match`",
    }
    parts = {
        "checkpointing": "",
        "no_checkpointing": ", no checkpointing",
        "match": "",
        "documents_8_x_2048": ", eight documents of 2048 tokens",
    }
    rows = []
    for part, more in parts.items():
        for way in (way for way in names if way in made[part]):
            one = made[part][way]
            ratio = one.get("gpu_seconds_ratio", one.get("seconds_ratio"))
            if ratio or "kernels" in one:  # of other fine-tunings the ratio alone is told
                clock = f"{one['seconds']:.2f} ({one['least_seconds']:.2f})"
                gpu = f"{one['gpu_seconds']:.3f}" if "gpu_seconds" in one else ""
                counts = (one.get(key, "") for key in ("kernels", "waits"))
                memory = f"{one['peak_gb']:.1f}"
                rows.append([names[way] + more, clock, gpu, f"{ratio or 1:.2f}", *counts, memory])
    columns = ["step", "s, median (least)", "s of the GPU", "of fine-tuning"]
    return {"columns": [*columns, "kernels", "waits", "GB"], "rows": rows}


def chosen(table: Table, names: str | None) -> Table:
    """Some columns of a table, in the order asked for; the first always. After "|" some rows."""
    if not names:
        return table
    names, _, rows = names.partition("|")
    first, *_ = table["columns"]
    wanted = [first, *(name.strip() for name in names.split(",") if name.strip())]
    at = [table["columns"].index(name) for name in wanted]
    kept = [name.strip() for name in rows.split(",") if name.strip()]
    return {
        "columns": wanted,
        "rows": [[row[i] for i in at] for row in table["rows"] if not kept or row[0] in kept],
    }


def cell(file: str, key: str, row: str, column: str) -> str:
    table = tables(file)[key]
    found = [r for r in table["rows"] if " / ".join(map(str, r)).startswith(row)]
    if len(found) != 1:
        sys.exit(f"{file} {key}: {len(found)} rows begin with {row!r}.")
    at = [i for i, name in enumerate(table["columns"]) if name.startswith(column)]
    return str(found[0][at[0]])


def filled(text: str) -> str:
    """A page with all its tables and cells made anew."""
    text = TABLE.sub(lambda m: m[1] + markdown(chosen(tables(m[2])[m[3]], m[4])) + m[5], text)
    return CELL.sub(lambda m: m[1] + cell(m[2], m[3], m[4], m[5]) + m[6], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args()
    differ = [page for page in PAGES if filled(page.read_text("utf-8")) != page.read_text("utf-8")]
    for page in differ:
        if not given.check:
            page.write_text(filled(page.read_text("utf-8")), "utf-8")
        print(f"{page.relative_to(ROOT)}: {'differs' if given.check else 'written'}")
    if given.check and differ:
        sys.exit("run `make docs-tables`")


if __name__ == "__main__":
    main()
