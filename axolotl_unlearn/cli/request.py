"""``axolotl-unlearn request``: make, plan, run and look at deletion requests."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli import _records
from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.cli._options import ABOVE_ZERO, COUNT, PATH, few_logs, lines, say
from axolotl_unlearn.cli._ray import RayCommand
from axolotl_unlearn.errors import UnlearnError

_FILE = click.Path(dir_okay=False, path_type=Path)
_LIMIT = click.option("--limit-minutes", type=ABOVE_ZERO, help="Of an exact way, for auto.")


@click.group()
def command() -> None:
    """Delete rows of the training data from a fine-tuned model, with the proof.

    \b
    axolotl-unlearn request new finetune.yml --where id=ada-quill --out requests/2026-001
    axolotl-unlearn request run requests/2026-001
    axolotl-unlearn request audit MODEL requests/  later: is anything back?
    """


for _one in _records.COMMANDS:
    command.add_command(_one)


def _pairs(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in lines(context, option, given)]
    for number, (name, equals, _value) in enumerate(pairs, start=1):
        if not (name and equals):
            raise UnlearnError(f"--where, value {number}: it must be FIELD=VALUE.")
    return [(name, value) for name, _equals, value in pairs]


def _quietly() -> None:
    """No warnings of kernels that nobody asks for here either."""
    few_logs()
    # What is deleted is nobody's business; without a network it also waits for ever at the end.
    os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")
    logging.disable(logging.WARNING)  # `axolotl-unlearn` has read the level already
    click.get_current_context().call_on_close(lambda: logging.disable(logging.NOTSET))


@command.command("new")
@click.argument("config", type=PATH)
@click.option("--out", required=True, type=PATH, help="Folder to make.")
@click.option("--where", multiple=True, callback=_pairs, help="FIELD=VALUE; nested: meta.id=...")
@click.option("--person", "people", multiple=True, callback=lines, help="Rows with this name.")
@click.option("--contains", multiple=True, callback=lines, help="Rows with this text.")
@click.option("--matches", "patterns", multiple=True, callback=lines, help="Regular expression.")
@click.option("--rows", type=_FILE, help="Rows as they stand in the training data.")
@click.option("--documents", multiple=True, callback=lines, help="`document` or `id`, with commas.")
@click.option("--subjects", type=_FILE, help="Names, one a line, or JSON lines with `subject`, "
              "`person`, ...: a record for each.")  # fmt: skip
@click.option("--with-near", is_flag=True, help="Also the near-duplicates that are found.")
@click.option("--with-mentions", is_flag=True, help="Also the rows that mention the same names.")
@click.option("--heldout", type=_FILE, help="Rows that it never saw.  [test set of CONFIG]")
@click.option("--model", type=PATH, help="[last one of the ledger, CONFIG's output_dir]")
@click.option("--retain", type=COUNT, help="Retained rows at most.")
@click.option("--steps", type=COUNT, help="Budget.  [400]")
@click.option("--minutes", type=ABOVE_ZERO, help="Budget.")
@click.option("--learning-rate", type=ABOVE_ZERO, help="[half of CONFIG's]")
def new(config: Path, out: Path, subjects: Path | None, documents: list[str], **given: Any) -> None:
    """Choose the rows of CONFIG's training data that its model is to forget.

    CONFIG is the one that made the model, by plain `axolotl train`, with datasets of any type. The
    rest of its rows is kept. Rows that say the same are named, and taken only if you say so. What
    is typed stays in the shell's history and in `ps`: `@FILE` reads values from a file, one a line,
    and `@-` from the standard input.

    \b
    Example:
      axolotl-unlearn request new finetune.yml --where id=ada-quill --out requests/2026-001
      axolotl-unlearn request new finetune.yml --person @names.txt --out requests/2026-002
      axolotl-unlearn request new finetune.yml --subjects week-48.jsonl --out requests/2026-w48
    """
    _quietly()
    from axolotl_unlearn.requests.choose import Wanted, read_subjects, together
    from axolotl_unlearn.requests.new import Options, new_request
    from axolotl_unlearn.requests.request import counted

    documents = [one.strip() for part in documents for one in part.split(",") if one.strip()]
    asked = ("where", "contains", "rows", "people", "patterns")
    wanted = Wanted(documents=documents, **{name: given.pop(name) for name in asked})
    if subjects:
        if any(vars(wanted).values()):
            raise UnlearnError("--subjects names all rows; leave the other options out, or it.")
        given["subjects"] = read_subjects(subjects)
        wanted = together(given["subjects"])
    options = Options(**{name: value for name, value in given.items() if value is not None})
    made = new_request(config, out, wanted, options)
    facts, offered = made.request.facts, made.offered
    counts, chosen = facts["counts"], facts["chosen"]
    answer(folder=out, counts=counts, chosen=chosen, offered=offered.reasons)
    answer(limits=facts["limits"], other_ledgers=made.other_ledgers)
    say(
        f"{out}: {counted(counts['forget'], 'row')} to forget, {counts['retain']} of "
        f"{counts['trained'] - counts['forget']} others to keep verbatim, {counts['heldout']} "
        f"held-out rows set the level and {counts['judge']} judge."
    )
    if others := chosen["other_forms"]:
        say(
            f"{counted(others, 'named row')} found in another spelling than you wrote (capitals, "
            f"Unicode form, spaces, dashes, quotes); see {out / 'data' / 'forget.jsonl'}."
        )
    if offered.near and not options.with_near:
        near = "retained rows are nearly the same as rows to forget (--with-near takes them)."
        say(f"{len(offered.near)} {near}")
    for name, ids in offered.mentions.items() if not options.with_mentions else ():
        say(f"{len(ids)} retained rows also say {name!r} (--with-mentions takes them).")
    for name, count in offered.frequent.items():
        say(f"{count} retained rows say {name!r}, too many to be offered (--contains takes them).")
    if offered.reasons:
        say(f"Each of them with its reason: {out / 'offered.json'}")
    for other in made.other_ledgers:
        unknown = f"the requests in {other} are not looked for in what this one makes."
        say(f"{out.parent} begins a new ledger; {unknown}")
    if options.subjects:
        say(f"{counted(len(options.subjects), 'subject')}: each gets a record of its own.")
    say(*(f"Not claimed: {limit}." for limit in facts["limits"]))
    say(f"Next: axolotl-unlearn request run {out}")


@command.command("plan")
@click.argument("folder", type=PATH)
@_LIMIT
def plan(folder: Path, limit_minutes: float | None) -> None:
    """Seconds, memory and what is shown, for each way that is open to the request in FOLDER.

    Seconds are those of the trainings, from what the last ones took; nothing is trained. `request
    run --way auto` takes the cheapest exact way, or `match` where both take longer than the limit.
    """
    few_logs()
    from rich.filesize import decimal

    from axolotl_unlearn.requests.request import Request
    from axolotl_unlearn.requests.ways import plan as ways

    costs = ways.plan(Request.load(folder))
    taken = ways.choose(costs, limit_minutes and 60 * limit_minutes)
    answer(ways=[vars(cost) for cost in costs], auto=taken)
    for cost in costs:
        if cost.closed:
            say(f"{cost.way:8}  not open: {cost.closed}")
            continue
        memory = decimal(cost.bytes) if cost.bytes else "unknown"
        say(f"{cost.way:8}  {cost.seconds:.0f} s ({cost.by}), memory {memory}; {cost.shows}")
        if cost.pays_from:
            say(f"{'':8}  less than retraining from {cost.pays_from:,} rows read in training")
        if cost.measuring:
            say(f"{'':8}  and {cost.measuring:.0f} s of tests, as in the last request")
    say(f"auto      {taken}")


@command.command("run", cls=RayCommand)
@click.argument("folder", type=PATH)
@click.option("--accept", metavar="REASON", help="Hand over a model whose verdict is not good.")
@click.option("--threads", type=COUNT, help="[all cores]")
@click.option("--way", type=click.Choice(("retrain", "shards", "match", "auto")),
              help="[auto, or that of an earlier start]")  # fmt: skip
@click.option("--repeat", is_flag=True, help="Of retrain: train twice and compare the weights.")
@click.option("--processes", default=1, type=COUNT, help="Of each training.")
@_LIMIT
def run(folder: Path, limit_minutes: float | None, **given: Any) -> None:
    """Forget the rows of the request in FOLDER, measure, attack, record; goes on if stopped.

    `--way retrain` trains the base on the remaining rows, `--way shards` one shard of a model made
    by `axolotl-unlearn shards train`; both are exact. `match` unlearns. `auto` takes the cheapest
    exact way (see `request plan`), or `match` where both take longer than `--limit-minutes`.
    """
    _quietly()
    from axolotl_unlearn.requests.request import Request
    from axolotl_unlearn.requests.run import run_request

    verdict = run_request(folder, limit=limit_minutes and 60 * limit_minutes, **given)
    model, record, page = Request.load(folder).after, folder / "record.json", folder / "REPORT.html"
    judged = {key: value for key, value in verdict.items() if key != "documents"}
    answer(model=model, verdict=judged, record=record, page=page)
    say(f"Verdict: {verdict['status']}{'' if verdict['good'] else ', accepted'}. Model: {model}")
    say(*(f"Not claimed: {limit}." for limit in verdict["limits"]))
    say(f"Record: {record} (page: {page})")


@command.command("list")
@click.argument("requests_dir", metavar="[REQUESTS]", type=PATH, default="requests")
def list_(requests_dir: Path) -> None:
    """All requests of a folder, in the order of its ledger; the last model is the current one."""
    from axolotl_unlearn.requests.ledger import Ledger
    from axolotl_unlearn.requests.request import Request

    if not requests_dir.is_dir():
        raise UnlearnError(f"{requests_dir} does not exist; name the folder of the requests.")
    ledger = Ledger(requests_dir)
    states: dict[str, list[str]] = {}
    for entry in ledger.entries():
        state = entry["event"] + ("" if entry.get("good", True) else " (not good)")
        states.setdefault(entry["request"], []).append(f"{state} {entry['time'][:10]}")
    folders = {path.parent.name for path in requests_dir.glob("*/request.json")}
    listed: list[dict[str, Any]] = []
    for name in [*states, *sorted(folders - set(states))]:
        rows = "its folder is gone"
        if name in folders:
            rows = f"{Request.load(requests_dir / name).facts['counts']['forget']} rows"
        listed.append({"request": name, "rows": rows, "events": states.get(name, [])})
        say(f"{name}  {rows}  {', '.join(states.get(name, ['not carried out']))}")
    current = ledger.current()
    answer(requests=listed, current=current)
    say(f"current model: {current['path'] if current else 'no request was carried out'}")


@command.command("show")
@click.argument("folder", type=PATH)
def show(folder: Path) -> None:
    """What a request asked for and what became of it."""
    from axolotl_unlearn.requests.ledger import Ledger
    from axolotl_unlearn.requests.pages import readings
    from axolotl_unlearn.requests.record import PAGE, read
    from axolotl_unlearn.requests.request import Request

    request = Request.load(folder)
    facts = request.facts
    known = [e for e in Ledger(folder.parent).entries() if e["request"] == request.id]
    shown = {key: facts[key] for key in ("id", "created", "chosen", "counts", "config")}
    answer(**shown, events=known)
    say(
        f"request {request.id} of {facts['created']}",
        f"  chosen by   {'; '.join(map(str, facts['chosen']['how']))}",
        "  rows        " + ", ".join(f"{n} {k}" for k, n in facts["counts"].items()),
        f"  config      {facts['config']['path']}",
    )
    if not known:
        say(f"  not carried out yet: axolotl-unlearn request run {folder}")
        return
    statement = read(folder)
    verdict, documents = statement["predicate"]["verdict"], readings(statement)
    answer(verdict=verdict, documents=documents, report=folder / PAGE)
    say(f"  judgement   {verdict['status']}")
    if verdict["accepted"]:
        say(f"  accepted    {verdict['accepted']}")
    say("  documents   " + ", ".join(f"{n} {reading}" for reading, n in documents.items() if n))
    say(*(f"  ledger      line {e['entry']}: {e['event']} {e['time']}" for e in known))
    say(f"  report      {folder / PAGE}")
