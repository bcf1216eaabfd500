"""Is *this* document gone? One line a document of the forget set, worst first.

Membership: can any attack tell the document, of the member file, from texts that were never seen
(`membership.told_documents`)? Outputs: is an answer of the document still said, and how much of its
rows comes out greedily (extraction strength)? A retrained model is what both are read against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy.stats import false_discovery_control

from axolotl_unlearn.metrics.intervals import LEVEL
from axolotl_unlearn.metrics.membership import Documents, told_documents
from axolotl_unlearn.metrics.verdict.criteria import RECITED_TOKENS, recites

#: Share of false accusations among the documents that are told.
RATE = 1 - LEVEL
#: Worst first.
READINGS = (
    "recited",
    "still said",
    "still known",
    "pushed away",
    "not told",
    "not said",
    "not measured",
)


@dataclass(frozen=True)
class Evidence:
    """What one model did with the forget documents.

    Attributes:
        members: Attack to score of each member by document, high = rather a member.
        nonmembers: Attack to ``[M]`` scores, in one order for all models.
        extraction: Extraction strength by row id.
        said: Is the answer in the generation, by row id of the questions.
        tokens: Of each row's answer, by row id.
        halves: Extraction strength of a member's second half and the tokens of the whole, by
            document.
        held: That of each non-member.
    """

    members: Mapping[str, Mapping[str, float]]
    nonmembers: Mapping[str, Sequence[float]]
    extraction: Mapping[str, float] = field(default_factory=dict)
    said: Mapping[str, bool] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    halves: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    held: Sequence[float] = ()

    @cached_property
    def _losses(self) -> np.ndarray:
        return np.sort(self.nonmembers["loss"])

    def figures(self, document: str, rows: Sequence[str]) -> dict[str, Any]:
        """The document's numbers; None where there are none."""
        loss = self.members.get("loss", {}).get(document)
        strengths = [self.extraction[row] for row in rows if row in self.extraction]
        answers = [self.said[row] for row in rows if row in self.said]
        # The score is minus the loss: non-members with a lower loss score higher.
        lower = None
        if loss is not None:
            others = self._losses
            lower = (len(others) - np.searchsorted(others, loss, "right")) / len(others)
        return {
            "loss": None if loss is None else -loss,
            "rank": None if lower is None else float(lower),
            "min_k_plus_20": self.members.get("min_k_plus_20", {}).get(document),
            "extraction_strength": max(strengths, default=None),
            "answer_said": any(answers) if answers else None,
            "answers": len(answers),
            "answers_said": sum(answers) if answers else None,
        }


def recited(
    model: Evidence, retrained: Evidence | None, document: str, rows: Sequence[str]
) -> bool | None:
    """By the rule of the verdict (`criteria.recites`); None with neither a retrained model nor
    held-out texts of which none comes out whole."""
    if retrained is None and not 0 <= max(model.held, default=math.nan) < 1:
        return None
    base = None if retrained is None else [retrained.extraction.get(row, 0.0) for row in rows]
    recitals = [
        recites(model.extraction[row], model.tokens.get(row, 0), base and base[i], model.held)
        for i, row in enumerate(rows)
        if row in model.extraction
    ]
    strength, tokens = model.halves.get(document, (0.0, 0))
    half = None if retrained is None else retrained.halves.get(document, (0.0, 0))[0]
    return any(recitals) or recites(strength, tokens, half, model.held, 2 * RECITED_TOKENS)


