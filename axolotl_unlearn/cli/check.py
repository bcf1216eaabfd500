"""``axolotl-unlearn check my.yml``"""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote

import click

from axolotl_unlearn.cli._options import PATH, Answer, fitted, show


@click.command("check")
@click.argument("config", type=PATH)
@click.option("--full/--quick", default=None,
              help="Also tokens, plan, memory and Axolotl's own checks.")  # fmt: skip
@click.option(
    "--show",
    "rows",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Print N rows of each side as the model will read them.",
)
def command(config: Path, full: bool | None, rows: int) -> Answer:
    """Find what is wrong with CONFIG before any GPU second is spent.

    Reads config, data files and tokenizer; no weights. All faults are listed at once, each
    with its cure. Without one it says what the run would do: objectives, rows, tokens, steps,
    forwards, memory, retain rows that hardly differ from forget rows. Texts are printed with
    `--show` alone.

    CONFIG may be a recipe of mergekit: do its models fit together (base, shapes, tokenizer)? Of
    these all weights are read.

    Exit code 0 if no fault was found, 2 if there is one. `--quick`, the default, answers sooner,
    from config and rows alone. Axolotl's own program takes `--full`.
    """
    from axolotl_unlearn.config.reading import read_config

    given, summary, facts, path = read_config(config), (), {}, quote(str(config))
    then = f"axolotl train {path}"
    if "merge_method" in given:
        from axolotl_unlearn.merging import check as check_recipe
        from axolotl_unlearn.merging import unread

        faults, then = list(map(str, check_recipe(given))), f"mergekit-yaml {path} OUT"
        facts = {"unread": [] if faults else unread(given)}
        summary = [f"  {one} was not read: it is no folder here" for one in facts["unread"]]
    else:
        from axolotl_unlearn.checks.report import check

        full = "axolotl.cli.main" in sys.modules if full is None else full
        faults, summary, facts = check(config, full, rows)
    show(*summary)
    for line in (line for fault in faults for line in f"  ✗ {fault}".split("\n")):
        click.secho(fitted(line), fg="red", err=True)
    if faults:
        click.echo(f"{config}: {len(faults)} fault{'s' * (len(faults) > 1)}", err=True)
    else:
        click.secho(fitted(f"{config}: ready; run `{then}`"), fg="green")
    return Answer({"ready": not faults, "faults": faults, **facts}, exit=2 if faults else 0)
