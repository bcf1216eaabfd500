"""``axolotl-unlearn request``: make, plan, run deletion requests, and look at what they left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date, datetime
from pathlib import Path
from shlex import quote
from typing import Any

import click

from axolotl_unlearn.cli._options import COUNT, PATH, Answer, few_logs, lines, one_value, show
from axolotl_unlearn.errors import UnlearnError, counted

_FILE = click.Path(dir_okay=False, path_type=Path)
_PLACE = click.Path(exists=True, path_type=Path)
_DAY = click.DateTime(["%Y-%m-%d"])
_FOLDER = click.argument("folder", type=PATH)


@click.group()
def command() -> None:
    """Delete rows of the training data from a fine-tuned model, with a record of it.

    \b
    axolotl-unlearn request new finetune.yml --where id=ada --out requests/1
    axolotl-unlearn request run requests/1
    axolotl-unlearn request audit MODEL requests/  later: is anything back?
    """


def _pairs(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in lines(context, option, given)]
    for number, (name, equals, _value) in enumerate(pairs, start=1):
        if not (name and equals):
            says = f"--where, value {number}: it must be FIELD=VALUE."
            raise UnlearnError(says, code="requests.no-pair")
    return [(name, value) for name, _equals, value in pairs]


def _day(_: click.Context, __: click.Parameter, given: datetime | None) -> date | None:
    return given and given.date()


def _outside(_: click.Context, option: click.Parameter, given: Path | None) -> Path | None:
    """A file more in the folder of a request would be a fault of its record."""
    for place in given.absolute().resolve().parents if given else ():
        if (place / "request.json").is_file():
            says = f"{option.opts[0]} {given} is in the folder of a request; name another place."
            raise UnlearnError(says, code="requests.inside-request")
    return given


@command.command("new")
@click.argument("config", type=PATH)
@click.option("--out", required=True, type=PATH, callback=_outside, help="Folder to make.")
@click.option("--where", multiple=True, callback=_pairs, help="FIELD=VALUE; nested: meta.id=...")
@click.option("--person", "people", multiple=True, callback=lines, help="Rows with this name.")
@click.option("--contains", multiple=True, callback=lines, help="Rows with this text.")
@click.option("--rows", type=_FILE, help="Rows as they stand in the training data.")
@click.option("--documents", multiple=True, callback=lines, help="`document` or `id`, with commas.")
@click.option("--subjects", type=_FILE, help="`subject`, `person`, ...: a record for each line.")
@click.option("--with-near", is_flag=True, help="Also the near-duplicates that are found.")
@click.option("--with-mentions", is_flag=True, help="Also the rows that mention the same names.")
@click.option("--heldout", type=_FILE, help="Rows that it never saw.  [test set of CONFIG]")
@click.option("--canaries", type=_FILE, help="Rows by coin, of `axolotl-unlearn canaries`.")
@click.option("--model", type=PATH, help="[last one of the ledger, CONFIG's output_dir]")
@click.option("--retain", type=COUNT, help="Retained rows at most.")
@click.option("--steps", type=COUNT, help="Budget.  [400]")
def new(config: Path, out: Path, subjects: Path | None, documents: list[str], **given: Any):
    """Choose the rows of CONFIG's training data that its model is to forget.

    CONFIG is the one that made the model, by plain `axolotl train`, with datasets of any type. The
    rest of its rows is kept. Rows that say the same are named, and taken only if you say so. What
    is typed stays in the shell's history and in `ps`: `@FILE` reads values from a file, one a line,
    and `@-` from the standard input.

    \b
    axolotl-unlearn request new finetune.yml --where id=ada --out requests/1
    axolotl-unlearn request new finetune.yml --person @names.txt --out requests/2
    axolotl-unlearn request new finetune.yml --subjects w.jsonl --out requests/3
    """
    few_logs()
    from axolotl_unlearn.requests.choose import Wanted, read_subjects, together
    from axolotl_unlearn.requests.new import Options, new_request

    documents = [one.strip() for part in documents for one in part.split(",") if one.strip()]
    asked = ("where", "contains", "rows", "people")
    wanted = Wanted(documents=documents, **{name: given.pop(name) for name in asked})
    if subjects:
        if any(vars(wanted).values()):
            says = "--subjects names all rows; leave the other options out, or it."
            raise UnlearnError(says, code="requests.subjects-and-more")
        given["subjects"] = read_subjects(subjects)
        wanted = together(given["subjects"])
    options = Options(**{name: value for name, value in given.items() if value is not None})
    made = new_request(config, out, wanted, options)
    facts, offered = made.request.facts, made.offered
    said = {name: facts[name] for name in ("counts", "chosen", "limits")}
    said |= {"offered": offered.reasons, "hints": offered.hints, "fields": offered.fields}
    said |= {"folder": out}
    return Answer(said, _made(out, made, options))


def _made(out: Path, made: Any, options: Any) -> Iterator[str]:
    from axolotl_unlearn.requests.choose import Wanted, speaking

    facts, offered = made.request.facts, made.offered
    counts = facts["counts"]

    def kept(count: int, one: str, more: str) -> str:
        return counted(count, f"other row {one}", f"other rows {more}")

    for name in speaking([out.name, *options.subjects], Wanted()):
        yield f"{name!r} stands in every record and export: take a number if it names anybody."
    yield (
        f"{out}: {counted(counts['forget'], 'row')} to forget, {counts['retain']} of "
        f"{counts['trained'] - counts['forget']} others to keep verbatim. Of held-out rows "
        f"{counts['heldout']} set the level, {counts['judge']} judge."
    )
    taken = {*offered.near} if options.with_near else set()
    taken |= {row for ids in offered.mentions.values() for row in ids if options.with_mentions}
    if left := len(offered.near.keys() - taken):
        yield f"{kept(left, 'is', 'are')} nearly the same; `--with-near` deletes them too."
    for name, ids in offered.mentions.items():
        if left := len({*ids} - taken):
            yield f"{kept(left, 'says', 'say')} {name!r}; `--with-mentions` deletes them too."
    for name, ids in offered.hints.items():
        if left := len({*ids} - taken):
            yield f"{kept(left, *['may'] * 2)} be about {name!r} or somebody else: read them."
    for field, count in offered.fields.items():
        yield f"{counted(count, 'other row')} with {field}: another field, or zeros in front."
    for name, count in offered.frequent.items():
        yield f"{kept(count, 'says', 'say')} {name}: too many to offer; `--contains` takes them."
    if offered.reasons:
        passages = f"; passages: {out / 'data/offered.json'}" * bool(offered.passages)
        yield f"Each with its reason: {out / 'offered.json'}{passages}"
    if options.subjects:
        yield f"{counted(len(options.subjects), 'subject')}: each gets a record of its own."
    yield from (f"Limit: {limit}." for limit in facts["limits"])
    yield f"Next: axolotl-unlearn request run {quote(str(out))}"


@command.command("plan")
@_FOLDER
def plan(folder: Path):
    """Cost and what is shown, for each way that is open to the request in FOLDER.

    The cost is the number of rows that are read; nothing is trained. `request run --way auto` takes
    the cheapest exact way, or `match`.
    """
    few_logs()
    from axolotl_unlearn.requests import ways
    from axolotl_unlearn.requests.new import LEAST_HELDOUT
    from axolotl_unlearn.requests.request import at_root, lines_of
    from axolotl_unlearn.requests.verdict import needed

    with at_root(folder) as request:
        costs, counts = ways.plan(request), request.facts["counts"]
        # Of a long text there are several rows.
        documents = len({row["id"] for row in lines_of(request.folder, "forget")})
    taken = ways.choose(costs)
    said = [
        f"{cost.way:8}  not open: {cost.closed}"
        if cost.closed
        else f"{cost.way:8}  {cost.reads:.0f} rows read; {cost.shows}"
        for cost in costs
    ]
    match = any(cost.way == "match" and not cost.closed for cost in costs)
    if few := match and needed(documents, counts["judge"]):
        held = f"{counted(counts['judge'], 'held-out row')} that judge"
        whole = max(LEAST_HELDOUT, 2 * few)  # half of them set the level
        says = f"with {held} match is not shown: it takes {few}, of {whole} (`new --heldout`)"
        said.append(f"{'':8}  {says}")
    facts = {"ways": [vars(cost) for cost in costs], "auto": taken, "heldout_needed": int(few)}
    return Answer(facts, [*said, f"auto      {taken}"])


@command.command("run")
@_FOLDER
@click.option("--accept", metavar="REASON", help="Hand over a model whose verdict is not good.")
@click.option("--threads", type=COUNT, help="[all cores; those of shards]")
@click.option("--way", type=click.Choice(("shards", "retrain", "match", "auto")),
              help="[auto, or that of an earlier start]")  # fmt: skip
@click.option("--processes", default=1, type=COUNT, help="Of each training but shards.")
def run(folder: Path, **given: Any):
    """Forget the rows of the request in FOLDER, measure, attack, record; goes on if stopped.

    `--way retrain` trains the base on the remaining rows, which is exact; `shards` one part of a
    model of `axolotl-unlearn shards train`, which is exact too. `match` unlearns. `auto` takes the
    cheapest exact way (see `request plan`), or `match` where none is open.
    """
    few_logs()
    from axolotl_unlearn.requests.request import Request
    from axolotl_unlearn.requests.run import run_request

    verdict = run_request(folder, **given)
    model, record, page = Request.load(folder).after, folder / "record.json", folder / "REPORT.html"
    judged = {key: value for key, value in verdict.items() if key != "documents"}
    said = [
        f"Verdict: {verdict['outcome']}{'' if verdict['good'] else ', accepted'}. Model: {model}",
        *(f"Limit: {limit}." for limit in verdict["limits"]),
        f"Record: {record} (page: {page})",
        # The model before is still there.
        f"Next: axolotl-unlearn request erase {quote(str(folder))}",
    ]
    return Answer({"model": model, "verdict": judged, "record": record, "page": page}, said)


@command.command("list")
@click.argument("requests_dir", metavar="[REQUESTS]", type=_PLACE, default="requests")
def list_(requests_dir: Path):
    """All requests of a folder, in the order of its ledger; the last model is the current one."""
    from axolotl_unlearn.requests.request import MAKING, Ledger, Request

    ledger = Ledger(requests_dir)
    states: dict[str, list[str]] = {}
    for entry in ledger.entries():
        carried = "handed over" if entry.get("good") else "accepted"  # whatever the verdict was
        own = {"tried": entry.get("outcome") or "tried", "accepted": carried}
        if "begun" not in entry:
            own["erasing"] = "files removed for another request"
        state = own.get(entry["event"], entry["event"])
        states.setdefault(entry["request"], []).append(f"{state} {entry['time'][:10]}")
    folders = {path.parent.name for path in requests_dir.glob("*/request.json")}
    half = {path.parent.name for path in requests_dir.glob(f"*/{MAKING}")}
    listed, said = [], []
    for name in [*states, *sorted((folders | half) - set(states))]:
        rows = "half made: remove its folder" if name in half else "its folder is gone"
        events = states.get(name, [])
        if name in folders:
            rows = counted(Request.load(requests_dir / name).facts["counts"]["forget"], "row")
        listed.append({"request": name, "rows": rows, "events": events})
        said.append(f"{name}  {rows}  {', '.join(events or ['not carried out'])}")
    current, warnings = ledger.current(), ledger.warnings()
    said.append(f"current model: {current['path'] if current else 'no request was carried out'}")
    said += [f"ledger: {one}" for one in warnings]
    return Answer({"requests": listed, "current": current, "warnings": warnings}, said)


# --- what a request left behind ------------------------------------------------------------------


@command.command("audit")
@click.argument("model")
@click.argument("requests_dir", metavar="REQUESTS", type=PATH)
@click.option("--device", help="[default: the accelerator, else cpu]")
@click.option("--batch-size", default=64)
@click.option("--quiet", is_flag=True, help="No progress bars.")
def audit(model: str, requests_dir: Path, quiet: bool, **options: Any):
    """Look in MODEL for every document that REQUESTS have deleted from a model.

    For after further fine-tuning, merging or quantisation. Documents appear under the keyed ids of
    their records. Exit code 0: nothing is back; 3: something is; 1: nothing, but a request is not
    as recorded, or a document could not be measured; 2: nothing could be tested.
    """
    from axolotl_unlearn.requests.audit import audit_requests

    result = audit_requests(model, requests_dir, progress=not quiet, **options)
    result.require_tested(requests_dir)
    return Answer(result.to_json(), [*result.back_lines(), result.says], exit=result.exit)


@command.command("derived")
@_FOLDER
@click.argument("places", nargs=-1, required=True, type=_PLACE)
def derived(folder: Path, places: tuple[Path, ...]):
    """List models below PLACES that were made of one that knows the rows of the request in FOLDER.

    Copies, adapters and merges are known by digests of their weights, and by what their own files
    name. GGUF files are listed unread. Nothing is removed. Exit code 0: none was found; 3: some
    were.
    """
    from rich.filesize import decimal

    from axolotl_unlearn.requests.derived import derived as found_in
    from axolotl_unlearn.requests.erase import shown

    models = found_in(folder, places)
    said = [f"withdraw  {decimal(o.bytes):>9}  {shown(o.path)}: {o.why}" for o in models]
    said.append(f"to withdraw: {len(models)}; what names nothing is not found")
    return Answer({"withdraw": [vars(one) for one in models]}, said, exit=3 if models else 0)


@command.command("erase")
@_FOLDER
@click.option("--yes", is_flag=True, help="Remove what is listed; without it nothing changes.")
@click.option("--with-data", is_flag=True, help="Also the rows kept for later audits.")
@click.option("--search", "places", multiple=True, type=_PLACE, help="Where else to look.")
def erase(folder: Path, yes: bool, with_data: bool, places: tuple[Path, ...]):
    """Remove the model before a request, its checkpoints, caches and logs; look for what is left.

    Lists first; `--yes` removes, and searches again. Nothing outside the folders of the requests
    and those that the config writes to is removed, and nothing that the new model needs. Searched
    are these, the working folder and the caches of Hugging Face. Found texts are never printed.
    """
    from axolotl_unlearn.requests import erase as erasing
    from axolotl_unlearn.requests.record import places as places_left
    from axolotl_unlearn.requests.request import held, home

    with ExitStack() as stack:
        if yes and (folder / "request.json").is_file():  # nobody removes or trains beside it
            stack.enter_context(held(home(folder).parent))
        click.echo("searching all files; minutes where folders or caches are large", err=True)
        planned = erasing.plan(folder, places=places, with_data=with_data)
        said = [*planned.lines(), *planned.found_lines()]
        facts = {"items": [vars(item) for item in planned.items], "removed": yes}
        facts |= planned.facts()
        if not yes:
            return Answer(facts, [*said, "nothing was changed; `--yes` removes what is listed so"])
        show(*said)  # before anything goes
        click.echo("removing what is listed so, then searching again", err=True)
        count = places_left(erasing.erase(planned))
        facts |= planned.facts() | {"places": count}
    left = "whether deleted texts are left was not searched"
    if count is not None:
        left = f"deleted texts are left in {counted(count, 'file')}"
    gone = f"removed {counted(len(planned.removable), 'place')}; {left}"
    return Answer(facts, [f"{gone}; written into the record"])


# --- who is answered -----------------------------------------------------------------------------


@command.command("export")
@_FOLDER
@click.option("--out", required=True, type=PATH, callback=_outside, help="The zip to write.")
@click.option("--subject", help="Of a request of many: this one's record and no other's.")
@click.option("--by", callback=one_value, help="Who answers.")
@click.option("--to", callback=one_value, help="Who asked.")
@click.option("--reference", callback=one_value, help="Theirs or yours.")
@click.option("--received", type=_DAY, callback=_day, help="[when the request was made]")
@click.option("--due", type=_DAY, callback=_day, help="[a month later]")
@click.option("--key", "private_key", type=PATH, help="PEM, EC: sign all of it.")
def export(folder: Path, out: Path, **given: Any):
    """Write record, report, ledger entries, dates, how to verify and a reply into one file.

    The record names nobody; the reply says what you give here and nothing else. `@FILE` reads a
    value from a file. Without `--key` whoever receives it cannot tell who wrote it.
    """
    from axolotl_unlearn.requests.record import read
    from axolotl_unlearn.requests.verify import export

    made = export(folder, out, **given)
    days = ", ".join(f"{day} {made[day]}" for day in ("received", "due", "done"))
    late = ", late" if made["late"] else ""
    said = f"{out}: {days}{late}. Read REPLY.txt in it before you send it."
    first = "The model before has not been erased, and the reply says so: `request erase` first."
    warned = [] if read(folder)["predicate"].get("erased") else [first]
    return Answer({"file": out, **made}, [said, *warned])


@command.command("verify")
@_FOLDER
@click.option("--model", help="Where the model is now: a folder or base+adapter.  [as recorded]")
@click.option("--public-key", type=PATH, help="PEM file of who signed it.")
@click.option("--head", type=PATH, help="Copy of ledger.head, or an export, kept elsewhere.")
@click.option("--repeat", is_flag=True, help="Train again, and compare the weights.")
@click.option("--base", type=PATH, help="Of --repeat: the base model.  [as recorded]")
@click.option("--rows", type=PATH, help="Of --repeat: folder of the rows that were read.")
def verify(
    folder: Path, model: str | None, public_key: Path | None, head: Path | None, repeat: bool,
    base: Path | None, rows: Path | None,
):  # fmt: skip
    """Compare ledger, record, model, data and signature of the request in FOLDER.

    FOLDER may be the file that `request export` wrote. Exit code 0: all that was compared is as the
    owner of the key signed it; 2: ledger or files were changed; 3: nothing speaks against it, but
    no signature was compared; 4: the signature is not that of the key; 5: the model is another.
    """
    from axolotl_unlearn.requests.verify import kept_head, verify, verify_export

    if (head and folder.is_file()) or ((base or rows) and not repeat):
        says = "--head is for a request's folder, --base and --rows for --repeat; leave it out."
        raise UnlearnError(says, code="requests.not-compared")
    if folder.is_file():
        found = verify_export(folder, model, public_key)
    else:
        found = verify(folder, model, public_key, head and kept_head(head))
    if repeat:
        from axolotl_unlearn.requests.ways.retrain import repeat as trained_again

        found.says.append(trained_again(folder, base, rows))
    parts = ("signature", "model", "files", "ledger", "says")
    return Answer({part: getattr(found, part) for part in parts}, found.says, exit=found.exit)


@command.command("told")
@_FOLDER
@click.option("--recipient", required=True, help="Who was told, as the record is to name them.")
@click.option("--day", type=_DAY, callback=_day, help="[today]")
def told(folder: Path, recipient: str, day: date | None):
    """Put into the record who else was told of the erasure (GDPR, Article 19)."""
    from axolotl_unlearn.requests.record import told

    day = day or date.today()
    signed = "; sign the record again" * (folder / "record.json.sig").exists()
    told(folder, recipient, day)
    said = f"{folder}: {recipient} was told on {day}{signed}"
    return Answer({"recipient": recipient, "day": day}, [said])


@command.command("sign")
@_FOLDER
@click.option("--key", "private_key", required=True, type=PATH, help="PEM, EC.")
def sign(folder: Path, private_key: Path):
    """Sign the record, and through its digests the model, with your own key.

    Needs `pip install 'axolotl-unlearn[sign]'` (model-signing).

    \b
    Example:
      openssl ecparam -name prime256v1 -genkey -noout -out key.pem
      openssl ec -in key.pem -pubout -out key.pub
      axolotl-unlearn request sign requests/2026-001 --key key.pem
    """
    from axolotl_unlearn.requests.record import RECORD, read, sign_file
    from axolotl_unlearn.requests.request import home

    read(folder)
    made = sign_file(home(folder) / RECORD, private_key)
    return Answer({"signature": made}, [f"Signature: {made}"])


@command.command("suppress")
@click.argument("requests_dir", metavar="REQUESTS", type=PATH)
@click.option("--rows", type=PATH, help="A training file (.jsonl, .json, .parquet) to filter.")
@click.option("--out", type=PATH, callback=_outside, help="JSON lines of what may be learned.")
def suppress(requests_dir: Path, rows: Path | None, out: Path | None):
    """Write the suppression list of REQUESTS, and filter a training file with it.

    The list has keyed digests of the deleted rows and their texts, and no text. `request erase`
    writes it too. Our own dataset types read it: `unlearn: {data: {suppression: FILE}}`; for a
    plain `axolotl train` filter the file.
    """
    from axolotl_unlearn.requests import rows as rows_of

    if (rows is None) != (out is None):
        says = "--rows and --out belong together; give both or none."
        raise UnlearnError(says, code="requests.rows-and-out")
    path, count, new, unlisted = rows_of.suppress(requests_dir)
    facts: dict[str, Any] = {"list": path, "digests": count, "new": new}
    said = [f"{path}: {counted(count, 'digest')}, new: {new}"]
    if rows is not None and out is not None:
        kept, gone = rows_of.filtered(path, rows, out)
        facts |= {"rows": out, "kept": kept, "left_out": gone}
        said.append(f"{out}: {counted(kept, 'row')} of {rows}; left out, deleted before: {gone}")
    if unlisted:
        says = f"{'; '.join(said)}; but nothing of request {unlisted[0]} can be put on the list"
        why = "its rows are gone, have no text, or only those of kept rows"
        cure = "take care yourself that they are not learned again"
        raise UnlearnError(f"{says}: {why}; {cure}.", code="requests.nothing-suppressed")
    return Answer(facts, said)
