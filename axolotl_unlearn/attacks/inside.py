"""Membership from inside the model: what an attacker sees who has its weights.

The attacks of `axolotl-unlearn eval` see what a model says of a text. A model can be alike in that
and still carry the text: its hidden states lie elsewhere than at texts it never saw, or its loss is
flatter around it (white-box, arXiv 1812.00910). Each view is judged by the learned attack
(`axolotl_unlearn.metrics.learned`), which is told some members and asked about the others.

Shape letters: N texts, S numbers of all layers' states, W linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from axolotl_unlearn.attacks.target import AttackTarget, collate
from axolotl_unlearn.data.records import document_id
from axolotl_unlearn.engine.needs import ForwardSpec
from axolotl_unlearn.engine.observe import observe
from axolotl_unlearn.engine.token_scoring import Query, check_length, text_queries
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.learned import (
    FEATURES,
    MIN_TEXTS,
    PENALTY,
    Learned,
    learned_attack,
    some_texts,
)
from axolotl_unlearn.metrics.membership import trained_equivalence
from axolotl_unlearn.models import input_device

#: What it looks at, in words.
VIEWS = {"states": "hidden states", "gradients": "gradient norms"}
#: (id, text) of each.
Documents = Sequence[tuple[str, str]]


def inside_features(
    model: Any,
    texts: Sequence[Query],
    *,
    batch_size: int = 8,
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, NDArray[np.float32]]:
    """What is inside a model at each text.

    Returns:
        ``states`` ``[N, S]``: mean and standard deviation, over the positions that predict a text's
        tokens, of the hidden states after each layer. ``gradients`` ``[N, W]``: natural logarithm
        of the norm of the gradient that the text's mean NLL gives each linear layer of the decoder
        (fused experts are none).

    Raises:
        UnlearnError: a text is longer than the model takes.
    """
    check_length(model, texts)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i].ids))
    rows: list[tuple[NDArray, NDArray]] = [(np.empty(0), np.empty(0))] * len(texts)
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        batch = collate([(texts[i].ids, texts[i].ids) for i in numbers], input_device(model))
        where = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for row, i in enumerate(numbers):
            where[row, list(texts[i].times)] = True
        with torch.no_grad():
            observed = observe(model, batch, ForwardSpec(profiles=where, gradients=where))
        sides = observed.profiles.cpu(), observed.gradients.cpu()
        for i, *views in zip(numbers, *sides, strict=True):
            rows[i] = (views[0].numpy(), views[1].numpy())
        if on_batch is not None:
            on_batch(len(numbers))
    return {view: np.stack(side) for view, side in zip(VIEWS, zip(*rows, strict=True), strict=True)}


def inside_attack(
    subject: AttackTarget,
    members: Documents,
    nonmembers: Documents,
    control: AttackTarget | None = None,
) -> dict[str, Any]:
    """Tell members from non-members by each of `VIEWS`; a ``control`` never saw the members.

    Returns:
        What the attack's file holds. By view: ``auc`` of the model and of the ``control``, out of
        fold; ``difference`` of the two with its 90 % interval, from the same permutations of the
        labels under both; ``told``: AUC and exact permutation p of the attack on differences from
        the control's features (what makes a text unusual for every model cancels), without one of
        the plain attack; ``picked``: members whose own p is below .05.
    """
    sides = [some_texts(members), some_texts(nonmembers)]
    if min(map(len, sides)) < MIN_TEXTS:
        raise UnlearnError(
            f"there are {len(sides[0])} member and {len(sides[1])} nonmember texts; this attack "
            f"needs {MIN_TEXTS} of each kind: add rows."
        )
    seen = [_seen(one, [*sides[0], *sides[1]]) for one in (subject, control) if one is not None]
    if len({tuple(one[view].shape[1] for view in VIEWS) for one in seen}) > 1:
        raise UnlearnError(
            "model and control are of different architectures; the control of this attack has to "
            "be of the same."
        )
    n, documents = len(sides[0]), [[document_id(name) for name, _ in side] for side in sides]

    def attack(features: NDArray) -> Learned:
        return told_by(features[:n], features[n:], *documents)

    views = {}
    for view in VIEWS:
        first, *other = (attack(one[view]) for one in seen)
        told, figures = first, {"title": VIEWS[view], "auc": first.auc}
        if other:
            told = attack(seen[0][view].astype(float) - seen[1][view])
            figures |= {"control": other[0].auc, "difference": _difference(first, other[0])}
        picked = int((told.each < 0.05).sum())
        views[view] = figures | {"told": {"auc": told.auc, "p": told.p}, "picked": picked}
    names = {"model": subject.name, "control": control.name if control else None}
    counts = {"members": len(sides[0]), "nonmembers": len(sides[1])}
    return {"attack": "inside", "title": "Looking inside", **names, **counts, "views": views}


def told_by(members: NDArray, nonmembers: NDArray, *documents: Any, **options: Any) -> Learned:
    """`learned_attack` on as many features as there are; those on token scores count as they do.

    Raises:
        UnlearnError: Nothing can be learned, or no permutation exchanges documents.
    """
    penalty = PENALTY * max(1.0, members.shape[1] / FEATURES)
    learned = learned_attack(members, nonmembers, *documents, penalty=penalty, **options)
    if learned is None:
        raise UnlearnError(
            "the model gives numbers that are not finite at some texts (load it in float32 or "
            f"bfloat16, `--dtype`), or there are fewer than {MIN_TEXTS} of a kind to learn from."
        )
    if learned.p is None:
        raise UnlearnError(
            "no document of member.jsonl has as many rows as one of nonmember.jsonl, so chance "
            "cannot exchange them: give both one row a document."
        )
    return learned


def _difference(first: Learned, second: Learned) -> dict[str, Any]:
    """Of two AUC on the same texts, with its 90 % interval."""
    spread = float((first.null - second.null).std(ddof=1))
    texts = min(len(first.members), len(first.nonmembers))
    same = trained_equivalence(first.auc - second.auc, spread, texts)
    return {**asdict(same), "equivalent": same.equivalent}


def _seen(subject: AttackTarget, documents: Documents) -> dict[str, NDArray[np.float32]]:
    """`inside_features` of a model's own tokens, under a progress bar."""
    model, tokenizer = subject.load()
    model.eval()
    texts = text_queries(tokenizer, [text for _, text in documents])
    with subject.bar("looking inside", len(texts)) as on_batch:
        return inside_features(model, texts, batch_size=subject.batch_size, on_batch=on_batch)


