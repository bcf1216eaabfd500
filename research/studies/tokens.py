"""A picture: how surprised each model is by each token of one document.

    python -m research.studies.tokens DOCUMENTS.jsonl ID OUT.png NAME=MODEL ...

Cells are nats, -log p of the token given those before it: 0 is white, 8 and more is dark. A text that is
known is white throughout, a text never seen is as dark as in the retrained model, and darker than
there is pushed away. The demo's: `make demo`, then the models under out/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DARK = 8.0


def nats(folder: str, text: str) -> tuple[list[str], list[float]]:
    """Tokens of the text (as text) and their surprise, from the second token on."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        logits = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
        )
    surprise = -logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return [tokenizer.decode([token]) for token in ids[0, 1:]], surprise.tolist()


def picture(words: list[str], rows: dict[str, list[float]], out: Path) -> None:
    """A line of cells for each model, the tokens above them."""
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(0.24 * len(words) + 1.5, 0.34 * len(rows) + 1.3))
    image = axes.imshow(list(rows.values()), cmap="Reds", vmin=0, vmax=DARK, aspect="auto")
    means = [f"{name}  {sum(row) / len(row):.2f}" for name, row in rows.items()]
    axes.set_yticks(range(len(rows)), means)
    axes.set_xticks(range(len(words)), words, rotation=90, family="monospace")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, pad=0.01, label="nats")
    figure.savefig(out, bbox_inches="tight")


def main(documents: str, name: str, out: str, *models: str) -> None:
    rows = [json.loads(line) for line in Path(documents).read_text("utf-8").splitlines()]
    text = next(row["document"] for row in rows if row["id"] == name)
    read = {label: nats(folder, text) for label, folder in (one.split("=", 1) for one in models)}
    picture(
        next(iter(read.values()))[0], {label: row for label, (_, row) in read.items()}, Path(out)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
