"""``axolotl-unlearn tasks``: our lm-eval tasks, run by it."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import click

from axolotl_unlearn.cli._options import answer, read_json, wanted
from axolotl_unlearn.errors import UnlearnError


@click.group()
def command() -> None:
    """Our lm-eval tasks: TOFU, MUSE, RWKU, WMDP, SemEval-2025 Task 4, likelihoods of answers.

    Plain lm_eval finds them in a checkout by `--include_path eval_tasks`.
    """


@command.command(
    "run",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run lm_eval with `--model hf-unlearn` and our tasks known to it.

    All ARGUMENTS are lm_eval's. The folder of our tasks is included unless you name another. The
    folder of an adapter may stand for `pretrained=`: its base is read from it.

    \b
    Example:
      axolotl-unlearn tasks run --model hf-unlearn --tasks unlearn_likelihood \\
        --model_args pretrained=out/merged --batch_size 16 \\
        --metadata '{"data_dir": "examples/demo"}'
    """
    if not arguments or set(arguments) & {"-h", "--help"}:
        click.echo(click.get_current_context().get_help())
        return
    given = _apart(map(_base_and_adapter, arguments))
    from lm_eval.__main__ import cli_evaluate

    import axolotl_unlearn.evaluation.lm  # noqa: F401 (registers hf-unlearn)
    from axolotl_unlearn.evaluation.tasks import task_folder

    for number, word in enumerate(given[1:], 1):
        # lm_eval takes a folder of the working folder for the task that it is named like: a name
        # that stands there twice it looks up.
        named = given[number - 1] in _TASKS and Path(word).is_dir()
        if named and not any(Path(word).glob("*.yaml")):
            given[number] = f"{word},{word}"
    if _after(given, "--include_path") is None:
        given += ["--include_path", str(task_folder())]
    before = sys.argv
    try:
        with tempfile.TemporaryDirectory() as folder:
            if wanted() and _after(given, "--output_path") is None:
                given += ["--output_path", folder]
            sys.argv = ["lm_eval", *given]
            cli_evaluate()
            answer(results=[read_json(path) for path in Path(folder).rglob("results_*.json")])
    except UnlearnError:  # a sentence of ours quotes no row
        raise
    except Exception as error:
        if click.get_current_context().find_root().params.get("debug"):
            raise
        if unknown := _unknown(given):
            ours = sorted(p.name for p in task_folder().iterdir() if (p / "utils.py").is_file())
            says, cure = f"lm_eval knows no task {unknown[0]!r}", f"ours are {', '.join(ours)}"
            raise UnlearnError(f"{says}; {cure}.", code="tasks.unknown") from None
        says = f"lm_eval ended with {type(error).__name__}"
        cure = "what it says may quote rows: `axolotl-unlearn --debug tasks run ...` shows it"
        raise UnlearnError(f"{says}; {cure}.", code="tasks.lm-eval") from None
    finally:
        sys.argv = before


def _base_and_adapter(word: str) -> str:
    """``pretrained=ADAPTER`` as lm_eval takes it: ``pretrained=BASE,peft=ADAPTER``.

    Raises:
        UnlearnError: Nothing that could be a model is there.
    """
    from axolotl_unlearn.models import ADAPTER_CONFIG, is_tokenizer, parse_models

    found = re.search(r"\bpretrained=([^,]+)", word)
    if found is None or "peft=" in word:
        return word
    if Path(found[1]).exists() and not Path(found[1], ADAPTER_CONFIG).is_file():
        return word
    (spec,) = parse_models([found[1]])
    if spec.adapter is None:  # whole weights lie beside it
        return word
    own = any(is_tokenizer(path.name) for path in Path(spec.adapter).iterdir())
    more = f",tokenizer={spec.adapter}" if own and "tokenizer=" not in word else ""
    return word.replace(found[0], f"pretrained={spec.model},peft={spec.adapter}{more}")


_TASKS = ("--tasks", "-t")


def _apart(words: Iterable[str]) -> list[str]:
    """``--tasks=NAME`` as two words, and others that are looked at here."""
    made: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        looked = equals and option in (*_TASKS, "--include_path", "--output_path")
        made += [option, value] if looked else [word]
    return made


def _after(words: list[str], *options: str) -> str | None:
    return next((after for word, after in pairwise(words) if word in options), None)


def _unknown(words: list[str]) -> list[str]:
    """Names after ``--tasks`` that lm-eval cannot find."""
    from lm_eval.tasks import TaskManager

    asked = (_after(words, *_TASKS) or "").split(",")
    names = [name for name in asked if name and "/" not in name]
    manager = TaskManager(include_path=_after(words, "--include_path")) if names else None
    return [name for name in names if not manager.match_tasks([name])]
