"""`axolotl-unlearn merge`."""

from __future__ import annotations

import re

import click

from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.cli._options import PATH, say
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.recipe import METHODS, SCALES, SPACES


class PathList(click.Option):
    """An option that takes all words up to the next option: --parents out/over out/under."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, multiple=True, **kwargs)

    def add_to_parser(self, parser, ctx):
        super().add_to_parser(parser, ctx)
        for name in self.opts:
            option = parser._long_opt.get(name)
            if option is None:
                continue
            process = option.process

            def take(value, state, process=process):
                process(value, state)
                while state.rargs and not _is_option(state.rargs[0]):
                    process(state.rargs.pop(0), state)

            option.process = take


def _is_option(word: str) -> bool:
    return bool(re.match(r"-[^\d.]", word))  # -0.5 is a weight


@click.command()
@click.option("--parents", cls=PathList, help="Adapters or full models; negate:PATH: reversed.")
@click.option("--base", type=PATH, help="The model that all started from.")
@click.option("--out", type=PATH, help="Folder of the result.")
@click.option("--method", default="ties", help=", ".join(METHODS))
@click.option("--space", default="delta", help=", ".join(SPACES))
@click.option("--density", default=0.8, help="Share of entries kept, (0, 1].")
@click.option("--weights", cls=PathList, type=float, help="One a parent  [default: 1 each]")
@click.option("--scale", default="average", help=", ".join(SCALES))
@click.option("--seed", default=0, help="Of the random drops of DARE.")
@click.option("--recipe", type=PATH, help="Repeat the merge of a merge.json on the same weights.")
@click.option("--overwrite", is_flag=True, help="Replace an existing --out.")
@click.option("--force", is_flag=True, help="Merge despite another base or LoRA initialisation.")
def command(parents, base, out, recipe, overwrite, force, weights, **options) -> None:
    """Merge complementary unlearned models and write the mergekit recipe beside the result.

    \b
    Example:
      axolotl-unlearn merge --parents out/over out/under --base out/memorised --out out/merged
    """
    from axolotl_unlearn.merging.run import merge, merge_from_recipe

    if recipe is not None:
        source = click.get_current_context().get_parameter_source
        for name in ("parents", "base", "weights", *options):
            if source(name) is click.core.ParameterSource.COMMANDLINE:
                raise UnlearnError(f"--recipe holds --{name} already: leave it out, or --recipe.")
    needed = {"--out": out} if recipe else {"--parents": parents, "--base": base, "--out": out}
    if missing := [name for name, value in needed.items() if not value]:
        says = " and ".join(missing)
        raise UnlearnError(f"merge needs {says}: see `axolotl-unlearn merge --help`.")
    shared = {"overwrite": overwrite, "force": force, "log": say, "progress": True}
    if recipe is not None:
        folder = merge_from_recipe(recipe, out, **shared)
    else:
        folder = merge(parents, base, out, weights=weights or None, **options, **shared)
    answer(model=folder)
    click.echo(f"Merged {len(parents) or 'the same'} parents into {folder}")
