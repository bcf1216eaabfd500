"""``python -m research leaderboard``: all methods on one data set with one budget."""

from __future__ import annotations

from pathlib import Path

import click

from research.cli._options import jobs_option

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("leaderboard")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/leaderboard"))
@click.option("--seeds", default="0", show_default=True, help="Separated by spaces.")
@click.option("--methods", help="Only these, separated by commas.  [all]")
@click.option("--trials", default=6, show_default=True, help="Strengths that each method may try.")
@click.option("--model", type=_FOLDER, help="Your own model instead of the embedded one.")
@click.option("--retrained", type=_FOLDER, help="One that never saw the forget rows.")
@click.option(
    "--data", type=_FOLDER, help="Its forget and retain rows, with validation/ and test/."
)
@click.option("--teacher", type=_FOLDER, help="One that Match compares with.")
@click.option("--example", default="npo_over", show_default=True, help="Settings of training.")
@click.option("--layer", type=click.IntRange(0), help="Of RMU.  [that of the embedded model]")
@jobs_option
@click.option(
    "--ray", metavar="[ADDRESS]", is_flag=False, flag_value="local",
    help="Each run a task of Ray: of a cluster (`auto`, HOST:PORT), or of this machine [local].",
)  # fmt: skip
def command(
    out: Path,
    seeds: str,
    methods: str | None,
    trials: int,
    model: Path | None,
    retrained: Path | None,
    data: Path | None,
    teacher: Path | None,
    example: str,
    layer: int | None,
    jobs: int | None,
    ray: str | None,
) -> None:
    """Compare methods: the same rows, steps and retain losses, the same number of trials each.

    Each method's own strength is chosen on the validation half; the table is of the test half,
    with relearning and rounding to 4 bits. A second call goes on where the first one ended. All
    methods with six trials are about 170 short runs a seed.

    \b
    python -m research leaderboard
    python -m research leaderboard --methods npo,simnpo,rmu --seeds 0
    python -m research leaderboard --model M --retrained R --data D --example smollm2/over
    """
    from axolotl_unlearn.errors import UnlearnError
    from research.studies.leaderboard import EPOCHS, World, leaderboard

    own = (model, retrained, data)
    if any(own) and not all(own):
        raise UnlearnError("give --model, --retrained and --data together, or none of them.")
    try:
        numbers = [int(seed) for seed in seeds.split()]
    except ValueError:
        raise UnlearnError(f"--seeds {seeds!r} must be whole numbers with spaces.") from None
    world = World(
        example, None if model else EPOCHS, model, retrained, data, layer, teacher=teacher
    )
    path = leaderboard(out, numbers, methods, world=world, trials=trials, threads=jobs, ray=ray)
    click.echo(path.read_text("utf-8"))
    click.echo(f"Data: {out / 'results.json'}; page: {path}")