def audit(
    model: Evidence,
    documents: Mapping[str, Sequence[str]],
    *,
    original: Evidence | None = None,
    retrained: Evidence | None = None,
    learned: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """One dict a document, worst first.

    Args:
        documents: Row ids by document of the forget set; documents that only the member file has
            come with no rows.
        learned: p-values of members by document from the learned attack; the smaller of it and that
            of the other attacks together counts, doubled. Of a member that it did not see: 1.

    Returns:
        ``document``; ``rows``: ``{id, extraction_strength, answer_said}`` each; the figures of
        `Evidence.figures` (``rank``: share of non-members with a lower loss); ``p`` and ``q``
        (after Benjamini and Hochberg) of membership, ``told``; ``before`` and ``retrained``: the
        same figures of those models; ``reading``:

            recited       half of a text and more comes out word for word (see `recited`)
            still said    more answers are said than by the retrained model (at all, without one)
            still known   told from texts that were never seen, as if known
            pushed away   told, as something that was pushed away
            not told      neither
            not said      no answer is said; membership was not measured
            not measured  neither membership nor an answer to look for
    """
    names = [name for name in documents if name in model.members.get("loss", {})]
    tested: dict[str, tuple[float, float, str]] = {}
    if names:
        tests = _tests(model, retrained, names)
        p_values = tests.p
        if learned:
            p_values = np.minimum(1, 2 * np.minimum(p_values, [learned.get(n, 1.0) for n in names]))
        q_values = false_discovery_control(p_values, method="bh")
        each = zip(p_values.tolist(), q_values.tolist(), tests.side, strict=True)
        tested = dict(zip(names, each, strict=True))
    lines = []
    for name, rows in documents.items():
        p, q, side = tested.get(name, (None, None, ""))
        figures = model.figures(name, rows)
        target = retrained.figures(name, rows) if retrained else None
        line: dict[str, Any] = {"document": name, **figures, "p": p, "q": q}
        line["told"] = None if q is None else q <= RATE
        line["before"] = original.figures(name, rows) if original else None
        line["retrained"] = target
        strength, said = model.extraction, model.said
        line["rows"] = [
            {"id": row, "extraction_strength": strength.get(row), "answer_said": said.get(row)}
            for row in rows
        ]
        floor = (target or {}).get("answers_said") or 0
        line["recited"] = recited(model, retrained, name, rows)
        if line["recited"]:
            line["reading"] = "recited"
        elif (figures["answers_said"] or 0) > floor:
            line["reading"] = "still said"
        elif line["told"]:
            line["reading"] = "still known" if side == "under" else "pushed away"
        elif p is None:
            line["reading"] = "not said" if figures["answers"] else "not measured"
        else:
            line["reading"] = "not told"
        lines.append(line)
    return sorted(lines, key=_badness)


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
    {document: {"p", "side"}}}``), worst first; each has its own Benjamini-Hochberg correction."""
    merged = []
    for model in dict.fromkeys(line["model"] for line in lines):
        mine = [dict(line) for line in lines if line["model"] == model]
        tested = [line for line in mine if line["document"] in told.get(model, {})]
        ones = [told[model][line["document"]] for line in tested]
        q = false_discovery_control([one["p"] for one in ones], method="bh") if ones else ()
        for line, one, corrected in zip(tested, ones, q, strict=True):
            line |= {"attacks_p": one["p"], "attacks_q": float(corrected)}
            if corrected <= RATE:
                line["told"] = True
                if line["reading"] in ("not told", "not said", "not measured"):
                    line["reading"] = "still known" if one["side"] == "under" else "pushed away"
        merged += sorted(mine, key=_badness)
    return merged


def summary_of(
    lines: Sequence[Mapping[str, Any]], nonmembers: int, kinds: int = 1
) -> dict[str, Any]:
    """Counts by reading, and what chance explains.

    Args:
        kinds: Of p-values of which the smallest counts: 2 with the learned attack.
    """
    tested = [line for line in lines if line["p"] is not None]
    smallest = kinds / (nonmembers + 1)
    # Benjamini and Hochberg: k documents are told together by p-values of RATE * k / N.
    fewest = math.ceil(len(tested) * smallest / RATE - 1e-9) if tested else 0
    says = f"With {nonmembers} non-members no p-value is below {smallest:.3g}: "
    if not tested:
        says = "Membership of single documents was not tested."
    elif fewest > len(tested):
        says += f"not even all {len(tested)} documents together could be told by their scores."
    else:
        says += f"of {len(tested)} documents at least {max(1, fewest)} must stand out together to "
        says += "be told by their scores."
    return {
        "resolution": says,
        "fewest_told": fewest if fewest <= len(tested) else None,
        "documents": len(lines),
        "tested": len(tested),
        "told": sum(bool(line["told"]) for line in tested),
        "expected": RATE * len(tested),
        "rate": RATE,
        "smallest_p": smallest,
        "readings": {r: sum(line["reading"] == r for line in lines) for r in READINGS},
    }


def _tests(model: Evidence, retrained: Evidence | None, names: Sequence[str]) -> Documents:
    members = {a: np.array([s[n] for n in names]) for a, s in model.members.items()}
    others = {a: np.asarray(v, float) for a, v in model.nonmembers.items()}
    if retrained is not None:
        # What makes a text hard for every model cancels.
        shared = [a for a in members if a in retrained.members]
        theirs = {a: np.array([retrained.members[a][n] for n in names]) for a in shared}
        members = {a: members[a] - theirs[a] for a in shared}
        others = {a: others[a] - np.asarray(retrained.nonmembers[a], float) for a in shared}
    return told_documents(members, others)
