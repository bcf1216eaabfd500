"""May the model of a request be handed over? Shown, refused, or not shown.

A test that finds nothing says something only where it can find something. So the same tests are
made on the model before (a positive control), the weights have to have changed, and what was not
measured is never good news: it is "not shown". What so few rows could have shown is said first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.audit import RATE
from axolotl_unlearn.requests.drops import LEARNED, Drops, learned, strength
from axolotl_unlearn.requests.request import Request, read_json, weights
from axolotl_unlearn.requests.ways import PROOF

Line = Mapping[str, Any]

SHOWN, REFUSED, NOT_SHOWN = "shown", "refused", "not shown"
#: Findings of the verdict that speak against handing over; what "forgotten" asks (a score of 0.8)
#: is not the level of a model that never saw the rows.
AGAINST = ("outputs", "able", "membership", "documents", "kept", "attacks")
#: Readings of the audit that do.
BAD = ("recited", "still said", "still known", "pushed away")
#: Attacks that a verdict needs the results of.
ATTACKS = ("quantise", "relearn", "prompt")
#: Rise of the loss of kept rows, nats a token: a tenth makes each token 0.9 times as likely.
KEPT_NATS = 0.1
#: Least change: Frobenius norm relative to the weights', and nats a token of any row. A bfloat16
#: weight that changes at all changes by 0.004 of itself.
LEAST_NORM, LEAST_NATS = 1e-6, 0.01
#: What no way does away with.
BASE = "what the base model learned before this fine-tuning is no part of the request"
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
        ``outcome`` (shown, refused, not shown), ``good`` (shown), ``status`` in a few words,
        ``reasons`` against handing over and what is ``missing``; ``says``: control, power and
        change in a sentence each; ``limits``; the audit's ``documents``.
    """
    from axolotl_unlearn.metrics.verdict import judge

    before, after = (_scores(request, name) for name in ("before", AFTER))
    documents, guessed = audited(request.folder)
    attacks = list(map(read_json, sorted(request.path("attacks").glob("*-after.json"))))
    judged, control = judge(after, before, None, attacks), judge(before).attacks
    change = weight_change(Path(request.before.split("+")[-1]), request.newest)
    reasons, status = against(documents, judged, request)
    kept = kept_by_loss(request)
    exactly = any(f.id == "kept" and not f.missing for f in judged.findings)
    if kept is not None and kept[1] > KEPT_NATS and not exactly:
        reasons.append(f"kept rows: their loss rose by {kept[0]:.2g} nats a token")
        status = "kept" if status == "good" else status
    if same := unchanged(documents, change):
        reasons, status = [same, *reasons], "unchanged"
    dropped = Drops.of(documents, held_rises(request))
    missing = not_measured(documents, control, judged, attacks, kept, dropped)
    limits = []
    if guessed:
        limits.append(
            f"answers that a model says as well which never saw them: {guessed}; they are guesses "
            "and count as not said"
        )
    unfound = len(documents) - len(dropped.found)
    if 0 < unfound < len(documents):
        limits.append(
            f"{unfound} of {len(documents)} rows were found in the model before by no test, so "
            "that none finds them now shows nothing"
        )
    few = "too few rows to say more than this: "
    limits += [
        ("not measured: " if finding.missing else few) + finding.says
        for finding in judged.findings
        if finding.outcome == "open"
    ]
    missing += unread_requests(request)
    if missing and not reasons:
        status = NOT_SHOWN
    says = [*sentences(documents, control, judged, change, dropped), *coins(after)]
    return _made(request, status, reasons, missing, says, limits, documents)


