"""Several models, all metrics, one results.json: `axolotl unlearn eval` as a function.

What was measured of a model is cached under the digest of its weights, of the data and of the
task version, so a second run only does what is new, and an interrupted one goes on where it was.
Scores, losses and ids are stored; generated texts only of made-up data or with ``with_text``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.models import (
    ModelSpec,
    load_model,
    load_tokenizer,
    parse_models,
    weights_digest,
)
from axolotl_unlearn.evaluation.sets import MIN_MEMBERS, EvaluationSets, Row, load_sets
from axolotl_unlearn.evaluation.summary import add_distances, summarise
from axolotl_unlearn.evaluation.tasks import TASK_VERSION

SCHEMA = 1
#: Raised when what is measured or how it is stored changes.
_CACHE_VERSION = 2


@dataclass(frozen=True)
class Settings:
    """How models are run; part of the cache key where it can change a score."""

    device: str
    dtype: str
    batch_size: int
    max_gen_toks: int
    join: str = " "
    keep_texts: bool = False

    @property
    def key(self) -> list[Any]:
        # In float32 the batch size changes nothing; in half precision it can.
        batch = None if self.dtype == "float32" else self.batch_size
        device = self.device.split(":")[0]
        # None stands where the generic questions were, which now have a key of their own.
        return [device, self.dtype, batch, self.max_gen_toks, self.join, None]


@dataclass
class Measured:
    """What one model did: everything that the summary is computed from.

    Attributes:
        values: score of each generated row, by its key ("forget/<id>").
        texts: generations by row key; empty for rows that come from a cache without texts.
        contained: is the answer in the generation, for each question by row key.
        outputs: counts over the generations of each side (`metrics.fluency.reference_figures`).
        options: 1 where the most probable option is the right one, 0 elsewhere.
        extraction: extraction strength (floor 0) of each forget row, in file order.
        attacks: membership attacks by name, one number a document, members first; low = member.
        generic: answers to generic questions, where they were asked; cached by itself.
    """

    values: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    stopped: dict[str, bool] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    contained: dict[str, bool] = field(default_factory=dict)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    member_loss: list[float] = field(default_factory=list)
    nonmember_loss: list[float] = field(default_factory=list)
    options: list[int] = field(default_factory=list)
    extraction: list[float] = field(default_factory=list)
    attacks: dict[str, list[float]] = field(default_factory=dict)
    generic: dict[str, Any] | None = None
    seconds: float = 0.0

    def stored(self, keep_texts: bool) -> dict[str, Any]:
        data = {name: value for name, value in vars(self).items() if name != "generic"}
        if not keep_texts:
            data["texts"] = {}
        return data


class _Bars:
    """Rich progress bars on stderr; silent where `show` is false."""

    def __init__(self, show: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not show,
        )

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        task = self.progress.add_task(name, total=total)
        yield lambda n: self.progress.advance(task, n)
        self.progress.update(task, completed=total)

    def note(self, text: str) -> None:
        self.progress.console.print(text, soft_wrap=True, highlight=False)


def evaluate(
    models: Sequence[str | ModelSpec],
    data_dir: str | os.PathLike[str] | None = None,
    out_dir: str | os.PathLike[str] = "out/eval",
    names: Sequence[str] | None = None,
    *,
    batch_size: int = 64,
    limit: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    max_gen_toks: int = 256,
    with_text: bool = False,
    mmlu_dir: str | os.PathLike[str] | None = None,
    mmlu_shots: int = 0,
    generic: str | None = None,
    min_members: int = MIN_MEMBERS,
    original: str | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    use_cache: bool = True,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Evaluate models on a data folder and write ``out_dir/results.json``.

    The scores are exactly those of the official script (and of the lm-eval group): greedy, at
    most `max_gen_toks` new tokens, raw prompts. In half precision that needs ``batch_size=1``.

    Args:
        models: folders, ``base+adapter``, or ``name=...`` (see `evaluation.models`).
        data_dir: forget, retain, member, nonmember and optionally general or mmlu.
        names: how the results call the models; default: from their folders.
        limit: only the first rows of each part, interleaved over the cells (to try out).
        device: default "cuda" where there is one, else "cpu".
        dtype: default "float32" on a CPU and the checkpoint's own elsewhere.
        generic: "builtin" or a file: also ask generic questions with the patterns of the forget
            questions (`evaluation.generic`), and report the drop from the original.
        with_text: keep generated texts of data that were not made up.
        original: name of the model before unlearning, for the utility gate and as reference of
            the collapse check; default: the model called "original", else "memorised".
        resamples: bootstrap resamples for the intervals; 0 for none.

    Returns:
        The entries of ``models`` in results.json.

    Raises:
        UnlearnError: Something is wrong with data or models; said before weights are loaded.
    """
    specs = parse_models(models, names)
    sets = load_sets(
        data_dir, mmlu_dir=mmlu_dir, mmlu_shots=mmlu_shots, min_members=min_members
    ).limited(limit)
    before = _original_of(specs, original)
    if batch_size < 1 or max_gen_toks < 1:
        raise UnlearnError("batch size and max-gen-toks must be 1 or more.")
    device = device or _default_device()
    settings = Settings(
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "auto"),
        batch_size=batch_size,
        max_gen_toks=max_gen_toks,
        keep_texts=with_text or sets.synthetic,
    )
    questions = _questions(generic, sets)
    out = Path(out_dir)
    cache = Cache(out / "cache" if use_cache else None)
    bars = _Bars(progress)
    with bars.progress:
        for note in sets.notes:
            bars.note(f"note: {note}")
        measured: dict[str, Measured] = {}
        keys = {spec.name: cache.key(spec, sets, settings) for spec in specs}
        unjudged = [s for s in specs if cache.get(_collapse_key(keys, s, before)) is None]
        for spec in specs:
            found = cache.load(keys[spec.name], sets, settings)
            # Without its texts, or counts over those of the original, nobody could say whether it
            # collapsed.
            if found is not None and len(found.texts) < len(sets.rows):
                reference = spec is before and unjudged and not found.outputs
                if spec in unjudged or reference:
                    found = None
            asked = _generic_key(keys[spec.name], questions)
            known = cache.get(asked) if questions else None
            if found is None or (questions and known is None):
                started = time.perf_counter()
                tokenizer = load_tokenizer(spec)
                model = load_model(spec, dtype=_dtype(settings.dtype), device=settings.device)
                if found is None:
                    found = _measure(
                        model, tokenizer, sets, settings, cache, keys[spec.name], bars, spec.name
                    )
                    found.seconds = time.perf_counter() - started
                    cache.save(keys[spec.name], found, settings)
                if questions and known is None:
                    known = _ask(model, tokenizer, questions, settings, bars, spec.name)
                    cache.put(asked, known)
                del model
            found.generic = known
            measured[spec.name] = found
        collapse = _collapse(specs, before, measured, sets, settings, cache, keys, bars)
        with bars.bar("blind baselines, intervals", len(specs) + 1) as advance:
            blind = _blind(sets, cache, seed)
            advance(1)
            results = []
            for spec in specs:
                results.append(
                    summarise(
                        spec,
                        measured[spec.name],
                        sets,
                        original=measured[before.name] if before else None,
                        is_original=before is not None and spec.name == before.name,
                        collapse=collapse[spec.name],
                        blind=blind,
                        resamples=resamples,
                        seed=seed,
                        with_text=settings.keep_texts,
                    )
                )
                advance(1)
            add_distances(results, measured, sets, resamples=resamples, seed=seed)
    _write(out / "results.json", results, sets, settings)
    return results


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _original_of(specs: Sequence[ModelSpec], name: str | None) -> ModelSpec | None:
    by_name = {spec.name: spec for spec in specs}
    if name is not None:
        if name not in by_name:
            raise UnlearnError(f"--original {name!r} is none of the models ({', '.join(by_name)}).")
        return by_name[name]
    return by_name.get("original") or by_name.get("memorised")


