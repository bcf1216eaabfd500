"""`axolotl-unlearn eval`: official scores, intervals and flags of several models."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

import click

from axolotl_unlearn.cli._options import FILE, PATH, Answer

BACKENDS = click.Choice(["transformers", "vllm", "auto"])


@click.command("eval")
@click.argument("models", nargs=-1, required=True)
@click.option("--data", "data_dir", type=PATH, help="[examples/demo]")
@click.option("--out", "out_dir", type=PATH, default="out/eval")
@click.option("--original", help="Which model is the one before unlearning [original, memorised].")
@click.option("--batch-size", default=64)
@click.option("--limit", type=int, help="Only so many rows, documents, questions, to try out.")
@click.option("--device", help="[default: the accelerator, else cpu]")
@click.option("--device-map", type=click.Choice(["auto"]), help="Spread a model over all devices.")
@click.option("--dtype", help="float32, bfloat16, float16 or auto [float32 on cpu, else auto]")
@click.option("--backend", type=BACKENDS, default="transformers", help="auto: vLLM on a GPU.")
@click.option("--max-gen-toks", default=256, help="New tokens a row.")
@click.option("--canaries", type=FILE, help="Rows by coin.  [canaries.jsonl of the data folder]")
@click.option(
    "--samples",
    default=0,
    type=click.IntRange(0),
    help="Draws of each forget row, as long again each.",
)
@click.option("--min-members", default=20, help="Fewer are refused; 0: no membership.")
@click.option("--join", default=" ", show_default="a space", help="Between input and output.")
@click.option("--with-text", "keep_texts", is_flag=True, help="Keep texts in cache and results.")
@click.option("--store", type=PATH, help="Measurements of several evaluations.  [OUT/cache]")
@click.option("--quiet", is_flag=True, help="No progress bars.")
def command(models: tuple[str, ...], quiet: bool, **options):
    """Evaluate MODELS on a data folder; write OUT/results.json and print the table.

    A model is a folder with weights, an adapter folder, base+adapter, or name=one of these. The
    data folder holds forget, retain, member and nonmember (.jsonl, .json or .parquet), and
    general for utility. Results are cached by content; an interrupted run goes on.

    \b
    Example:
      axolotl-unlearn eval original=out/memorised out/over out/under out/merged
      axolotl-unlearn report out/eval
    """
    from axolotl_unlearn.evaluation.sets import DEFAULT_DATA_DIR, need_file
    from axolotl_unlearn.models import parse_models

    specs = parse_models(models)  # a name that is wrong is said before heavy libraries load
    data = Path(options.pop("data_dir") or DEFAULT_DATA_DIR)
    for name in ("forget", "retain", *("member", "nonmember") * bool(options["min_members"])):
        need_file(data, name)
    from axolotl_unlearn.evaluation.measurement import Options
    from axolotl_unlearn.evaluation.run import evaluate
    from axolotl_unlearn.report import answer_of, table

    asked = Options(progress=not quiet, **options)
    evaluate(specs, data, asked)
    out = options["out_dir"]
    file, judged = out / "results.json", answer_of(out)
    found = json.loads(file.read_text("utf-8"))
    coins = [one for one in found["models"] if "canaries" in one]
    said = [
        *(table(judged), *judged.reasons),
        *(f"{one['name']}: {one['canaries']['sentence']}" for one in coins),
        f"Results: {file} (page: axolotl-unlearn report {quote(str(out))})",
    ]
    return Answer({"file": file, **found, "verdicts": judged.labels}, said)
