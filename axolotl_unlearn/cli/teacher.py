"""``axolotl-unlearn teacher my.yml``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._options import COUNT, FILE, PATH, Answer


@click.command("teacher")
@click.argument("config", type=FILE)
@click.option("--forget", type=FILE, multiple=True, required=True, help="Rows it must not see.")
@click.option("--retain", type=FILE, multiple=True, help="Rows it learns from [CONFIG's others].")
@click.option("--rows", type=COUNT, help="About how many of them [all].")
@click.option("--passes", type=COUNT, default=1)
@click.option("--out", type=PATH, default=Path("out/teacher"))
@click.option("--start", is_flag=True, help="Also the start, halfway to the teacher: OUT-start.")
@click.option("--bf16/--no-bf16", default=None, help="[CONFIG's]")
def command(config: Path, out: Path, start: bool, **given: Any):
    """Make the teacher of `match`: CONFIG's base, tuned briefly on retained rows.

    CONFIG is the one that made the model. Its base has seen none of its documents; a pass over
    retained rows, with CONFIG's own settings, teaches it their kind. The forget rows are only
    read to make sure that it does not meet them.

    \b
    Example:
      axolotl-unlearn teacher original.yml --forget data/forget.jsonl --start
    """
    from axolotl_unlearn.config.reading import read_config
    from axolotl_unlearn.training.teacher import make_start, make_teacher, original_of

    original = original_of(config) if start else None
    cost = make_teacher(config, out, start=start, **given)
    said = (
        f"{out}: {cost['rows']} of {cost['available']} retained rows, {cost['passes']} "
        f"pass{'es' * (cost['passes'] > 1)}, {cost['seconds']:.0f} s."
    )
    base, adapter = cost["base"], cost["adapter"]
    where = f"{{model: {base}, adapter: {out}}}" if adapter else f"{{model: {out}}}"
    if original is None:
        then = [f"In the config that forgets: {{objective: match, reference: {where}}}"]
        return Answer({"model": out, **cost}, [said, *then])
    made = make_start(original, cost, out)
    kept = f"{{model: {base}, adapter: {original}}}" if adapter else str(original)
    rate = read_config(config).get("learning_rate")
    then = (
        f"In the config that forgets:\n\nbase_model: {made}\nunlearn:\n  preset: never-seen\n"
        f"  teacher: {where if adapter else out}\n  original: {kept}\n"
        "  heldout: HELDOUT.jsonl   # texts of the same kinds that the model never saw\n"
        f"learning_rate: {rate}   # that of {config.name}\nnum_epochs: 10"
    )
    return Answer({"model": out, **cost}, [said, *then.splitlines()])