class Cache:
    """Measurements by content. Without a folder nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.files: dict[str, str] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.files = _read_json(folder / "files.json") or {}

    def key(self, spec: ModelSpec, sets: EvaluationSets, settings: Settings) -> str:
        if self.folder is None:
            return ""
        weights = weights_digest(spec, self.files)
        _write_json(self.folder / "files.json", self.files)
        parts = [_CACHE_VERSION, TASK_VERSION, weights, sets.digest, settings.key]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def load(self, key: str, sets: EvaluationSets, settings: Settings) -> Measured | None:
        stored = self.get(key)
        if stored is None:
            return None
        found = Measured(**stored)
        _count(found, sets)
        if settings.keep_texts and len(found.texts) < len(sets.rows):
            return None  # texts are asked for now but were not stored then
        return found

    def save(self, key: str, found: Measured, settings: Settings) -> None:
        self.put(key, found.stored(settings.keep_texts))
        if self.folder is not None:
            self.partial(key).unlink(missing_ok=True)

    def get(self, key: str) -> Any:
        return None if self.folder is None else _read_json(self.folder / f"{key}.json")

    def put(self, key: str, data: Any) -> None:
        if self.folder is not None:
            _write_json(self.folder / f"{key}.json", data)

    def partial(self, key: str) -> Path:
        """Rows of a model that is being generated, one JSON line each."""
        return self.folder / f"{key}.partial.jsonl"

    def rows_so_far(self, key: str, need_texts: bool) -> Iterator[dict[str, Any]]:
        if self.folder is None or not self.partial(key).is_file():
            return
        for line in self.partial(key).read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # the last line of a run that was killed
                continue
            if not need_texts or row.get("text") is not None:
                yield row

    def add_rows(self, key: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.folder is None:
            return
        with self.partial(key).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _write_json(path: Path, data: Any) -> None:
    """Whole or not at all: a killed run leaves no half file."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    draft.replace(path)


