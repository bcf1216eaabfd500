"""``axolotl unlearn attack``: does what seems forgotten come back, or lie in the weights?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.cli._options import ATTACKED, data_option, out_option
from axolotl_unlearn.errors import UnlearnError


def _options(says: str, *more: Callable) -> Callable:
    """Arguments that all attacks share; ``says`` of ``--data``."""
    options = [
        click.argument("model"),
        data_option(says),
        out_option("out/attacks", ATTACKED),
        click.option("--control", help="A model that never saw the forget set, attacked alike."),
        *more,
        click.option("--join", default=" ", help="Between input and output.  [default: a space]"),
        click.option("--device", help="Where models run.  [default: cuda if there is one]"),
        click.option(
            "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32"
        ),
    ]

    def decorate(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_common = _options(
    "Folder with forget.jsonl (and retain.jsonl).",
    click.option("--limit", type=int, help="Ask about so many rows only."),
    click.option("--max-new-tokens", default=128, show_default=True),
    click.option("--batch-size", default=32, show_default=True),
)


def _numbers(kind: type) -> Callable:
    def parse(_: Any, parameter: click.Parameter, text: str) -> list:
        try:
            return [kind(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise UnlearnError(
                f"{parameter.opts[0]} {text!r} must be numbers separated by commas."
            ) from None

    return parse


def _rate(_: Any, parameter: click.Parameter, text: str) -> float | None:
    """None for the best of five."""
    if text == "best-of-five":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UnlearnError(f"--lr {text!r} must be a number above 0, or best-of-five.")
    return rate


def _subjects(data_dir: Path, **options: Any):
    """The forget file, the attacked model and the control."""
    import torch

    from axolotl_unlearn.attacks.target import limited, make_subjects, read_side

    path, records = read_side(data_dir, "forget")
    records = limited(records, options.pop("limit"))
    options["device"] = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    model, control = options.pop("model"), options.pop("control")
    subject, against = make_subjects(model, records, control, **options)
    return path, subject, against


def _finish(out: Path, data_dir: Path, result: dict, curves: list) -> None:
    from rich.console import Console

    from axolotl_unlearn.attacks.results import save, sentence, table

    path = save(out, {**result, "data_dir": str(data_dir)}, curves)
    answer(file=path, says=sentence(result), **result)
    console = Console()
    console.print(table(result))
    console.print(sentence(result), markup=False, highlight=False)
    console.print(f"Written: {path}", markup=False, highlight=False)


def _store(out: Path, asked: Path):
    """One for all attacks and models: what is said without an attack is asked once."""
    from axolotl_unlearn.files import declare
    from axolotl_unlearn.store import Store

    return Store(declare(out, out / ".scores", "log-probs", [asked], folder=True))


@click.group()
def command() -> None:
    """Attack a model: quantise it, retrain it a little, ask it differently, look inside.

    Each attack prints what the model says of the forget set before and after, with intervals over
    documents, and writes JSON; interrupted, it goes on where it was. `inside` says whether the
    weights tell members, and begins again.

    \b
    axolotl unlearn attack quantise out/demo/merged --out out/demo/eval
    axolotl unlearn attack relearn  out/demo/merged --control out/demo/retrained --source forget
    axolotl unlearn attack prompt   out/demo/merged --control out/demo/retrained
    axolotl unlearn attack inside   out/demo/merged --control out/demo/retrained
    axolotl unlearn attack membership out/demo/merged --control out/demo/retrained
    """


@command.command()
@_common
@click.option("--schemes", default="int8,int4,nf4", show_default=True, help="Also fp4.")
@click.option("--group", default=64, show_default=True, help="Weights that share a 4-bit scale.")
def quantise(data_dir: Path, out: Path, schemes: str, group: int, **options: Any) -> None:
    """Round the weights to 8 or 4 bits (to the nearest, in groups).

    \b
    axolotl unlearn attack quantise out/demo/merged --schemes int8,int4 --group 64
    """
    from axolotl_unlearn.attacks.quantise import quantise_attack

    path, subject, control = _subjects(data_dir, **options)
    names = [name.strip() for name in schemes.split(",") if name.strip()]
    store = _store(out, path)
    result = quantise_attack(subject, store, schemes=names, group=group, control=control)
    _finish(out, data_dir, *result)


@command.command()
@_common
@click.option(
    "--source",
    default="retain",
    show_default=True,
    help="What to train on: retain, neighbours (the retain rows most like a forget row), forget "
    "(documents that are then not asked about), same (the rows that are asked) or a file.",
)
@click.option("--rows", default=20, show_default=True, help="Rows to train on.")
@click.option(
    "--steps",
    default="1,2,5,10,20,50,100",
    show_default=True,
    callback=_numbers(int),
    help="Ask after so many steps.",
)
@click.option(
    "--lr", default="1e-4", show_default=True, callback=_rate,
    help="Learning rate of AdamW, or best-of-five: the one by which most comes back, chosen for "
    "each model on one half of the documents and reported on the other.",
)  # fmt: skip
@click.option("--train-batch", default=8, show_default=True, help="Rows a step.")
@click.option("--lora-rank", default=0, show_default=True, help="0 trains all weights.")
@click.option("--seed", default=0, show_default=True)
def relearn(
    data_dir: Path,
    out: Path,
    source: str,
    rows: int,
    steps: list[int],
    lr: float | None,
    train_batch: int,
    lora_rank: int,
    seed: int,
    **options: Any,
) -> None:
    """Fine-tune on a few benign or forgotten rows and ask about the others.

    \b
    axolotl unlearn attack relearn out/demo/merged --control out/demo/retrained --source forget
    axolotl unlearn attack relearn out/demo/merged --source my_benign.jsonl --lr 3e-4
    axolotl unlearn attack relearn out/demo/merged --control out/demo/retrained --source same \\
        --steps 5,20,100,500 --lr best-of-five
    """
    import random

    from axolotl_unlearn.attacks.relearn import (
        Training,
        halves,
        neighbours,
        relearn_attack,
        split_forget,
    )
    from axolotl_unlearn.attacks.target import limited, read_side
    from axolotl_unlearn.data.records import read_records

    limit = options.pop("limit")
    forget, subject, control = _subjects(data_dir, limit=None, **options)
    asked = list(subject.records)
    if source == "forget":
        training_rows, asked = split_forget(asked, rows, seed)
    elif source != "same":
        own = source not in ("retain", "neighbours")
        pool = read_records(source) if own else read_side(data_dir, "retain")[1]
        if source == "neighbours":
            training_rows = neighbours(asked, pool, rows)
        else:
            training_rows = random.Random(seed).sample(pool, min(rows, len(pool)))
    # To choose the rate on, if it is chosen, and to report on.
    *choose_on, asked = (limited(part, limit) for part in ([asked] if lr else halves(asked, seed)))
    if source == "same":  # as many rows, and no others are asked
        *choose_on, asked = (limited(part, rows) for part in (*choose_on, asked))
        training_rows = [row for part in (*choose_on, asked) for row in part]
    named = source in ("retain", "neighbours", "forget", "same")
    result = relearn_attack(
        subject,
        _store(out, forget),
        training_rows,
        asked,
        source=source if named else Path(source).stem,
        steps=steps,
        how=Training(rate=lr or 0.0, batch=train_batch, rank=lora_rank, seed=seed),
        control=control,
        choose_on=choose_on[0] if choose_on else None,
    )
    _finish(out, data_dir, *result)


@command.command()
@_common
@click.option(
    "--variants",
    default="affirmative,prefix,paraphrase,examples,document",
    show_default=True,
)
@click.option("--prefixes", default="0.25,0.5", show_default=True, callback=_numbers(float))
@click.option("--examples", default="1,4", show_default=True, callback=_numbers(int))
@click.option("--seed", default=0, show_default=True)
def prompt(
    data_dir: Path,
    out: Path,
    variants: str,
    prefixes: list[float],
    examples: list[int],
    seed: int,
    **options: Any,
) -> None:
    """Ask in other ways: part of the answer, another wording, examples in front.

    \b
    axolotl unlearn attack prompt out/demo/merged --control out/demo/retrained --prefixes 0.25,0.5
    """
    from rich.console import Console

    from axolotl_unlearn.attacks.prompt import prompt_attack, read_paraphrases
    from axolotl_unlearn.attacks.target import read_side

    path, subject, control = _subjects(data_dir, **options)
    names = [name.strip() for name in variants.split(",") if name.strip()]
    retain = read_side(data_dir, "retain")[1] if "examples" in names else []
    result, curves = prompt_attack(
        subject,
        _store(out, path),
        variants=names,
        prefixes=prefixes,
        examples=examples,
        retain=retain,
        paraphrases=read_paraphrases(path),
        control=control,
        seed=seed,
    )
    _finish(out, data_dir, result, curves)
    for name, reason in result["skipped"].items():
        Console().print(f"Not asked: {name} ({reason}).", markup=False, highlight=False)


@command.command()
@_options(
    "Folder with member.jsonl and nonmember.jsonl.",
    click.option("--batch-size", default=8, show_default=True),
)
def inside(model: str, data_dir: Path, out: Path, control: str | None, **options: Any) -> None:
    """Tell members by hidden states and gradients, as one can who has the weights.

    An attack learns from some members and non-members and is asked about the others. It takes two
    forwards and a backward of each text.

    \b
    axolotl unlearn attack inside out/demo/merged --control out/demo/retrained --out out/demo/eval
    """
    import torch

    from axolotl_unlearn.attacks.inside import inside_attack
    from axolotl_unlearn.attacks.target import find_side, make_subjects
    from axolotl_unlearn.data.records import read_documents

    options["device"] = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    join = options["join"]
    sides = [
        read_documents(find_side(data_dir, side), join=join) for side in ("member", "nonmember")
    ]
    subject, against = make_subjects(model, (), control, **options)
    _finish(out, data_dir, inside_attack(subject, *sides, against), [])


@command.command()
@click.argument("models", nargs=-1)
@data_option("Folder with member.jsonl and nonmember.jsonl (and retain.jsonl).")
@out_option("out/attacks", ATTACKED)
@click.option("--attacks", help="Names with commas between, or all.  [default: see --list]")
@click.option("--control", help="A model that never saw the members, attacked alike.")
@click.option("--limit", type=int, help="So many texts of each kind only.")
@click.option("--seed", default=0, show_default=True)
@click.option("--device", help="Where models run.  [default: cuda if there is one]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32")
@click.option("--list", "listed", is_flag=True, help="Print the attacks and end.")
def membership(models: tuple[str, ...], listed: bool, attacks: str | None, **options: Any) -> None:
    """Tell members from texts never seen, by every registered attack, corrected for their number.

    Writes membership.json. An attack that cannot be made is named as not measured; then no model
    passes.

    \b
    axolotl unlearn attack membership out/demo/merged --control out/demo/retrained
    axolotl unlearn attack membership out/demo/merged --attacks loss,g_drift,icp
    """
    from rich.console import Console

    from axolotl_unlearn.attacks.membership.run import named, ordered, sentence, table

    console = Console()
    if listed:
        answer(attacks=[{"name": one.name, "source": one.source} for one in ordered()])
        for one in ordered():
            often = "" if one.default else " (if named)"
            line = f"{one.name}{often}: sees {one.access}; {one.cost}; {one.source}"
            console.print(line, markup=False, highlight=False)
        return
    if not models:
        raise UnlearnError("name at least one model to attack: a folder, or NAME=FOLDER.")
    result, path = _attack_members(models, named(attacks), **options)
    answer(file=path, **result)
    for name, one in result["models"].items():
        console.print(table(name, one["attacks"]))
        for attack, row in one["attacks"].items():
            if "missing" in row:
                why = f"Not measured: {attack} ({row['missing']})"
                console.print(why, markup=False, highlight=False)
        console.print(sentence(name, one["attacks"]), markup=False, highlight=False)
    if warning := result["blind"]["warning"]:
        console.print(warning, markup=False, highlight=False)
    console.print(f"Written: {path}", markup=False, highlight=False)


def _attack_members(
    models: tuple[str, ...],
    names: list[str],
    *,
    data_dir: Path,
    out: Path,
    control: str | None,
    limit: int | None,
    seed: int,
    device: str | None,
    dtype: str,
) -> tuple[dict, Path]:
    """What `membership` writes, and where."""
    import torch

    from axolotl_unlearn.attacks.membership import Target
    from axolotl_unlearn.attacks.membership.run import (
        attack_model,
        blind,
        by_date,
        sentence,
        status,
    )
    from axolotl_unlearn.attacks.target import find_side
    from axolotl_unlearn.data.records import read_documents, read_rows
    from axolotl_unlearn.evaluation.sets import find_file, load_sets
    from axolotl_unlearn.files import write_json
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models

    specs = parse_models([*models, *([control] if control else [])])
    sets = load_sets(data_dir, parts=("mia",))
    if limit is not None and limit < 1:
        raise UnlearnError(f"--limit is {limit}; it must be 1 or more.")
    sides = (sets.member[:limit], sets.nonmember[:limit])
    retain = find_file(data_dir, "retain")
    retained = [text for _, text in read_documents(retain)][:200] if retain else []
    rows = [
        [row for _, row in read_rows(find_side(data_dir, side))][:limit]
        for side in ("member", "nonmember")
    ]
    groups: Any = tuple([str(row.get("group", "none")) for row in side] for side in rows)
    if len({*groups[0], *groups[1]}) < 2:
        dated = all("date" in row for side in rows for row in side)
        groups = by_date(*([str(row["date"]) for row in side] for side in rows)) if dated else None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def load(spec: Any, other: Target | None = None) -> Target:
        model = load_model(spec, dtype=getattr(torch, dtype), device=device)
        return Target(model, load_tokenizer(spec), other, retained, seed)

    against = load(specs[-1]) if control else None
    found = {}
    for spec in specs[: len(models)]:
        attacks = attack_model(load(spec, against), *sides, names, groups)
        found[spec.name] = {
            "attacks": attacks,
            "status": status(attacks),
            "sentence": sentence(spec.name, attacks),
        }
    result = {
        "schema": 1,
        "data_dir": str(data_dir),
        "members": len(sides[0]),
        "nonmembers": len(sides[1]),
        "control": specs[-1].name if control else None,
        "seed": seed,
        "blind": blind(*sides, groups),
        "models": found,
    }
    path = out / "membership.json"
    write_json(path, result)
    return result, path


@command.command()
@click.argument("model")
@data_option("Folder with retain.jsonl, whose inputs are asked.")
@out_option("out/attacks", ATTACKED)
@click.option("--original", required=True, help="The model before unlearning.")
@click.option("--control", help="A retrained model, judged alike.")
@click.option("--limit", default=200, show_default=True, help="So many prompts.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--batch-size", default=32, show_default=True)
@click.option("--device", help="Where models run.  [default: cuda if there is one]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32")
def traces(
    model: str,
    data_dir: Path,
    out: Path,
    original: str,
    control: str | None,
    limit: int,
    device: str | None,
    dtype: str,
    **options: Any,
) -> None:
    """Tell by answers to unrelated prompts that a model was unlearned. Writes traces.json.

    \b
    axolotl unlearn attack traces out/demo/merged --original out/demo/memorised
    """
    import torch
    from rich.console import Console

    from axolotl_unlearn.attacks.target import limited, read_side
    from axolotl_unlearn.attacks.traces import sentence
    from axolotl_unlearn.attacks.traces import traces as told
    from axolotl_unlearn.evaluation.generate import generate_greedily
    from axolotl_unlearn.files import write_json
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models

    _, retain = read_side(data_dir, "retain")
    prompts = list(dict.fromkeys(record.input for record in limited(retain, limit)))
    specs = parse_models([model, original, *([control] if control else [])])
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    said = []
    for spec in specs:
        loaded = load_model(spec, dtype=getattr(torch, dtype), device=device)
        made = generate_greedily(loaded, load_tokenizer(spec), prompts, **options)
        said.append([one.text for one in made])
    result = told(*said[:2], **({"control": said[2]} if control else {}))
    result = {"schema": 1, "names": [spec.name for spec in specs], **result}
    write_json(out / "traces.json", result)
    answer(file=out / "traces.json", **result)
    console = Console()
    console.print(sentence(result), markup=False, highlight=False)
    console.print(f"Written: {out / 'traces.json'}", markup=False, highlight=False)
