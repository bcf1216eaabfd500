"""Write the numbers of the pages from their committed data: `make docs-tables`.

    python research/tables.py                   fill the pages anew
    python research/tables.py --check           exit code 1 if a page differs from its data
    python research/tables.py collect out/fresh/results.json [ANOTHER SEED'S ...] fresh
                                            commit a finished study

A page marks what is written here:

    <!-- table FILE KEY [COLUMN, ...] [| ROW, ...] -->   a table of research/results/FILE.json
    <!-- end -->
    <!--= FILE KEY ROW COLUMN -->.921<!--/-->   one cell of it

ROW is the beginning of a row, its first cells joined by " / "; COLUMN that of a column's name. A
file holds tables *as printed* ("tables": columns and rows of text, with the commit whose page
printed them), or a *study* (schema "study"; "seeds": per seed and model all scores, with versions,
machine and command), of which `analysis.study` makes the tables comparison, differences, seeds,
told, or a *leaderboard* (tables methods and chosen, by `analysis.leaderboard`), *tofu* and
*tofu-published* (by `analysis.tofu`), *membership* (by
`studies.membership`), or a *yardstick* ("of": a table's name and the data files
whose seeds it is of, by `analysis.never_seen`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from research.analysis import leaderboard, never_seen, study, tofu
from research.analysis.seeds import Table, markdown
from research.studies import membership

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    ROOT / "axolotl_unlearn" / "README.md",
    ROOT / "axolotl_unlearn" / "agents.md",
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
        sys.exit(f"{path} does not exist: run the study and `python research/tables.py collect`.")
    content = json.loads(path.read_text("utf-8"))
    made = OF_SCHEMA.get(content.get("schema"), lambda _: {})(content)
    return made | content.get("tables", {})


def of_study(content: dict[str, Any]) -> dict[str, Table]:
    """The tables of a study over seeds."""
    seeds = {int(seed): models for seed, models in content["seeds"].items()}
    return study.study_tables(seeds)


def of_yardstick(content: dict[str, Any]) -> dict[str, Table]:
    """How far models are apart that never saw the texts, by group of seeds."""
    stored = {
        file: json.loads((RESULTS / f"{file}.json").read_text("utf-8"))["seeds"]
        for files in content["of"].values()
        for file in files
    }
    return {
        name: never_seen.yardstick({k: v for file in files for k, v in stored[file].items()})
        for name, files in content["of"].items()
    }


def of_benchmark(content: dict[str, Any]) -> dict[str, Table]:
    """What a step costs beside other ways (`make bench`)."""
    made = json.loads((RESULTS / content["of"]).read_text("utf-8"))

    def ratio(other: str, plan: str = "step", ours: str = "ours") -> dict[str, float]:
        return made[plan]["ratios"][f"{ours} / {other}"]

    def row(name: str, target: str, *ratios: dict[str, float]) -> list[str]:
        costs = (" / ".join(f"{r[key]:.2f}" for r in ratios) for key in ("time", "memory"))
        return [name, *costs, target]

    rows = []
    for other, name, target in (
        ("zjuklab", "ZJUKLAB's way (second model, padded to 256, retain rows twice)", "0.33, 0.55"),
        (
            "framework",
            "the framework's way (second model, sides apart, whole logits)",
            "0.40, 0.55",
        ),
        ("finetune", "plain LoRA fine-tuning on the same padded rows", "1.25, 1.1"),
        ("finetune_packed", "plain LoRA fine-tuning with packed rows", ""),
    ):
        rows.append(row(name, target, ratio(other)))
        if other in ("zjuklab", "framework"):
            rows[-1][1] += f" ({1 / ratio(other)['time']:.1f}x faster)"
    packed = "finetune_packed"
    rows += [
        row("the same, first epoch", "", ratio(packed, ours="ours_first_epoch")),
        row("the same, labels on whole documents", "", ratio(packed, "step_document")),
        row(
            "without KL, against padded / packed fine-tuning",
            "1.05",
            *(ratio(other, ours="ours_npo_nll") for other in ("finetune", packed)),
        ),
    ]
    first = "our step (NPO + NLL + KL, adapter off; second epoch on) against"
    return {"speed-and-memory": {"columns": [first, "time", "memory", "target"], "rows": rows}}


#: How the tables of a data file are made of its numbers.
OF_SCHEMA = {
    "study": of_study,
    "leaderboard": leaderboard.tables,
    "tofu": tofu.tables,
    "tofu-published": tofu.published_tables,
    "yardstick": of_yardstick,
    "membership": membership.tables,
    "benchmark": of_benchmark,
}


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


def collect(results: Path, name: str, *more: Path) -> Path:
    """Copy a study's results into research/results (``more``: other seeds'), no text, no path."""
    content = json.loads(results.read_text("utf-8"))
    for path in more:
        content["seeds"] |= json.loads(path.read_text("utf-8"))["seeds"]
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("collect", nargs="*", help="collect RESULTS NAME")
    given = parser.parse_args()
    if given.collect:
        _, results, *more, name = given.collect
        print(collect(Path(results), name, *map(Path, more)))
        return
    differ = [page for page in PAGES if filled(page.read_text("utf-8")) != page.read_text("utf-8")]
    for page in differ:
        if not given.check:
            page.write_text(filled(page.read_text("utf-8")), "utf-8")
        print(f"{page.relative_to(ROOT)}: {'differs' if given.check else 'written'}")
    if given.check and differ:
        sys.exit("run `make docs-tables`")


if __name__ == "__main__":
    main()
