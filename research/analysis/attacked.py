"""What attacks see of several models, and where a member's tail comes from.

    python -m research.analysis.attacked --reference out/base --data out/data \\
        --out attacked.json original=out/original retrained=out/retrained match=out/match

For each model: the AUC of the six attacks and of a learned one on members against non-members,
each compared with the retrained model's by an equivalence test; and the loss of members and
non-members by token rank (the least likely token of each text at rank 0, the most likely at 1).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from axolotl_unlearn.data.documents import author_of
from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.intervals import LEVEL, Clusters, auc, auc_interval
from axolotl_unlearn.metrics.membership import (
    MARGIN,
    Equivalence,
    attack_scores,
    auc_equivalence,
)
from axolotl_unlearn.metrics.memorisation import TokenFacts

#: Relative ranks at which the curves are given.
RANKS = np.linspace(0, 1, 21)
_QUANTILES = np.linspace(0, 1, 11)
#: Parts of each side of which the learned attack is told all but one.
FOLDS = 5
#: By which its spread between two models is known to a twentieth.
PERMUTATIONS = 200
#: In the order of the tables; a seed from before an attack was made has it not.
TITLES = {
    "loss": "loss",
    "zlib": "zlib",
    "min_k_20": "Min-20%",
    "min_k_plus_20": "Min-20%++",
    "entropy": "entropy",
    "reference": "ref.",
    "learned": "learned",
}

Sides = tuple[NDArray, NDArray]
#: Token facts of members and of non-members.
Facts = tuple[Sequence[TokenFacts], Sequence[TokenFacts]]


def trained_equivalence(value: float, spread: float, texts: int) -> Equivalence:
    """The same of two trained attacks, whose out-of-fold scores depend on each other: DeLong's
    standard error of them is more than a quarter too small (benchmark `learned_spread`).

    Args:
        spread: Standard deviation of the difference ``value`` under permutations of the labels.
        texts: Of the smaller side.
    """
    half = float(norm.ppf(LEVEL)) * spread
    p = float(norm.sf((MARGIN - abs(value)) / max(spread, 1e-12)))
    room = MARGIN - abs(value)
    needed = math.ceil(texts * (half / room) ** 2) if room > 0 else None
    return Equivalence(float(value), value - half, value + half, MARGIN, p, needed)


def rank_curve(facts: Sequence[TokenFacts]) -> list[float]:
    """Mean loss in nats at each of `RANKS`, tokens of each text sorted from least likely."""
    rows = []
    for one in facts:
        loss = -np.sort(np.asarray(one.logp, float))
        rows.append(np.interp(RANKS, np.linspace(0, 1, len(loss)), loss))
    return [round(float(value), 4) for value in np.mean(rows, axis=0)]


def learned_scores(
    members: Sequence[TokenFacts],
    nonmembers: Sequence[TokenFacts],
    *,
    folds: int = FOLDS,
    divisions: int = 10,
) -> Sides:
    """A learned attack: logistic regression on quantiles of log-prob and of Min-K%++'s z.

    It is told which texts are members, apart from the fold that it scores: stronger than anything
    an attacker without labels can do with these features. Scores are means over several divisions
    into folds: with 80 members the AUC of one has a standard deviation of .03.

    Returns:
        Out-of-fold scores of members and non-members, high = rather a member.
    """
    inputs = np.array([_features(one) for one in [*members, *nonmembers]])
    labels = np.repeat([1, 0], [len(members), len(nonmembers)])
    found = _out_of_fold(inputs, labels, folds, divisions)
    return found[labels == 1], found[labels == 0]


def _features(one: TokenFacts) -> NDArray:
    logp = np.asarray(one.logp, float)
    z = (logp - np.asarray(one.mean, float)) / np.maximum(np.asarray(one.sd, float), 1e-6)
    return np.concatenate([np.quantile(logp, _QUANTILES), np.quantile(z, _QUANTILES), [logp.std()]])


def _out_of_fold(inputs: NDArray, labels: NDArray, folds: int, divisions: int) -> NDArray:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    divided = [StratifiedKFold(folds, shuffle=True, random_state=i) for i in range(divisions)]
    scores = [
        cross_val_predict(model, inputs, labels, cv=cv, method="decision_function")
        for cv in divided
    ]
    return np.mean(scores, axis=0)


def learned_spread(first: Facts, second: Facts) -> float:
    """Standard deviation of the difference of two models' learned AUC where neither tells anything.

    The labels are permuted, alike under both; for `trained_equivalence`.

    Args:
        first, second: (members, non-members) of the same texts under the two models.
    """
    inputs = [
        np.array([_features(one) for one in [*side[0], *side[1]]]) for side in (first, second)
    ]
    labels = np.repeat([1, 0], [len(side) for side in first])
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(PERMUTATIONS):
        drawn = rng.permutation(labels)
        found = [_out_of_fold(one, drawn, FOLDS, 2) for one in inputs]
        gaps.append(np.subtract(*(auc(one[drawn == 1], one[drawn == 0]) for one in found)))
    return float(np.std(gaps, ddof=1))


def _authors(texts: tuple[Sequence[str], Sequence[str]]) -> Clusters:
    """The author of each text, else the text itself; None where nobody names one."""
    if not any(author_of(text) for side in texts for text in side):
        return None
    return tuple([author_of(text) or f"text {i} {j}" for j, text in enumerate(side)]
                 for i, side in enumerate(texts))  # fmt: skip


def attacked(
    facts: Mapping[str, tuple[Sequence[TokenFacts], Sequence[TokenFacts]]],
    reference: tuple[Sequence[TokenFacts], Sequence[TokenFacts]],
    texts: tuple[Sequence[str], Sequence[str]],
) -> dict[str, Any]:
    """What the attacks find, by model.

    Args:
        facts: Model -> token facts of members and of non-members.
        reference: The same of a model that saw neither, for the attack "reference".
        texts: Members and non-members; those with an author (`data.documents.author_of`) are
            independent by authors, as far as DeLong's intervals go.

    Returns:
        Model -> ``attacks`` (name -> auc, interval, and where a model "retrained" is there the
        difference from it with its 90 % interval and whether it is equivalent), ``loss`` and
        ``ranks`` of members and non-members.
    """
    scores: dict[str, dict[str, Sides]] = {}
    for name, sides in facts.items():
        by_side = [
            attack_scores(side, side_texts, known)
            for side, side_texts, known in zip(sides, texts, reference, strict=True)
        ]
        scores[name] = {a: (by_side[0][a], by_side[1][a]) for a in by_side[0]}
        scores[name]["learned"] = learned_scores(*sides)
    clusters = _authors(texts)
    found = {}
    for name, sides in facts.items():
        attacks = {}
        for attack, pair in scores[name].items():
            attacks[attack] = {
                "auc": round(float(auc(*pair)), 4),
                "interval": [round(float(v), 4) for v in auc_interval(*pair, clusters=clusters)],
            }
            if "retrained" in facts and name != "retrained":
                test = auc_equivalence(pair, scores["retrained"][attack], clusters=clusters)
                if attack == "learned":
                    spread = learned_spread(sides, facts["retrained"])
                    test = trained_equivalence(test.value, spread, min(map(len, sides)))
                attacks[attack]["from_retrained"] = {
                    "value": round(test.value, 4),
                    "interval": [round(test.low, 4), round(test.high, 4)],
                    "equivalent": test.equivalent,
                }
        found[name] = {
            "attacks": attacks,
            "loss": [round(float(np.mean([-f.logp.mean() for f in side])), 4) for side in sides],
            "ranks": [rank_curve(side) for side in sides],
        }
    return found


def score_models(models: Mapping[str, str], reference: str, data: Path) -> dict[str, Any]:
    """`attacked` of models in folders, on ``data/member`` and ``data/nonmember``."""
    from axolotl_unlearn.data.documents import read_documents
    from axolotl_unlearn.engine.token_scoring import score_texts
    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models

    texts = tuple(
        [text for _, text in read_documents(data / f"{side}.jsonl")]
        for side in ("member", "nonmember")
    )

    def facts(where: str) -> tuple[Sequence[TokenFacts], Sequence[TokenFacts]]:
        import torch

        (spec,) = parse_models([f"model={where}"])
        tokenizer = load_tokenizer(spec)
        model = load_model(spec, dtype=torch.float32, device="cpu")
        return tuple(score_texts(model, tokenizer, side) for side in texts)

    return attacked({n: facts(where) for n, where in models.items()}, facts(reference), texts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--reference", required=True, help="model that saw neither side")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    models = dict(model.split("=", 1) for model in given.models)
    found = score_models(models, given.reference, given.data)
    write_json(given.out, found)


if __name__ == "__main__":
    main()
