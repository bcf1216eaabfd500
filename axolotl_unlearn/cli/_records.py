"""``axolotl-unlearn request audit | derived | erase | clean | export | verify | sign | suppress``:
what a request left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.cli._options import PATH, one_value, say
from axolotl_unlearn.errors import UnlearnError

_DAY = click.DateTime(["%Y-%m-%d"])
_SEARCHED = click.option("--search", "places", multiple=True, type=PATH, help="Where else to look.")


@click.command("audit")
@click.argument("model")
@click.argument("requests_dir", metavar="REQUESTS", type=PATH)
@click.option("--junit", "junit_file", type=PATH, help="Write junit XML.")
@click.option("--figures", type=PATH, help="Write them as JSON.")
@click.option("--device", help="[cuda where there is one, else cpu]")
@click.option("--batch-size", default=64)
@click.option("--quiet", is_flag=True, help="No progress bars.")
def audit(model, requests_dir, junit_file, figures, quiet: bool, **options) -> None:
    """Look for every deleted document of REQUESTS in MODEL, as it is now.

    For after further fine-tuning, merging or quantisation. Documents appear under the keyed ids of
    their records. Exit code 0: nothing is back; 3: something is; 2: it could not be tested.
    """
    from axolotl_unlearn.files import write, write_json
    from axolotl_unlearn.requests.audit import audit_requests, junit

    result = audit_requests(model, requests_dir, progress=not quiet, **options)
    answer(**result.to_json())
    if figures:
        write_json(figures, result.to_json())
    if junit_file:
        write(junit_file, junit(result))
    result.require_tested(requests_dir)
    say(*result.back_lines(), result.says)
    if result.back:
        raise SystemExit(3)


@click.command("derived")
@click.argument("folder", type=PATH)
@click.argument("places", nargs=-1, required=True, type=PATH)
def derived(folder: Path, places: tuple[Path, ...]) -> None:
    """List models below PLACES that were made of one that knows the rows of the request in FOLDER.

    Adapters, merges, GGUF and quantised copies are known by digests of weights and tensors, and by
    what their own files name. Ask before `request erase`: without the old model its tensors cannot
    be compared. Nothing is removed. Exit code 0: none was found; 3: some were.
    """
    from rich.filesize import decimal

    from axolotl_unlearn.requests.derived import derived as found_in
    from axolotl_unlearn.requests.removal import shown

    models = found_in(folder, places)
    answer(withdraw=[vars(one) for one in models])
    say(*(f"withdraw  {decimal(o.bytes):>9}  {shown(o.path)}: {o.why}" for o in models))
    say(f"to withdraw: {len(models)}; what names and shares nothing is not found")
    if models:
        raise SystemExit(3)


@click.command("erase")
@click.argument("folder", type=PATH)
@click.option("--yes", is_flag=True, help="Remove what is listed; without it nothing changes.")
@click.option("--with-data", is_flag=True, help="Also the rows kept for later audits.")
@_SEARCHED
def erase(folder: Path, yes: bool, with_data: bool, places: tuple[Path, ...]) -> None:
    """Remove the model before a request, its checkpoints, caches and logs; look for what is left.

    Lists first; `--yes` removes, and searches again. Nothing outside the folders that the config
    writes to is removed, and nothing that the new model needs. Searched are these, the working
    folder and the caches of Hugging Face. Found texts are never printed.
    """
    from axolotl_unlearn.requests import erase as erasing

    _there(places)
    planned = erasing.plan(folder, places=places, with_data=with_data)
    say(*planned.lines(), *planned.found_lines())
    items = [vars(item) for item in planned.items]
    answer(items=items, removed=yes, **planned.facts())
    if not yes:
        say("nothing was changed; `--yes` removes what is listed so")
        return
    listed = erasing.erase(planned)
    say(
        f"removed {len(planned.removable)} places; {len(listed['left']) or 'no'} other places "
        "still hold deleted texts; written into the record"
    )


@click.command("clean")
@click.argument("out", type=PATH)
@click.option("--dry-run", is_flag=True, help="Only list.")
@click.option("--forget", multiple=True, type=PATH, help="Forget rows.  [where the run read them]")
@_SEARCHED
def clean(out: Path, dry_run: bool, forget: tuple[Path, ...], places: tuple[Path, ...]) -> None:
    """Remove forget texts, tokens and log-probs that runs left in OUT, and prove it by a search.

    The model and its checkpoints stay. Searched are OUT, prepared data and the caches of Hugging
    Face, for windows of eight words; exit code 3 if one is left. Texts are not printed.
    """
    from axolotl_unlearn.requests import removal

    _there((*forget, *places))
    planned = removal.of_run(out, forget=forget, places=places)
    say(*planned.lines())
    answer(items=[vars(item) for item in planned.items], yours=planned.sources, removed=not dry_run)
    if dry_run:
        say("nothing was changed")
        return
    result = removal.clean(planned)
    answer(**planned.facts())
    left = f"removed {len(planned.removable)} places; {len(result.left) or 'none'} left"
    say(*planned.found_lines(), left)
    stays = len(planned.items) - len(planned.removable)
    if result.left or stays or not planned.texts.windows:
        raise SystemExit(3)


def _there(paths: tuple[Path, ...]) -> None:
    for path in paths:
        if not path.exists():
            raise UnlearnError(f"{path} does not exist; name a file or folder.")


@click.command("export")
@click.argument("folder", type=PATH)
@click.option("--out", required=True, type=PATH, help="The zip archive to write.")
@click.option("--subject", help="Of a request of many: this one's record and no other's.")
@click.option("--by", callback=one_value, help="Who answers.")
@click.option("--to", callback=one_value, help="Who asked.")
@click.option("--reference", callback=one_value, help="Theirs or yours.")
@click.option("--received", type=_DAY, help="YYYY-MM-DD  [when the request was made]")
@click.option("--due", type=_DAY, help="[a month later]")
def export(folder: Path, out: Path, subject: str | None, **given: Any) -> None:
    """Write record, report, ledger entries, dates, how to verify and a reply into one file.

    The record names nobody; the reply says what you give here and nothing else. `@FILE` reads a
    value from a file. `request verify FILE` accepts what was written and finds a byte changed.

    \b
    Example:
      axolotl-unlearn request export requests/2026-001 --received 2026-11-02 --to @name.txt \\
        --out 2026-001.zip
      axolotl-unlearn request verify 2026-001.zip
    """
    from axolotl_unlearn.requests import export as exporting

    given |= {day: given[day] and given[day].date() for day in ("received", "due")}
    handling = exporting.export(folder, out, exporting.Handling(**given), subject)
    answer(file=out, **handling)
    late = ", late" if handling["late"] else ""
    say(
        f"{out}: received {handling['received']}, due {handling['due']}, done "
        f"{handling['done']}{late}. Read REPLY.txt in it before you send it."
    )


@click.command("verify")
@click.argument("folder", type=PATH)
@click.option("--model", help="Where the model is now: a folder or base+adapter.  [as recorded]")
@click.option("--public-key", type=PATH, help="PEM file of who signed it.")
def verify(folder: Path, model: str | None, public_key: Path | None) -> None:
    """Compare ledger, record, model, data and signature of the request in FOLDER.

    FOLDER may be the file that `request export` wrote. Exit code 2 and one sentence at the first
    thing that is not as it was.
    """
    from axolotl_unlearn.requests import export, record

    said = (export if folder.is_file() else record).verify(folder, model, public_key)
    answer(says=said)
    say(*said)


@click.command("sign")
@click.argument("folder", type=PATH)
@click.option("--key", "private_key", required=True, type=PATH, help="PEM, EC.")
def sign(folder: Path, private_key: Path) -> None:
    """Sign the record, and through its digests the model, with your own key.

    Needs `pip install 'axolotl-unlearn[sign]'` (model-signing).

    \b
    Example:
      openssl ecparam -name prime256v1 -genkey -noout -out key.pem
      openssl ec -in key.pem -pubout -out key.pub
      axolotl-unlearn request sign requests/2026-001 --key key.pem
    """
    from axolotl_unlearn.requests import record

    signature = record.sign(folder, private_key)
    answer(signature=signature)
    say(f"Signature: {signature}")


@click.command("suppress")
@click.argument("requests_dir", metavar="REQUESTS", type=PATH)
@click.option("--rows", type=PATH, help="A training file (.jsonl, .json, .parquet) to filter.")
@click.option("--out", type=PATH, help="Where to write the rows that may be learned, JSON lines.")
def suppress(requests_dir: Path, rows: Path | None, out: Path | None) -> None:
    """Write the suppression list of REQUESTS, and filter a training file with it.

    The list has keyed digests of the deleted rows and their texts, and no text. `request erase`
    writes it too. Our own dataset types read it: `unlearn: {data: {suppression: FILE}}`; for a
    plain `axolotl train` filter the file.

    \b
    Example:
      axolotl-unlearn request suppress requests/
      axolotl-unlearn request suppress requests/ --rows next.jsonl --out next-allowed.jsonl
    """
    from axolotl_unlearn.requests import suppress as suppressing

    if (rows is None) != (out is None):
        raise UnlearnError("--rows and --out belong together; give both or none.")
    path, count, new = suppressing.suppress(requests_dir)
    answer(list=path, digests=count, new=new)
    say(f"{path}: {count} digests, {new} of them new")
    if rows is not None:
        kept, gone = suppressing.filtered(path, rows, out)
        answer(rows=out, kept=kept, left_out=gone)
        say(f"{out}: {kept} rows of {rows}; {gone} were deleted before and are left out")


#: For the group `request`.
COMMANDS = (audit, derived, erase, clean, export, verify, sign, suppress)
