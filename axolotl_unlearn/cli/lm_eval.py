"""`axolotl unlearn lm-eval`: lm-eval's own command line with our tasks and model registered."""

from __future__ import annotations

import sys

import click


@click.command(
    "lm-eval",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run lm_eval with `--model hf-unlearn`, `--model hf-whp` and our tasks known to it.

    All ARGUMENTS are lm_eval's. The folder of our tasks is included unless you name another.

    \b
    Example:
      axolotl unlearn lm-eval --model hf-unlearn --model_args pretrained=out/merged \\
        --tasks unlearn_likelihood --metadata '{"data_dir": "out/demo/data"}' --batch_size 16

    hf-whp (arXiv 2310.02238) takes off a model's logits what more training on the forget rows adds:
    --model_args pretrained=out/memorised,reinforced=out/reinforced,alpha=5
    """
    if not arguments or set(arguments) & {"-h", "--help"}:
        click.echo(click.get_current_context().get_help())
        return
    from lm_eval.__main__ import cli_evaluate

    import axolotl_unlearn.evaluation.lm  # noqa: F401 (registers hf-unlearn)
    import axolotl_unlearn.experimental.whp  # noqa: F401 (registers hf-whp)
    from axolotl_unlearn.evaluation.tasks import task_folder

    given = list(arguments)
    if not any(a == "--include_path" or a.startswith("--include_path=") for a in given):
        given += ["--include_path", str(task_folder())]
    before, sys.argv = sys.argv, ["lm_eval", *given]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
