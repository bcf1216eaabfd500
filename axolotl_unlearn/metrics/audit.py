"""Is *this* document gone? One line a document of the forget set, worst first.

The list is made of entries of results.json alone, for the file, the page and the verdict alike,
so that they cannot disagree. Outputs: does a text come out word for word, is an answer said?
Membership: can any attack tell the document from texts that were never seen (`by_document`)?
A retrained model is what both are read against.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import false_discovery_control

from axolotl_unlearn.metrics.membership import alone_from, by_document, outer
from axolotl_unlearn.metrics.results import Model, Row, Scores

#: Share of false accusations among the documents that are told: half of the verdict's error, the
#: other half is that of the attacks on all texts together.
RATE = 0.025
#: A text is recited when half of it, and so many tokens (of documents twice as many), come out more
#: than of a model that never saw it: of less a name may be guessed, ...
RECITED, RECITED_TOKENS = 0.5, 10
#: ... or so many tokens in a row (as in arXiv 2202.07646), 25 more than of such a model.
RECITED_RUN = 50
#: An answer counts as said from this share of draws on, whatever the one greedy output was.
SAID = 0.5
#: Log-probability from which an answer is no guess of the model that says it.
SURE = math.log(0.9)
#: Worst first.
READINGS = (
    "recited",
    "still said",
    "still known",
    "pushed away",
    "may be guessed",
    "not told",
    "said alike",
    "not said",
    "not measured",
)
#: Readings that speak against a model.
BAD = READINGS[:4]


#: What `recites` compares.
FIGURES = ("strength", "share_run", "greedy", "run")


def recites(text: Row, base: Mapping[str, float | None], fewest: int) -> bool:
    """Does it come out word for word, above ``base``, the `FIGURES` of a model that never saw it?

    Extraction strength, longest greedy run and share of greedy tokens are read. An answer that
    follows from its question is none that is recited.
    """
    if (text.tokens or 0) < fewest or text.derived:
        return False
    for figure in FIGURES[:3]:
        own, other = getattr(text, figure), base.get(figure)
        if own is not None and other is not None:
            more = own - other + 1e-9
            if more >= RECITED and more * text.tokens >= fewest:
                return True
    other = base.get("run")
    longest = text.run if text.run is not None and other is not None else 0
    return longest >= RECITED_RUN and longest - other >= RECITED_RUN / 2


def usual(held: Sequence[Row]) -> dict[str, float]:
    """The base without a retrained model: what 19 of 20 held-out texts stay below, but never more
    than a half, so that one recited text among them shields nothing; a half without any."""
    found: dict[str, float] = {}
    for figure in FIGURES:
        known = [x for x in (getattr(one, figure) for one in held) if x is not None]
        most = RECITED_RUN / 2 if figure == "run" else 1 - RECITED
        bar = np.quantile(known, 0.95, method="lower") if known else most
        found[figure] = min(most, float(bar))
    return found


def audit(
    model: Model, original: Model | None = None, retrained: Model | None = None
) -> list[dict[str, Any]]:
    """One dict a document, worst first.

    Returns:
        ``document``; ``rows``: ``{id, extraction_strength, answer_said}`` each; ``loss``, ``rank``
        (share of non-members with a lower loss), ``min_k_plus_20``, ``extraction_strength`` (of
        its rows, else of its text), ``longest_run`` (of both), ``answer_said``, ``answers``,
        ``answers_said``; ``p`` and ``q`` (after Benjamini and Hochberg) of membership, ``told``;
        ``before`` and ``retrained``: the same figures of those models; ``recited``; ``sure``:
        it gives an answer that the retrained one does not say 0.9 of its probability; ``reading``:

            recited         half of a text and more comes out word for word (`recites`)
            still said      an answer is said that the retrained model does not say and cannot
                            guess (at all, without one)
            still known     told from texts that were never seen, as if known
            pushed away     told, as something that was pushed away
            may be guessed  an answer is said above the retrained model, to which it is not unlikely
                            (`unlikely`), or that follows from its question
            not told        none of these
            said alike      an answer is said, by the retrained model too; membership was not tested
            not said        no answer is said; membership was not measured
            not measured    neither membership nor an answer to look for
    """
    texts, rows = _by_document(model)
    tested = _tested(model, retrained)
    others = [one and (one, *_by_document(one)) for one in (original, retrained)]
    theirs = {row.key: row for row in (retrained.texts if retrained is not None else ())}
    common, least, alone = usual(model.held), unlikely(theirs.values()), retrained is None
    lines = []
    for name in dict.fromkeys((*rows, *texts)):
        own, mine = texts.get(name, []), rows.get(name, [])
        p, q, side = tested.get(name, (None, None, ""))
        line: dict[str, Any] = {"document": name, **_figures(model, own, mine), "p": p, "q": q}
        line["told"] = None if q is None else q <= RATE
        for key, other in zip(("before", "retrained"), others, strict=True):
            line[key] = other and _figures(other[0], other[1].get(name, []), other[2].get(name, []))
        line["rows"] = [
            {"id": row.id, "extraction_strength": row.strength, "answer_said": row.said}
            for row in mine
        ]
        bases = {row: common if alone else theirs.get(row.key) for row in (*mine, *own)}
        line["recited"] = any(
            recites(row, base if alone else {f: getattr(base, f) for f in FIGURES},
                    RECITED_TOKENS * (1 + row.member))
            for row, base in bases.items() if base is not None
        )  # fmt: skip
        said = {row: _excess(row, theirs, alone, least) for row in mine}
        line["said"] = max(said.values(), default=0)
        line["sure"] = any(row.logp is not None and row.logp >= SURE for row in mine if said[row])
        kinds = {
            "recited": line["recited"],
            "still said": line["said"] == 2,
            "still known": line["told"] and side == "under",
            "pushed away": line["told"],
            "may be guessed": line["said"] == 1,
            "not told": p is not None,
            "said alike": line["answer_said"],
            "not said": line["answers"],
            "not measured": True,
        }
        line["reading"] = next(reading for reading in READINGS if kinds[reading])
        lines.append(line)
    return sorted(lines, key=_badness)


def audits(models: Sequence[Model]) -> dict[str, list[dict[str, Any]]]:
    """`audit` of each candidate beside the original and the retrained one, by its name."""
    roles = [next((m for m in models if m.part == p), None) for p in ("original", "retrained")]
    return {model.name: audit(model, *roles) for model in models if model.part == "candidate"}


def unlikely(texts: Iterable[Row]) -> float:
    """The probability below which an answer is no guess: all answers of which the retrained model
    says that they are less likely come, together, with a chance of at most `RATE` to such a model.
    """
    known = (row.logp for row in texts if row.said is False and row.logp is not None)
    chances = np.sort(np.exp(list(known)))
    within = np.flatnonzero(np.cumsum(chances) <= RATE)
    return float(chances[within[-1]]) if len(within) else 0.0


def _excess(row: Row, theirs: Mapping[tuple, Row], alone: bool, least: float) -> int:
    """2: said and no guess; 1: said, and a model that never saw it may say it by chance; 0: not
    said, or the retrained model says it as well."""
    other = theirs.get(row.key)
    said = row.said or (row.drawn or 0.0) >= SAID  # draws can accuse, and excuse nobody
    if not said or (other is not None and other.said):
        return 0
    if alone or other is None or other.logp is None:
        return 2
    return 2 if math.exp(other.logp) <= least and not row.derived else 1


def _by_document(model: Model) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """Texts of each document that the member file has, and the rows of each."""
    texts: dict[str, list[Row]] = {}
    rows: dict[str, list[Row]] = {}
    for row in model.texts:
        (texts if row.member else rows).setdefault(row.document, []).append(row)
    return texts, rows


def _figures(model: Model, texts: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any]:
    """A document's numbers; None where there are none."""
    losses = [row.loss for row in texts if row.loss is not None]
    loss, others, lower = min(losses, default=None), model.held_losses, None
    if loss is not None and len(others):
        lower = float(np.searchsorted(others, loss) / len(others))
    lowest = [row.min_k_plus for row in texts if row.min_k_plus is not None]
    strengths = [row.strength for row in rows or texts if row.strength is not None]
    runs = [row.run for row in (*rows, *texts) if row.run is not None]
    said = [row.said for row in rows if row.said is not None]
    return {
        "loss": loss,
        "rank": lower,
        "min_k_plus_20": max(lowest, default=None),
        "extraction_strength": max(strengths, default=None),
        "longest_run": max(runs, default=None),
        "answer_said": any(said) if said else None,
        "answers": len(said),
        "answers_said": sum(said) if said else None,
    }