def sentence(result: Mapping[str, Any]) -> str:
    """What the attack shows, in words."""
    return f"What its weights tell of members: {'; '.join(map(says, result['views'].values()))}."


def says(view: Mapping[str, Any]) -> str:
    """What one view shows."""
    told, gap = view["told"], view.get("difference")
    if not gap:
        return f"{view['title']} AUC {view['auc']:.2f}, p {told['p']:.2g}"
    apart = f"{gap['value']:+.2f} [{gap['low']:+.2f}, {gap['high']:+.2f}]"
    return (
        f"{view['title']} AUC {view['auc']:.2f}, {view['control']:.2f} of the control ({apart}); "
        f"{told['auc']:.2f} where the attack knows the control, p {told['p']:.2g}"
    )


def grid(title: str, figures: Sequence[str], *names: str) -> Any:
    """An empty rich table."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE_HEAD)
    for name in names:
        made.add_column(name, overflow="fold", no_wrap=name == "measure")
    for name in figures:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def table(result: Mapping[str, Any]) -> Any:
    """The result as a rich table."""
    counts = f"{result['members']} members, {result['nonmembers']} others"
    figures = ("AUC", "control", "difference", "knowing\nit", "p", "picked\nout")
    made = grid(f"{result['title']}: {result['model']} ({counts})", figures, "seen")
    for view in result["views"].values():
        gap, told = view.get("difference"), view["told"]
        made.add_row(
            view["title"],
            f"{view['auc']:.2f}",
            f"{view['control']:.2f}" if gap else "n/a",
            f"{gap['value']:+.2f}\n{gap['low']:+.2f}, {gap['high']:+.2f}" if gap else "n/a",
            f"{told['auc']:.2f}" if gap else "n/a",
            f"{told['p']:.4f}",
            str(view["picked"]),
        )
    made.caption = "Each text is judged by an attack that was not told of it; 90 % intervals."
    return made