def _measure(
    model, tokenizer, sets, settings: Settings, cache: Cache, key: str, bars: _Bars, name: str
) -> Measured:
    """Everything but the generic questions."""
    found = Measured()
    _measure_likelihoods(model, tokenizer, sets, settings, found, bars, name)
    _measure_rows(model, tokenizer, sets, settings, found, cache, key, bars, name)
    _count(found, sets)
    return found


def _count(found: Measured, sets: EvaluationSets) -> None:
    """What is kept of all texts instead of them; an earlier version's cache has it not yet."""
    from axolotl_unlearn.evaluation.generic import contains_answer
    from axolotl_unlearn.metrics.fluency import reference_figures

    # An interrupted run of real data has no texts of the rows before.
    if found.outputs or len(found.texts) < len(sets.rows):
        return
    found.outputs = {
        side: reference_figures([found.texts[r.key] for r in sets.rows if r.side == side])
        for side in ("retain", "forget")
    }
    found.contained = {
        row.key: contains_answer(found.texts[row.key], row.record.output)
        for row in sets.rows
        if row.record.kind == "question"
    }


def _dtype(name: str) -> Any:
    import torch

    if name == "auto":
        return "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnlearnError(f"--dtype {name!r}: use float32, bfloat16, float16 or auto.")
    return dtype


def _measure_likelihoods(model, tokenizer, sets, settings, found, bars, name) -> None:
    from axolotl_unlearn.evaluation.continuations import encode_pairs
    from axolotl_unlearn.evaluation.scorer import Query, score_options, score_queries, score_texts
    from axolotl_unlearn.metrics.memorisation import (
        extraction_strength,
        loss,
        min_k,
        min_k_plus,
    )

    texts = [text for _, text in [*sets.member, *sets.nonmember]]
    with bars.bar(f"{name}: documents", len(texts)) as advance:
        facts = score_texts(model, tokenizer, texts, on_batch=lambda done: advance(len(done)))
    losses = [loss(one) for one in facts]
    found.attacks = {
        "min_k_20": [-min_k(one, 0.2) for one in facts],
        "min_k_plus_20": [-min_k_plus(one, 0.2) for one in facts],
    }
    found.member_loss = losses[: len(sets.member)]
    found.nonmember_loss = losses[len(sets.member) :]
    if not all(map(_finite, losses)):
        raise UnlearnError(
            f"model {name!r}: the loss of a document is not finite; its weights are broken."
        )
    if sets.utility:
        questions = [(option.context, option.continuations) for option in sets.utility]
        with bars.bar(f"{name}: utility", len(questions)):
            sums = score_options(model, tokenizer, questions)
        found.options = [
            int(_best(row) == option.answer) for row, option in zip(sums, sets.utility, strict=True)
        ]
    from axolotl_unlearn.args import DataArgs

    pairs = [(record.input, record.output) for record in sets.forget]
    encoded = encode_pairs(tokenizer, pairs, DataArgs(join=settings.join))
    queries = [Query.of([*prompt, *answer], len(prompt)) for prompt, answer in encoded]
    with bars.bar(f"{name}: extraction", len(queries)) as advance:
        facts = score_queries(model, queries, on_batch=lambda done: advance(len(done)))
    found.extraction = [extraction_strength(one) for one in facts]


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


