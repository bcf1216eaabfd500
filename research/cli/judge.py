"""``python -m research judge``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from axolotl_unlearn.cli._options import data_option


@click.command("judge")
@click.argument("model")
@data_option("Folder with forget.jsonl.")
@click.option("--endpoint", required=True, help="OpenAI-compatible, as http://localhost:8000/v1.")
@click.option("--judge", "name", required=True, help="The judging model's name there.")
@click.option("--limit", default=50, show_default=True, help="So many rows.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Scores of each row as JSON.")
def command(model, data_dir, endpoint, name, limit, max_new_tokens, out) -> None:
    """Let a language model mark answers to forget prompts: natural? different from the text?

    Sends prompts, answers and forget texts to the endpoint. A key is read from OPENAI_API_KEY.

    \b
    python -m research judge out/demo/merged --data out/demo/data \\
        --endpoint http://localhost:8000/v1 --judge my-judge
    """
    import numpy as np
    import torch

    from axolotl_unlearn.attacks.target import limited, read_side
    from axolotl_unlearn.evaluation.generate import generate_greedily
    from axolotl_unlearn.files import write_json
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
    from research.probes.judge import agreement, judged

    (spec,) = parse_models([model])
    records = limited(read_side(data_dir, "forget")[1], limit)
    said = generate_greedily(
        load_model(spec, dtype=torch.float32, device="cpu"), load_tokenizer(spec),
        [r.input for r in records], max_new_tokens=max_new_tokens,
    )  # fmt: skip
    rows = [(r.input, text, r.output) for r, text in zip(records, said, strict=True)]
    found = judged(rows, endpoint, name, os.environ.get("OPENAI_API_KEY"))
    for mark, scores in found.items():
        click.echo(f"{mark}: {np.mean(scores):.2f} (0 to 1, {len(scores)} rows)")
    same = agreement(found["naturalness"], said)
    click.echo(
        f"Our flag of broken texts agrees with the judge's naturalness on {same:.0%} of them."
    )
    if out:
        write_json(out, found | {"id": [r.id for r in records]})
