"""One call from per-text losses to everything that can be said about membership."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics import intervals, membership, memorisation

#: Below this many texts of a kind an AUC is close to a coin toss.
MIN_TEXTS = 20
FPRS = (0.01, 0.001)


def membership_lab(
    member_loss: Sequence[float],
    nonmember_loss: Sequence[float],
    member_texts: Sequence[str] | None = None,
    nonmember_texts: Sequence[str] | None = None,
    *,
    attacks: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    blind: Mapping[str, membership.Baseline] | None = None,
    level: float = intervals.LEVEL,
    seed: int = 0,
) -> dict[str, Any]:
    """Judge membership from the loss of each text, and say whether the judgement means anything.

    Args:
        member_loss, nonmember_loss: Mean loss of each text, nats a token.
        member_texts, nonmember_texts: The texts, in the same order; without them the blind
            baselines and the zlib attack are left out and the result says so.
        blind: Blind baselines of these texts if they are known already (they take seconds and are
            the same for every model).
        attacks: More losses (low = rather a member) by name, e.g. ``{"min_k_20": (a, b)}``.

    Returns:
        The figures of the loss attack (see `attack_figures`) at the top level; ``attacks`` with
        those of every attack; ``blind`` baselines (None without texts); ``meaningful`` (None if
        unknown), ``sentence`` in words; ``n``.

    Raises:
        UnlearnError: fewer than 20 texts of a kind, other lengths, losses that are not numbers,
            or a text that is member and non-member at once.
    """
    losses = {"loss": (member_loss, nonmember_loss)}
    texts = (member_texts, nonmember_texts)
    if (member_texts is None) != (nonmember_texts is None):
        raise UnlearnError("Give the texts of members and of non-members, or of neither.")
    for name, side in (("member", 0), ("nonmember", 1)):
        count = len(losses["loss"][side])
        if count < MIN_TEXTS:
            raise UnlearnError(
                f"There are {count} {name} texts; membership needs at least {MIN_TEXTS} of each "
                f"kind (150 and 150 give an AUC to within 0.07): add rows to {name}.jsonl."
            )
        if texts[side] is not None and len(texts[side]) != count:
            raise UnlearnError(
                f"{count} {name} losses but {len(texts[side])} texts: score the same file."
            )
    if member_texts is not None:
        both = set(member_texts) & set(nonmember_texts)
        if both:
            raise UnlearnError(
                f"{len(both)} texts are in both member.jsonl and nonmember.jsonl; remove them "
                "from one, because a text cannot be seen and unseen."
            )
        losses["zlib"] = tuple(
            np.asarray(loss, float) / [memorisation.compressed_bytes(t) for t in some]
            for loss, some in zip(losses["loss"], texts, strict=True)
        )
    losses |= attacks or {}
    figures = {name: attack_figures(*pair, name=name, level=level) for name, pair in losses.items()}
    if blind is None and member_texts is not None:
        blind = membership.blind_baselines(member_texts, nonmember_texts, seed=seed, level=level)
    warning = membership.blind_sentence(blind) if blind is not None else None
    n = {"member": len(member_loss), "nonmember": len(nonmember_loss)}
    ideal = intervals.ideal_membership(*n.values())
    return {
        **figures["loss"],
        "attacks": figures,
        "blind": None if blind is None else {name: asdict(b) for name, b in blind.items()},
        "meaningful": None if blind is None else warning is None,
        "ideal": asdict(ideal),
        "n": n,
        "sentence": warning or _sentence(figures["loss"], ideal, blind is not None),
    }


def attack_figures(
    member_loss: ArrayLike,
    nonmember_loss: ArrayLike,
    *,
    name: str = "loss",
    level: float = intervals.LEVEL,
) -> dict[str, Any]:
    """Figures of one attack that calls texts of low loss members.

    Returns:
        ``auc`` and its DeLong ``interval``, ``mia_score`` and ``mia_score_interval``,
        ``forgetting``; ``tpr``: for each false positive rate the share of members found
        (``value``, ``interval``), the same for the attack turned round (``reversed``: calls
        texts of unusually high loss unlearned members), and ``resolvable``: whether there are
        enough non-members to see that rate.
    """
    scores = [-np.asarray(loss, float) for loss in (member_loss, nonmember_loss)]
    if not all(np.isfinite(score).all() for score in scores):
        raise UnlearnError(
            f"The {name} of some texts is NaN or infinite; the model's weights or its precision "
            "are broken: evaluate in float32 and check the weights."
        )
    members, others = scores
    bounds = intervals.auc_interval(members, others, level)
    value = intervals.auc(members, others)
    tpr = {}
    for fpr in FPRS:
        share = membership.tpr_at_fpr(members, others, fpr)
        hits = round(share * len(members))
        tpr[str(fpr)] = {
            "value": share,
            "interval": membership.share_interval(hits, len(members), level),
            "reversed": membership.tpr_at_fpr(-members, -others, fpr),
            "resolvable": len(others) * fpr >= 1,
        }
    return {
        "auc": value,
        "interval": bounds,
        "mia_score": float(intervals.mia_score(value)),
        "mia_score_interval": intervals.mia_score_interval(members, others, level),
        "forgetting": membership.forgetting(bounds),
        "tpr": tpr,
    }


def _sentence(figures: Mapping[str, Any], ideal: intervals.Ideal, checked: bool) -> str:
    low, high = figures["interval"]
    meaning = {
        "under": "Members are still recognised by their low loss (under-forgetting)",
        "over": "Members stand out by unusually high loss (over-forgetting)",
        "balanced": "Members cannot be told from texts the model never saw",
    }[figures["forgetting"]]
    text = (
        f"{meaning}: AUC {figures['auc']:.3f} [{low:.3f}, {high:.3f}], MIA score "
        f"{figures['mia_score']:.3f} where a perfect model expects {ideal.expected:.3f} and in "
        f"one case of twenty falls below {ideal.tail:.3f}."
    )
    return text if checked else text + " Blind baselines were not run: the texts were not given."
