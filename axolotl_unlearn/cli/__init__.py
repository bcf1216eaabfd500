"""``axolotl-unlearn ...``: a thin, lazy command group; each command has a file of its own."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import sys
import traceback
import warnings

import click

from axolotl_unlearn.cli._json import answer, one_object
from axolotl_unlearn.errors import UnlearnError

#: Commands that are methods without a promise of stability: hidden, found by their name.
EXPERIMENTAL = ("augment",)
_STUDIES = """
    analyse canaries demo demo-real depth fisher-start leaderboard locate make-data never-seen
    reproduce reproduce-real tune-merge
""".split()
#: Old names -> the command lines that replace them, for one release.
RENAMED = {
    "audit": "axolotl-unlearn request audit",
    "clean": "axolotl-unlearn request clean",
    "compare": "axolotl-unlearn eval --compare",
    "lm-eval": "axolotl-unlearn tasks run",
    "record": "axolotl-unlearn request",
    "register-tasks": "axolotl-unlearn tasks register",
    **{name: f"python -m research {name}" for name in _STUDIES},
}


class LazyGroup(click.Group):
    """A group whose commands are the modules of a package, imported when they are used.

    A module ``make_data`` gives the command ``make-data`` through its attribute ``command``.
    Faults of the user (`UnlearnError`) become one sentence and exit code 2.
    """

    package = __name__

    def list_commands(self, ctx: click.Context) -> list[str]:
        path = importlib.import_module(self.package).__path__
        names = [module.name for module in pkgutil.iter_modules(path)]
        return sorted(name.replace("_", "-") for name in names if not name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"{self.package}.{cmd_name.replace('-', '_')}").command

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except UnlearnError as error:
            self.fail(ctx, f"Error: {error}", 2)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # which click knows
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None:
                name = str(error.filename)
                name = name if len(name) < 200 else f"{name[:200]}..."
                self.fail(ctx, f"Error: {name}: {error.strerror}; give another path.", 2)
            if ctx.params.get("debug"):
                raise
            self.fail(ctx, _without_message(error), 1)

    @staticmethod
    def fail(ctx: click.Context, says: str, code: int) -> None:
        click.echo(says, err=True)
        answer(error=says.partition("Error: ")[2])
        ctx.exit(code)


def _without_message(error: BaseException) -> str:
    """Where an unexpected error came from; what libraries say of values may quote a row."""
    frames = traceback.format_tb(error.__traceback__)[-6:]
    return (
        f"{''.join(frames)}Error: unexpected {type(error).__name__}, please report it. Its message "
        "may quote your rows: `axolotl-unlearn --debug ...` shows it."
    )


def quiet() -> None:
    """Keep what libraries say to developers (kernels that are not there, deprecations) off the
    screen, here and in the processes of a job."""
    warnings.simplefilter("ignore")
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if datasets := sys.modules.get("datasets"):  # `axolotl-unlearn` has loaded it before
        datasets.disable_progress_bars()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")


#: Libraries that log or warn about themselves when they are imported.
NOISY = ("torchao", "bitsandbytes", "transformers", "datasets", "accelerate", "trl", "peft",
         "kernels", "torch", "torch.utils._pytree", "huggingface_hub",
         "axolotl.utils.data.sft")  # fmt: skip


class Commands(LazyGroup):
    """Those of the plugin, and under their old names those that have moved."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Wherever it stands: no command needs the option.
        words = [word for word in args if word != "--json"]
        return super().parse_args(ctx, ["--json"] * (len(words) < len(args)) + words)

    def invoke(self, ctx: click.Context):
        if not ctx.params["as_json"]:
            return super().invoke(ctx)
        with one_object(ctx):
            return super().invoke(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in EXPERIMENTAL:
            name = f"axolotl_unlearn.experimental.cli_{cmd_name.replace('-', '_')}"
            return importlib.import_module(name).command
        return _renamed(self, cmd_name) or super().get_command(ctx, cmd_name)


def _renamed(group: click.Group, name: str) -> click.Command | None:
    """An alias that says the new name and, where that is a command here, does what it does."""
    if name not in RENAMED:
        return None
    program, *words = RENAMED[name].split()
    takes_all = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @click.command(name, hidden=True, context_settings=takes_all)
    @click.pass_context
    def command(ctx: click.Context) -> None:
        says = f"`axolotl-unlearn {name}` is now `{RENAMED[name]}`"
        if program == "python":
            raise UnlearnError(f"{says}, in a checkout of the repository.")
        click.echo(f"{says}.", err=True)
        group.get_command(ctx, words[0]).main(
            [*words[1:], *ctx.args], prog_name=f"{program} {words[0]}", standalone_mode=False
        )

    return command


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.option("--debug", is_flag=True, help="Warnings of libraries, and whole tracebacks.")
@click.option("--json", "as_json", is_flag=True, help="Of any command: one JSON object.")
def unlearn(debug: bool, as_json: bool) -> None:
    """Forget documents, merge complementary models, and prove what was forgotten.

    \b
    Three ways to begin:
      axolotl-unlearn init --base-model M --forget F --retain R    a config of your own
      axolotl-unlearn request new finetune.yml --where id=ada --out requests/1
                                                                   delete a person's rows
      make demo                                                    see it work, in a checkout
    """
    if not debug:
        quiet()
