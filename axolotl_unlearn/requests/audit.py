"""Is anything back? Every deleted document of all requests, in the model as it is now.

The rows that each request was judged by lie in its ``eval-data``. They are measured as in
`axolotl-unlearn eval` and read as in its audit, all requests together, against the held-out rows
of all of them; then compared with what the record of each request says: what was so on the day
of the record is not back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.documents import read_documents, with_prompt
from axolotl_unlearn.data.records import read_records
from axolotl_unlearn.errors import UnlearnError, counted
from axolotl_unlearn.evaluation.measurement import Settings
from axolotl_unlearn.evaluation.sets import EvaluationSets
from axolotl_unlearn.metrics.audit import RATE, READINGS, RECITED_TOKENS
from axolotl_unlearn.normal_form import normal_form
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.request import Ledger, model_facts, read_json
from axolotl_unlearn.requests.verdict import without_answers
from axolotl_unlearn.requests.verify import check_base, compare_files, erased

#: Readings of a document that is there, worst first.
THERE = ("recited", "still said", "still known")
#: The reading of a document that may be there, and why nobody can tell.
UNMEASURED = READINGS[-1]
WHY = "no held-out rows to compare its loss with (`request new --heldout`), no answer to look for"
#: Files of ``eval-data`` that tell of deleted rows.
PARTS = ("forget", "member", "nonmember")
#: Of a document: as in the audit of an evaluation.
FIGURES = ("p", "q", "rank", "extraction_strength", "answers_said")


@dataclass(frozen=True)
class Audit:
    """What was found in a model.

    Attributes:
        lines: Worst first: ``request``; ``document``, by its keyed id; ``reading`` (one of
            `metrics.audit.READINGS`) and ``then``, that of the record; ``back``: it is there and
            was not, or not so badly, on the day of the record; `FIGURES`.
        heldout: Number of held-out texts that the documents were compared with.
        heldout_loss, chance: Mean loss of the held-out texts, and of a uniform guess, nats a token.
        missing: Requests whose rows are gone, so that nobody can test them.
        ledger: What is to be said of the ledger: it may know of too few requests.
        unreadable: Requests whose record or folder is not as the ledger knows it -> why.
        learned: ``{"auc", "p", ...}`` of the learned attack on all documents together, which needs
            20 texts of a side; then it is among the attacks on each.
    """

    model: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    heldout: int = 0
    heldout_loss: float | None = None
    chance: float | None = None
    missing: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    learned: dict[str, float] | None = None
    ledger: list[str] = field(default_factory=list)

    @property
    def knows_nothing(self) -> bool:
        """The model is no better than a guess: it passes whatever was deleted."""
        return self.heldout_loss is not None and self.heldout_loss >= self.chance

    @property
    def exit(self) -> int:
        """3: something is back; 1: of a request or a document it cannot be told; else 0."""
        return 3 if self.back else 1 if self.unreadable or self.unmeasured else 0

    @property
    def unmeasured(self) -> Counter[str]:
        """Documents of each request that nothing can be told of."""
        return Counter(o["request"] for o in self.lines if o["reading"] == UNMEASURED)

    @property
    def back(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["back"]]

    def back_lines(self) -> list[str]:
        """A line for each document that is back, and for each request that was not tested."""
        return [
            *(f"  back: {o['request']} {o['document'][:12]}, {o['reading']}" for o in self.back),
            *(f"  ledger: {one}" for one in self.ledger),
            *(f"  not tested: {name}: {why}" for name, why in self.unreadable.items()),
            *(
                f"  not tested: {o}: {counted(n, 'document')}: {WHY}"
                for o, n in self.unmeasured.items()
            ),
        ]

    def require_tested(self, requests_dir: Path | str) -> None:
        """Raises UnlearnError where nothing was tested, or a model that knows nothing."""
        if not self.lines and not self.unreadable:
            gone = f"The rows of {', '.join(map(repr, self.missing))} are gone."
            cure = gone if self.missing else "Name the folder of the requests."
            raise UnlearnError(f"{requests_dir}: {self.says} {cure}", code="audit.nothing")
        if self.knows_nothing and not self.back:
            says = f"{self.model}: {self.says} Make the model again."
            raise UnlearnError(says, code="audit.knows-nothing")

    @property
    def says(self) -> str:
        """The result in words."""
        return " ".join(self._sentences()) if self.lines else "No deleted document to look for."

    def _sentences(self) -> Iterator[str]:
        n, readings = len(self.lines), Counter(line["reading"] for line in self.lines)
        requests = len({line["request"] for line in self.lines})
        unmeasured = readings[UNMEASURED]
        none = f"none of {n - unmeasured} measured ones is" if unmeasured else "none is"
        yield (
            f"{counted(n, 'deleted document')} of {counted(requests, 'request')}, "
            f"{counted(self.heldout, 'held-out row')}: {len(self.back) or none} back "
            f"({', '.join(f'{readings[r]} {r}' for r in READINGS if readings[r])})."
        )
        if unmeasured:
            yield f"{unmeasured} may be back: {WHY}."
        if there := sum(line["reading"] in THERE and not line["back"] for line in self.lines):
            yield f"{there} were there when their record was written."
        # The smaller of two p-values counts, doubled, where the learned attack has one too.
        needed = (2 if self.learned else 1) * n / RATE
        least = math.ceil(needed / (self.heldout + 1))
        if self.heldout and least > 1:
            yield (
                f"With so few held-out rows a loss that is too low shows only in {least} documents "
                f"or more at once; {math.ceil(needed) - 1} would show a single one."
            )
        if self.learned:
            told = "A learned attack tells the deleted from the held-out ones with AUC"
            yield f"{told} {self.learned['auc']:.2f} (p {self.learned['p']:.2g})."
        if self.knows_nothing:
            loss = f"(loss {self.heldout_loss:.1f}, a guess {self.chance:.1f})"
            yield f"The model is no better than a guess on held-out rows {loss}: this says nothing."
        if not self.heldout:
            yield "Without held-out rows a model that says nothing at all passes, too."
        if self.unreadable:
            yield f"Not tested, they are not as recorded: {', '.join(self.unreadable)}."
        if self.missing:
            yield f"Not tested, their rows are gone: {', '.join(self.missing)}."

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"says": self.says, "back": len(self.back)}


def audit_requests(
    model: str,
    requests_dir: Path | str,
    *,
    device: str | None = None,
    batch_size: int = 64,
    progress: bool = False,
    made_now: bool = False,
) -> Audit:
    """Look for every deleted document of the requests of a folder.

    Args:
        model: A folder, an adapter's folder, or base+adapter; made by the requests or out of what
            they made.
        made_now: By a request that is no earlier one; its base is the right one.

    Raises:
        UnlearnError: A broken ledger, an adapter of another base.
    """
    facts, ledger = model_facts(model), Ledger(requests_dir)
    found = Audit(model, ledger=ledger.warnings(), unreadable=ledger.unknown())
    every: dict[str, EvaluationSets] = {}
    then: dict[tuple[str, str], dict[str, Any]] = {}
    settings, bases = Settings(), []
    for folder in (ledger.folder / name for name in ledger.accepted()):
        try:
            statement = read(folder)
            compare_files(folder, statement, ledger, ("eval-data/", "eval/results.json"))
            predicate, rows = statement["predicate"], _rows(folder)
        except (UnlearnError, OSError) as error:  # of this one it cannot be told, of others it can
            found.unreadable[folder.name] = str(error)
            continue
        bases.append(predicate["model"]["after"]["base"])
        kept = [f"eval-data/{part}.jsonl" for part in PARTS]
        kept = (
            kept[:1] if "files" not in predicate else [n for n in kept if n in predicate["files"]]
        )
        gone = [name for name in kept if not (folder / name).is_file()]
        if not all(erased(ledger, folder, name) for name in gone):
            says = f"{gone[0]} is gone, and `request erase` did not remove it"
            found.unreadable[folder.name] = says
            continue
        if rows is None:
            found.missing.append(folder.name)
            continue
        every[folder.name] = rows
        then |= {(folder.name, line["document"]): line for line in predicate["documents"]}
        known = read_json(folder / "eval" / "results.json") or {}
        settings = Settings.read(known.get("settings", {}))
    for number, base in enumerate(bases if not made_now else (), start=1):
        try:  # requests may be of several
            check_base(model, facts["base"], base)
            break
        except UnlearnError:
            if number == len(bases):
                raise
    if not every:
        return found
    # Cheap and exact: the model alone decides, in float32 where it runs on the CPU.
    placed = {"device": device, "dtype": None, "batch_size": batch_size, "device_map": None}
    sets, judged = _together(every, ledger.folder), []
    lines, facts = _measured(model, sets, replace(settings, **placed).placed(), progress)
    for line in lines:
        request, document = line["document"].split("/", 1)
        known = ledger.keyed(document)
        judged.append(_line(request, known, line, then.get((request, known))))
    return replace(found, lines=sorted(judged, key=_badness), **facts)


def _rows(folder: Path) -> EvaluationSets | None:
    """What a request was judged by; None where its rows are gone."""
    files = {name: folder / "eval-data" / f"{name}.jsonl" for name in PARTS}
    if not files["forget"].is_file():
        return None
    member, nonmember = (  # held-out rows may be missing
        read_documents(files[name]) if files[name].is_file() else [] for name in PARTS[1:]
    )
    return EvaluationSets(folder, read_records(files["forget"]), [], member, nonmember)


def _line(
    request: str, document: str, now: Mapping[str, Any], then: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What a document does now, beside what it did when the record was written."""
    before = then or {}
    said = (now["answers_said"] or 0) > (before.get("answers_said") or 0)
    # Every token of a row comes out greedily; of a short one that is an answer.
    whole = now["extraction_strength"] == 1 and (before.get("extraction_strength") or 0) < 1
    long = (now.get("longest_run") or 0) >= RECITED_TOKENS
    reading = "recited" if whole and long else now["reading"]
    if (said or whole) and reading != "recited":
        reading = "still said"
    elif reading == "still said":  # no more than on the day of the record
        reading = without_answers(now)
    known = before.get("reading")
    was = THERE.index(known) if known in THERE else len(THERE)
    back = said or whole or (reading in ("recited", "still known") and THERE.index(reading) < was)
    line = {"request": request, "document": document, "reading": reading}
    return line | {"then": known, "back": back} | {n: now[n] for n in FIGURES}


