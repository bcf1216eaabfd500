"""``--ray [ADDRESS]``: a command, or its independent parts, as tasks of Ray.

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
#: What of the environment goes along; keys do not.
ALONG = ("HF_", "AXOLOTL_", "OMP_", "TOKENIZERS_", "UNLEARN_", "PYTHONPATH")


class RayCommand(click.Command):
    """A command that takes ``--ray``: a task runs it as it was typed."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        says = "As a task of Ray: of a cluster (`auto` finds it), or of this machine [local]."
        self.params.append(
            click.Option(["--ray"], metavar="[ADDRESS]", expose_value=False, help=says)
        )

    def make_context(self, info_name, args, parent=None, **extra) -> click.Context:
        words, address = list(args), None
        if "--ray" in words:
            place = words.index("--ray")
            words.pop(place)
            given = place < len(words) and ADDRESS.fullmatch(words[place])
            address = words.pop(place) if given else "local"
        context = super().make_context(info_name, list(words), parent, **extra)
        names = [info_name]
        while parent is not None and parent.command.name != "unlearn":
            names.insert(0, parent.info_name)
            parent = parent.parent
        context.meta["ray"] = address, names, words
        return context

    def invoke(self, context: click.Context) -> Any:
        address, names, words = context.meta["ray"]
        if address is None:
            return super().invoke(context)
        ((code, out, says),) = run([[*names, *words, *["--json"] * wanted()]], address)
        click.echo(says, nl=False, err=True)
        if wanted():
            answer(**json.loads(out))
        else:
            click.echo(out, nl=False)
        return context.exit(code)


def _run(words: Sequence[str], folder: str, along: dict[str, str]) -> tuple[int, str, str]:
    """In a worker: exit code, standard output and error."""
    command = [sys.executable, "-m", "axolotl_unlearn.cli", *words]
    environment = {**os.environ, **along}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout, done.stderr


def run(commands: Sequence[Sequence[str]], address: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of commands of ours, a task each, with a core and a GPU if the
    cluster has any.

    Raises:
        UnlearnError: Ray is not installed, or nobody answers there.
    """
    try:
        import ray
    except ImportError:
        raise UnlearnError(
            "`--ray` needs Ray, which is not installed: `pip install ray`, or leave out `--ray`."
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(None if address == "local" else address, log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
            raise UnlearnError(f"`--ray {address}`: no cluster answers ({why}).") from None
    along = {name: value for name, value in os.environ.items() if name.startswith(ALONG)}
    task = ray.remote(
        num_cpus=1, num_gpus=int(ray.cluster_resources().get("GPU", 0) > 0), max_retries=3
    )(_run)
    return ray.get([task.remote(list(one), os.getcwd(), along) for one in commands])
