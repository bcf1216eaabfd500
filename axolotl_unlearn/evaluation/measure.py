"""From a model to what it did: likelihoods, generated rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.cache import Cache
from axolotl_unlearn.evaluation.measurement import Measured, Settings, count_outputs
from axolotl_unlearn.evaluation.sets import Row
from axolotl_unlearn.evaluation.workers import Workers
from axolotl_unlearn.models import ModelSpec, load_model

if TYPE_CHECKING:
    from axolotl_unlearn.data.records import Record
    from axolotl_unlearn.evaluation.mmlu import Option
    from axolotl_unlearn.metrics.memorisation import TokenFacts

T = TypeVar("T")
R = TypeVar("R")


class ProgressBars:
    """Rich progress bars on stderr; silent where `show` is false."""

    def __init__(self, show: bool) -> None:
        from rich import progress
        from rich.console import Console

        bar = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
        self.progress = progress.Progress(
            "{task.description}", *bar, console=Console(stderr=True), disable=not show
        )

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        task = self.progress.add_task(name, total=total)
        yield lambda n: self.progress.advance(task, n)
        self.progress.update(task, completed=total)

    def note(self, text: str) -> None:
        self.progress.console.print(text, soft_wrap=True, highlight=False)


def measure(
    model, tokenizer, sets, settings: Settings, cache: Cache, key: str, bars: ProgressBars,
    spec: ModelSpec,
) -> Measured:  # fmt: skip
    """All that is known of a model."""
    found = Measured()
    if getattr(model, "scores", True):
        _measure_likelihoods(model, tokenizer, sets, settings, found, cache, key, bars, spec.name)
    else:
        bars.note(
            f"note: {spec.name}: this server gives no log-probs of a prompt (`echo`), so loss, "
            "attacks, extraction and utility are not measured."
        )
    _measure_rows(model, tokenizer, sets, settings, found, cache, key, bars, spec)
    count_outputs(found, sets)
    return found


def load(spec: ModelSpec, settings: Settings, workers: Workers) -> Any:
    """The model where these settings put it: on this process' device, spread over several, or on
    its server."""
    if spec.served:
        from axolotl_unlearn.evaluation.served import Served

        return Served(spec.model)
    return load_model(
        spec,
        dtype=torch_dtype(settings.dtype),
        device=workers.device or settings.device,
        device_map=settings.device_map,
    )


def counting(advance: Callable[[int], None], workers: Workers) -> Callable[[list[int]], None]:
    """Moves a bar by what this process and, about as fast, each of its siblings has done."""
    return lambda done: advance(len(done) * workers.count)


def torch_dtype(name: str) -> Any:
    import torch

    if name == "auto":
        return "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnlearnError(f"--dtype {name!r}: use float32, bfloat16, float16 or auto.")
    return dtype


#: Items that are scored at once, and stored: what a killed run does again.
_AT_ONCE = 1000


def in_parts(
    items: Sequence[T], score: Callable[[Sequence[T]], list[R]], cache: Cache, key: str
) -> list[R]:
    """``score(items)``, a part of them at a time; JSON-like values go on where they were."""
    known = {row["key"]: row["value"] for row in cache.rows_so_far(key, False)}
    for start in range(0, len(items), _AT_ONCE):
        part = items[start : start + _AT_ONCE]
        numbers = range(start, start + len(part))
        if not known.keys() >= set(numbers):
            values = dict(zip(numbers, score(part), strict=True))
            known |= values
            if cache.workers.main:
                cache.add_rows(key, [{"key": n, "value": value} for n, value in values.items()])
    return [known[number] for number in range(len(items))]


def _measure_likelihoods(
    model, tokenizer, sets, settings, found, cache: Cache, key: str, bars, name
) -> None:
    from axolotl_unlearn.config import DataArgs
    from axolotl_unlearn.engine import token_scoring as scoring
    from axolotl_unlearn.evaluation.continuations import encode_pairs
    from axolotl_unlearn.evaluation.served import Served
    from axolotl_unlearn.metrics import memorisation as metrics
    from axolotl_unlearn.metrics.learned import text_features

    workers, served = cache.workers, isinstance(model, Served)

    def facts_of(one: TokenFacts) -> dict[str, Any]:
        facts = {
            "loss": metrics.loss(one),
            "min_k_20": -metrics.min_k(one, 0.2),
            # As of an answer whose prompt is the first half.
            "extraction": metrics.extraction_strength(one[len(one) // 2 :]),
            "tokens": len(one),
        }
        if not served:  # what needs the distributions
            facts |= {"min_k_plus_20": -metrics.min_k_plus(one, 0.2)}
            facts |= {"entropy": metrics.entropy(one), "features": text_features(one)}
        return facts

    def documents(texts: Sequence[str]) -> list[dict[str, Any]]:
        if served:
            ask, asked = model.pairs, [(getattr(text, "prompt", ""), str(text)) for text in texts]
        else:
            ask, asked = partial(scoring.score_texts, model, tokenizer), texts
        return list(map(facts_of, workers.map(partial(ask, on_batch=count), asked)))

    def utility(questions: Sequence[Option]) -> list[int]:
        asked = [(option.context, option.continuations) for option in questions]
        score = model.options if served else partial(scoring.score_options, model, tokenizer)
        answers = zip(workers.map(score, asked), questions, strict=True)
        # The first of equals.
        return [int(row.index(max(row)) == question.answer) for row, question in answers]

    def extraction(records: Sequence[Record]) -> list[dict[str, Any]]:
        if served:
            ask, asked = model.pairs, [(r.input, settings.join + r.output) for r in records]
        else:
            pairs = [(r.input, r.output) for r in records]
            pairs = encode_pairs(tokenizer, pairs, DataArgs(join=settings.join))
            ask = partial(scoring.score_queries, model)
            asked = [scoring.Query.of([*prompt, *answer], len(prompt)) for prompt, answer in pairs]
        facts = workers.map(partial(ask, on_batch=count), asked)
        strength = metrics.extraction_strength
        return [{"strength": strength(one), "tokens": len(one)} for one in facts]

    texts = [text for _, text in [*sets.member, *sets.nonmember]]
    with bars.bar(f"{name}: documents", len(texts)) as advance:
        count = counting(advance, workers)
        each = in_parts(texts, documents, cache, f"{key}-documents")
    losses = [one["loss"] for one in each]
    found.attacks = {
        attack: [one[attack] for one in each]
        for attack in ("min_k_20", "min_k_plus_20", "entropy")
        if attack in (each or [{}])[0]
    }
    found.features = [one["features"] for one in each if "features" in one]
    found.text_extraction = [one["extraction"] for one in each]
    found.text_tokens = [one["tokens"] for one in each]
    found.member_loss = losses[: len(sets.member)]
    found.nonmember_loss = losses[len(sets.member) :]
    if not all(map(math.isfinite, losses)):
        raise UnlearnError(
            f"model {name!r}: the loss of a document is not finite; its weights are broken."
        )
    if sets.utility:
        with bars.bar(f"{name}: utility", len(sets.utility)):
            found.options = in_parts(sets.utility, utility, cache, f"{key}-utility")
    with bars.bar(f"{name}: extraction", len(sets.forget)) as advance:
        count = counting(advance, workers)
        rows = in_parts(sets.forget, extraction, cache, f"{key}-extraction")
    found.extraction = [one["strength"] for one in rows]
    found.answer_tokens = [one["tokens"] for one in rows]


def _measure_rows(model, tokenizer, sets, settings, found, cache, key, bars, spec) -> None:
    from axolotl_unlearn.evaluation import in_vllm
    from axolotl_unlearn.evaluation.generate import generate_greedily
    from axolotl_unlearn.evaluation.served import Served
    from axolotl_unlearn.metrics.semeval import row_score
    from axolotl_unlearn.metrics.words import contains_answer

    rows: dict[str, Row] = {row.key: row for row in sets.rows}

    def take(stored: Mapping[str, Any]) -> None:
        places = {"value": found.values, "tokens": found.tokens, "stopped": found.stopped,
                  "contained": found.contained, "text": found.texts}  # fmt: skip
        for name, place in places.items():
            if stored.get(name) is not None:
                place[stored["key"]] = stored[name]

    for stored in cache.rows_so_far(key, settings.keep_texts):
        if stored.get("key") in rows:
            take(stored)
    todo = [row for row in sets.rows if row.key not in found.values]
    workers, mine = cache.workers, []
    with bars.bar(f"{spec.name}: rows", len(sets.rows)) as advance:
        advance(len(sets.rows) - len(todo))
        todo = workers.share(todo)
        count = counting(advance, workers)

        def on_batch(numbers, generations) -> None:
            done = []
            for number, generation in zip(numbers, generations, strict=True):
                row = todo[number]
                said, kind, expected = generation.text, row.record.kind, row.record.output
                stored = {
                    "key": row.key,
                    "value": row_score(kind, said, expected),
                    "tokens": generation.tokens,
                    "stopped": generation.stopped,
                    "contained": contains_answer(said, expected) if kind == "question" else None,
                }
                mine.append({**stored, "text": said})
                done.append({**stored, "text": said if settings.keep_texts else None})
            cache.add_rows(key, done)
            count(numbers)

        prompts, limit = [row.record.input for row in todo], settings.max_gen_toks
        if isinstance(model, Served):
            model.generate(prompts, limit, on_batch)
        elif settings.backend == "vllm":
            in_vllm.generate(spec, tokenizer, prompts, limit, settings.dtype, on_batch)
        else:
            how = {"max_new_tokens": limit, "batch_size": settings.batch_size}
            generate_greedily(model, tokenizer, prompts, **how, on_batch=on_batch)
        for part in workers.gather(mine):
            for stored in part:
                take(stored)
