"""Unlearning traces: do answers to unrelated prompts betray that a model was unlearned?

arXiv 2506.14003 trains classifiers on the outputs of a model before and after unlearning. Here
both answer the same prompts, a linear classifier on words and word pairs learns from some prompts
which answer is whose, and is asked about the others: half of them right is what one wishes for.
Any further training leaves traces too, so the retrained model is judged alike.

Shape letters: P prompts, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from axolotl_unlearn.attacks.target import limited, make_subjects, read_side
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.generate import generate_greedily
from axolotl_unlearn.metrics.intervals import LEVEL

PERMUTATIONS = 1999
#: Ridge penalty a prompt, of features of length 1.
PENALTY = 0.1
#: Fewer prompts than this are no test.
LEAST = 20


def tell_apart(
    first: Sequence[str], second: Sequence[str], *, folds: int = 5, seed: int = 0
) -> dict[str, Any]:
    """Which of two answers to a prompt is whose, out of fold.

    Features are the differences of the answers' TF-IDF vectors, so a prompt cancels. Under "both
    answer alike" the two answers of each prompt can be exchanged: p is the share of such exchanges
    that are told as well, and the interval holds .5 exactly where 95 % of them reach as far.

    Returns:
        ``share`` told right (an answer alike counts half), ``low``, ``high``, ``p``, ``alike``
        (share of prompts with equal answers) and ``n``.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    count = len(first)
    words = TfidfVectorizer(token_pattern=r"\S+", ngram_range=(1, 2), sublinear_tf=True)
    alike = float(np.mean([a == b for a, b in zip(first, second, strict=True)]))
    found = {"share": 0.5, "low": 0.5, "high": 0.5, "p": 1.0, "alike": alike, "n": count}
    if alike == 1:
        return found
    vectors = words.fit_transform([*first, *second])
    apart = vectors[:count] - vectors[count:]
    near = (apart @ apart.T).toarray()
    rng = np.random.default_rng(seed)
    fold = rng.permutation(count) % folds
    predictor = np.zeros((count, count))
    for number in range(folds):
        test, train = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        ridge = near[np.ix_(train, train)] + PENALTY * len(train) * np.eye(len(train))
        predictor[np.ix_(test, train)] = np.linalg.solve(ridge, near[np.ix_(train, test)]).T
    signs = rng.choice([-1.0, 1.0], (count, PERMUTATIONS + 1))
    signs[:, 0] = 1
    scores = signs * (predictor @ signs)  # of each exchange; 0 counts as half right
    shares = ((scores > 1e-12) + 0.5 * (np.abs(scores) <= 1e-12)).mean(0)
    value, null = shares[0], shares[1:]
    ends = value - (np.quantile(null, [(1 + LEVEL) / 2, (1 - LEVEL) / 2]) - 0.5)
    low, high = (float(end) for end in ends.clip(0, 1))
    p = float((1 + (null >= value - 1e-12).sum()) / len(shares))
    return found | {"share": float(value), "low": low, "high": high, "p": p}


def traces(answers: Sequence[str], original: Sequence[str], **others: Sequence[str]) -> dict:
    """`tell_apart` of a model's answers from the original's, and of each other model's."""
    if len(answers) < LEAST:
        raise UnlearnError(
            f"there are {len(answers)} different prompts in retain.jsonl; traces need {LEAST}."
        )
    found = {"model": tell_apart(answers, original)}
    return found | {name: tell_apart(some, original) for name, some in others.items()}


def traces_attack(
    model: str,
    original: str,
    control: str | None,
    data_dir: Path,
    limit: int,
    max_new_tokens: int,
    batch_size: int,
    **settings: Any,
) -> dict[str, Any]:
    """What ``traces.json`` holds: `traces` of greedy answers to inputs of retained rows."""
    rows = limited(read_side(data_dir, "retain")[1], limit)
    prompts, said, names = list(dict.fromkeys(row.input for row in rows)), [], []
    options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    pair = make_subjects(original, (), control, **settings)
    for one in (make_subjects(model, (), **settings)[0], *filter(None, pair)):
        said.append(generate_greedily(*one.load(), prompts, **options))
        names.append(one.name)
    others = {"control": said[2]} if control else {}
    return {"schema": 1, "names": names, **traces(*said[:2], **others)}


def sentence(result: Mapping[str, Any]) -> str:
    """What the traces show, in words."""

    def said(one: Mapping[str, Any]) -> str:
        figures = f"{one['share']:.2f} [{one['low']:.2f}, {one['high']:.2f}], p {one['p']:.2g}"
        return f"{figures}; {one['alike']:.0%} of answers alike"

    text = (
        f"Whose an answer is, the original's or its own, is told right in {said(result['model'])}"
    )
    if "control" in result:
        return text + f"; of the retrained control's, in {said(result['control'])}."
    return text + "; without a control part of it may be any training's."
