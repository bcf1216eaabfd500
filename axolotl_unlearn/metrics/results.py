"""What results.json holds: the facts about each model, with types, checked where they enter.

Numbers that are missing, null or not finite are None, and stay None: `metrics.verdict` says what it
could not read. Text where a number belongs is no measurement but a broken file, and refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator
from scipy.stats import false_discovery_control

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.metrics.intervals import Clusters, auc, harmonic_mean

#: Raised when what is needed changes: files of another version are refused.
SCHEMA = 2
CELLS = semeval.CELLS
Role = Literal["original", "retrained", "reference", "candidate"]
#: Scores by attack: (members, non-members), high = rather a member.
Scores = dict[str, tuple[np.ndarray, np.ndarray]]


def _number(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError("must be a number")
    try:
        return None if value is None or not math.isfinite(value) else float(value)
    except OverflowError:
        raise ValueError("must be a number that a float can hold") from None


def _share(value: float | None) -> float | None:
    if value is not None and not -1e-9 <= value <= 1 + 1e-9:
        raise ValueError("must be between 0 and 1")
    return value


def _ordered(pair: tuple[float | None, float | None] | None) -> tuple[float, float] | None:
    return None if pair is None or None in pair else (min(pair), max(pair))


def _present(parts: Any) -> Any:
    """Parts by name without those that are null."""
    named = isinstance(parts, Mapping)
    return {name: one for name, one in parts.items() if one is not None} if named else parts


#: Ids of rows that have none, which say nothing about other files.
MADE_UP = re.compile(r"row\d+")
Number = Annotated[float | None, BeforeValidator(_number)]
Share = Annotated[Number, AfterValidator(_share)]
Finite = Annotated[float, BeforeValidator(_number)]
Unit = Annotated[Finite, AfterValidator(_share)]
Count = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_number)]
Numbers = tuple[Number, ...]
Interval = Annotated[tuple[Number, Number] | None, AfterValidator(_ordered)]
Names = tuple[str, ...]
P = TypeVar("P")
Named = Annotated[dict[str, P], BeforeValidator(_present)]


class Part(BaseModel):
    """Keys that are not named here are kept as they are; null is as good as missing."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return _present(data)

    @property
    def more(self) -> Mapping[str, Any]:
        """What the file has beside the fields of this class."""
        return self.model_extra or {}


class Outputs(Part):
    """Shares of outputs on one side (`metrics.fluency`); ``nonsense`` of the longer ones;
    ``refusing`` and ``echo`` where the prompts were known."""

    n: Count = None
    broken: Share = None
    empty: Share = None
    constant: Share = None
    nonsense: Share = None
    nonsense_n: Count = None
    refusing: Share = None
    echo: Share = None
    reference: Outputs | None = None


class Collapse(Outputs):
    """Of the retain side, and under ``forget`` of the forget side."""

    collapsed: bool | None = None
    reasons: Names = ()
    forget: Outputs | None = None


class Gate(Part):
    threshold: Share = None
    original: Share = None
    below_gate: bool | None = None


class Answers(Part):
    """Of a side's questions: number, share answered exactly, share whose output has the answer."""

    n: Count = None
    exact: Share = None
    contained: Share = None


class Sides(Part):
    """Losses of one attack, low = rather a member."""

    member: Numbers = ()
    nonmember: Numbers = ()


class Likelihood(Part):
    """Scores of members and non-members, text by text.

    Attributes:
        member_id, nonmember_id: Ids in the order of the scores: models are paired by them.
        member_cluster, nonmember_cluster: The document or author of each text.
        member_document: The document of each member, as the forget rows call it.
        attacks: More scores of the same texts.
    """

    member_loss: Numbers = ()
    nonmember_loss: Numbers = ()
    member_id: Names = ()
    nonmember_id: Names = ()
    member_cluster: Names = ()
    nonmember_cluster: Names = ()
    member_document: Names = ()
    attacks: Named[Sides] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agree(self) -> Likelihood:
        sides = (self.member_id, self.nonmember_id)
        both = {name for name in sides[0] if not MADE_UP.fullmatch(name)} & {*sides[1]}
        if both or any(len(set(side)) < len(side) for side in sides):
            raise ValueError("the same id stands for two texts")
        losses = (self.member_loss, self.nonmember_loss)
        if any(side and len(side) != len(own) for side, own in zip(sides, losses, strict=True)):
            raise ValueError("it has not one id for each loss")
        return self

    @property
    def documents(self) -> Names:
        """Of each member."""
        known = len(self.member_document) == len(self.member_loss)
        names = self.member_document if known else self.member_id
        return names or tuple(f"row{i}" for i in range(len(self.member_loss)))