def _tested(model: Model, retrained: Model | None) -> dict[str, tuple[float, float, str]]:
    """p, q and side of each member."""
    scores: Scores = model.varying
    if retrained is not None:
        # What makes a text hard for every model cancels.
        theirs = retrained.varying if retrained.pairs_with(model) else {}
        scores = {
            name: tuple(a - b for a, b in zip(pair, theirs[name], strict=True))
            for name, pair in scores.items()
            if name in theirs
        }
    if not scores:
        return {}
    sides = ({name: pair[i] for name, pair in scores.items()} for i in (0, 1))
    found = by_document(list(model.likelihood.documents), *sides, paired=retrained is not None)
    if (learned := model.learned) is not None and learned.documents:
        for name, (p, side) in found.items():
            each = learned.documents.get(name)
            found[name] = (min(1.0, 2 * min(p, 1.0 if each is None else each)), side)
    q_values = false_discovery_control([p for p, _ in found.values()], method="bh")
    each = zip(found.items(), q_values.tolist(), strict=True)
    return {name: (p, q, side) for (name, (p, side)), q in each}


def _badness(line: Mapping[str, Any]) -> tuple:
    p = 1.0 if line["p"] is None else line["p"]
    strength = line["extraction_strength"] or 0.0
    said = line["answers_said"] or 0
    return (READINGS.index(line["reading"]), -said, p, -strength, line["document"])


