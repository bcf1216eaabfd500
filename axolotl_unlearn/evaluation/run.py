"""Several models, all metrics, one results.json: `axolotl-unlearn eval` as a function.

What was measured of a model is cached under the digest of its weights, of the data and of the
code's versions. Generated texts are stored only with ``keep_texts``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation import summary
from axolotl_unlearn.evaluation.cache import Cache
from axolotl_unlearn.evaluation.canaries import add_canaries
from axolotl_unlearn.evaluation.collapse import CollapseChecker
from axolotl_unlearn.evaluation.in_vllm import backend
from axolotl_unlearn.evaluation.measure import ProgressBars, Session
from axolotl_unlearn.evaluation.measurement import Measured, Options, Settings
from axolotl_unlearn.evaluation.sets import MIN_MEMBERS, data_digests
from axolotl_unlearn.evaluation.summary import AUDIT_FILE
from axolotl_unlearn.evaluation.tasks import CODE, TASK_VERSION
from axolotl_unlearn.files import declare, write_json, write_lines
from axolotl_unlearn.metrics.membership import blind_baselines
from axolotl_unlearn.metrics.results import SCHEMA, load_results
from axolotl_unlearn.metrics.verdict import can_be_good
from axolotl_unlearn.models import ModelSpec, original_of, parse_models, weights_digest
from axolotl_unlearn.store import versions


def evaluate(
    models: Sequence[str | ModelSpec],
    data: str | os.PathLike[str] | None = None,
    options: Options | None = None,
) -> list[dict[str, Any]]:
    """Evaluate models on a data folder and write results.json.

    The scores are exactly those of the official script (and of the lm-eval group): greedy, at
    most ``max_gen_toks`` new tokens, raw prompts. In half precision that needs ``batch_size=1``.

    Args:
        models: Folders, ``base+adapter``, or ``name=...`` (see `axolotl_unlearn.models`).
        data: See `evaluation.sets`.

    Returns:
        The entries of ``models`` in results.json.

    Raises:
        UnlearnError: Something is wrong with data or models; said before weights are loaded.
    """
    options = options or Options()
    specs = parse_models(models)
    if options.batch_size < 1 or options.max_gen_toks < 1:
        raise UnlearnError("batch size and max-gen-toks must be 1 or more.", code="eval.size")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UnlearnError(
            "an evaluation is one process; leave out `accelerate launch`, and give --device-map "
            "auto for a model that does not fit one device.",
            code="eval.several-processes",
        )
    settings = Settings.read(asdict(options.placed()))
    alone = not settings.device_map
    settings = replace(settings, backend=backend(options.backend, str(settings.device), alone))
    every = replace(settings, limit=None).load_sets(data)
    if (sets := every.limited(settings.limit)) is every:
        settings = replace(settings, limit=None)
    before = original_of(specs, settings.original)
    out = Path(options.out_dir)
    kept = Path(settings.store or out / "cache")
    holds = "texts" if settings.keep_texts else "log-probs"
    for name in ("results.json", AUDIT_FILE):
        declare(out, out / name, holds)
    declare(out, kept, holds, folder=True)
    cache = Cache(kept)
    bars = ProgressBars(options.progress)
    with bars.progress:
        few = can_be_good(len(sets.member), len(sets.nonmember)) if sets.member else ""
        by = f"generation by {settings.backend or 'transformers'}"
        by = by if options.backend == "auto" else ""
        for note in filter(None, [*sets.notes, few, by]):
            bars.note(f"note: {note}")
        weights = {spec.name: weights_digest(spec) for spec in specs}
        session = Session(sets, settings, cache, bars)
        measured, collapse = _measure_all(session, specs, before, weights)
        with bars.bar("blind baselines, intervals", len(specs) + 1) as advance:
            texts = [[text for _, text in side] for side in (sets.member, sets.nonmember)]
            enough = min(map(len, texts)) >= MIN_MEMBERS
            clusters = summary.text_clusters(sets)
            blind = blind_baselines(*texts, clusters, seed=settings.seed) if enough else None
            advance(1)
            results, original = [], measured[before.name] if before else None
            others = [spec.name for spec in specs if spec is not before]
            for spec in specs:
                role = "original" if spec is before else summary.role_of(spec.name, others)
                entry = {"name": spec.name, "model": spec.source, "role": role}
                entry |= {"collapse": collapse[spec.name], "weights": weights[spec.name]}
                entry |= {"data": data_digests(sets.folder), "code": CODE}
                own = summary.summarise(measured[spec.name], sets, settings, original, blind)
                results.append(entry | own)
                advance(1)
            summary.add_distances(results, measured, sets)
            if losses := {n: one.canary_loss for n, one in measured.items() if one.canary_loss}:
                add_canaries([r for r in results if r["name"] in losses], losses, sets.coins)
            summary.add_learned(results, measured, sets)
            lines = summary.add_audits(results, measured, sets, settings.keep_texts)
    write_lines(out / AUDIT_FILE, lines, private=True)
    written = {
        "schema": SCHEMA,
        "data_dir": str(sets.folder),
        "data_digest": sets.digest,
        "notes": sets.notes,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": asdict(settings),
        "versions": {"python": python_version(), "task": TASK_VERSION, **versions()},
        "models": results,
    }
    load_results(written)  # what is read with types is written so
    write_json(out / "results.json", written, private=True, ensure_ascii=False, allow_nan=False)
    return results


def _measure_all(
    session: Session, specs: Sequence[ModelSpec], before: ModelSpec | None,
    weights: Mapping[str, str],
) -> tuple[dict[str, Measured], dict[str, dict[str, Any] | None]]:  # fmt: skip
    """What each model did, and its collapse report, from the cache where they are known."""
    measured: dict[str, Measured] = {}
    collapse: dict[str, dict[str, Any] | None] = {}
    sets, settings, cache = session.sets, session.settings, session.cache
    keys = {name: cache.key(digest, sets, settings) for name, digest in weights.items()}
    judge = CollapseChecker(session, keys, before)
    unjudged = [spec for spec in specs if judge.stored(spec) is None]
    # The original first: each of the others is judged by it as soon as it is measured, so that
    # a killed run makes nobody's outputs again and the texts of one model are in memory.
    for spec in sorted(specs, key=lambda one: one is not before):
        known = cache.load(keys[spec.name], sets, settings)
        # Without its texts, or counts over those of the original, nobody could say whether it
        # collapsed.
        if known is not None and len(known.texts) < len(sets.rows):
            reference = spec is before and unjudged and not known.outputs
            if reference or judge.stored(spec) is None:
                known = None
        if known is None:
            started = time.perf_counter()
            known = session.measure(session.load(spec), keys[spec.name], spec.name)
            known.seconds = time.perf_counter() - started
            cache.save(keys[spec.name], known, settings)
        measured[spec.name] = known
        collapse[spec.name] = judge.report(spec, known, measured[before.name] if before else None)
        if not settings.keep_texts:
            known.texts = {}
    return measured, collapse
