"""``axolotl unlearn request``: make, run and look at deletion requests."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import click

from axolotl_unlearn.cli import _audit, _derived, _erase, _export, _record, _suppress, _ways
from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.cli._options import lines
from axolotl_unlearn.cli._ray import RayCommand
from axolotl_unlearn.cli._requests import COMMANDS
from axolotl_unlearn.errors import UnlearnError

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def command() -> None:
    """Delete rows of the training data from a fine-tuned model, with the proof.

    \b
    axolotl unlearn request new finetune.yml --where id=ada-quill --out requests/2026-001
    axolotl unlearn request run requests/2026-001
    axolotl unlearn request audit MODEL requests/  later: is anything back?
    """


def _pairs(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> list[tuple[str, str]]:
    found = [text.partition("=") for text in lines(context, option, given)]
    for number, (name, equals, _value) in enumerate(found, start=1):
        if not (name and equals):
            raise UnlearnError(f"--where, value {number}: it must be FIELD=VALUE.")
    return [(name, value) for name, _equals, value in found]


def _quietly() -> None:
    """No config of hundreds of lines, no warnings of kernels that nobody asks for here."""
    os.environ.setdefault("AXOLOTL_LOG_LEVEL", "WARNING")
    # What is deleted is nobody's business; without a network it also waits for ever at the end.
    os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")
    logging.disable(logging.WARNING)  # `axolotl unlearn` has read the level already
    click.get_current_context().call_on_close(lambda: logging.disable(logging.NOTSET))


@command.command("new")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option(
    "--where", multiple=True, callback=_pairs, help="FIELD=VALUE; of nested objects meta.id=..."
)
@click.option("--person", "people", multiple=True, callback=lines, help="Rows with this name.")
@click.option("--contains", multiple=True, callback=lines, help="Rows with this text.")
@click.option("--matches", "patterns", multiple=True, callback=lines, help="Regular expression.")
@click.option("--rows", type=_FILE, help="Rows as they stand in the training data.")
@click.option(
    "--documents", multiple=True, callback=lines, help="Values of `document` or `id`, with commas."
)
@click.option(
    "--subjects",
    type=_FILE,
    help="Names, one a line, or JSON lines with `subject`, `person`, ...: a record for each.",
)
@click.option("--with-near", is_flag=True, help="Also the near-duplicates that are found.")
@click.option("--with-mentions", is_flag=True, help="Also the rows that mention the same names.")
@click.option("--heldout", type=_FILE, help="Rows that it never saw.  [test set of CONFIG]")
@click.option(
    "--model", type=click.Path(path_type=Path), help="[last one of the ledger, CONFIG's output_dir]"
)
@click.option("--retain", type=click.IntRange(1), help="Retained rows at most.")
@click.option("--steps", type=click.IntRange(1), help="Budget.  [400]")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Budget.")
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), help="[half of CONFIG's]")
def new(
    config: Path,
    out: Path,
    where: list[tuple[str, str]],
    people: list[str],
    contains: list[str],
    patterns: list[str],
    rows: Path | None,
    documents: list[str],
    subjects: Path | None,
    **given,
) -> None:
    """Choose the rows of CONFIG's training data that its model is to forget.

    CONFIG is the one that made the model, by plain `axolotl train`, with datasets of any type. The
    rest of its rows is kept. Rows that say the same are named, and taken only if you say so. What
    is typed stays in the shell's history and in `ps`: `@FILE` reads values from a file, one a line,
    and `@-` from the standard input.

    \b
    Example:
      axolotl unlearn request new finetune.yml --where id=ada-quill --out requests/2026-001
      axolotl unlearn request new finetune.yml --person @names.txt --out requests/2026-002
      axolotl unlearn request new finetune.yml --subjects week-48.jsonl --out requests/2026-w48
    """
    _quietly()
    from axolotl_unlearn.requests.choose import Wanted
    from axolotl_unlearn.requests.new import Options, new_request
    from axolotl_unlearn.requests.request import counted
    from axolotl_unlearn.requests.subjects import read_subjects, together

    documents = [one.strip() for part in documents for one in part.split(",") if one.strip()]
    wanted = Wanted(where, contains, rows, documents, people, patterns)
    if subjects:
        if any(vars(wanted).values()):
            raise UnlearnError("--subjects names all rows; leave the other options out, or it.")
        given["subjects"] = read_subjects(subjects)
        wanted = together(given["subjects"])
    options = Options(**{name: value for name, value in given.items() if value is not None})
    made = new_request(config, out, wanted, options)
    facts = made.request.facts
    counts = facts["counts"]
    answer(
        folder=out,
        counts=counts,
        chosen=facts["chosen"],
        offered=made.offered.reasons,
        limits=facts["limits"],
        other_ledgers=made.other_ledgers,
    )
    click.echo(
        f"{out}: {counted(counts['forget'], 'row')} to forget, {counts['retain']} of "
        f"{counts['trained'] - counts['forget']} others to keep verbatim, {counts['heldout']} "
        f"held-out rows set the level and {counts['judge']} judge."
    )
    if others := facts["chosen"]["other_forms"]:
        click.echo(
            f"{counted(others, 'named row')} found in another spelling than you wrote (capitals, "
            f"Unicode form, spaces, dashes, quotes); see {out / 'data' / 'forget.jsonl'}."
        )
    if made.offered.near and not options.with_near:
        click.echo(
            f"{len(made.offered.near)} retained rows are nearly the same as rows to forget "
            "(--with-near takes them)."
        )
    for name, ids in made.offered.mentions.items() if not options.with_mentions else ():
        click.echo(f"{len(ids)} retained rows also say {name!r} (--with-mentions takes them).")
    for name, count in made.offered.frequent.items():
        click.echo(
            f"{count} retained rows say {name!r}, too many to be offered (--contains takes them)."
        )
    if made.offered.reasons:
        click.echo(f"Each of them with its reason: {out / 'offered.json'}")
    for other in made.other_ledgers:
        click.echo(
            f"{out.parent} begins a new ledger; the requests in {other} are not looked for in what "
            "this one makes."
        )
    if options.subjects:
        click.echo(f"{counted(len(options.subjects), 'subject')}: each gets a record of its own.")
    for limit in facts["limits"]:
        click.echo(f"Not claimed: {limit}.")
    click.echo(f"Next: axolotl unlearn request run {out}")


@command.command("run", cls=RayCommand)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--accept", metavar="REASON", help="Hand over a model whose verdict is not good.")
@click.option("--threads", type=click.IntRange(1), help="[all cores]")
@click.option(
    "--way",
    type=click.Choice(("retrain", "shards", "match", "auto")),
    help="[auto, or that of an earlier start]",
)
@click.option("--repeat", is_flag=True, help="Of retrain: train twice and compare the weights.")
@click.option(
    "--processes", default=1, show_default=True, type=click.IntRange(1), help="Of each training."
)
@click.option(
    "--limit-minutes", type=click.FloatRange(0, min_open=True), help="Of an exact way, for auto."
)
def run(
    folder: Path,
    accept: str | None,
    threads: int | None,
    way: str | None,
    repeat: bool,
    processes: int,
    limit_minutes: float | None,
) -> None:
    """Forget the rows of the request in FOLDER, measure, attack, record; goes on if stopped.

    `--way retrain` trains the base on the remaining rows, `--way shards` one shard of a model made
    by `axolotl unlearn shards train`; both are exact. `match` unlearns. `auto` takes the cheapest
    exact way (see `request plan`), or `match` where both take longer than `--limit-minutes`.

    \b
    Example:
      axolotl unlearn request run requests/2026-001
      axolotl unlearn request run requests/2026-001 --way retrain
    """
    _quietly()
    from axolotl_unlearn.requests.request import Request
    from axolotl_unlearn.requests.run import run_request

    limit = limit_minutes and 60 * limit_minutes
    given = {"way": way, "repeat": repeat, "limit": limit, "processes": processes}
    verdict = run_request(folder, accept=accept, threads=threads, **given)
    answer(
        model=Request.load(folder).after,
        verdict={key: value for key, value in verdict.items() if key != "documents"},
        record=folder / "record.json",
        page=folder / "REPORT.html",
    )
    said = verdict["status"] + ("" if verdict["good"] else ", accepted")
    click.echo(f"Verdict: {said}. Model: {Request.load(folder).after}")
    for limit in verdict["limits"]:
        click.echo(f"Not claimed: {limit}.")
    click.echo(f"Record: {folder / 'record.json'} (page: {folder / 'REPORT.html'})")


for _one in (
    *(*COMMANDS, _ways.plan, *_record.COMMANDS, _audit.command, *_erase.COMMANDS),
    _suppress.command,
    _export.command,
    _derived.command,
):
    command.add_command(_one)
