"""`axolotl unlearn register-tasks`: make `lm_eval --tasks semeval_unlearn` work as it stands."""

from __future__ import annotations

import click


@click.command("register-tasks")
@click.option("--remove", is_flag=True, help="Remove what was registered.")
def command(remove: bool) -> None:
    """Copy the task folder into the installed lm-eval, or remove it again.

    Until an lm-eval release reads task folders of other packages, this is what makes our tasks
    known to plain `lm_eval`. Without it, use `lm_eval --include_path eval_tasks`.

    \b
    Example:
      axolotl unlearn register-tasks
      lm_eval --model hf --model_args pretrained=out/merged --tasks semeval_unlearn
      axolotl unlearn register-tasks --remove
    """
    from axolotl_unlearn.evaluation.tasks import register_tasks, unregister_tasks

    if remove:
        folders = unregister_tasks()
        for folder in folders:
            click.echo(f"removed {folder}")
        if not folders:
            click.echo("nothing was registered")
        return
    for path in register_tasks():
        click.echo(f"copied {path.name} to {path.parent}")
    click.echo("`lm_eval --tasks semeval_unlearn` now finds the tasks; --remove undoes this.")
