"""Relearning attack: does a little training bring the forgotten texts back?

A model that merely hides its knowledge recovers with a few steps on benign or on a few forgotten
rows, faster than a model that never had it (arXiv 2406.13356; arXiv 2506.12618, section 4). Rows
that are trained on are never asked about: with forget rows, whole documents are set aside for
training and the others are asked. The control, a model never trained on the forget set, gets the
same training: only what the attacked model recovers above it was left behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from axolotl_unlearn.attacks.probes import MEASURES, Scores, plain_probes
from axolotl_unlearn.attacks.results import curve, figures_row, rows_digest, scores_key, stored
from axolotl_unlearn.attacks.subject import Subject
from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.encode import Encoder
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.store import Store

STEPS = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Training:
    """How the attacker trains.

    Attributes:
        rate: Learning rate of AdamW, constant, no weight decay, gradients clipped at 1.
        batch: Rows a step.
        rank: Rank of a LoRA on all linear layers; 0 trains all weights.
        seed: Of the order of rows and of the LoRA.
    """

    rate: float = 1e-4
    batch: int = 8
    rank: int = 0
    seed: int = 0


def split_forget(
    records: Sequence[Record], rows: int, seed: int = 0
) -> tuple[list[Record], list[Record]]:
    """Whole documents with together at least ``rows`` rows to train on, and all other rows.

    Raises:
        UnlearnError: if no document would be left to ask about.
    """
    documents = sorted({record.document for record in records})
    random.Random(seed).shuffle(documents)
    chosen: set[str] = set()
    for document in documents:
        if sum(record.document in chosen for record in records) >= rows:
            break
        chosen.add(document)
    trained = [record for record in records if record.document in chosen]
    asked = [record for record in records if record.document not in chosen]
    if not asked:
        raise UnlearnError(
            f"training on {rows} rows takes all {len(documents)} documents of the forget set and "
            "leaves none to ask about; lower --rows."
        )
    return trained, asked


def train(
    model: Any,
    tokenizer: Any,
    records: Sequence[Record],
    steps: Sequence[int],
    how: Training,
    join: str = " ",
) -> Iterator[tuple[int, Any]]:
    """Fine-tune ``model`` in place and stop at each number of steps.

    Loss as in memorisation: whole documents for completions, answers for questions, EOS included.

    Yields:
        (steps done, model in evaluation mode), in ascending order.
    """
    torch.manual_seed(how.seed)
    options = DataArgs(join=join)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    encoder = Encoder(tokenizer, options, max_length=limit)
    rows = []
    for record in records:
        encoded = encoder.encode(record)
        labels = encoder.labels(encoded, encoder.labelled(record.kind))
        rows.append((encoded.input_ids, labels))
    model.requires_grad_(True)  # one whose adapter was merged comes frozen
    if how.rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(
                r=how.rank,
                lora_alpha=how.rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
        )
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=how.rate, weight_decay=0.0)
    order = _endless(len(rows), how.seed)
    done = 0
    for stop in sorted(set(steps)):
        model.train()
        while done < stop:
            batch = _collate([rows[next(order)] for _ in range(how.batch)], model.device)
            loss = model(**batch, use_cache=False).loss
            if not torch.isfinite(loss):
                raise UnlearnError(
                    f"the relearning loss is {float(loss)} at step {done + 1}; lower --lr."
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
        model.eval()
        # Asking needs the model itself; the LoRA layers stay inside it.
        yield stop, model.get_base_model() if how.rank else model


def _endless(n: int, seed: int) -> Iterator[int]:
    """Row numbers, each pass in another order."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(range(n), n)


def _collate(rows: Sequence[tuple[list[int], list[int]]], device: Any) -> dict[str, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)

    def padded(index: int, fill: int) -> torch.Tensor:
        return torch.tensor([row[index] + [fill] * (width - len(row[index])) for row in rows])

    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    batch = {"input_ids": padded(0, 0), "labels": padded(1, IGNORE), "attention_mask": mask}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def relearn_attack(
    subject: Subject,
    store: Store,
    training_rows: Sequence[Record],
    asked: Sequence[Record],
    *,
    source: str,
    steps: Sequence[int] = STEPS,
    how: Training | None = None,
    control: Subject | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Recall of forget rows after each number of training steps.

    Args:
        training_rows: What the attacker trains on.
        asked: Forget rows that are asked about; none of them may be trained on.
        source: What the rows are called in the result, e.g. "forget" or "retain".

    Returns:
        The result, and recovery curves of model and control.
    """
    how = how or Training()
    if not training_rows:
        raise UnlearnError("there are no rows to train on; raise --rows or give another --source.")
    trained_ids = {(record.input, record.output) for record in training_rows}
    if any((record.input, record.output) in trained_ids for record in asked):
        raise UnlearnError("some rows are both trained on and asked about; take one set out.")
    probes = plain_probes(asked, join=subject.join)
    stops = sorted({0, *steps})

    def scores(of: Subject) -> dict[int, Scores]:
        base = (of.identity, rows_digest(asked), rows_digest(training_rows), how)
        keys = {
            stop: scores_key("relearn", *base, stop) if stop else scores_key(*base[:2], "plain")
            for stop in stops
        }
        missing = [stop for stop in stops if store.get(keys[stop]) is None]
        if missing:
            model, tokenizer = of.load()
            # Training is repeated up to the first missing step, asking is not.
            for stop, trained in train(model, tokenizer, training_rows, missing, how, subject.join):

                def make(stop=stop, trained=trained) -> Scores:
                    return of.ask(trained, tokenizer, probes, f"after {stop} steps")

                stored(store, keys[stop], make)
        return {stop: stored(store, keys[stop], _never) for stop in stops}

    ours = scores(subject)
    theirs = scores(control) if control else {}
    rows = [
        figures_row(f"{stop} steps", stop, ours[stop], ours[0], theirs.get(stop)) for stop in stops
    ]
    title = f"Relearning on {len(training_rows)} {source} rows"
    result = {
        "attack": "relearn",
        "title": title,
        "model": subject.name,
        "control": control.name if control else None,
        "source": source,
        "training_rows": len(training_rows),
        "training": vars(how),
        "rows": rows,
    }
    attack = f"relearn on {len(training_rows)} {source} rows"
    curves = [curve(attack, subject.name, "step", rows, measure) for measure in MEASURES]
    if control:
        control_rows = [{"x": stop, **theirs[stop].figures()} for stop in stops]
        curves += [curve(attack, control.name, "step", control_rows, m) for m in MEASURES]
    return result, curves


def _never() -> Scores:
    raise AssertionError("scores of every step were stored before")
