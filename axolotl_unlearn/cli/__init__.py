"""``axolotl-unlearn ...``: a thin, lazy command group; each command has a file of its own."""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import os
import pkgutil
import sys
import warnings

import click

from axolotl_unlearn import __version__
from axolotl_unlearn.cli._options import Answer, answer, one_object, show
from axolotl_unlearn.errors import UnlearnError, printed

#: The disk is full, of which a write says no name.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: After Ctrl-C, of what leaves more than nothing.
_STORED = ("eval", "shards", "attack quantise", "attack relearn", "attack prompt")
_GOES_ON = dict.fromkeys(_STORED, "goes on: what is finished is kept")
_GOES_ON["request erase"] = "goes on where it stopped"
_GOES_ON["request run"] = (
    "goes on where it stopped: what is done is kept, a training that was stopped begins again"
)
_WORDS = "axolotl_unlearn.words"
#: Commands of Axolotl's own program.
AXOLOTL = ("train", "preprocess", "merge-lora", "evaluate", "inference", "quantize", "vllm-serve")


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
        module = importlib.import_module(f"{self.package}.{cmd_name.replace('-', '_')}")
        return module.command

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except UnlearnError as error:
            self.fail(ctx, f"Error: {error}", 2)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # which click knows
        except KeyboardInterrupt:
            words = ctx.meta.get(_WORDS, [""])
            how = _GOES_ON.get(words[0], _GOES_ON.get(" ".join(words), "begins again"))
            self.fail(ctx, f"Error: stopped; the same command {how}.", 130)
        except Exception as error:
            reason: BaseException | None = error
            while reason and not (
                isinstance(reason, OSError) and (reason.filename or reason.errno in _FULL)
            ):
                reason = reason.__cause__  # `datasets` wraps what stopped it
            if reason:
                says = f"Error: {str(reason.filename or 'a file')[:200]} cannot be read or written "
                says += f"({reason.strerror}); make room, allow it, or give another path."
                self.fail(ctx, says, 2)
            if ctx.params.get("debug"):
                raise
            # What libraries say of values may quote a row.
            says = (
                f"Error: unexpected {type(error).__name__}, please report it with what "
                "`axolotl-unlearn --debug ...` shows, which may quote your rows."
            )
            self.fail(ctx, says, 1)

    @staticmethod
    def fail(ctx: click.Context, says: str, code: int) -> None:
        click.echo(printed(says), err=True)
        answer(error=says.partition("Error: ")[2])
        ctx.exit(code)


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
    """Those of the plugin; ``--json`` may stand anywhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Wherever it stands: no command needs the option.
        words = [word for word in args if word != "--json"]
        return super().parse_args(ctx, ["--json"] * (len(words) < len(args)) + words)

    def invoke(self, ctx: click.Context):
        if not ctx.params["as_json"]:
            return super().invoke(ctx)
        with one_object(ctx):
            return super().invoke(ctx)

    def resolve_command(self, ctx: click.Context, args: list[str]):
        ctx.meta[_WORDS] = args[:2]
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            meant = "axolotl" if args[0] in AXOLOTL else near and "axolotl-unlearn"
            name = near[0] if near and meant != "axolotl" else args[0]
            raise UnlearnError(
                f"there is no command {args[0]!r}; "
                + (f"did you mean `{meant} {name}`?" if meant else "`--help` lists them."),
                code="cli.no-command",
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="axolotl-unlearn")
@click.option("--debug", is_flag=True, help="Warnings of libraries, and whole tracebacks.")
@click.option("--json", "as_json", is_flag=True, help="Of any command: one JSON object.")
def unlearn(debug: bool, as_json: bool) -> None:
    """Forget documents, delete the rows of people, and measure what was forgotten.

    \b
    Three ways to begin:
      a config of your own
        axolotl-unlearn init --base-model M --forget F --retain R
      delete a person's rows
        axolotl-unlearn request new my.yml --where id=ada --out requests/1
      see it work, in a checkout
        make demo
    """
    if not debug:
        quiet()


@unlearn.result_callback()
def say(found: Answer | None, **_: object) -> None:
    """The one printer. The lines are said all the same: with ``--json`` on standard error."""
    if found is not None:
        answer(**found.facts)
        show(*found.lines)
        if found.exit:
            raise SystemExit(found.exit)
