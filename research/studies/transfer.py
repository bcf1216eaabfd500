"""Train the transferred membership classifier: ``python -m research.studies.transfer``.

Tiny models of several architectures learn background documents (the control), then members for
some epochs more. A logistic regression over all of them tells members from documents never seen;
each architecture is also left out of the training once and asked.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch

from axolotl_unlearn.engine.token_scoring import score_texts
from axolotl_unlearn.metrics.intervals import auc
from research.attacks import transfer
from research.worlds.generate import Sizes, make_corpus

STEPS = (4, 10, 25)
SIDE = 60
ROOT = Path(__file__).parents[2]


def make_model(kind: str, vocabulary: int, seed: int):
    """A tiny model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2 + seed % 2, "num_attention_heads": 4}
    names = {"gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}}
    more = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    if kind != "gpt2":
        more |= {"intermediate_size": 128, "max_position_embeddings": 512}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **names.get(kind, sizes), **more)
    )


def train(model, tokenizer, texts: list[str], epochs: int, seed: int) -> None:
    """AdamW, 16 texts a step."""
    rng = random.Random(seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        order = rng.sample(texts, len(texts))
        for start in range(0, len(order), 16):
            rows = [tokenizer(text)["input_ids"][:96] for text in order[start : start + 16]]
            width = max(map(len, rows))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
            labels = ids.masked_fill(seen == 0, -100)
            model(input_ids=ids, attention_mask=seen, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()


def main() -> None:
    from sklearn.linear_model import LogisticRegression
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-olmo")
    kinds = ("llama", "gpt2", "gpt_neox")
    sets: list[tuple[str, int, np.ndarray]] = []
    for number, kind in enumerate(kinds * 2):
        sizes = Sizes(stories=60, pii=60, nonmembers=60, general=110, background=960)
        corpus = make_corpus(9101 + number, sizes)
        rest = [d.text for d in corpus.background][:160]
        pool = [d.text for d in [*corpus.forget, *corpus.retain]]
        random.Random(number).shuffle(pool)
        asked = [text[:250] for text in pool[: 2 * SIDE]]
        model = make_model(kind, len(tokenizer), number)
        train(model, tokenizer, rest, 4, number)
        control = score_texts(model, tokenizer, asked)
        for steps in STEPS:
            train(model, tokenizer, asked[:SIDE], steps, number)
            found = transfer.features(score_texts(model, tokenizer, asked), control)
            sets.append((kind, steps, found))
            print(kind, steps, flush=True)
    labels = np.repeat([1, 0], SIDE)

    def learn(chosen: list[np.ndarray]) -> np.ndarray:
        line = LogisticRegression(C=0.01, max_iter=2000)
        return line.fit(np.concatenate(chosen), np.tile(labels, len(chosen))).coef_[0]

    held = {}
    for kind in kinds:
        line = learn([values for other, _, values in sets if other != kind])
        for other, steps, values in sets:
            if other == kind:
                area = auc(values[:SIDE] @ line, values[SIDE:] @ line)
                held.setdefault(f"{kind}, {steps} epochs more", []).append(round(area, 3))
    print(json.dumps(held, indent=1))
    line = learn([values for _, _, values in sets])
    said = {"command": "python -m research.studies.transfer", "held_out_auc": held}
    found = said | {"weights": [round(float(w), 5) for w in line]}
    transfer.WEIGHTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