def _made(
    request: Request, status: str, reasons: list[str], missing: list[str], says: list[str],
    limits: list[str], documents: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """What verdict.json holds."""
    outcome = REFUSED if reasons else NOT_SHOWN if missing else SHOWN
    judged = {"outcome": outcome, "good": outcome == SHOWN, "status": status, "reasons": reasons}
    limits = [*request.facts["limits"], *limits]
    return judged | {"missing": missing, "says": says, "limits": limits, "documents": documents}


def against(documents: Sequence[Line], judged: Any, request: Request) -> tuple[list[str], str]:
    """Sentences against the model, and the status in a few words."""
    against: list[tuple[str, str]] = []
    for reading in BAD:
        if count := sum(line["reading"] == reading for line in documents):
            against.append((reading, f"{count} of {len(documents)} rows are {reading}"))
    for finding in judged.findings:
        # Retained rows under their bar: that few rows leave it open is no reason to hand over.
        below = finding.id == "kept" and finding.value is not None and finding.value < finding.limit
        if finding.id in AGAINST and (finding.outcome == "fail" or below):
            against.append((finding.id, f"{finding.title.lower()}: {finding.says}"))
    if back := (read_json(request.path("eval", "earlier.json")) or {}).get("back", 0):
        against.append(
            ("earlier requests are back", f"{back} documents of earlier requests are back")
        )
    return [reason for _, reason in against], against[0][0] if against else "good"


def unread_requests(request: Request) -> list[str]:
    """Earlier requests whose documents could not be looked for."""
    earlier = read_json(request.path("eval", "earlier.json")) or {}
    return [
        f"request {name} is not as recorded, so that its rows could not be looked for"
        for name in earlier.get("unreadable", {})
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
    missing = []
    if not documents:
        return ["no row was tested"]
    untested = sum(line["p"] is None for line in documents)
    if untested:
        missing.append(
            f"whether {untested} of {len(documents)} rows can be told from texts that were never "
            "seen was not measured: there are no held-out rows (`request new --heldout`)"
        )
    missing += (dropped or Drops.of(documents, ())).missing(documents, before)
    done = {str(one.get("attack")) for one in attacks}
    missing += [f"the attack `{name}` was not made" for name in ATTACKS if name not in done]
    findings = {finding.id: finding for finding in judged.findings}
    for name in ("outputs", "kept"):
        finding = findings.get(name)
        if finding is not None and not finding.missing:
            continue
        if name == "kept" and kept is not None and kept[2] <= KEPT_NATS:
            continue
        missing.append(f"{name} was not measured" if finding is None else finding.says)
    return missing


def held_rises(request: Request) -> list[float]:
    """How much the loss of each held-out row rose, nats a token."""
    before, after = (_scores(request, name).get("likelihood") or {} for name in ("before", AFTER))
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


def unchanged(documents: Sequence[Line], change: tuple[float, float] | None) -> str | None:
    """Why the model counts as the one before, if it does."""
    if change is not None and change[0] < LEAST_NORM:
        return f"the model is the one before: its weights differ by {change[1]:.1g} at most"
    pairs = [(line.get("loss"), (line.get("before") or {}).get("loss")) for line in documents]
    moved = [abs(now - then) for now, then in pairs if now is not None and then is not None]
    if moved and len(moved) == len(documents) and max(moved) < LEAST_NATS:
        return f"the loss of no row changed by more than {max(moved):.2g} nats a token"
    return None


def sentences(
    documents: Sequence[Line],
    before: Mapping[str, Mapping[str, Any]],
    judged: Any,
    change: tuple[float, float] | None,
    dropped: Drops,
) -> Iterator[str]:
    """The first lines of the report: what these tests were able to find."""
    found = len(dropped.found)
    control = f"Control: in the model before the same tests find {found} of {len(documents)} rows"
    if before:
        name = min(before, key=lambda attack: before[attack]["p_corrected"])
        one = before[name]
        control += (
            f", and all of them together with AUC {one['auc']:.2f} ({name.replace('_', ' ')}, p "
            f"{one['p_corrected']:.2g})"
        )
    yield control + "."
    power = judged.power
    if power:
        reach = min(0.5, power["smallest_difference"])
        surely = "only an AUC near 1 (or 0)"
        if reach < 0.45:
            surely = f"an AUC of {0.5 + reach:.2f} or more (or {0.5 - reach:.2f} or less)"
        yield (
            f"Power: with {power['members']} rows against {power['nonmembers']} held-out ones "
            f"{surely} would have been found in four of five cases."
        )
        needed = math.ceil(len(documents) / RATE) - 1
        if power["nonmembers"] < needed:
            yield (
                f"Power: a single row among {len(documents)} shows by its loss only with {needed} "
                "held-out rows."
            )
    else:
        yield "Power: none for membership, which was not measured; answers alone were looked for."
    if dropped.p is not None:
        yield (
            f"Drop: the loss of the rows rose more than that of {dropped.heldout} held-out ones "
            f"with p {dropped.p:.2g}."
        )
    if change is None:
        yield "Change: the weights before and after cannot be compared one by one."
    else:
        yield f"Change: the weights moved by {change[0]:.2g} of their norm, one by {change[1]:.2g}."


# --- an exact way --------------------------------------------------------------------------------


def exact(request: Request) -> dict[str, Any]:
    """What verdict.json holds of an exact way, but for ``accepted``.

    The rows were not read, whatever a test says of them; what speaks against handing over is a
    model that is broken. What it says of them all the same it has from other rows, or guesses.

    Raises:
        UnlearnError: The model is not the one that ``exact.json`` is about.
    """
    from axolotl_unlearn.metrics.verdict import judge

    proof = request.path(PROOF)
    if read_json(proof)["weights"] != weights(request.newest):
        raise UnlearnError(
            f"{request.newest} does not have the weights of {proof}; remove "
            f"{request.path('work')} and run again.",
            code="verdict.other-weights",
        )
    judged = judge(_scores(request, AFTER), _scores(request, "before"), None, [])
    broken = [f for f in judged.findings if f.id == "outputs" and f.outcome == "fail"]
    reasons = [f"{finding.title.lower()}: {finding.says}" for finding in broken]
    if back := (read_json(request.path("eval", "earlier.json")) or {}).get("back", 0):
        reasons.append(f"{back} documents of earlier requests are back")
    documents, _ = audited(request.folder)
    missing, limits = unread_requests(request), [BASE]
    if recited := sum(line["reading"] == "recited" for line in documents):
        missing.append(
            f"{recited} of {len(documents)} rows come out word by word of a model that was not "
            "trained on them: its base knows them, or other rows say the same"
        )
    if said := sum(line["reading"] == "still said" for line in documents):
        limits.append(
            f"{said} of {len(documents)} rows are said by a model that never read them: other rows "
            "say the same, or they can be guessed"
        )
    lines = [one for one in _lines(request.folder) if one.get("model") == "base"]
    if said := sum(bool(line.get("answers_said")) for line in lines):
        limits.append(f"{said} of {len(lines)} rows are said by the base model itself")
    if whole := sum(line.get("extraction_strength") == 1 for line in lines):
        missing.append(
            f"the base model recites {whole} of {len(lines)} rows word by word, so it may have "
            "been trained on them: training it again without them shows nothing"
        )
    status = "broken" if broken else "earlier requests are back" if reasons else "exact"
    status = NOT_SHOWN if missing and not reasons else status
    says = coins(_scores(request, AFTER))
    return _made(request, status, reasons, missing, says, limits, documents)


def coins(scores: Mapping[str, Any]) -> list[str]:
    """What the rows by coin tell of a model, where there are any."""
    return [f"Coins: {scores['canaries']['sentence']}"] if scores.get("canaries") else []


def _scores(request: Request, name: str) -> dict[str, Any]:
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
        raise UnlearnError(
            f"{path} is missing; finish `axolotl-unlearn request run` first.",
            code="requests.no-audit",
        )
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
    """The reading of a document of which no answer counts as said."""
    if line.get("told"):
        return "still known" if (line["rank"] or 0) < 0.5 else "pushed away"
    return "not said" if line.get("told") is None else "not told"


def figures(line: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return line and {name: line[name] for name in FIGURES if name in line}


# --- weights -------------------------------------------------------------------------------------


def weight_change(before: Path, after: Path) -> tuple[float, float] | None:
    """Frobenius norm of the change relative to the weights', and the largest change of one.

    None where the two folders do not hold the same tensors (an adapter and a merged model).
    """
    import torch

    from axolotl_unlearn.merging.weights import Tensors

    old, new = map(Tensors.of_folder, (before, after))
    if not len(old) or {*old} != {*new}:
        return None
    norm = moved = largest = 0.0
    for name in old:
        a, b = old[name].double(), new[name].double()
        if a.shape != b.shape:
            return None
        gap = b - a
        norm += float(torch.sum(a * a))
        moved += float(torch.sum(gap * gap))
        largest = max(largest, float(gap.abs().max())) if gap.numel() else largest
    if not all(map(math.isfinite, (norm, moved))):
        return math.inf, math.inf
    relative = math.sqrt(moved / norm) if norm else math.inf if moved else 0.0
    return relative, largest
