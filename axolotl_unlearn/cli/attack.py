"""``axolotl-unlearn attack``: does what seems forgotten come back, or lie in the weights?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._options import (
    ABOVE_ZERO,
    ATTACKED,
    COUNT,
    Answer,
    data_option,
    out_option,
    show,
)
from axolotl_unlearn.device import device_name
from axolotl_unlearn.errors import UnlearnError

DTYPES = ("float32", "bfloat16", "float16")


def _parts(kind: type) -> Callable:
    """A callback that reads values with commas between, whole numbers from 1 on."""

    def parse(_: Any, parameter: click.Parameter, text: str) -> list:
        try:
            parts = [kind(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            fault = f"{parameter.opts[0]} {text!r} must be numbers separated by commas."
            raise UnlearnError(fault) from None
        if kind is int and min(parts, default=1) < 1:
            raise UnlearnError(f"{parameter.opts[0]} {text!r} must be numbers of 1 or more.")
        return parts

    return parse


def _default(name: str, value: Any, says: str | None = None, **more: Any) -> Callable:
    return click.option(name, default=value, help=says, **more)


CONTROL = click.option("--control", help="A model that never saw the forget set, attacked alike.")
DEVICE = click.option("--device", callback=lambda _, __, given: device_name(given),
                       help="[default: the accelerator, else cpu]")  # fmt: skip
DTYPE = click.option("--dtype", type=click.Choice(DTYPES), default=DTYPES[0])
_JOIN = _default("--join", " ", "Between input and output.", show_default="a space")
_SEED = _default("--seed", 0)


def _common(function: Callable) -> Callable:
    """Arguments that attacks share."""
    options = [
        click.argument("model"),
        data_option("Folder with forget.jsonl (and retain.jsonl)."),
        out_option("out/attacks", ATTACKED),
        CONTROL,
        click.option("--limit", type=int, help="Ask about so many rows only."),
        _default("--max-new-tokens", 128, type=COUNT),
        _default("--batch-size", 32, type=COUNT),
        *(_JOIN, DEVICE, DTYPE),
    ]
    return functools.reduce(lambda f, o: o(f), reversed(options), function)


_ASKED = ("model", "control", "max_new_tokens", "batch_size", "join", "device", "dtype")


def _subjects(data_dir: Path, out: Path, options: dict, limit: int | None = None):
    """Of `_common`, taken from the options: the forget file, whether the limit leaves rows out, the
    attacked model, the control, and one store for all attacks and models (what is said without an
    attack is asked once)."""
    from axolotl_unlearn.attacks.target import limited, make_subjects, read_side
    from axolotl_unlearn.files import declare
    from axolotl_unlearn.store import Store

    path, records = read_side(data_dir, "forget")
    asked = {name: options.pop(name) for name in _ASKED}
    subjects = make_subjects(records=limited(records, limit), **asked)
    store = Store(declare(out, out / ".scores", "log-probs", folder=True))
    return path, len(subjects[0].records) < len(records), *subjects, store


def _found(out: Path, data_dir: Path, result: dict, cut: bool) -> Answer:
    from axolotl_unlearn.attacks.results import save, table
    from axolotl_unlearn.metrics.verdict import sentence

    given = click.get_current_context().params
    how = {"limit": given["limit"] if cut else None, "join": given["join"], "dtype": given["dtype"]}
    path = save(out, how | result | {"data_dir": str(data_dir)})
    said = [table(result), sentence(result), f"Written: {path}"]
    if "limit" in result:
        said.insert(0, f"Only {result['limit']} rows can be asked: the others have no input.")
    said += [f"Not asked: {name} ({why})." for name, why in result.get("skipped", {}).items()]
    return Answer({"file": path, "says": sentence(result), **result}, said)


@click.group()
def command() -> None:
    """Attack a model: quantise it, retrain it a little, ask it differently, look inside.

    The first three print what the model says of the forget set before and after, with intervals
    over documents; interrupted, they go on where they were. `membership` and `inside` tell members
    of the training data from texts it never saw. All write JSON.

    \b
    axolotl-unlearn attack relearn out/merged --control out/retrained
    """


@command.command()
@_common
@_default("--schemes", "int8,int4,nf4", "How to round.", callback=_parts(str))
def quantise(data_dir: Path, out: Path, limit: int | None, **options: Any) -> Answer:
    """Round the weights to 8 or 4 bits (to the nearest, in groups)."""
    from axolotl_unlearn.attacks.quantise import quantise_attack

    _, cut, subject, control, store = _subjects(data_dir, out, options, limit)
    return _found(out, data_dir, quantise_attack(subject, store, control=control, **options), cut)


@command.command()
@_common
@_default(
    "--source", "retain", "What to train on: retain, a file, or forget (documents that are then "
    "not asked about).",
)  # fmt: skip
@_default("--rows", 20, "Rows to train on.", type=COUNT)
@_default("--steps", "1,2,5,10,20,50,100", "Ask after so many steps.", callback=_parts(int))
@_default("--lr", 1e-4, "Learning rate of AdamW.", type=ABOVE_ZERO)
@_default("--train-batch", 8, "Rows a step.", type=COUNT)
@_default("--lora-rank", 0, "0 trains all weights.", type=click.IntRange(0))
@_SEED
def relearn(data_dir: Path, out: Path, source: str, lr: float, **options: Any) -> Answer:
    """Fine-tune on a few benign or forgotten rows and ask about the others.

    \b
    axolotl-unlearn attack relearn out/merged --source forget
    """
    from axolotl_unlearn.attacks.relearn import Training, chosen_rows, relearn_attack

    _, _, subject, control, store = _subjects(data_dir, out, options)
    steps, batch, rank = (options.pop(name) for name in ("steps", "train_batch", "lora_rank"))
    how = {"steps": steps, "how": Training(lr, batch, rank, options["seed"])}
    rows = chosen_rows(source, subject.records, data_dir, **options)
    left = len(rows["asked"]) + (len(rows["training_rows"]) if source == "forget" else 0)
    made = relearn_attack(subject, store, **rows, **how, control=control)
    return _found(out, data_dir, made, left < len(subject.records))


@command.command()
@_common
@_default("--variants", "affirmative,prefix,paraphrase,examples", callback=_parts(str))
@_default("--prefixes", "0.25,0.5", callback=_parts(float))
@_default("--examples", "1,4", callback=_parts(int))
@_SEED
def prompt(data_dir: Path, out: Path, limit: int | None, **options: Any) -> Answer:
    """Ask in other ways: part of the answer, another wording, examples in front."""
    from axolotl_unlearn.attacks.prompt import prompt_attack, read_paraphrases
    from axolotl_unlearn.attacks.target import read_side

    path, cut, subject, control, store = _subjects(data_dir, out, options, limit)
    retain = read_side(data_dir, "retain")[1] if "examples" in options["variants"] else []
    others = {"retain": retain, "paraphrases": read_paraphrases(path), "control": control}
    return _found(out, data_dir, prompt_attack(subject, store, **others, **options), cut)


def _members(function: Callable) -> click.Command:
    """A command that makes attacks of the registry: those that read what a model says, or those
    that need its weights."""

    @click.argument("models", nargs=-1)
    @data_option("Folder with member.jsonl and nonmember.jsonl (and retain.jsonl).")
    @out_option("out/attacks", ATTACKED)
    @CONTROL
    @click.option("--attacks", "names", help="Names with commas between, or all.  [see --list]")
    @click.option(
        "--extension", "extensions", multiple=True, help="A module that registers more attacks."
    )
    @click.option("--list", "listed", is_flag=True, help="Print the attacks and end.")
    @click.option("--limit", type=int, help="So many texts of each kind only.")
    @_SEED
    @_JOIN
    @DEVICE
    @DTYPE
    @functools.wraps(function)
    def run(models: tuple[str, ...], out: Path, names: str | None, listed: bool,
            extensions: tuple[str, ...], **options: Any) -> Answer:  # fmt: skip
        from axolotl_unlearn.attacks.members import attack_models, chosen, said
        from axolotl_unlearn.attacks.registry import attacks
        from axolotl_unlearn.attacks.results import save

        kind, known = function.__name__, attacks(extensions)
        some = chosen(known, names, kind == "inside")
        if listed:
            return Answer({"attacks": [*map(str, some)]}, map(str, some))
        if not models:
            says = "name at least one model to attack: a folder, or NAME=FOLDER."
            raise UnlearnError(says, code="attack.no-model")
        made = []
        for file in attack_models(models, some, kind=kind, **options):
            made.append({"file": save(out, file), **file})
            show(*said(file), f"Written: {made[-1]['file']}")
        return Answer(made[0] if len(made) == 1 else {"results": made})

    return command.command()(run)


@_members
def membership() -> None:
    """Tell members from texts never seen by what a model says of them.

    Each attack gives every text a score, or learns from some texts and is asked about the others.
    An attack that cannot be made is named as not measured; then no model passes.

    \b
    axolotl-unlearn attack membership out/merged --control out/retrained
    """


@_members
def inside() -> None:
    """Tell members by hidden states and gradients, as one can who has the weights.

    An attack learns from some members and non-members and is asked about the others.
    """
