"""``axolotl-unlearn tasks``: our lm-eval tasks, run by it."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from unittest.mock import patch

import click

from axolotl_unlearn.cli._options import Answer
from axolotl_unlearn.errors import UnlearnError

#: Options of lm_eval that are looked at here.
_LOOKED = ArgumentParser(add_help=False, allow_abbrev=False)
_LOOKED.add_argument("--tasks", "-t", nargs="+", default=[])
_LOOKED.add_argument("--include_path")


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
def run(arguments: tuple[str, ...]) -> Answer | None:
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
        return None
    looked, given = _LOOKED.parse_known_args([*map(_base_and_adapter, arguments)])
    tasks = [name for word in looked.tasks for name in word.split(",") if name]
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.utils import handle_non_serializable

    import axolotl_unlearn.evaluation.lm  # noqa: F401 (registers hf-unlearn)
    from axolotl_unlearn.evaluation.tasks import task_folder

    # lm_eval takes a folder of the working folder for the task that it is named like: a name that
    # stands there twice it looks up.
    twice = [one for one in tasks if Path(one).is_dir() and not any(Path(one).glob("*.yaml"))]
    given += ["--tasks", *tasks, *twice] if tasks else []
    given += ["--include_path", looked.include_path or str(task_folder())]
    save, found = EvaluationTracker.save_results_aggregated, []

    def kept(tracker: EvaluationTracker, results: dict, samples: dict | None = None) -> None:
        """Wherever it writes them, and if it writes them at all."""
        save(tracker, results, samples)
        found.append(json.loads(json.dumps(results, default=handle_non_serializable)))

    try:
        with (
            patch.object(EvaluationTracker, "save_results_aggregated", kept),
            patch.object(sys, "argv", ["lm_eval", *given]),
        ):
            cli_evaluate()
    except UnlearnError:  # a sentence of ours quotes no row
        raise
    except Exception as error:
        if click.get_current_context().find_root().params.get("debug"):
            raise
        if str(error).startswith("Tasks not found: "):  # with the names that were typed
            ours = sorted(p.name for p in task_folder().iterdir() if (p / "utils.py").is_file())
            says = f"lm_eval says: {error}; ours are {', '.join(ours)}."
            raise UnlearnError(says, code="tasks.unknown") from None
        says = f"lm_eval ended with {type(error).__name__}"
        cure = "what it says may quote rows: `axolotl-unlearn --debug tasks run ...` shows it"
        raise UnlearnError(f"{says}; {cure}.", code="tasks.lm-eval") from None
    return Answer({"results": found})


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
    if spec.adapter is None:  # a name on the hub
        return word
    own = any(is_tokenizer(path.name) for path in Path(spec.adapter).iterdir())
    more = f",tokenizer={spec.adapter}" if own and "tokenizer=" not in word else ""
    return word.replace(found[0], f"pretrained={spec.model},peft={spec.adapter}{more}")
