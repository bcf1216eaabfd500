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
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.cache import Cache
from axolotl_unlearn.evaluation.collapse import CollapseChecker, collapse_key
from axolotl_unlearn.evaluation.measure import ProgressBars, ask, load, measure
from axolotl_unlearn.evaluation.measurement import Measured, Settings
from axolotl_unlearn.evaluation.sets import MIN_MEMBERS, EvaluationSets, find_file
from axolotl_unlearn.evaluation.summary import (
    AUDIT_FILE,
    add_audits,
    add_distances,
    add_learned,
    add_priv_leak,
    add_reference,
    summarise,
)
from axolotl_unlearn.evaluation.tasks import TASK_VERSION
from axolotl_unlearn.evaluation.workers import Workers
from axolotl_unlearn.files import declare, write_json, write_lines
from axolotl_unlearn.metrics.results import SCHEMA, load_results
from axolotl_unlearn.models import ModelSpec, load_tokenizer, parse_models


def evaluate(
    models: Sequence[str | ModelSpec],
    data_dir: str | os.PathLike[str] | None = None,
    out_dir: str | os.PathLike[str] = "out/eval",
    names: Sequence[str] | None = None,
    *,
    batch_size: int = 64,
    limit: int | None = None,
    device: str | None = None,
    device_map: str | None = None,
    dtype: str | None = None,
    max_gen_toks: int = 256,
    with_text: bool = False,
    mmlu_dir: str | os.PathLike[str] | None = None,
    mmlu_shots: int = 0,
    generic: str | None = None,
    min_members: int = MIN_MEMBERS,
    join: str = " ",
    original: str | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    store: str | os.PathLike[str] | None = None,
    use_cache: bool = True,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Evaluate models on a data folder and write ``out_dir/results.json``.

    Started by ``accelerate launch`` each process takes a share of the rows; the main one writes
    and returns what one process alone would, the others return nothing.

    The scores are exactly those of the official script (and of the lm-eval group): greedy, at
    most `max_gen_toks` new tokens, raw prompts. In half precision that needs ``batch_size=1``.

    Args:
        models: folders, ``base+adapter``, or ``name=...`` (see `evaluation.models`).
        data_dir: forget, retain, member, nonmember and optionally general or mmlu.
        names: how the results call the models; default: from their folders.
        limit: only the first rows of each part, interleaved over the cells (to try out).
        device: default "cuda" where there is one, else "cpu".
        device_map: "auto" for a model that does not fit one device: spread over all there are.
        dtype: default "float32" on a CPU and the checkpoint's own elsewhere.
        generic: "builtin" or a file: also ask generic questions with the patterns of the forget
            questions (`evaluation.generic`), and report the drop from the original.
        min_members: refuse fewer members or non-members; 0 measures no membership.
        join: what stands between input and output.
        store: folder of measurements by content; default ``out_dir/cache``.
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
    if batch_size < 1 or max_gen_toks < 1:
        raise UnlearnError("batch size and max-gen-toks must be 1 or more.")
    workers = Workers()
    if device_map and workers.count > 1:
        raise UnlearnError(
            "--device-map spreads one model over all devices, several processes have a model "
            "each; use one of the two."
        )
    device = device or (workers.device or _default_device()).split(":")[0]
    settings = Settings(
        device=device,
        device_map=device_map,
        dtype=dtype or ("float32" if device == "cpu" else "auto"),
        batch_size=batch_size,
        max_gen_toks=max_gen_toks,
        mmlu_dir=None if mmlu_dir is None else str(mmlu_dir),
        mmlu_shots=mmlu_shots,
        generic=generic,
        min_members=min_members,
        join=join,
        limit=limit,
        original=original,
        resamples=resamples,
        seed=seed,
        store=None if store is None else str(store),
    )
    sets = settings.load_sets(data_dir)
    settings = replace(settings, keep_texts=with_text or sets.synthetic)
    before = _original_of(specs, original)
    questions = _questions(generic, sets)
    out = Path(out_dir)
    kept = Path(store or out / "cache")
    if workers.main:
        holds = "texts" if settings.keep_texts else "log-probs"
        rows = [find_file(sets.folder, "forget")]
        common = [find_file(sets.folder, "retain")]
        for name in ("results.json", AUDIT_FILE):
            declare(out, out / name, holds, rows, retained=common)
        if use_cache:
            declare(out, kept, holds, rows, folder=True)
    cache = Cache(kept if use_cache else None, workers)
    bars = ProgressBars(progress and workers.main)
    with bars.progress:
        for note in sets.notes if workers.main else ():
            bars.note(f"note: {note}")
        measured: dict[str, Measured] = {}
        collapse: dict[str, dict[str, Any] | None] = {}
        weights = {spec.name: cache.weights(spec) for spec in specs}
        keys = {name: cache.key(digest, sets, settings) for name, digest in weights.items()}
        unjudged = [s for s in specs if cache.get(collapse_key(keys, s, before)) is None]
        judge = CollapseChecker(before, sets, settings, cache, keys, bars)
        # The original first: each of the others is judged by it as soon as it is measured, so that
        # a killed run makes nobody's outputs again and the texts of one model are in memory.
        for spec in sorted(specs, key=lambda one: one is not before):
            found = cache.load(keys[spec.name], sets, settings)
            # Without its texts, or counts over those of the original, nobody could say whether it
            # collapsed.
            if found is not None and len(found.texts) < len(sets.rows):
                reference = spec is before and unjudged and not found.outputs
                if reference or cache.get(collapse_key(keys, spec, before)) is None:
                    found = None
            asked = _generic_key(keys[spec.name], questions)
            known = cache.get(asked) if questions else None
            if found is None or (questions and known is None):
                started = time.perf_counter()
                tokenizer = None if spec.served else load_tokenizer(spec)
                model = load(spec, settings, workers)
                if found is None:
                    found = measure(
                        model, tokenizer, sets, settings, cache, keys[spec.name], bars, spec.name
                    )
                    found.seconds = time.perf_counter() - started
                    cache.save(keys[spec.name], found, settings)
                if questions and known is None and not spec.served:
                    known = ask(model, tokenizer, questions, settings, workers, bars, spec.name)
                    cache.put(asked, known)
                del model
            found.generic = known
            measured[spec.name] = found
            original_found = measured[before.name] if before else None
            collapse[spec.name] = judge.report(spec, found, original_found)
            if not settings.keep_texts:
                found.texts = {}
        if not workers.main:
            return []
        cache.workers = Workers(alone=True)  # the others have left
        with bars.bar("blind baselines, intervals", len(specs) + 1) as advance:
            blind = _blind(sets, cache, seed)
            advance(1)
            results = []
            for spec in specs:
                results.append(
                    {"weights": weights[spec.name]}
                    | summarise(
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
            add_reference(results)
            add_priv_leak(results)
            learned = add_learned(results, measured, sets)
            lines = add_audits(
                results, measured, sets, learned=learned, with_text=settings.keep_texts
            )
    write_lines(out / AUDIT_FILE, lines, private=True)
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


def _write(path: Path, models: list[dict], sets: EvaluationSets, settings: Settings) -> None:
    results = {
        "schema": SCHEMA,
        "data_dir": str(sets.folder),
        "data_digest": sets.digest,
        "synthetic": sets.synthetic,
        "notes": sets.notes,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(settings),
        "versions": _versions(),
        "models": models,
    }
    load_results(results)  # what is read with types is written so
    write_json(path, results, private=True, ensure_ascii=False, allow_nan=False)


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
