"""`axolotl-unlearn report`: results.json to one HTML page and one table."""

from __future__ import annotations

import json
from pathlib import Path

import click

from axolotl_unlearn.cli._options import PATH, Answer


@click.command("report")
@click.argument("folder", type=PATH)
@click.option("--out", type=PATH, help="Page to write [FOLDER/report.html].")
@click.option("--attacks", type=PATH, help="More files of `axolotl-unlearn attack`.")
def command(folder: Path, out: Path | None, attacks: Path | None):
    """Write the HTML report of an evaluation and print its table.

    FOLDER holds the results.json of `axolotl-unlearn eval` (the file itself will do).
    """
    from axolotl_unlearn.files import declare
    from axolotl_unlearn.report import answer_of, find_inputs, load_results, table, write_report

    results = load_results(folder)
    extras = find_inputs(results, folder, attacks)
    out = out or (folder if folder.is_dir() else folder.parent) / "report.html"
    if (results.more.get("settings") or {}).get("keep_texts"):
        declare(out.parent, out, "texts")
    page = write_report(results, out, extras=extras)
    file = folder / "results.json" if folder.is_dir() else folder
    judged = answer_of(results, extras["attack_results"])
    facts = {
        "page": page,
        "file": file,
        **json.loads(file.read_text("utf-8")),
        "verdicts": judged.labels,
    }
    return Answer(facts, [table(judged), *judged.reasons, f"Report: {page}"])