def _badness(line: Mapping[str, Any]) -> tuple:
    p = 1.0 if line["p"] is None else line["p"]
    named = line["request"], line["document"]
    return (not line["back"], READINGS.index(line["reading"]), p, *named)


def _together(parts: Mapping[str, EvaluationSets], folder: Path) -> EvaluationSets:
    """The rows of all requests; ids get the request in front.

    A row that was deleted is no held-out row, whatever request it comes from.
    """
    forget = [
        replace(row, id=f"{name}/{row.id}", source=f"{name}/{row.document}")
        for name, sets in parts.items()
        for row in sets.forget
    ]
    member = [(f"{name}/{i}", text) for name, sets in parts.items() for i, text in sets.member]
    deleted = {normal_form(with_prompt(text)) for _, text in member}
    heldout: dict[str, tuple[str, str]] = {}
    for name, sets in parts.items():
        for i, text in sets.nonmember:
            if normal_form(with_prompt(text)) not in deleted:
                heldout.setdefault(with_prompt(text), (f"{name}/{i}", text))
    nonmember = [*heldout.values()]
    return EvaluationSets(folder, forget, [], member if nonmember else [], nonmember)


def _measured(
    model: str, sets: EvaluationSets, settings: Settings, progress: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Audit lines, and what `Audit` says of the model."""
    from axolotl_unlearn.engine.head import output_vocabulary
    from axolotl_unlearn.evaluation.cache import Cache
    from axolotl_unlearn.evaluation.measure import ProgressBars, Session
    from axolotl_unlearn.evaluation.summary import add_audits, add_learned, text_facts
    from axolotl_unlearn.models import parse_models

    spec = parse_models([model])[0]
    session = Session(sets, settings, Cache(None), ProgressBars(progress))
    loaded = session.load(spec)
    with session.bars.progress:
        measured = session.measure(loaded, "", spec.name)
    own = {"name": "model", "role": "candidate", **text_facts(measured, sets)}
    add_learned([own], {"model": measured}, sets)
    learned, losses = own.get("learned", {}), measured.nonmember_loss
    return add_audits([own], {"model": measured}, sets), {
        "heldout": len(sets.nonmember),
        "heldout_loss": sum(losses) / len(losses) if losses else None,
        "chance": math.log(output_vocabulary(loaded.model)),
        "learned": {k: v for k, v in learned.items() if k != "documents"} or None,
    }
