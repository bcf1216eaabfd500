"""`axolotl-unlearn eval`: official scores, intervals and flags of several models."""

from __future__ import annotations

from typing import Any

import click

from axolotl_unlearn.cli._json import answer, read_json
from axolotl_unlearn.cli._options import FILE, PATH, say, show
from axolotl_unlearn.errors import UnlearnError

BACKENDS = click.Choice(["transformers", "vllm", "auto"])


@click.command("eval")
@click.argument("models", nargs=-1, required=True)
@click.option("--data", "data_dir", type=PATH, help="[examples/demo]")
@click.option("--out", "out_dir", type=PATH, default="out/eval")
@click.option("--compare", is_flag=True, help="Only the difference of two MODELS that OUT holds.")
@click.option("--original", help="Which model is the one before unlearning [original, memorised].")
@click.option("--batch-size", default=64)
@click.option("--limit", type=int, help="Only so many rows, documents, questions, to try out.")
@click.option("--device", help="[default: the accelerator, else cpu]")
@click.option("--device-map", type=click.Choice(["auto"]), help="Spread a model over all devices.")
@click.option("--dtype", help="float32, bfloat16, float16 or auto [float32 on cpu, else auto]")
@click.option("--backend", type=BACKENDS, default="transformers", help="auto: vLLM on a GPU.")
@click.option("--max-gen-toks", default=256, help="New tokens a row.")
@click.option("--canaries", type=FILE, help="Rows by coin.  [canaries.jsonl of the data folder]")
@click.option("--samples", default=0, help="Draws of each forget row, as long again each.")
@click.option("--min-members", default=20, help="Fewer are refused; 0: no membership.")
@click.option("--join", default=" ", show_default="a space", help="Between input and output.")
@click.option("--with-text", is_flag=True, help="Keep generated texts in cache and results.")
@click.option("--store", type=PATH, help="Measurements of several evaluations.  [OUT/cache]")
@click.option("--no-cache", is_flag=True, help="Measure again and store nothing but results.")
@click.option("--quiet", is_flag=True, help="No progress bars.")
def command(models: tuple[str, ...], no_cache: bool, quiet: bool, compare: bool, **options) -> None:
    """Evaluate MODELS on a data folder; write OUT/results.json and print the table.

    A model is a folder with weights, an adapter folder, base+adapter, or name=one of these. The
    data folder holds forget, retain, member and nonmember (.jsonl, .json or .parquet), and
    general for utility. Results are cached by content; an interrupted run goes on.

    \b
    Example:
      axolotl-unlearn eval original=out/memorised out/over out/under out/merged
      axolotl-unlearn report out/eval
      axolotl-unlearn eval --compare merged over
    """
    if compare:
        if len(models) != 2:
            raise UnlearnError(f"--compare takes two models that --out holds; {len(models)} given.")
        _show_difference(*models, options["data_dir"], options["out_dir"])
        return
    from axolotl_unlearn.models import parse_models

    specs = parse_models(models)  # a name that is wrong is said before heavy libraries load
    from axolotl_unlearn.evaluation.measurement import Options
    from axolotl_unlearn.evaluation.run import evaluate
    from axolotl_unlearn.report import reasons, table

    data = options.pop("data_dir")
    asked = Options(use_cache=not no_cache, progress=not quiet, **options)
    if not evaluate(specs, data, asked):
        return  # not the main process of several
    out = options["out_dir"]
    answer(file=out / "results.json", **read_json(out / "results.json"))
    show(table(out))
    say(*reasons(out).splitlines())
    found = read_json(out / "results.json")["models"]
    say(*(f"{one['name']}: {one['canaries']['sentence']}" for one in found if "canaries" in one))
    say(f"Results: {out / 'results.json'} (page: axolotl-unlearn report {out})")


def _show_difference(*asked: Any) -> None:
    """Nothing is measured again, and settings are those of the evaluation."""
    from rich.table import Table

    from axolotl_unlearn.evaluation.compare import compare

    result = compare(*asked)
    answer(**result)
    grid = Table(title=f"{result['first']} - {result['second']} (same rows, paired by document)")
    for heading in ("score", "difference", "95 % interval", "p", "smallest"):
        grid.add_column(heading, justify="left" if heading == "score" else "right")
    for metric, gap in result["differences"].items():
        bold = "bold" if gap["low"] > 0 or gap["high"] < 0 else ""
        bounds = rf"\[{gap['low']:+.3f}, {gap['high']:+.3f}]"
        figures = (f"{gap['value']:+.3f}", bounds, f"{gap['p']:.4f}", f"{gap['smallest']:.3f}")
        grid.add_row(metric, *figures, style=bold)
    grid.caption = (
        "p after Holm over all scores. smallest: the difference that these rows would show in four "
        "of five data sets."
    )
    show(grid, result["sentence"])
