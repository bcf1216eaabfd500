"""Prompt attacks: is the knowledge gone, or only the answer to this wording of the question?

    affirmative   the reply begins with "Sure, here is the answer:" (arXiv 2506.12618)
    prefix        the reply begins with a share of the true answer; only the rest is asked for
    paraphrase    another wording, where the rows bring one
    examples      solved retain rows of the same task and kind stand in front

A model that never saw the forget set also completes half a phone number badly and half a sentence
quite well: give it as control.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from axolotl_unlearn.attacks.probes import Probe, Scores, plain_probes
from axolotl_unlearn.attacks.results import figures_row, result_of, stored
from axolotl_unlearn.attacks.target import AttackTarget
from axolotl_unlearn.data.records import Record, read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.words import fold
from axolotl_unlearn.models import load_tokenizer
from axolotl_unlearn.store import Store

VARIANTS = ("affirmative", "prefix", "paraphrase", "examples")
AFFIRMATIVE = "Sure, here is the answer:"
SEPARATOR = "\n\n"
PARAPHRASES = ("paraphrase", "paraphrased_question", "paraphrased_input")


def prefix_probes(probes: Sequence[Probe], tokenizer: Any, share: float) -> list[Probe]:
    """The reply already holds the first ``share`` of the answer's tokens, at least one.

    Probes whose answer is a single token, or whose cut is not one of the text (half a character),
    are left out.
    """
    cut = []
    for probe in probes:
        ids = tokenizer(probe.continuation, add_special_tokens=False)["input_ids"]
        given = max(1, math.floor(share * len(ids)))
        if given >= len(ids):
            continue
        start = tokenizer.decode(ids[:given], clean_up_tokenization_spaces=False)
        if probe.continuation.startswith(f" {start}"):  # as Llama's decoder leaves it
            start = f" {start}"
        rest = probe.continuation.removeprefix(start)
        if start.strip() and rest != probe.continuation and fold(rest):
            new = {"prompt": probe.prompt + start, "continuation": rest, "expected": rest.strip()}
            cut.append(replace(probe, **new))
    return cut


def read_paraphrases(path: Path) -> dict[str, str]:
    """Id of a row to another wording of its input, from the field that has one."""
    wordings = {}
    for number, (_, row) in enumerate(read_rows(path)):
        text = next((row[name] for name in PARAPHRASES if row.get(name)), None)
        if isinstance(text, str) and text.strip():
            wordings[str(row.get("id", f"row{number}"))] = text.strip()
    return wordings


def example_probes(
    probes: Sequence[Probe],
    tasks: Mapping[str, str],
    retain: Sequence[Record],
    count: int,
    seed: int = 0,
    join: str = " ",
) -> list[Probe]:
    """``count`` solved retain rows of the same task (``tasks``: by id) and kind in front."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in retain:
        groups.setdefault((record.task, record.kind), []).append(record)
    pools = [groups.get((tasks[probe.id], probe.kind), []) for probe in probes]
    made = []
    for probe, pool in zip(probes, pools, strict=True):
        if len(pool) >= count:
            shown = random.Random(f"{seed}:{probe.id}").sample(pool, count)
            texts = [record.input + join + record.output for record in shown]
            made.append(replace(probe, prompt=SEPARATOR.join([*texts, probe.prompt])))
    return made


def prompt_attack(
    subject: AttackTarget,
    store: Store,
    *,
    variants: Sequence[str] = VARIANTS,
    prefixes: Sequence[float] = (0.25, 0.5),
    examples: Sequence[int] = (1, 4),
    retain: Sequence[Record] = (),
    paraphrases: Mapping[str, str] | None = None,
    control: AttackTarget | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Recall of the forget rows under each variant, against the plain prompt of the same rows;
    ``skipped``: variant to reason."""
    if unknown := sorted(set(variants) - set(VARIANTS)):
        raise UnlearnError(
            f"there is no prompt variant {unknown[0]!r}; choose among {', '.join(VARIANTS)}.",
            code="attack.no-variant",
        )
    if strange := [share for share in prefixes if not 0 < share < 1]:
        raise UnlearnError(
            f"a prefix of {strange[0]} is no share of the answer between 0 and 1.",
            code="attack.no-share",
        )
    records, join = subject.records, subject.join
    plain = plain_probes(records, join=join)
    tasks = {record.id: record.task for record in records}
    loaded: dict[str, tuple[Any, Any]] = {}

    def model_of(of: AttackTarget) -> tuple[Any, Any]:
        if of.name not in loaded:
            loaded.clear()  # one model in memory at a time
            loaded[of.name] = of.load()
        return loaded[of.name]

    def scores(of: AttackTarget, name: str, probes: Sequence[Probe]) -> Scores:
        how = "plain" if name == "plain" else [(p.prompt, p.continuation) for p in probes]
        options = {"until": SEPARATOR} if name.startswith("examples") else {}
        return stored(
            store, of, records, how, lambda: of.ask(*model_of(of), probes, name, **options)
        )

    tokenizer = load_tokenizer(subject.spec)
    said = [replace(p, prompt=f"{p.prompt}{join}{AFFIRMATIVE}") for p in plain]
    worded = [replace(p, prompt=paraphrases[p.id]) for p in plain if p.id in (paraphrases or {})]
    # Variant -> name of each way and its probes.
    ways = {
        "affirmative": {"affirmative": said},
        "prefix": {f"prefix {100 * s:.12g}%": prefix_probes(plain, tokenizer, s) for s in prefixes},
        "paraphrase": {"paraphrase": worded},
        "examples": {
            f"examples {n}": example_probes(plain, tasks, retain, n, seed, join) for n in examples
        },
    }
    chosen = {"plain": plain}
    for variant in VARIANTS:
        chosen |= ways[variant] if variant in variants else {}
    asked = {name: some for name, some in chosen.items() if some}
    none = "no row of the forget set can be asked this way"
    skipped = {name: none for name in chosen if name not in asked}
    if "paraphrase" in skipped and not paraphrases:
        skipped["paraphrase"] = f"no row has a field {' or '.join(PARAPHRASES)}"
    ours, theirs = (
        {name: scores(of, name, some) for name, some in asked.items()} if of else {}
        for of in (subject, control)
    )
    rows = [figures_row(n, one, ours["plain"], theirs.get(n)) for n, one in ours.items()]
    return result_of("prompt", "Prompting", subject, control, rows, skipped=skipped)