@dataclass(frozen=True)
class Row:
    """What a model does with one text: a forget row (its answer), or a whole document.

    Attributes:
        member: A document of the member file.
        tokens: Scored ones; ``run``: longest run of greedy ones; ``greedy``: their share.
        strength: Extraction strength, floor 0, of a document of its second half.
        logp: Of the whole answer, nats. exact, contained: Of a question's generation.
        drawn: Share of draws that say the answer (`eval --samples`).
        derived: Does an answer follow from its question (`evaluation.summary.derived`)?
        loss, min_k_plus: Of a document; high ``min_k_plus`` is rather a member.
        cluster: Its author or document, "" where the file does not name it.
    """

    id: str
    document: str
    member: bool = False
    tokens: int | None = None
    strength: float | None = None
    run: int | None = None
    greedy: float | None = None
    logp: float | None = None
    exact: bool | None = None
    contained: bool | None = None
    drawn: float | None = None
    derived: bool | None = None
    loss: float | None = None
    min_k_plus: float | None = None
    cluster: str = ""

    @property
    def key(self) -> tuple[bool, str]:
        """Its own among all texts: a row may have the id of a member."""
        return self.member, self.id

    @property
    def share_run(self) -> float | None:
        return None if self.run is None or not self.tokens else self.run / self.tokens

    @property
    def said(self) -> bool | None:
        """Is the answer said, or at least as likely as not? None where no question is asked."""
        if self.contained is None and self.exact is None:
            return None
        likely = self.logp is not None and self.logp >= math.log(0.5)
        return bool(self.contained or self.exact or likely)


class Texts(Part):
    """Columns of `Row`."""

    tokens: tuple[Count, ...] = ()
    strength: tuple[Share, ...] = ()
    run: tuple[Count, ...] = ()
    greedy: tuple[Share, ...] = ()

    #: Columns that the verdict asks for, and those that may be there.
    COLUMNS: ClassVar[Names] = ("tokens", "strength", "run", "greedy")
    MORE: ClassVar[Names] = ()

    @model_validator(mode="after")
    def _agree(self) -> Texts:
        if len({len(getattr(self, name)) for name in self.COLUMNS} - {0}) > 1:
            raise ValueError("its columns are of different lengths")
        for run, tokens in zip(self.run, self.tokens, strict=False):
            if None not in (run, tokens) and run > tokens:
                raise ValueError("a run is longer than its text")
        return self

    def columns(self, count: int) -> list[dict[str, Any]]:
        """By text; {} where there is another number of texts."""
        each: list[dict[str, Any]] = [{} for _ in range(count)]
        for name in (*self.COLUMNS, *self.MORE):
            if len(values := getattr(self, name)) == count:
                for one, value in zip(each, values, strict=True):
                    one[name] = value
        return each


class Extraction(Texts):
    """Of each forget row, in one order, and of documents."""

    id: Names = ()
    document: Names = ()
    logp: Numbers = ()
    exact: tuple[bool | None, ...] = ()
    contained: tuple[bool | None, ...] = ()
    drawn: tuple[Share, ...] = ()
    derived: tuple[bool | None, ...] = ()
    cluster: Names = ()
    member: Texts = Texts()
    nonmember: Texts = Texts()

    COLUMNS: ClassVar[Names] = (*Texts.COLUMNS, "id", "document", "logp", "exact", "contained")
    MORE: ClassVar[Names] = ("drawn", "derived", "cluster")

    @model_validator(mode="after")
    def _one_row_an_id(self) -> Extraction:
        if len(set(self.id)) < len(self.id):
            raise ValueError("the same id stands for two rows")
        if any(
            follows and asked is None
            for follows, asked in zip(self.derived, self.exact, strict=False)
        ):
            raise ValueError("an answer follows from a question that is not asked")
        return self