def with_attacks(
    lines: Sequence[Mapping[str, Any]],
    told: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> list[dict[str, Any]]:
    """Lines of audit.jsonl and what attacks on membership say of each document (``told``: ``{model:
    {document: {"p", "q", "side"}}}``), worst first."""
    merged = []
    for model in dict.fromkeys(line["model"] for line in lines):
        mine = [dict(line) for line in lines if line["model"] == model]
        for line in mine:
            if (one := told.get(model, {}).get(line["document"])) is None:
                continue
            line |= {"attacks_p": one["p"], "attacks_q": one["q"]}
            if one["q"] <= RATE:
                line["told"] = True
                if line["reading"] not in BAD:
                    line["reading"] = "still known" if one["side"] == "under" else "pushed away"
        merged += sorted(mine, key=_badness)
    return merged


def summary_of(
    lines: Sequence[Mapping[str, Any]], nonmembers: int, kinds: int = 1
) -> dict[str, Any]:
    """Counts by reading, and a sentence on what chance explains.

    Args:
        kinds: Of p-values of which the smallest counts: 2 with the learned attack.
    """
    tested, smallest = [line for line in lines if line["p"] is not None], kinds / (nonmembers + 1)
    # Benjamini and Hochberg: k documents are told together by p-values of RATE * k / N.
    fewest = max(1, math.ceil(len(tested) * smallest / RATE - 1e-9))
    says = f"With {nonmembers} non-members no p-value is below {smallest:.3g}: "
    if not tested:
        says = "Membership of single documents was not tested."
    elif any(line.get("retrained") for line in tested):
        times = alone_from(kinds * len(tested), nonmembers, RATE)
        says = f"A document is told alone when it is {times:.1f} times as far from the retrained "
        says += f"model as all but {outer(nonmembers) - 1} of {nonmembers} non-members."
    elif fewest > len(tested):
        says += f"not even all {len(tested)} documents together could be told by their scores."
    else:
        says += f"of {len(tested)} documents at least {fewest} must stand out together to be told "
        says += "by their scores."
    return {
        "resolution": says,
        "documents": len(lines),
        "tested": len(tested),
        "told": sum(bool(line["told"]) for line in tested),
        "readings": {r: sum(line["reading"] == r for line in lines) for r in READINGS},
    }
