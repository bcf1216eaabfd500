"""``axolotl unlearn ...``: a thin, lazy command group; each command has a file of its own."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import traceback
import warnings

import click

from axolotl_unlearn.errors import UnlearnError


class LazyGroup(click.Group):
    """A group whose commands are the modules of this package, imported when they are used.

    A module ``make_data`` gives the command ``make-data`` through its attribute ``command``.
    Faults of the user (`UnlearnError`) become one sentence and exit code 2.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = [module.name for module in pkgutil.iter_modules(__path__)]
        return sorted(name.replace("_", "-") for name in names if not name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{__name__}.{cmd_name.replace('-', '_')}")
        return module.command

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except UnlearnError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(2)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None:
                name = str(error.filename)
                name = name if len(name) < 200 else f"{name[:200]}..."
                click.echo(f"Error: {name}: {error.strerror}; give another path.", err=True)
                ctx.exit(2)
            if ctx.params.get("debug"):
                raise
            click.echo(_without_message(error), err=True)
            ctx.exit(1)


def _without_message(error: BaseException) -> str:
    """Where an unexpected error came from; what libraries say of values may quote a row."""
    frames = traceback.format_tb(error.__traceback__)[-6:]
    return (
        f"{''.join(frames)}Error: unexpected {type(error).__name__}, please report it. Its message "
        "may quote your rows: `axolotl unlearn --debug ...` shows it."
    )


def quiet() -> None:
    """Keep what libraries say to developers (kernels that are not there, deprecations) off the
    screen, here and in the processes of a job."""
    warnings.simplefilter("ignore")
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")


#: Libraries that log or warn about themselves when they are imported.
NOISY = ("torchao", "bitsandbytes", "transformers", "datasets", "accelerate", "trl", "peft",
         "kernels", "torch", "huggingface_hub")  # fmt: skip


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Warnings of libraries, and whole tracebacks.")
def unlearn(debug: bool) -> None:
    """Forget documents, merge complementary models, and prove what was forgotten.

    \b
    axolotl unlearn demo                      the whole job on embedded data
    axolotl unlearn check my.yml              what is wrong, before any GPU second
    axolotl unlearn eval out/merged --data D  scores with intervals
    """
    if not debug:
        quiet()