def _measure_rows(model, tokenizer, sets, settings, found, cache, key, bars, name) -> None:
    from axolotl_unlearn.evaluation.generate import generate_greedily
    from axolotl_unlearn.evaluation.generic import contains_answer
    from axolotl_unlearn.metrics.semeval import row_score

    rows: dict[str, Row] = {row.key: row for row in sets.rows}

    def take(stored: Mapping[str, Any]) -> None:
        row_key = stored["key"]
        found.values[row_key] = stored["value"]
        found.tokens[row_key] = stored["tokens"]
        found.stopped[row_key] = stored["stopped"]
        if stored.get("contained") is not None:
            found.contained[row_key] = stored["contained"]
        if stored.get("text") is not None:
            found.texts[row_key] = stored["text"]

    for stored in cache.rows_so_far(key, settings.keep_texts):
        if stored.get("key") in rows:
            take(stored)
    todo = [row for row in sets.rows if row.key not in found.values]
    with bars.bar(f"{name}: rows", len(sets.rows)) as advance:
        advance(len(sets.rows) - len(todo))

        def on_batch(numbers, generations) -> None:
            done = []
            for number, generation in zip(numbers, generations, strict=True):
                row = todo[number]
                record = row.record
                stored = {
                    "key": row.key,
                    "value": row_score(record.kind, generation.text, record.output),
                    "tokens": generation.tokens,
                    "stopped": generation.stopped,
                    "contained": contains_answer(generation.text, record.output)
                    if record.kind == "question"
                    else None,
                }
                take({**stored, "text": generation.text})
                done.append({**stored, "text": generation.text if settings.keep_texts else None})
            cache.add_rows(key, done)
            advance(len(numbers))

        generate_greedily(
            model,
            tokenizer,
            [row.record.input for row in todo],
            max_new_tokens=settings.max_gen_toks,
            batch_size=settings.batch_size,
            on_batch=on_batch,
        )


def _questions(generic: str | None, sets: EvaluationSets) -> list[Any]:
    """The generic questions whose answers are not in the forget set; none unless asked for."""
    from axolotl_unlearn.evaluation.generic import builtin_items, outside, read_items

    if generic is None:
        return []
    items = builtin_items() if generic == "builtin" else read_items(generic)
    return outside(items, [text for r in sets.forget for text in (r.input, r.output)])


def _generic_key(key: str, questions: Sequence[Any]) -> str:
    content = json.dumps([asdict(item) for item in questions]).encode()
    return f"{key}-generic-{hashlib.sha256(content).hexdigest()[:16]}"


def _ask(model, tokenizer, questions, settings, bars, name) -> dict[str, Any]:
    from axolotl_unlearn.evaluation.generic import score_generic

    with bars.bar(f"{name}: generic", len(questions)):
        return score_generic(model, tokenizer, questions, batch_size=settings.batch_size)


def _blind(sets: EvaluationSets, cache: Cache, seed: int) -> dict[str, Any] | None:
    """What separates members from non-members without any model; None with too few texts."""
    from axolotl_unlearn.evaluation.membership_lab import MIN_TEXTS
    from axolotl_unlearn.metrics.membership import Baseline, blind_baselines

    if min(len(sets.member), len(sets.nonmember)) < MIN_TEXTS:
        return None
    key = f"blind-{sets.digest[:32]}-{seed}"
    stored = cache.get(key)
    if stored is None:
        texts = [[text for _, text in side] for side in (sets.member, sets.nonmember)]
        stored = {name: asdict(one) for name, one in blind_baselines(*texts, seed=seed).items()}
        cache.put(key, stored)
    return {name: Baseline(**one) for name, one in stored.items()}


