"""``--ray [ADDRESS]``: independent commands as tasks of Ray.

The machines of a cluster share the working folder, where store and results lie; so what was
measured by a run that died is known to the next.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from axolotl_unlearn.cli._json import answer, wanted
from axolotl_unlearn.errors import UnlearnError

ADDRESS = re.compile(r"local|auto|ray://.+|[^/]+:\d+")


class RayCommand(click.Command):
    """A command that takes ``--ray``: a task for each of its subjects."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        says = "As tasks of Ray: of a cluster (`auto` finds it), or of this machine [local]."
        self.params.append(
            click.Option(["--ray"], metavar="[ADDRESS]", expose_value=False, help=says)
        )

    def make_context(self, info_name, args, parent=None, **extra) -> click.Context:
        words, address = list(args), None
        place = next((n for n, w in enumerate(words) if w.partition("=")[0] == "--ray"), None)
        if place is not None:
            address = words.pop(place).partition("=")[2]
            if not address:
                given = place < len(words) and ADDRESS.fullmatch(words[place])
                address = words.pop(place) if given else "local"
            extra["allow_extra_args"] = True
        context = super().make_context(info_name, list(words), parent, **extra)
        names = [info_name]
        while parent is not None and parent.command.name != "unlearn":
            names.insert(0, parent.info_name)
            parent = parent.parent
        context.meta["ray"] = address, names, *self._split(context, words)
        return context

    def _split(self, context: click.Context, words: list[str]) -> tuple[list[str], list[str]]:
        """Options and subjects, as they were typed."""
        given, rest, order = self.make_parser(context).parse_args(words)
        options, subjects = [], []
        for one in dict.fromkeys(order):
            values = given[one.name]
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(one, click.Option):
                    options += [one.opts[0], *([] if one.is_flag else [value])]
                elif isinstance(value, str):
                    subjects.append(value)
        return options, [*subjects, *rest]

    def invoke(self, context: click.Context) -> Any:
        address, names, options, subjects = context.meta["ray"]
        if address is None:
            return super().invoke(context)
        options += ["--json"] * wanted()
        done = run([[*names, *options, subject] for subject in subjects], address)
        for _, out, says in done:
            click.echo(says, nl=False, err=True)
            click.echo("" if wanted() else out, nl=False)
        if wanted():
            answers = [json.loads(out) for _, out, _ in done]
            answer(**(answers[0] if len(answers) == 1 else {"tasks": answers}))
        return context.exit(next((code for code, _, _ in done if code), 0))


def connect(address: str) -> Any:
    """Ray, with a cluster, or an UnlearnError; "local" is this machine."""
    try:
        import ray
    except ImportError:
        raise UnlearnError(
            "`--ray` needs Ray, which is not installed: `pip install ray`, or leave out `--ray`."
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(None if address == "local" else address, log_to_driver=False)
        except Exception as error:  # a plain one where the machine is too busy
            why = str(error).partition("\n")[0]
            raise UnlearnError(f"`--ray {address}`: no cluster answers ({why}).") from None
    return ray


def along() -> dict[str, str]:
    """What of the environment goes to the workers; keys do not."""
    names = ("HF_", "AXOLOTL_", "OMP_", "TOKENIZERS_", "UNLEARN_", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


def _run(words: Sequence[str], folder: str, along: dict[str, str]) -> tuple[int, str, str]:
    """In a worker: exit code, standard output and error."""
    done = subprocess.run(
        [sys.executable, "-m", "axolotl_unlearn.cli", *words],
        cwd=folder,
        env={**os.environ, **along},
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout, done.stderr


def run(commands: Sequence[Sequence[str]], address: str) -> list[tuple[int, str, str]]:
    """What `_run` says of commands: a task each, with a core, and a GPU if there are any."""
    ray = connect(address)
    gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=3)(_run)
    return ray.get([task.remote(list(one), os.getcwd(), along()) for one in commands])
