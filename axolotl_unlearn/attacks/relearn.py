"""Relearning attack: does a little training bring the forgotten texts back?

A model that merely hides its knowledge recovers with a few steps on benign or on a few forgotten
rows, faster than a model that never had it (arXiv 2406.13356; arXiv 2506.12618, section 4). Rows
that are trained on are never asked about: with forget rows, whole documents are set aside for
training and the others are asked (`same` is the exception: how fast are they learned again?). The
control, a model never trained on the forget set, gets the same training: only what the attacked
model recovers above it was left behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from axolotl_unlearn.attacks.probes import MEASURES, Scores, plain_probes
from axolotl_unlearn.attacks.results import curve, figures_row, rows_digest, scores_key, stored
from axolotl_unlearn.attacks.target import AttackTarget
from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.encode import Encoder
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.store import Store

STEPS = (1, 2, 5, 10, 20, 50, 100)
#: Learning rates of `best_rate`, the same five for every model.
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)


class Diverged(UnlearnError):
    """The training loss is not finite."""


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


def halves(records: Sequence[Record], seed: int = 0) -> tuple[list[Record], list[Record]]:
    """Two halves of the documents: to choose a learning rate on, and to report on.

    Raises:
        UnlearnError: There is one document.
    """
    documents = sorted({record.document for record in records})
    random.Random(f"{seed}/halves").shuffle(documents)
    first = set(documents[: len(documents) // 2])
    if not first:
        raise UnlearnError(
            "`--lr best-of-five` chooses the rate on other documents than it reports on, and one "
            "alone can be asked; lower --rows, or give a number."
        )
    parts = ([r for r in records if (r.document in first) == side] for side in (True, False))
    return tuple(parts)


def neighbours(forget: Sequence[Record], pool: Sequence[Record], rows: int) -> list[Record]:
    """The ``rows`` rows of ``pool`` that are most like a forget row, by TF-IDF of their words."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [[f"{r.input} {r.output}" for r in records] for records in (pool, forget)]
    vectors = TfidfVectorizer(token_pattern=r"\w+").fit(texts[0] + texts[1])
    ours, theirs = map(vectors.transform, texts)
    like = (ours @ theirs.T).max(axis=1).toarray()[:, 0]
    order = sorted(range(len(pool)), key=lambda i: (-like[i], i))
    return [pool[i] for i in order[:rows]]


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
                raise Diverged(
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

            def make(stop=stop, trained=trained) -> Scores:
                return subject.ask(trained, tokenizer, probes, f"after {stop} steps")

            stored(store, keys[stop], make)
    return {stop: stored(store, keys[stop], _never) for stop in stops}


def best_rate(
    subject: AttackTarget,
    store: Store,
    training_rows: Sequence[Record],
    choose_on: Sequence[Record],
    asked: Sequence[Record],
    steps: Sequence[int],
    how: Training,
) -> tuple[Training, dict[int, Scores], dict[str, float | None]]:
    """``how`` with the rate of `RATES` that recalls most of ``choose_on``, what that gives of
    ``asked``, and what each rate recalls of ``choose_on`` (None: the training diverged).

    By the mean over the numbers of steps; of equals the lowest rate.

    Raises:
        Diverged: At every rate.
    """
    recalls: dict[str, float | None] = {}
    best: tuple[float, Training, dict[int, Scores]] | None = None
    first, second = ([probe.id for probe in plain_probes(r)] for r in (choose_on, asked))
    for rate in RATES:
        tried, name = replace(how, rate=rate), f"{rate:g}"
        try:
            # One training answers for both.
            found = scores_after(subject, store, training_rows, [*choose_on, *asked], steps, tried)
        except Diverged as fault:
            recalls[name], last = None, fault
            continue
        recalls[name] = fmean(fmean(found[step].only(first).recalled) for step in steps)
        if best is None or recalls[name] > best[0]:
            best = recalls[name], tried, {n: one.only(second) for n, one in found.items()}
    if best is None:
        raise last
    return *best[1:], recalls


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
    choose_on: Sequence[Record] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Recall of forget rows after each number of training steps.

    Args:
        training_rows: What the attacker trains on.
        asked: Forget rows that are asked about; with ``source`` "same" those that are trained on,
            else none of them may be.
        source: What the rows are called in the result, e.g. "forget" or "retain".
        choose_on: Forget rows of other documents, by which model and control get the best of five
            learning rates, each its own; None trains at that of ``how``.

    Returns:
        The result, and recovery curves of model and control.
    """
    how = how or Training()
    trained_ids = {(record.input, record.output) for record in training_rows}
    known = any((r.input, r.output) in trained_ids for r in (*asked, *(choose_on or ())))
    if source != "same" and known:
        raise UnlearnError("some rows are both trained on and asked about; take one set out.")
    if not training_rows:
        raise UnlearnError("there are no rows to train on; raise --rows or give another --source.")
    if choose_on and {r.document for r in choose_on} & {r.document for r in asked}:
        raise UnlearnError("a learning rate must be chosen on other documents than it reports on.")
    if source == "same" and control is None:
        raise UnlearnError(
            "`--source same` teaches the very rows that are asked about, so any model says them in "
            "the end: give a model that never saw them as --control."
        )
    stops = sorted({0, *steps})
    found, ways, rates = [], [], {}
    for one in filter(None, (subject, control)):
        own = how
        if choose_on:
            own, scores, rates[one.name] = best_rate(
                one, store, training_rows, choose_on, asked, steps, how
            )
        else:
            scores = scores_after(one, store, training_rows, asked, steps, how)
        found.append(scores)
        ways.append(own)
    ours, theirs = found[0], found[1] if control else {}
    rows = [
        figures_row(f"{stop} steps", stop, ours[stop], ours[0], theirs.get(stop)) for stop in stops
    ]
    title = f"Relearning on {len(training_rows)} {source} rows"
    if choose_on:
        title += ", the best of five rates"
    result = {
        "attack": "relearn",
        "title": title,
        "model": subject.name,
        "control": control.name if control else None,
        "source": source,
        "training_rows": len(training_rows),
        "training": vars(ways[0]),
        "rows": rows,
    }
    if control:
        result["control_training"] = vars(ways[1])
    if choose_on:
        names = len({record.document for record in choose_on})
        result["rates"] = {"rows": len(choose_on), "documents": names, "recalled": rates}
    attack = f"relearn on {len(training_rows)} {source} rows"
    curves = [curve(attack, subject.name, "step", rows, measure) for measure in MEASURES]
    if control:
        control_rows = [{"x": stop, **theirs[stop].figures()} for stop in stops]
        curves += [curve(attack, control.name, "step", control_rows, m) for m in MEASURES]
    return result, curves


def _never() -> Scores:
    raise AssertionError("scores of every step were stored before")
