"""``python -m research lm-eval``."""

from __future__ import annotations

import click

from axolotl_unlearn.cli.tasks import run


@click.command(
    "lm-eval",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """`axolotl-unlearn tasks run` with `--model hf-whp` (Who's Harry Potter, arXiv 2310.02238).

    Takes off a model's logits what more training on the forget rows adds:
    --model_args pretrained=out/memorised,reinforced=out/reinforced,alpha=5
    """
    import research.inference.whos_harry_potter  # noqa: F401 (registers hf-whp)

    ctx.invoke(run, arguments=arguments)
