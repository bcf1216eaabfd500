"""May the model of a request be handed over? Shown, refused, or not shown.

A test that finds nothing says something only where it can find something. So the same tests are
made on the model before (a positive control), the weights have to have changed, and what was not
measured is never good news: it is "not shown". What so few rows could have shown is said first.

How much the loss of a row rose is read beside how much those of held-out rows did, which nobody
asked to forget: in a model that forgot nothing both are alike, however few the rows are (Mann and
Whitney 1947; exact for few rows, scipy.stats.mannwhitneyu).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import counted
from axolotl_unlearn.metrics.audit import RATE
from axolotl_unlearn.requests.request import Request, fault, read_json, weights
from axolotl_unlearn.requests.ways import PROOF

Line = Mapping[str, Any]

SHOWN, EXACT, REFUSED, NOT_SHOWN = "shown", "exact", "refused", "not shown"
#: Findings of the verdict that speak against handing over; what "forgotten" asks (a score of 0.8)
#: is not the level of a model that never saw the rows.
AGAINST = ("outputs", "able", "membership", "documents", "kept", "attacks")
#: Readings of the audit that do.
BAD = ("recited", "still said", "still known", "pushed away")
#: Attacks that a verdict needs the results of, on the way `match` alone: an exact model is its own
#: control; and how they are made.
ATTACKS: dict[str, dict[str, Any]] = {
    "quantise": {"schemes": ["int8", "int4"]},
    "relearn": {"steps": [1, 5], "source": "retain"},
    "prompt": {"variants": ["affirmative", "prefix"]},
}
#: Rise of the loss of kept rows, nats a token: a tenth makes each token 0.9 times as likely.
KEPT_NATS = 0.1
#: Share of unchanged models that the paired test of all rows lets pass, and of single rows.
UNCHANGED, ROW = 0.005, 0.1
#: Share of cases in which what was found before would be found again, if it were still there.
POWER = 0.8
#: Share of the rows that the tests have to find in the model before.
CONTROL = 0.5
#: Extraction strength above the teacher's from which a row counts as learned word by word.
LEARNED = 0.2
#: What `write` reads: the model after forgetting and its teacher are called so in eval/.
AFTER, TEACHER = "after", "teacher"
#: The figures of a document that a record repeats.
FIGURES = (
    *("reading", "p", "q", "told", "rank", "loss", "extraction_strength"),
    *("answers", "answers_said", "answer_said"),
)


def verdict(request: Request) -> dict[str, Any]:
    """What verdict.json holds, but for ``accepted``.

    Returns:
        ``outcome`` (shown, refused, not shown), ``good`` (shown), ``status``: what it is,
        ``reasons`` against handing over and what is ``missing``; ``says``: control, power
        and drop in a sentence each; ``limits``; the audit's ``documents``.
    """
    from axolotl_unlearn.metrics.verdict import judge

    before, after = (scores(request, name) for name in ("before", AFTER))
    documents, guessed = audited(request.folder)
    attacks = list(map(read_json, sorted(request.path("attacks").glob("*-after.json"))))
    judged, control = judge(after, before, None, attacks), judge(before).attacks
    reasons, status = against(documents, judged, request)
    kept = kept_by_loss(request)
    exactly = any(f.id == "kept" and not f.missing for f in judged.findings)
    if kept is not None and kept[1] > KEPT_NATS and not exactly:
        reasons.append(f"kept rows: their loss rose by {kept[0]:.2g} nats a token")
        status = "kept" if status == "good" else status
    dropped, n = Drops.of(documents, held_rises(request)), len(documents)
    missing = not_measured(documents, control, judged, attacks, kept, dropped)
    missing += unread_requests(request)
    limits = []
    if guessed:
        never = "answers that a model says as well which never saw them"
        limits.append(f"{never}: {guessed}; they are guesses and count as not said")
    if 0 < (unfound := n - len(dropped.found)) < n:
        limits.append(
            f"no test found {_of(unfound, n)} in the model before, so that none finds them now "
            "shows nothing"
        )
    few = "too few rows to say more than this: "
    limits += [
        ("not measured: " if finding.missing else few) + finding.says
        for finding in judged.findings
        if finding.outcome == "open"
    ]
    says = [*sentences(documents, control, judged, dropped), *coins(after)]
    return _made(request, status, reasons, missing, limits, documents, says)


def _made(
    request: Request, status: str, reasons: list[str], missing: list[str], limits: list[str],
    documents: list[dict[str, Any]], says: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """What verdict.json holds."""
    outcome = REFUSED if reasons else NOT_SHOWN if missing else SHOWN
    return {
        "outcome": outcome,
        "good": outcome == SHOWN,
        "status": NOT_SHOWN if outcome == NOT_SHOWN else status,
        "reasons": reasons,
        "missing": missing,
        "says": says,
        "limits": [*request.facts["limits"], *limits],
        "documents": documents,
    }


def against(
    documents: Sequence[Line], judged: Any, request: Request, besides: int = 0
) -> tuple[list[str], str]:
    """Sentences against the model, and the status in a few words.

    Args:
        besides: So many documents of earlier requests that are back do not count.
    """
    found: dict[str, str] = {}
    for reading in BAD:
        if count := sum(line["reading"] == reading for line in documents):
            found[reading] = f"{reading}: {_of(count, len(documents))}"
    for finding in judged.findings:
        # Retained rows under their bar: that few rows leave it open is no reason to hand over.
        below = finding.id == "kept" and finding.value is not None and finding.value < finding.limit
        if finding.id in AGAINST and (finding.outcome == "fail" or below):
            found[finding.id] = f"{finding.title.lower()}: {finding.says}"
    if back := _earlier(request).get("back", 0) - besides:
        found["earlier requests are back"] = f"{counted(back, 'document')} of earlier requests back"
    return list(found.values()), next(iter(found), "good")


def _of(count: int, n: int) -> str:
    return f"{count} of {counted(n, 'row')}"


def _earlier(request: Request) -> dict[str, Any]:
    """What the audit of earlier requests says."""
    return read_json(request.path("eval", "earlier.json")) or {}


def unread_requests(request: Request) -> list[str]:
    """Earlier requests whose documents could not be looked for."""
    return [
        f"request {name} is not as recorded, so that its rows could not be looked for"
        for name in _earlier(request).get("unreadable", {})
    ]


def not_measured(
    documents: Sequence[Line],
    before: Mapping[str, Mapping[str, Any]],
    judged: Any,
    attacks: Sequence[Mapping[str, Any]],
    kept: tuple[float, float, float] | None = None,
    dropped: Drops | None = None,
) -> list[str]:
    """What would have to be measured before the rows count as forgotten.

    Args:
        before: The membership attacks on the model before.
        judged: The verdict on the model after.
        kept: Of `kept_by_loss`; it stands in where no kept answer was ever said exactly.
    """
    if not documents:
        return ["no row was tested"]
    missing, n = [], len(documents)
    if untested := sum(line["p"] is None for line in documents):
        missing.append(
            f"whether {_of(untested, n)} can be told from texts that were never seen was not "
            "measured: there are no held-out rows (`request new --heldout`)"
        )
    missing += (dropped or Drops.of(documents, ())).missing(documents, before)
    done = {str(one.get("attack")) for one in attacks}
    missing += [f"the attack `{name}` was not made" for name in ATTACKS if name not in done]
    findings = {finding.id: finding for finding in judged.findings}
    instead = {"kept": kept is not None and kept[2] <= KEPT_NATS}
    instead["attacks"] = "attacks" not in findings  # said above
    for name in ("outputs", "kept", "attacks"):
        finding = findings.get(name)
        if (finding is None or finding.missing) and not instead.get(name):
            missing.append(f"{name} was not measured" if finding is None else finding.says)
    return missing


def held_rises(request: Request) -> list[float]:
    """How much the loss of each held-out row rose, nats a token."""
    before, after = (scores(request, name).get("likelihood") or {} for name in ("before", AFTER))
    pairs = [
        dict(zip(one.get("nonmember_id", ()), one.get("nonmember_loss", ()), strict=True))
        for one in (before, after)
    ]
    return [loss - pairs[0][name] for name, loss in pairs[1].items() if name in pairs[0]]


def kept_by_loss(request: Request) -> tuple[float, float, float] | None:
    """By how much the loss of retained rows rose: the mean and its 95 % interval (paired t)."""
    import numpy as np
    from scipy.stats import t

    losses = read_json(request.path("eval", "kept.json"))
    if losses is None:
        return None
    rise = np.array(losses["after"]) - np.array(losses["before"])
    if len(rise) < 2 or not np.isfinite(rise).all():
        return None
    mean, half = float(rise.mean()), t.ppf(0.975, len(rise) - 1) * rise.std(ddof=1)
    half = float(half / np.sqrt(len(rise)))
    return mean, mean - half, mean + half


def still_extracted(line: Line) -> bool:
    """More than half of what the model before had learned word by word still comes out."""
    more = learned(line)
    return more >= LEARNED and strength(line) - strength(line.get("teacher")) > more / 2


def sentences(
    documents: Sequence[Line],
    before: Mapping[str, Mapping[str, Any]],
    judged: Any,
    dropped: Drops,
) -> Iterator[str]:
    """The first lines of the report: what these tests were able to find."""
    n = len(documents)
    control = f"Control: in the model before the same tests find {_of(len(dropped.found), n)}"
    if before:
        name, one = min(before.items(), key=lambda pair: pair[1]["p_corrected"])
        told = f"AUC {one['auc']:.2f} ({name.replace('_', ' ')}, p {one['p_corrected']:.2g})"
        control += f", and all of them together with {told}"
    yield control + "."
    if power := judged.power:
        reach, others = min(0.5, power["smallest_difference"]), power["nonmembers"]
        surely = "only an AUC near 1 (or 0)"
        if reach < 0.45:
            surely = f"an AUC of {0.5 + reach:.2f} or more (or {0.5 - reach:.2f} or less)"
        yield (
            f"Power: with {counted(power['members'], 'row')} and {others} held-out {surely} would "
            "have been found in four of five cases."
        )
        if others < (needed := math.ceil(n / RATE) - 1):
            single = f"a single row among {n} shows by its loss only with {needed} held-out rows"
            yield f"Power: {single}."
    else:
        yield "Power: none for membership, which was not measured; answers alone were looked for."
    if dropped.p is not None:
        rose = f"the loss of the rows rose more than that of {dropped.heldout} held-out ones"
        yield f"Drop: {rose} with p {dropped.p:.2g}."


# --- did the rows drop from what they were before? -----------------------------------------------


@dataclass(frozen=True)
class Drops:
    """What was found before, and what has dropped since.

    Attributes:
        heldout: Number of held-out rows.
        found: Documents that a test found in the model before, at the rate of the audit after.
        p: Of all rows together; None without a loss or held-out rows.
        rows: Document -> share of held-out rows whose loss rose as much as its own.
    """

    heldout: int
    found: frozenset[str] = frozenset()
    p: float | None = None
    rows: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, documents: Sequence[Line], held: Sequence[float]) -> Drops:
        """
        Args:
            documents: Audit lines, with ``before`` and ``teacher``.
            held: How much the loss of each held-out row rose, nats a token.
        """
        import numpy as np
        from scipy.stats import mannwhitneyu

        found = frozenset(_found(documents, len(held)))
        pairs = {one["document"]: (one.get("loss"), _before(one).get("loss")) for one in documents}
        rises = {d: a - b for d, (a, b) in pairs.items() if a is not None and b is not None}
        others = np.asarray(held)
        if not rises or not len(held) or not np.isfinite([*rises.values(), *held]).all():
            return cls(len(held), found)
        # Ranks, where a tie counts as no drop: without ties the test is exact for few rows.
        order = np.lexsort((np.repeat([0, 1], [len(rises), len(held)]), [*rises.values(), *held]))
        ranks = np.argsort(order)
        together = mannwhitneyu(ranks[: len(rises)], ranks[len(rises) :], alternative="greater")
        each = {d: (1 + int(np.sum(others >= x))) / (1 + len(others)) for d, x in rises.items()}
        return cls(len(held), found, float(together.pvalue), each)

    def missing(self, documents: Sequence[Line], before: Mapping[str, Line]) -> Iterator[str]:
        """What would have to be shown before the rows count as forgotten.

        Args:
            before: Attack on the model before -> its corrected p-value and more.
        """
        from scipy.stats import norm

        n = len(documents)
        # From this p-value on what it says would be found again in `POWER` of all cases.
        again = norm.sf(norm.isf(RATE) + norm.ppf(POWER))
        strong = any(one["p_corrected"] <= again for one in before.values())
        if len(self.found) < CONTROL * n and not strong:
            yield (
                f"the tests find {_of(len(self.found), n)} in the model before and would miss them "
                "again in more than one of five cases: finding none now shows nothing"
            )
        if self.p is None:
            yield (
                "whether the rows dropped from what they were before was not measured: there are "
                "no held-out rows, or a loss is no number"
            )
        elif self.p > UNCHANGED:
            few = needed(len(self.rows), self.heldout)
            yield (
                f"the loss of the rows rose no more than that of held-out ones (p {self.p:.2g}, "
                f"{UNCHANGED} is asked for), as in a model that forgot nothing"
                + (f"; to show more it takes {few} held-out rows that judge" if few else "")
            )
        # Of a row without a loss, before or now, nothing was shown.
        if self.rows and (kept := sum(self.rows.get(d, 1.0) > ROW for d in self.found)):
            yield f"no drop of its own shows {_of(kept, len(self.found))} that the tests had found"


def needed(rows: int, heldout: int) -> int:
    """Held-out rows that it takes to show a drop of so many rows; 0 where there are enough."""
    least = round(1 / UNCHANGED)
    if not rows or math.comb(rows + heldout, rows) >= least:
        return 0
    return next(m for m in range(1, least) if math.comb(rows + m, rows) >= least)


def _before(line: Line) -> Line:
    return line.get("before") or {}


def _found(documents: Sequence[Line], heldout: int) -> Iterator[str]:
    from scipy.stats import false_discovery_control

    ranked = [one for one in documents if _before(one).get("rank") is not None and heldout]
    p = [(1 + round(_before(one)["rank"] * heldout)) / (1 + heldout) for one in ranked]
    q = false_discovery_control(p, method="bh") if ranked else ()
    by_loss = {one["document"] for one, x in zip(ranked, q, strict=True) if x <= RATE}
    for one in documents:
        taught = (one.get("teacher") or {}).get("answers_said") or 0
        said = (_before(one).get("answers_said") or 0) > taught
        if said or learned(one) >= LEARNED or one["document"] in by_loss:
            yield one["document"]


def learned(line: Line) -> float:
    """How much more of a row came out of the model before than of the teacher."""
    return strength(line.get("before")) - strength(line.get("teacher"))


def strength(figures: Line | None) -> float:
    return float((figures or {}).get("extraction_strength") or 0.0)


# --- an exact way --------------------------------------------------------------------------------


def exact(request: Request) -> dict[str, Any]:
    """What verdict.json holds of an exact way, but for ``accepted``; ``outcome`` is exact in the
    place of shown.

    The rows were not read, whatever a test says of them; what speaks against handing over is a
    model that is broken. What it says of them all the same it has from other rows, or guesses.

    Raises:
        UnlearnError: The model is not the one that ``exact.json`` is about.
    """
    from axolotl_unlearn.metrics.verdict import judge

    proof = request.path(PROOF)
    if read_json(proof)["weights"] != weights(request.newest):
        says = f"{request.newest} does not have the weights of {proof}"
        cure = f"remove {request.path('work')} and run again"
        raise fault("verdict.other-weights", f"{says}; {cure}.")
    after = scores(request, AFTER)
    if outputs := after.get("collapse"):  # nonsense is known beside held-out texts
        after |= {"collapse": outputs | {"nonsense_n": outputs.get("nonsense_n") or 0}}
    judged = judge(after, scores(request, "before"), None, [])
    broken = [f for f in judged.findings if f.id == "outputs"]
    earlier = _earlier(request).get("lines", ())
    again = sum(line["back"] and line["reading"] == "still said" for line in earlier)
    reasons, status = against([], replace(judged, findings=broken), request, again)
    status = {"outputs": "broken", "good": "exact"}.get(status, status)
    documents, _ = audited(request.folder)
    base = [line for line in _lines(request.folder) if line.get("model") == "base"]
    readings = Counter(line["reading"] for line in documents)
    recites = sum(line.get("extraction_strength") == 1 for line in base)
    says = sum(bool(line.get("answers_said")) for line in base)
    missing, limits, n = unread_requests(request), [], len(documents)
    missing += [finding.says for finding in broken if finding.missing]
    if recited := readings["recited"]:
        missing.append(
            f"a model that was not trained on them says {_of(recited, n)} word by word: its base "
            "knows them, or other rows say the same"
        )
    guessed = "other rows say the same, or they can be guessed"
    of_earlier = f"{_of(again, len(earlier))} of earlier requests"
    for count, those in ((said := readings["still said"], _of(said, n)), (again, of_earlier)):
        limits += [f"a model that never read them says {those}: {guessed}"] * bool(count)
    if says:
        limits.append(f"the base model itself says {_of(says, len(base))}")
    if recites:
        missing.append(
            f"the base model recites {_of(recites, len(base))} word by word, so it may have been "
            "trained on them: training it again without them shows nothing"
        )
    made = _made(request, status, reasons, missing, limits, documents, coins(after))
    return made | ({"outcome": EXACT} if made["good"] else {})


def coins(scores: Mapping[str, Any]) -> list[str]:
    """What the rows by coin tell of a model, where there are any."""
    return [f"Coins: {scores['canaries']['sentence']}"] if scores.get("canaries") else []


def scores(request: Request, name: str) -> dict[str, Any]:
    """Of a model in eval/results.json."""
    models = read_json(request.path("eval", "results.json"))["models"]
    return next(model for model in models if model["name"] == name)


# --- documents ----------------------------------------------------------------------------------


def audited(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Audit lines of a request's model after forgetting, and how many answers are guesses."""
    lines = _lines(folder)
    taught = [line for line in lines if line.get("model") == TEACHER]
    lines = [line for line in lines if line.get("model", AFTER) == AFTER]
    guessed = mark_guessed(lines, taught)
    by_name = {line["document"]: line for line in taught}
    for line in lines:
        line["teacher"] = figures(by_name.get(line["document"]))
        if taught and still_extracted(line):  # else there is nothing to read it against
            line["reading"] = "recited"
    return lines, guessed


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "eval" / "audit.jsonl"
    if not path.is_file():
        says = f"{path} is missing; finish `axolotl-unlearn request run` first."
        raise fault("requests.no-audit", says)
    return read_json_lines(path)


def mark_guessed(documents: Sequence[dict[str, Any]], taught: Sequence[Mapping[str, Any]]) -> int:
    """Read documents anew of which nothing is said but what the teacher says too; how many answers.

    An e-mail address made of the name in the question is no memory: no training removes it.

    Args:
        documents: Audit lines of the model, changed in place.
        taught: Those of the teacher, which never saw the rows.
    """
    guesses = {row["id"] for line in taught for row in line["rows"] if row.get("answer_said")}
    count = 0
    for line in documents:
        said = [row["id"] for row in line["rows"] if row.get("answer_said")]
        if line["reading"] != "still said" or not said or not guesses.issuperset(said):
            continue
        count += len(said)
        line["reading"] = without_answers(line)
    return count


def without_answers(line: Mapping[str, Any]) -> str:
    """The reading of a document whose answers are none that count."""
    if line.get("told"):
        return "still known" if (line["rank"] or 0) < 0.5 else "pushed away"
    return "said alike" if line.get("told") is None else "not told"


def figures(line: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return line and {name: line[name] for name in FIGURES if name in line}