class Learned(Part):
    """AUC and p of the learned attack, p of each document, and the model whose features it was
    ``against``."""

    auc: Share = None
    p: Share = None
    against: str = "chance"
    documents: dict[str, Share] = Field(default_factory=dict)


class Blind(Part):
    auc: Share = None
    low: Share = None
    high: Share = None
    separates: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> Blind:
        known = [x for x in (self.low, self.auc, self.high) if x is not None]
        if known != sorted(known) or (self.separates is False and (self.low or 0.0) > 0.5):
            raise ValueError("a baseline contradicts its own interval")
        return self


class Figure(Part):
    """A figure of membership with its interval."""

    auc: Share = None
    value: Share = None
    interval: Interval = None


class Membership(Part):
    """Of `evaluation.summary`."""

    blind: Named[Blind] = Field(default_factory=dict)
    meaningful: bool | None = None
    sentence: str = ""
    attacks: Named[Figure] = Field(default_factory=dict)


class Distance(Part):
    """Paired difference from the retrained model."""

    value: Number = None
    interval: Interval = None
    p: Share = None


class Group(Part):
    value: Share = None
    n: Count = None


class Canaries(Part):
    """Of rows whose place in training a coin decided: exact p-values."""

    auc: Share = None
    p_known: Share = None
    p_pushed: Share = None


