"""``python -m research trusted``."""

from __future__ import annotations

import functools

import click


@click.command(
    "trusted",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """`axolotl-unlearn ARGUMENTS`, with the code that lies beside the weights (guard-it, mrp).

    \b
    python -m research trusted eval out/guard-it --data out/demo/data --out out/eval
    """
    from axolotl_unlearn import models
    from axolotl_unlearn.cli import unlearn

    models.load_model = functools.partial(models.load_model, trust_remote_code=True)
    if "vllm" in arguments:
        import vllm

        from research.inference import in_vllm

        vllm.LLM = in_vllm.load
    unlearn(arguments, prog_name="python -m research trusted")