def _collapse_key(keys: Mapping[str, str], spec: ModelSpec, before: ModelSpec | None) -> str:
    return f"{keys[spec.name]}-collapse3-{keys[before.name] if before else 'none'}"


def _collapse(
    specs, before, measured, sets, settings, cache, keys, bars
) -> dict[str, dict[str, Any] | None]:
    """The collapse report of each model, against the original's outputs where they are known.

    A model has collapsed if it breaks where it should still answer: on the retain rows. What it
    says to forgotten prompts is reported beside it (``forget``): repetition there is a flaw of
    the method (arXiv 2503.21088, 6.1), not of the whole model.
    """
    from axolotl_unlearn.evaluation.scorer import score_texts
    from axolotl_unlearn.metrics.fluency import collapse_report
    from axolotl_unlearn.metrics.memorisation import loss

    reports: dict[str, dict[str, Any] | None] = {}
    todo = []
    for spec in specs:
        key = _collapse_key(keys, spec, before)
        reports[spec.name] = cache.get(key) if keys[spec.name] else None
        if reports[spec.name] is None:
            todo.append((spec, key))
    if not todo:
        return reports
    judge = ordinary = None

    def losses(texts: Sequence[str], bar: str) -> list[float]:
        """Mean loss of each text under the original; 0 for a text of one token or none."""
        long = [i for i, text in enumerate(texts) if len(tokenizer(text)["input_ids"]) > 1]
        with bars.bar(bar, len(long)) as advance:
            facts = score_texts(
                judge,
                tokenizer,
                [texts[i] for i in long],
                loss_only=True,
                on_batch=lambda done: advance(len(done)),
            )
        found = [0.0] * len(texts)
        for i, one in zip(long, facts, strict=True):
            found[i] = loss(one)
        return found

    for spec, key in todo:
        found = measured[spec.name]
        rows = [row for row in sets.rows if row.key in found.texts]
        if not rows:
            continue
        texts = [found.texts[row.key] for row in rows]
        known, against = None, "expected answers"
        nll = None
        if before is not None and spec.name != before.name:
            if known := measured[before.name].outputs:
                against = "original's outputs"
            if judge is None:
                tokenizer = load_tokenizer(before)
                judge = load_model(before, dtype=_dtype(settings.dtype), device=settings.device)
                # An output begins in the middle of a text, where every model is less sure: so
                # does what it is compared with.
                halves = [_second_half(text) for _, text in sets.nonmember]
                ordinary = losses([half for half in halves if half], "ordinary texts")
            nll = losses(texts, f"{spec.name}: fluency")
        sides = {
            side: collapse_report(
                [texts[i] for i in where],
                known[side] if known else [rows[i].record.output for i in where],
                nll=None if nll is None else [nll[i] for i in where],
                ordinary_nll=None if nll is None else ordinary,
            )
            for side in ("retain", "forget")
            if (where := [i for i, row in enumerate(rows) if row.side == side])
        }
        report = dict(sides.get("retain") or sides["forget"])
        report["forget"] = sides.get("forget")
        report["against"] = against
        reports[spec.name] = report
        if keys[spec.name]:
            cache.put(key, report)
    return reports


def _second_half(text: str) -> str:
    """The later half of its words, or of its characters where it has one word."""
    words = text.split()
    return " ".join(words[len(words) // 2 :]) if len(words) > 1 else text[len(text) // 2 :]


def _write(path: Path, models: list[dict], sets: EvaluationSets, settings: Settings) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "schema": SCHEMA,
        "data_dir": str(sets.folder),
        "data_digest": sets.digest,
        "synthetic": sets.synthetic,
        "notes": sets.notes,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {
            "device": settings.device,
            "dtype": settings.dtype,
            "batch_size": settings.batch_size,
            "max_gen_toks": settings.max_gen_toks,
        },
        "versions": _versions(),
        "models": models,
    }
    draft = path.with_name(f"{path.name}.tmp")
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "task": TASK_VERSION}
    for package in ("axolotl-unlearn", "torch", "transformers", "peft", "rouge-score", "lm_eval"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