class Model(Part):
    """One entry of ``models``.

    Attributes:
        weights, data, code: Digests of the model and of each data file, versions: what binds the
            entry to its evidence.
        cells: Scores of the twelve cells, forget cells as 1 - v; None where there are no rows.
        n: Rows of each cell; ``member``, ``nonmember``, ``utility``, ``cells``.
        limit, max_gen_toks: Of the evaluation: so many rows, documents and questions at most (None:
            all), new tokens a row.
        intervals: 95 %, by name of the score.
        any_script, any_script_intervals: Cells (and intervals of them and of sides) by words of
            every script, where the official figure is off.
    """

    name: str = Field(min_length=1)
    model: str = ""
    weights: str | None = None
    data: Named[str] = Field(default_factory=dict)
    code: str | None = None
    role: Role | None = None
    cells: dict[str, Share] = Field(default_factory=dict)
    n: dict[str, Count] = Field(default_factory=dict)
    limit: Count = None
    max_gen_toks: Count = None
    intervals: dict[str, Interval] = Field(default_factory=dict)
    any_script: dict[str, Share] = Field(default_factory=dict)
    any_script_intervals: dict[str, Interval] = Field(default_factory=dict)
    task_aggregate: Share = None
    mia_auc: Share = None
    mia_score: Share = None
    utility: Share = None
    utility_chance: Share = None
    utility_groups: Named[Group] = Field(default_factory=dict)
    aggregate: Share = None
    collapse: Collapse | None = None
    gate: Gate | None = None
    answers: Named[Answers] = Field(default_factory=dict)
    likelihood: Likelihood = Likelihood()
    extraction: Extraction = Extraction()
    learned: Learned | None = None
    canaries: Canaries | None = None
    membership: Membership | None = None
    distance: Named[Distance] = Field(default_factory=dict)

    @pydantic.field_validator("cells", "any_script", mode="after")
    @classmethod
    def _known_cells(cls, cells: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(set(cells) - set(CELLS)):
            says = "expected names such as forget_task1_regurgitation"
            raise ValueError(f"the unknown cell {unknown[0]!r}; {says}")
        return cells

    @model_validator(mode="after")
    def _agree(self) -> Model:
        """An entry that contradicts itself is no evidence."""
        for name in (*semeval.SIDES, "utility", "mia_auc", *self.cells):
            value = self.side(name) if name in semeval.SIDES else self.value(name)
            ends = self.intervals.get(name)
            if value is not None and ends and not ends[0] - 1e-6 <= value <= ends[1] + 1e-6:
                raise ValueError(f"its {name} of {value:.3g} is not in its own interval")
        for what, stated, found in self._counts():
            if None not in (stated, found) and stated != found:
                raise ValueError(f"{stated} {what} are stated, but {found} are there")
        loss, answers = self.attack("loss"), self.answers.get("forget", Answers())
        if loss is not None and self.mia_auc is not None and abs(auc(*loss) - self.mia_auc) > 0.006:
            raise ValueError("its mia_auc is not that of its losses")
        for column in ("exact", "contained"):
            known = [x for x in getattr(self.extraction, column) if x is not None]
            share = getattr(answers, column)
            if known and share is not None and abs(sum(known) / len(known) - share) > 1e-6:
                raise ValueError(f"its share of {column} answers is not that of its rows")
        return self

    def _counts(self) -> Iterator[tuple[str, float | None, float | None]]:
        """What is counted twice in an entry, by what it calls it and by its rows."""
        one, rows = self.likelihood, self.extraction
        asked = sum(x is not None for x in rows.exact) or None
        yield "members", self.n.get("member"), len(one.member_loss) or None
        yield "non-members", self.n.get("nonmember"), len(one.nonmember_loss) or None
        yield "forget rows", self.rows("forget"), len(rows.id) or None
        yield "questions", self.rows("forget", "knowledge"), asked
        yield "answers", self.answers.get("forget", Answers()).n, asked
        if (n := self.n.get("utility")) and self.utility is not None:
            right = round(self.utility * n, 6)
            yield "right options", right, round(right)
            groups = [(g.n, round(g.value * g.n)) for g in self.utility_groups.values()
                      if None not in (g.n, g.value)]  # fmt: skip
            if groups:
                yield "questions by group", sum(k for k, _ in groups), n
                yield "right options by group", sum(hits for _, hits in groups), round(right)

    def rows(self, *parts: str) -> int | None:
        """Of the cells with these words in their names; None where one was not counted."""
        each = [self.n.get(name) for name in CELLS if all(part in name for part in parts)]
        return None if None in each else sum(each)

    @property
    def part(self) -> Role:
        """Its role; one that no role names has that of its name."""
        named = self.name if self.name in ("original", "retrained", "reference") else "candidate"
        return self.role or named

    def side(self, side: str, cells: Mapping[str, float | None] | None = None) -> float | None:
        """Harmonic mean of the cells of one side (forget cells are already 1 - v); 0 if any is
        0."""
        each = (self.cells if cells is None else cells).items()
        values = [value for name, value in each if name.startswith(side) and value is not None]
        return float(harmonic_mean(values)) if values else None

    def value(self, metric: str) -> float | None:
        """A headline score or a cell."""
        return self.cells.get(metric) if metric in CELLS else getattr(self, metric)

    @property
    def cell_count(self) -> int:
        """How many of the 12 cells have a value."""
        return sum(value is not None for value in self.cells.values())

    @property
    def flags(self) -> list[str]:
        """Why it must not be called good: "collapsed", "below gate", or nothing."""
        collapsed = self.collapse is not None and self.collapse.collapsed
        below = self.gate is not None and self.gate.below_gate
        return ["collapsed"] * bool(collapsed) + ["below gate"] * bool(below)

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Numbers of members and non-members behind the AUC, where known."""
        pair = (self.n.get("member"), self.n.get("nonmember"))
        if None in pair:
            pair = (len(self.likelihood.member_loss), len(self.likelihood.nonmember_loss))
        return pair if min(pair) >= 1 else None

    @property
    def independent(self) -> tuple[int, int] | None:
        """Numbers of clusters of members and of non-members; of texts where nobody names them."""
        named = self.clusters
        return tuple(len(set(side)) for side in named) if named and all(named) else self.sizes

    @cached_property
    def texts(self) -> list[Row]:
        """Forget rows, then documents of the member file."""
        one, each = self.likelihood, self.extraction.columns(len(self.extraction.id))
        found = [Row(**{"document": "", **columns}) for columns in each]
        lowest = self.attack("min_k_plus_20") or ((),)
        each = self.extraction.member.columns(len(one.documents))
        sides = one.member_loss, lowest[0], one.member_id, one.member_cluster
        columns = islice(zip_longest(one.documents, each, *sides), len(each))
        for place, (name, figures, loss, low, key, cluster) in enumerate(columns):
            known = {"loss": loss, "min_k_plus": None if low is None else float(low)}
            known |= {"cluster": cluster or ""}
            found.append(Row(str(key or place), name, True, **figures, **known))
        return found

    @cached_property
    def held(self) -> list[Row]:
        """Documents that it never saw."""
        texts = self.extraction.nonmember
        return [Row("", "", **columns) for columns in texts.columns(len(texts.tokens))]

    @cached_property
    def held_losses(self) -> np.ndarray:
        """Sorted."""
        return np.sort([x for x in self.likelihood.nonmember_loss if x is not None])

    @cached_property
    def varying(self) -> Scores:
        """By attack, {} without any: scores that are not all equal, which would order nothing.
        Attacks with another number of texts than the loss, or with a value that is no number, are
        left out: `metrics.verdict` names them."""
        each = {name: self.attack(name) for name in ("loss", *self.likelihood.attacks)}
        return {n: pair for n, pair in each.items() if pair and np.ptp(np.concatenate(pair)) > 0}

    @cached_property
    def clusters(self) -> Clusters:
        """Documents or authors of the texts; None where the file does not name them all."""
        one = self.likelihood
        named = (one.member_cluster, one.nonmember_cluster)
        losses = (one.member_loss, one.nonmember_loss)
        return named if list(map(len, named)) == list(map(len, losses)) else None

    def pairs_with(self, other: Model) -> bool:
        """The same texts in the same order, by their ids."""
        each = [one.likelihood for one in (self, other)]
        ids = [(one.member_id, one.nonmember_id) for one in each]
        sizes = {(len(one.member_loss), len(one.nonmember_loss)) for one in each}
        return bool(ids[0][0]) and ids[0] == ids[1] and sizes == {tuple(map(len, ids[0]))}

    def attack(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Scores of one attack, if each text has one."""
        one = self.likelihood
        sides = (one.member_loss, one.nonmember_loss)
        sizes = list(map(len, sides))
        if name != "loss":
            if name not in one.attacks:
                return None
            sides = (one.attacks[name].member, one.attacks[name].nonmember)
        if list(map(len, sides)) != sizes or min(sizes) < 2 or any(None in side for side in sides):
            return None
        return (-np.array(sides[0]), -np.array(sides[1]))


class Gap(Part):
    """A figure of an attack with its interval."""

    value: Finite
    low: Finite
    high: Finite

    @model_validator(mode="after")
    def _ordered(self) -> Gap:
        if not self.low <= self.value <= self.high:
            raise ValueError("the interval must hold the value")
        return self


class Gained(Gap):
    p: Unit


class Recalled(Part):
    recalled: Gained


class Before(Part):
    recalled: Figure = Figure()


class Tried(Part):
    """One variant of an attack on the text, and what the model said of it ``before``."""

    variant: str
    gain: Recalled
    before: Before = Before()
    above_control: Recalled | None = None


class Test(Part):
    """One attack on membership, of all texts or of a group, before any correction."""

    auc: Unit
    low: Unit
    high: Unit
    p: Unit
    difference: Gap | None = None


class Known(Part):
    """What attacks on membership tell of one document."""

    p: Unit
    side: Literal["under", "over"]


class Attack(Part):
    """A file of `axolotl-unlearn attack`: rows, or tests of members; what it was made of as in
    `Model`."""

    model: str
    attack: str
    title: str
    weights: str | None = None
    control_weights: str | None = None
    data: Named[str] = Field(default_factory=dict)
    rows: tuple[Tried, ...] = ()
    tests: dict[str, Test] = Field(default_factory=dict)
    missing: Names = ()
    limit: int | None = None
    max_new_tokens: int | None = None
    documents: dict[str, Known] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _all_there(self) -> Attack:
        if bool(self.rows) == bool(self.tests or self.missing):
            raise ValueError("it must hold one kind of attack")
        if self.missing and "tests" not in self.model_fields_set:
            raise ValueError("what is missing stands beside tests")
        # The first row is the model as it is.
        if len({row.above_control is not None for row in self.rows[1:]}) > 1:
            raise ValueError("part of it is missing")
        return self

    @property
    def q(self) -> dict[str, float]:
        """p of each document after Benjamini and Hochberg, whatever other files say."""
        p = [one.p for one in self.documents.values()]
        q = false_discovery_control(p, method="bh").tolist() if p else ()
        return dict(zip(self.documents, q, strict=True))


class Results(Part):
    """results.json."""

    schema_: Literal[2] = Field(alias="schema")
    models: tuple[Model, ...] = Field(min_length=1)
    data_dir: str = ""
    created: str = ""
    notes: Names = ()

    @pydantic.field_validator("models", mode="after")
    @classmethod
    def _distinct(cls, models: tuple[Model, ...]) -> tuple[Model, ...]:
        names = [model.name for model in models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            says = "evaluate them as `name=path` with different names"
            raise ValueError(f"two models named {twice[0]!r}; {says}")
        return models

    def role(self, role: Role) -> Model | None:
        """The first model that plays it."""
        return next((model for model in self.models if model.part == role), None)


T = TypeVar("T", bound=Part)


def read(kind: type[T], data: Any, where: str = "the results") -> T:
    """``data`` as a part of results.json.

    Raises:
        UnlearnError: The first fault, with its place in the file.
    """
    if isinstance(data, kind):
        return data
    try:
        return kind.model_validate(data)
    except pydantic.ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        raise UnlearnError(_sentence(where, first), code="results.faulty") from None
    except RecursionError:
        raise UnlearnError(
            f"{where}: nested too deeply; evaluate again.", code="results.faulty"
        ) from None


def _sentence(where: str, fault: Mapping[str, Any]) -> str:
    keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in fault["loc"])
    place, message = "".join(keys).removeprefix("."), fault["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return f"{where}, {place}: {message}; evaluate again." if place else f"{where}: {message}."


def load_results(source: Mapping[str, Any] | Results | str | Path) -> Results:
    """Results as they are checked at the door, from results.json, its folder or its content.

    Raises:
        UnlearnError: A missing file, broken JSON, another version, or the first fault in it.
    """
    if isinstance(source, Results):
        return source
    data, where = source, "the results"
    if not isinstance(source, Mapping):
        path = Path(source)
        path = path / "results.json" if path.is_dir() else path
        where = str(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            folder = path.parent if path.name == "results.json" else path
            raise UnlearnError(
                f"{path} does not exist; make it with "
                f"`axolotl-unlearn eval MODEL ... --data DIR --out {quote(str(folder))}`.",
                code="results.missing",
            ) from None
        except (ValueError, OSError, RecursionError) as fault:
            raise UnlearnError(
                f"{path} is not valid JSON ({fault}); run the evaluation again to rewrite it.",
                code="results.not-json",
            ) from fault
    if not isinstance(data, Mapping) or not data.get("models"):
        raise UnlearnError(
            f"{where} lists no models; expected the results.json of `axolotl-unlearn eval`.",
            code="results.no-models",
        )
    if data.get("schema") != SCHEMA:
        raise UnlearnError(
            f"{where} has schema {data.get('schema')!r:.40}, this version reads schema {SCHEMA}; "
            "evaluate again with this version of axolotl-unlearn.",
            code="results.version",
        )
    return read(Results, data, where)


def folder_of(results: str | Path) -> Path:
    """The folder of an evaluation, given as itself or as its results.json."""
    path = Path(results)
    return path if path.is_dir() else path.parent


def attack_results(folder: Path) -> list[dict[str, Any]]:
    """What each attack wrote into a file of its own.

    Half a file too: the verdict does not pass over it.
    """
    found, marks = [], {"attack", "title", "model", "rows", "tests"}
    for path in sorted(folder.glob("*-*.json")):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as fault:
            raise UnlearnError(
                f"{path} is not valid JSON ({fault}); remove or remake it.", code="report.not-json"
            ) from fault
        if isinstance(one, dict) and len(marks & one.keys()) > 1:
            found.append(one)
    return found
