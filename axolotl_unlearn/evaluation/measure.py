"""From a model to what it did: likelihoods, generated rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from axolotl_unlearn.data.records import Record
from axolotl_unlearn.engine import token_scoring
from axolotl_unlearn.errors import UnlearnError, plain
from axolotl_unlearn.evaluation import generate, in_vllm
from axolotl_unlearn.evaluation.cache import Cache
from axolotl_unlearn.evaluation.continuations import score_pairs
from axolotl_unlearn.evaluation.measurement import Measured, Settings, count_outputs
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.metrics.learned import text_features
from axolotl_unlearn.metrics.membership import attack_losses
from axolotl_unlearn.metrics.memorisation import (
    TokenFacts,
    exact_memorisation,
    extraction_strength,
    longest_run,
    loss,
)
from axolotl_unlearn.metrics.semeval import row_score
from axolotl_unlearn.metrics.words import contains_answer
from axolotl_unlearn.models import ModelSpec, load_model, load_tokenizer

T = TypeVar("T")
R = TypeVar("R")
#: What is moved by the numbers of finished items.
Count = Callable[[list[int]], None]


class ProgressBars:
    """Rich progress bars on stderr; silent where `show` is false."""

    def __init__(self, show: bool) -> None:
        from rich import progress
        from rich.console import Console

        name = progress.TextColumn("{task.description}", markup=False)
        bar = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
        console = Console(stderr=True, markup=False, emoji=False)
        self.progress = progress.Progress(name, *bar, console=console, disable=not show)

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        task = self.progress.add_task(plain(name), total=total)
        yield lambda n: self.progress.advance(task, n)
        self.progress.update(task, completed=total)

    def note(self, text: str) -> None:
        self.progress.console.print(plain(text), soft_wrap=True, highlight=False)


class Local:
    """A model of this process, on its device or spread over several.

    Attributes:
        scores: Whether it tells log-probs of a text.
        distributions: And what the whole vocabulary has; both as of `evaluation.served.Served`.
    """

    scores = distributions = True

    def __init__(self, spec: ModelSpec, settings: Settings) -> None:
        self.spec, self.settings, self.tokenizer = spec, settings, load_tokenizer(spec)
        how = {"device": settings.device, "device_map": settings.device_map}
        self.model = load_model(spec, dtype=torch_dtype(settings.dtype), **how)

    def texts(self, texts: Sequence[str], **options: Any) -> list[TokenFacts]:
        return token_scoring.score_texts(self.model, self.tokenizer, texts, **options)

    def answers(self, records: Sequence[Record], join: str, **options: Any) -> list[TokenFacts]:
        pairs = [(record.input, record.output) for record in records]
        return score_pairs(self.model, self.tokenizer, pairs, join, **options)

    def options(self, questions: Sequence[tuple[str, Sequence[str]]]) -> list[list[float]]:
        return token_scoring.score_options(self.model, self.tokenizer, questions)

    def generate(
        self, prompts: Sequence[str], most: int, on_batch: generate.OnBatch, seed: int | None = None
    ) -> None:
        if self.settings.backend == "vllm":
            lengths = [len(self.tokenizer(prompt)["input_ids"]) for prompt in prompts]
            generate.check_room(token_scoring.context_of(self.model), lengths, 1)
            given = (self.spec, self.tokenizer, prompts, most, self.settings.dtype)
            return in_vllm.generate(*given, on_batch, seed)
        how = {"max_new_tokens": most, "batch_size": self.settings.batch_size, "seed": seed}
        generate.generate_greedily(self.model, self.tokenizer, prompts, **how, on_batch=on_batch)


def _reach(facts: TokenFacts) -> dict[str, Any]:
    """Scored tokens, share of greedy ones and their longest run, given the true ones before."""
    greedy, run = exact_memorisation(facts), longest_run(facts)
    return {"tokens": len(facts), "greedy": greedy, "run": run}


def torch_dtype(name: str) -> Any:
    if name == "auto":
        return "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnlearnError(
            f"--dtype {name!r}: use float32, bfloat16, float16 or auto.", code="eval.dtype"
        )
    return dtype


def not_finite(name: str, what: str) -> UnlearnError:
    return UnlearnError(
        f"model {name!r}: the {what} is NaN or infinite; its weights or its precision are broken: "
        "evaluate in float32 and check the weights.",
        code="eval.not-finite",
    )


#: Items that are scored at once, and stored: what a killed run does again.
_AT_ONCE = 1000


@dataclass
class Session:
    """What models are asked, how, and where the answers are kept."""

    sets: EvaluationSets
    settings: Settings
    cache: Cache
    bars: ProgressBars

    def load(self, spec: ModelSpec) -> Local:
        return Local(spec, self.settings)

    @contextmanager
    def counting(self, name: str, total: int) -> Iterator[Count]:
        """A bar moved by what has been done."""
        with self.bars.bar(name, total) as advance:
            yield lambda done: advance(len(done))

    def each(
        self, bar: str, items: Sequence[T], ask: Callable[..., Sequence[Any]],
        made: Callable[[Any, T], R], key: str | None = None,
    ) -> list[R]:  # fmt: skip
        """``made`` of each answer of ``ask(items, on_batch=...)`` and its item, a part of them at a
        time; with a key an interrupted run goes on where it was."""
        stored = self.cache.rows_so_far(key) if key is not None else ()
        known = {row["key"]: row["value"] for row in stored}
        with self.counting(bar, len(items)) as count:
            for start in range(0, len(items), _AT_ONCE):
                part = items[start : start + _AT_ONCE]
                numbers = range(start, start + len(part))
                if not known.keys() >= set(numbers):
                    answers = ask(part, on_batch=count)
                    values = dict(zip(numbers, map(made, answers, part), strict=True))
                    known |= values
                    if key is not None:
                        rows = [{"key": n, "value": value} for n, value in values.items()]
                        self.cache.add_rows(key, rows)
        return [known[number] for number in range(len(items))]

    def measure(self, model: Local, key: str, name: str) -> Measured:
        """All that is known of a model."""
        measured = Measured()
        self._likelihoods(model, measured, key, name)
        self._rows(model, measured, key, name)
        if self.settings.samples:
            self._samples(model, measured, key, name)
        count_outputs(measured, self.sets)
        return measured

    def _likelihoods(self, model: Local, measured: Measured, key: str, name: str) -> None:
        def facts_of(one: TokenFacts, text: str) -> dict[str, Any]:
            attacks = attack_losses(one, text)
            # As of an answer whose prompt is the first half.
            known = {"loss": attacks.pop("loss"), "attacks": attacks}
            known |= {"strength": extraction_strength(one[len(one) // 2 :])}
            return known | _reach(one) | {"features": text_features(one)}

        def right(questions: Sequence[Any], on_batch: Count) -> list[int]:
            scores = model.options([(one.context, one.continuations) for one in questions])
            if any(math.isnan(value) for row in scores for value in row):
                raise not_finite(name, "log-probability of some options")
            # The first of equals.
            pairs = zip(scores, questions, strict=True)
            return [int(row.index(max(row)) == one.answer) for row, one in pairs]

        sets = self.sets
        texts = [text for _, text in [*sets.member, *sets.nonmember]]
        asked = f"{name}: documents", texts, model.texts, facts_of
        each = self.each(*asked, f"{key}-documents")
        measured.member, measured.nonmember = each[: len(sets.member)], each[len(sets.member) :]
        texts = [text for _, text in sets.canaries]
        if texts:
            asked = f"{name}: canaries", texts, model.texts, lambda one, _: loss(one)
            measured.canary_loss = self.each(*asked, f"{key}-canaries")
        values = {what: [one["attacks"][what] for one in each]
                  for what in (each[0]["attacks"] if each else ())}  # fmt: skip
        values["loss"] = [one["loss"] for one in each] + measured.canary_loss
        if bad := [what for what, some in values.items() if not all(map(math.isfinite, some))]:
            raise not_finite(name, f"{bad[0]} of some texts")
        if sets.utility:
            asked = f"{name}: utility", sets.utility, right, lambda one, _: one
            measured.options = self.each(*asked, f"{key}-utility")

        def extraction(one: TokenFacts, _: Record) -> dict[str, Any]:
            known = {"strength": extraction_strength(one), "logp": float(one.logp.sum())}
            return known | _reach(one)

        answers = partial(model.answers, join=self.settings.join)
        asked = f"{name}: extraction", sets.forget, answers, extraction
        measured.answers = self.each(*asked, f"{key}-extraction")
        if not all(math.isfinite(one["logp"]) for one in measured.answers):
            raise not_finite(name, "log-probability of some answers")

    def _samples(self, model: Local, measured: Measured, key: str, name: str) -> None:
        """In how many draws each forget row's answer is said, whatever is said greedily: a greedy
        answer hides what one of a few draws says (arXiv 2410.03523)."""
        rows = [row for row in self.sets.rows if row.side == "forget"]
        prompts = [row.record.input for row in rows]

        def drawn(draw: Sequence[int], on_batch: Count) -> list[dict[str, int]]:
            made: dict[str, int] = {}

            def take(numbers: Sequence[int], texts: Sequence[str]) -> None:
                for row, text in zip([rows[n] for n in numbers], texts, strict=True):
                    made[row.key] = int(contains_answer(text, row.record.output))

            seed = self.settings.seed + 1 + draw[0]
            model.generate(prompts, self.settings.max_gen_toks, take, seed)
            on_batch(draw)
            return [made]

        said = dict.fromkeys([row.key for row in rows], 0)
        for draw in range(self.settings.samples):  # one at a time: a killed run goes on after it
            asked = f"{name}: draw {draw + 1}", [draw], drawn, lambda one, _: one
            (made,) = self.each(*asked, f"{key}-draw{draw}")
            said = {row: count + made[row] for row, count in said.items()}
        measured.said_of_samples = said

    def _rows(self, model: Local, measured: Measured, key: str, name: str) -> None:
        sets, cache, texts = self.sets, self.cache, self.settings.keep_texts
        rows = {row.key: row for row in sets.rows}

        def take(stored: Mapping[str, Any]) -> None:
            for name, column in (("value", measured.values), ("text", measured.texts),
                                 ("contained", measured.contained)):  # fmt: skip
                if stored.get(name) is not None:
                    column[stored["key"]] = stored[name]

        # Without its texts nobody could say whether a model collapsed: they are generated again.
        for stored in cache.rows_so_far(key):
            if stored.get("key") in rows and stored.get("text") is not None:
                take(stored)
        todo = [row for row in sets.rows if row.key not in measured.values]
        if note := generate.other_end(model.model, model.tokenizer):
            self.bars.note(f"note: {name}: {note}")
        with self.counting(f"{name}: rows", len(todo)) as count:

            def on_batch(numbers, generations) -> None:
                done = []
                for number, said in zip(numbers, generations, strict=True):
                    row = todo[number]
                    kind, expected = row.record.kind, row.record.output
                    says_it = contains_answer(said, expected) if kind == "question" else None
                    known = {"key": row.key, "value": row_score(kind, said, expected)}
                    done.append(known | {"contained": says_it, "text": said})
                    take(done[-1])
                if texts:
                    cache.add_rows(key, done)
                count(numbers)

            prompts = [row.record.input for row in todo]
            model.generate(prompts, self.settings.max_gen_toks, on_batch)
