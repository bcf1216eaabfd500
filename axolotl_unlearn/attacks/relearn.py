"""Relearning attack: does a little training bring the forgotten texts back?

A model that merely hides its knowledge recovers with a few steps on benign or on a few forgotten
rows, faster than a model that never had it (arXiv 2406.13356; arXiv 2506.12618, section 4). Rows
that are trained on are not asked about. The control, a model never trained on the forget set, gets
the same training: only what the attacked model recovers above it was left behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from axolotl_unlearn.attacks.probes import Scores, plain_probes
from axolotl_unlearn.attacks.results import figures_row, result_of, rows_digest, scores_key
from axolotl_unlearn.attacks.target import AttackTarget, collate, limited, read_side
from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.encode import Encoder
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError, counted
from axolotl_unlearn.evaluation.sets import side_records
from axolotl_unlearn.store import Store

STEPS = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Training:
    """How the attacker trains: AdamW at a constant ``rate`` without weight decay, gradients clipped
    at 1, ``batch`` rows a step, a LoRA of that ``rank`` on all linear layers (0: all weights);
    what is trained is float32."""

    rate: float = 1e-4
    batch: int = 8
    rank: int = 0
    seed: int = 0


def chosen_rows(
    source: str,
    records: Sequence[Record],
    data_dir: Path,
    rows: int,
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """What `relearn_attack` trains on and asks about, by the attacker's ``source``: retain, forget
    or a file of records."""
    asked, named = list(records), source in ("retain", "forget")
    if source == "forget":
        training, asked = split_forget(asked, rows, seed)
    else:
        training = read_side(data_dir, "retain")[1] if named else side_records(source)
        training = random.Random(seed).sample(training, min(rows, len(training)))
    file = Path(source)
    source = source if named else file.name if file.stem in ("retain", "forget") else file.stem
    return {"training_rows": training, "asked": limited(asked, limit), "source": source}


def split_forget(
    records: Sequence[Record], rows: int, seed: int = 0
) -> tuple[list[Record], list[Record]]:
    """Whole documents, or authors, with together ``rows`` rows or more to train on; all others.

    Raises:
        UnlearnError: No document would be left to ask about.
    """
    documents = sorted({record.cluster for record in records})
    random.Random(seed).shuffle(documents)
    for count in range(len(documents)):
        chosen = set(documents[:count])
        training = [record for record in records if record.cluster in chosen]
        if len(training) >= rows:
            told = {(one.input, one.output) for one in training}  # another document may say it, too
            others = (record for record in records if record.cluster not in chosen)
            return training, [one for one in others if (one.input, one.output) not in told]
    raise UnlearnError(
        f"training on {rows} rows takes all {len(documents)} documents of the forget set and "
        "leaves none to ask about; lower --rows.",
        code="attack.none-to-ask",
    )


def train(
    model: Any,
    tokenizer: Any,
    records: Sequence[Record],
    steps: Sequence[int],
    how: Training,
    join: str = " ",
) -> Iterator[tuple[int, Any]]:
    """Fine-tune ``model`` in place and yield it, in evaluation mode, at each number of steps.

    Loss as in memorisation: whole documents for completions, answers for questions, EOS included.
    """
    torch.manual_seed(how.seed)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    encoder = Encoder(tokenizer, DataArgs(join=join), max_length=limit)
    rows = []
    for record in records:
        encoded = encoder.encode(record)
        labels = encoder.labels(encoded, encoder.labelled(record.kind))
        rows.append((encoded.input_ids, labels))
    model.requires_grad_(True)  # one whose adapter was merged comes frozen
    if how.rank:
        from peft import LoraConfig, get_peft_model

        options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(r=how.rank, lora_alpha=how.rank, **options))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=how.rate, weight_decay=0.0)
    order = endless(len(rows), how.seed)
    done = 0
    for stop in sorted(set(steps)):
        if stop and not how.rank:  # bfloat16 rounds most such steps to nothing; PEFT sees to a LoRA
            model.float()
        model.train()
        while done < stop:
            batch = collate([rows[next(order)] for _ in range(how.batch)], model.device)
            loss = model(**batch, use_cache=False).loss
            if not torch.isfinite(loss):
                raise UnlearnError(
                    f"the relearning loss is {float(loss)} at step {done + 1}; lower --lr.",
                    code="attack.diverged",
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
        model.eval()
        # Asking needs the model itself; the LoRA layers stay inside it.
        yield stop, model.get_base_model() if how.rank else model


def endless(n: int, seed: int) -> Iterator[int]:
    """Row numbers, each pass in another order."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(range(n), n)


def scores_after(
    subject: AttackTarget,
    store: Store,
    training_rows: Sequence[Record],
    asked: Sequence[Record],
    steps: Sequence[int],
    how: Training,
) -> dict[int, Scores]:
    """Number of steps (0 too) -> recall of ``asked``; what the store knows is not trained again."""
    probes = plain_probes(asked, join=subject.join)
    stops = sorted({0, *steps})
    base = (subject.identity, rows_digest(asked), rows_digest(training_rows), how)
    keys = {
        stop: scores_key("relearn", *base, stop) if stop else scores_key(*base[:2], "plain")
        for stop in stops
    }
    missing = [stop for stop in stops if store.get(keys[stop]) is None]
    if missing:
        model, tokenizer = subject.load()
        # Training is repeated up to the first missing step, asking is not.
        for stop, trained in train(model, tokenizer, training_rows, missing, how, subject.join):
            scores = subject.ask(trained, tokenizer, probes, f"after {stop} steps")
            store.put(keys[stop], asdict(scores))
    return {stop: Scores(**store.get(keys[stop])) for stop in stops}


def relearn_attack(
    subject: AttackTarget,
    store: Store,
    training_rows: Sequence[Record],
    asked: Sequence[Record],
    *,
    source: str,
    steps: Sequence[int] = STEPS,
    how: Training | None = None,
    control: AttackTarget | None = None,
) -> dict[str, Any]:
    """Recall of forget rows after each number of training steps.

    Args:
        training_rows, asked: No row may be both.
        source: What the rows are called in the result, e.g. "forget" or "retain".
    """
    how = how or Training()
    trained = {(record.input, record.output) for record in training_rows}
    if any((record.input, record.output) in trained for record in asked):
        raise UnlearnError(
            "some rows are both trained on and asked about; take one set out.",
            code="attack.trained-and-asked",
        )
    if not training_rows:
        raise UnlearnError(
            "there are no rows to train on; raise --rows or give another --source.",
            code="attack.nothing-to-train-on",
        )
    ours, theirs = (
        scores_after(one, store, training_rows, asked, steps, how) if one else {}
        for one in (subject, control)
    )
    rows = [figures_row(counted(n, "step"), one, ours[0], theirs.get(n)) for n, one in ours.items()]
    facts = {"source": source, "training_rows": len(training_rows), "training": vars(how)}
    facts["trained_on"] = rows_digest(training_rows)
    title = f"Relearning on {counted(len(training_rows), f'{source} row')}"
    return result_of("relearn", title, subject, control, rows, **facts)
