"""``axolotl-unlearn shards``: models of which a deletion request trains one part again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from axolotl_unlearn.cli._json import answer
from axolotl_unlearn.cli._options import COUNT, PATH, few_logs, say


@click.group()
def command() -> None:
    """Train a model in shards, so that a deletion request is exact and trains one shard again.

    \b
    axolotl-unlearn shards train finetune.yml --count 4 --slices 2 --by person --out shards
    axolotl-unlearn request new finetune.yml --model shards/model --where person=ada --out r/1
    axolotl-unlearn request run r/1 --way shards
    """


@command.command("train")
@click.argument("config", type=PATH)
@click.option("--out", required=True, type=PATH, help="Folder to make; model/ is the result.")
@click.option("--count", default=4, type=COUNT, help="Shards.")
@click.option("--slices", default=2, type=COUNT, help="Of each shard.")
@click.option("--by", help="Field whose rows stay together, as meta.person.  [document, id]")
@click.option("--merge", "method", default="linear", help="Method of mergekit.",
              type=click.Choice(("linear", "ties", "dare_linear", "dare_ties")))  # fmt: skip
@click.option("--sum", "summed", is_flag=True, help="Add the shards' changes; else their mean.")
@click.option("--density", default=0.8, help="Of ties and dare: entries kept.")
@click.option("--seed", default=0, help="Of dare's random drops.")
@click.option("--processes", default=1, type=COUNT, help="Of a training.")
@click.option("--threads", type=COUNT, help="Of a training.  [all cores]")
def train(
    config: Path, out: Path, method: str, density: float, summed: bool, seed: int,
    threads: int | None, **given: Any,
) -> None:  # fmt: skip
    """Train every shard of CONFIG's rows slice by slice, and merge; goes on if stopped.

    CONFIG is one of plain `axolotl train`. Rows of one person or document are in one shard.
    """
    few_logs()
    from axolotl_unlearn.merging.recipe import Recipe
    from axolotl_unlearn.requests.request import cores
    from axolotl_unlearn.requests.ways.shards import Sharding, train_shards

    recipe = Recipe(method=method, density=density, scale="sum" if summed else "average", seed=seed)
    sharding = Sharding(recipe=recipe, threads=threads or cores(), **given)
    facts = train_shards(config, out, sharding)
    answer(**facts | {"model": out / "model"})
    sizes = [
        sum(n for name, n in facts["rows"].items() if name.split("-")[0] == str(shard))
        for shard in range(1, sharding.count + 1)
    ]
    say(f"Rows of the shards: {', '.join(map(str, sizes))}.")
    if facts["unnamed"]:
        say(f"{facts['unnamed']} rows do not say to whom they belong; each stands for itself.")
    if facts["elsewhere"]:
        say(
            f"{facts['elsewhere']} people or documents are named in rows of others, in another "
            "shard: `request new` offers these rows."
        )
    say(f"Model: {out / 'model'} (recipe: {out / 'merge.yml'})")
