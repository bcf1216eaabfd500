"""The ``unlearn:`` block of an Axolotl config: strict, nested, checked before loading."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from axolotl_unlearn.columns import SIDES, Kind, task_number
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.objectives import OBJECTIVES


class Strict(BaseModel):
    """Unknown keys are faults, and numbers that no run can mean."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (dict, str, int, ObjectiveArgs)) else value


def _as_extensions(value: Any) -> Any:
    value = [value] if isinstance(value, (dict, str)) else value
    if not isinstance(value, list):
        return value
    return [{"extension": one} if isinstance(one, str) else one for one in value]


def _text_is(key: str) -> BeforeValidator:
    """A text stands for a block with this key alone."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class ReferenceArgs(Strict):
    """What objectives compare with: the starting model, or a teacher (another model)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "frozen_copy", "cached"] = Field(
        "auto",
        description="how the starting model is kept; auto: a fresh adapter is switched off, else "
        "frozen_copy (of the trained weights only)",
    )
    model: str | None = Field(None, description="a teacher: folder or name of a model of its own")
    adapter: str | None = Field(
        None, description="a teacher: folder of a LoRA adapter, of base_model or of `model`"
    )

    @model_validator(mode="after")
    def _check(self) -> ReferenceArgs:
        if self.is_teacher and "mode" in self.model_fields_set:
            raise ValueError("give `mode` for the starting model, or `model`/`adapter`, not both")
        return self

    @property
    def is_teacher(self) -> bool:
        """Whether it is not the starting model."""
        return bool(self.model or self.adapter)


Source = Annotated[ReferenceArgs, _text_is("mode")]
Elsewhere = Annotated[ReferenceArgs, _text_is("model")]


def _check_parameters(entry: BaseModel, what: str, known: Mapping[str, inspect.Parameter]) -> None:
    """Further keys of an entry against the keyword arguments of what it names.

    Raises:
        ValueError: One that is unknown or has a wrong value.
    """
    if taken := known.keys() & type(entry).model_fields:
        cure = "which is a key of every entry; give it another name"
        raise ValueError(f"{what} has a parameter `{min(taken)}`, {cure}")
    none = inspect.Parameter.empty
    fields = {
        key: (
            Any if p.annotation is none else p.annotation,
            ... if p.default is none else p.default,
        )
        for key, p in known.items()
    }
    try:
        validated = create_model("parameters", __base__=Strict, **fields)(**entry.model_extra)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        said = f": {key}: {first['msg']}"
        if first["type"] == "extra_forbidden":
            near = nearest(key, [*fields, *type(entry).model_fields])
            takes = ", ".join(fields) or "none"
            said = f" has no parameter {key!r}{near}; it takes {takes}"
        raise ValueError(f"{what}{said}") from None
    for key in entry.model_extra:
        entry.model_extra[key] = getattr(validated, key)


class Open(BaseModel):
    """Further keys are parameters of what an entry names."""

    model_config = ConfigDict(extra="allow")

    @property
    def parameters(self) -> dict[str, Any]:
        """Its own parameters, validated."""
        return dict(self.model_extra or {})


class ExtensionArgs(Open):
    """One entry of ``extensions:``: a module of yours or of `research.methods`, and its settings.

    Every further key is a keyword argument of the class. The module is imported when the config is
    read, so it may register objectives; it has to be on Python's path (``PYTHONPATH``).
    """

    extension: str = Field(
        description="`module:Class` of a `training.extensions.Extension`, or `module` for its "
        "objectives alone"
    )

    @property
    def kind(self) -> Callable[..., Any] | None:
        """Its class; None for a module alone."""
        return find_extension(self.extension)

    @model_validator(mode="after")
    def _check_parameters(self) -> ExtensionArgs:
        kind = self.kind
        try:
            known = inspect.signature(kind, eval_str=True).parameters if kind else {}
        except NameError as error:
            raise ValueError(f"extension {self.extension}: {error}; correct its module") from None
        _check_parameters(self, f"extension {self.extension}", known)
        return self


def find_extension(name: str) -> Callable[..., Any] | None:
    """What ``module:Class`` names; None for a module alone, which is imported.

    Raises:
        ValueError: There is no such module, or no such class in it.
    """
    module, _, attribute = name.partition(":")
    try:
        found = import_module(module)
    except Exception as error:  # of code of the user's
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            says = "is not found; its module has to be on Python's path, e.g. by PYTHONPATH"
        else:
            says = f"cannot be imported ({type(error).__name__}: {error}); correct its module"
        raise ValueError(f"the extension {name!r} {says}") from None
    kind = getattr(found, attribute, None) if attribute else None
    if attribute and not (isinstance(kind, type) and hasattr(kind, "takes_gradients")):
        raise ValueError(
            f"the extension {name!r}: {module} has no class {attribute!r} that is an Extension; "
            f"give `module:Class` of one, or `{module}` for its objectives alone"
        )
    sources = {module, *(getattr(one, "__module__", None) for one in vars(found).values())}
    sources |= {one.__name__ for one in vars(found).values() if isinstance(one, ModuleType)}
    registering = [one.function.__module__ for one in OBJECTIVES.values()]
    if not (attribute or any(m in sources or m.startswith(f"{module}.") for m in registering)):
        raise ValueError(
            f"the extension {name!r} registers no objective, so it would do nothing; name its "
            f"class, as `{module}:Class`"
        )
    return kind


class ObjectiveArgs(Open):
    """One entry of ``forget:`` or ``retain:``: an objective, its weight, and the rows it is for.

    Every further key is a parameter of the objective (``beta``, ``reduction``, ``direction`` ...),
    checked against the signature of the function in `axolotl_unlearn.objectives`.
    """

    objective: str = Field(description="name in the registry; see `axolotl-unlearn methods`")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="factor in the total loss")
    kinds: Annotated[list[Kind] | None, BeforeValidator(_as_list)] = Field(
        None, description="limit to completions or questions"
    )
    tasks: Annotated[list[int | str] | None, BeforeValidator(_as_list)] = Field(
        None, description="limit to tasks, e.g. [1, Task2]"
    )
    positions: Literal["answer", "all"] = Field(
        "answer",
        description="for distribution objectives: label positions, or every position of the row",
    )
    divide_by_length: int | None = Field(
        None,
        gt=0,
        description="divide by rows x this length instead of the number of positions "
        "(ZJUKLAB's code: 256, the padded length)",
    )
    reference: Source | None = Field(
        None, description="what this entry compares with; default: that of the block"
    )

    def is_for(self, kind: Kind, task: int) -> bool:
        """Whether rows of this kind and task number count for this entry."""
        of_kind = self.kinds is None or kind in self.kinds
        return of_kind and (self.tasks is None or task in map(task_number, self.tasks))

    def parameter(self, name: str) -> Any:
        """One of them, or its default."""
        default = OBJECTIVES[self.objective].parameters[name].default
        return self.parameters.get(name, default)

    @model_validator(mode="after")
    def _check_objective(self) -> ObjectiveArgs:
        known = OBJECTIVES.get(self.objective)
        if known is None:
            near = nearest(self.objective, OBJECTIVES)
            ours = "axolotl_unlearn.objectives."
            own = [n for n, o in OBJECTIVES.items() if not o.function.__module__.startswith(ours)]
            raise ValueError(
                f"there is no objective {self.objective!r}{near}; `axolotl-unlearn methods` lists "
                f"them{', extensions add ' * bool(own)}{', '.join(own)}"
            )
        _check_parameters(self, f"objective {self.objective}", known.parameters)
        if self.reference is not None and not known.reference:
            raise ValueError(
                f"objective {self.objective} compares with no reference; remove `reference`"
            )
        if (known.against_heldout or known.sees in ("labels", "pairs")) and self.positions == "all":
            raise ValueError(
                f"objective {self.objective} sees label positions only; remove `positions: all`"
            )
        if self.divide_by_length and known.unit(self.parameters) != "token":
            raise ValueError(
                f"objective {self.objective} is averaged over {known.unit(self.parameters)}s, so "
                "`divide_by_length` would do nothing; remove it"
            )
        return self


class LabelArgs(Strict):
    """Which tokens of a row carry labels, by the kind of row."""

    completion: Literal["document", "answer"] = Field(
        "document", description="membership is measured on documents, so they are forgotten whole"
    )
    question: Literal["document", "answer"] = "answer"


class FieldArgs(Strict):
    """Names of the fields in the user's files."""

    id: str = "id"
    input: str = "input"
    output: str = "output"
    task: str = "task"
    document: str = "document"


#: The dataset type of plain fine-tuning on records, and what it reads of ``unlearn.data``.
MEMORISE = "axolotl_unlearn.data.memorise"
SHAPING = ("join", "template", "chat_template", "eos", "labels", "max_length", "fields")


class DataArgs(Strict):
    """How a record becomes tokens: as the model saw it when it memorised it."""

    join: str = Field(" ", description="text between input and output")
    template: str | None = Field(None, description="e.g. 'Question: {input}\\nAnswer: {output}'")
    chat_template: bool = Field(
        False,
        description="use the chat template: tokens and labels of Axolotl's `type: chat_template`",
    )
    eos: bool | Literal["retain"] = Field(
        True,
        description="append the end-of-sequence token, with a label: to all rows, to none, or to "
        "all but forget rows, so that to stop is not forgotten too; with `chat_template` the end "
        "of the turn is there and `false` takes its label away",
    )
    max_length: int | None = Field(None, gt=1, description="default: sequence_len")
    labels: LabelArgs = Field(default_factory=LabelArgs)
    fields: FieldArgs = Field(default_factory=FieldArgs)
    suppression: str | None = Field(
        None,
        description="`suppression.json` of a folder of requests: rows that were deleted before are "
        "not learned again: left out of retain and memorise rows, and counted in the log",
    )
    rows: Annotated[list[dict[str, Any]], BeforeValidator(_as_list)] = Field(
        default_factory=list,
        description="rows of any Axolotl dataset type: the entry (or entries) of `datasets` that "
        "made the model, `{type: chat_template, ...}`; with `rl: dpo` for preference rows",
    )

    @model_validator(mode="after")
    def _check(self) -> DataArgs:
        for number, entry in enumerate(self.rows):
            if not entry.get("type") and not entry.get("rl"):
                raise ValueError(f"rows[{number}] has no `type` (chat_template, alpaca ...)")
            if str(entry.get("type")).startswith("sharegpt"):
                raise ValueError(
                    "Axolotl no longer reads rows of `type: sharegpt`; give `type: chat_template` "
                    "with `field_messages: conversations` and `message_property_mappings: {role: "
                    "from, content: value}`"
                )
        named = {f"fields.{name}" for name in self.fields.model_fields_set - {"id", "document"}}
        told = sorted(self.model_fields_set & {*SHAPING} - {"fields"} | named)
        if self.rows and told and not any(row.get("type") == MEMORISE for row in self.rows):
            raise ValueError(
                f"`{told[0]}` does nothing beside `rows`, whose type decides tokens and labels; "
                "remove one of them"
            )
        if "join" in self.model_fields_set and (self.template or self.chat_template):
            raise ValueError("`join` does nothing beside a template; remove one of them")
        if self.template and self.chat_template:
            raise ValueError("give either template or chat_template, not both")
        head, output, tail = (self.template or "").partition("{output}")
        wrong = "{input}" not in head or not output or "{input}" in tail or "{output}" in tail
        if self.template and wrong:
            raise ValueError(
                "template must contain {input} and, after it, {output} once, e.g. 'Question: "
                "{input}\\nAnswer: {output}'"
            )
        if self.chat_template and "document" in self.labels.model_dump(exclude_unset=True).values():
            raise ValueError(
                "labels: `document` would put labels on role headers and the system prompt of the "
                "chat template; remove it (labels are on the answer)"
            )
        return self

    @property
    def default_kind(self) -> Kind:
        """Kind of a row that has no `kind` and whose id does not tell: a template asks."""
        return "question" if self.chat_template or self.template else "completion"


class PairingArgs(Strict):
    """How forget and retain rows meet in a batch."""

    retain_per_forget: int = Field(1, ge=0, description="retain rows for each forget row")


class Sides(Strict):
    """Objectives of the forget rows and of the retain rows."""

    forget: Annotated[list[ObjectiveArgs], BeforeValidator(_as_list)] = Field(default_factory=list)
    retain: Annotated[list[ObjectiveArgs], BeforeValidator(_as_list)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_sides(self) -> Sides:
        for side, entry in self.entries():
            meant = OBJECTIVES[entry.objective].side
            if meant not in (side, "both"):
                does = "forgets" if meant == "forget" else "keeps"
                raise ValueError(
                    f"objective {entry.objective} {does} what its rows say, so it cannot be under "
                    f"`{side}:`; move it to `{meant}:` or choose another "
                    "(`axolotl-unlearn methods`)"
                )
        return self

    def entries(self) -> list[tuple[str, ObjectiveArgs]]:
        """All objectives as (side, entry), in the order of the config."""
        return [("forget", e) for e in self.forget] + [("retain", e) for e in self.retain]

    def roles(self) -> set[str]:
        """Roles of the rows that they need: a pair is made around each forget row."""
        roles = {role for side, e in self.entries() for role in OBJECTIVES[e.objective].roles(side)}
        return roles | ({"forget"} if "alternative" in roles else set())


class PhaseArgs(Sides):
    """A stretch of the run with objectives of its own; the learning rate begins anew."""

    steps: int | None = Field(None, gt=0, description="optimizer steps")
    epochs: float | None = Field(None, gt=0, description="or passes, as `pairing` counts them")
    learning_rate: float | None = Field(None, gt=0, description="default: that of the config")
    fresh_optimizer: bool = Field(
        False, description="begin without the moments of the phase before (AILS-NTUA)"
    )

    @model_validator(mode="after")
    def _check_phase(self) -> PhaseArgs:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give the length of the phase as `steps` or as `epochs`")
        if not self.entries():
            raise ValueError("the phase has no objective; add `forget:` or `retain:`")
        return self


class LevelArgs(Strict):
    """Held-out rows: the level that forget rows are brought to, and when they are there."""

    heldout: str = Field(
        description="file of rows of the same kinds that the model never saw; not the ones that "
        "judge it later"
    )
    every: int | None = Field(
        None, gt=0, description="steps between two looks; default: a fifth of the run, at most 30"
    )
    retain: float = Field(
        0.1, ge=0, description="nats a token that the loss of retained rows may rise"
    )
    said: float = Field(
        1, ge=0, le=1, description="share of the retained rows that may no longer be said in full"
    )
    per_document: bool = Field(
        False,
        description="for few documents: end only when none of them is told by itself, take an AUC "
        "within its own sampling error for 0.5, and score all rows, not 100 of each kind and task",
    )
    least_rows: int = Field(
        1,
        gt=0,
        description="documents to forget (or questions, where there are none) below which "
        "`feature_matching` and its kin do nothing",
    )
    certainty: bool = Field(
        False,
        description="set the temperature of `nckd` so that the model is as sure of forget rows as "
        "of held-out ones",
    )


#: Keys that a config gives for a preset's places (``$teacher``), and whether they are needed.
FILLED = {"teacher": True, "heldout": True, "original": False}


class UnlearnArgs(Sides):
    """The ``unlearn:`` block."""

    preset: str | None = Field(None, description="published settings: " + "see presets/")
    teacher: Elsewhere | None = Field(
        None,
        description="of `preset: never-seen`: a model that never saw the forget rows (PATH, or "
        "{model: PATH, adapter: PATH})",
    )
    heldout: str | None = Field(
        None, description="of `preset: never-seen`: rows that the model never saw (`level.heldout`)"
    )
    original: Elsewhere | None = Field(
        None,
        description="of `preset: never-seen`: the model that retained rows are held to, where "
        "base_model is a start on the way to the teacher; default: base_model",
    )
    reference: Source = Field(
        default_factory=ReferenceArgs,
        description="what objectives compare with: the starting model (auto, frozen_copy, "
        "cached), or a teacher ({model: PATH}, {adapter: PATH})",
    )
    reference_gib: float = Field(
        4,
        ge=0,
        description="hidden states of the starting model that KL asks for again in later epochs: "
        "GiB of `<output_dir>/reference` for each process; 0 computes them anew",
    )
    phases: list[PhaseArgs] = Field(
        default_factory=list,
        description="in place of `forget:` and `retain:`: stretches with objectives of their own",
    )
    extensions: Annotated[list[ExtensionArgs], BeforeValidator(_as_extensions)] = Field(
        default_factory=list,
        description="methods that are no objective, and objectives of your own: `module:Class`, or "
        "`{extension: module:Class, ...}` with its settings",
    )
    data: DataArgs = Field(default_factory=DataArgs)
    pairing: PairingArgs = Field(default_factory=PairingArgs)
    level: LevelArgs | None = Field(
        None, description="held-out rows: what `match` aims at, and when the run ends"
    )
    chunk_mib: int = Field(256, gt=0, description="memory for one chunk of float32 logits")

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        from axolotl_unlearn.config import presets

        # A key that is left empty is not given; an unknown one is a fault.
        given = {k: v for k, v in values.items() if v is not None or k not in cls.model_fields}
        for one in _as_extensions(given.get("extensions") or []):  # they may bring objectives
            if isinstance(one, dict) and isinstance(one.get("extension"), str):
                find_extension(one["extension"])
        preset, taken = {}, []
        if given.get("preset"):
            preset, taken = presets.load_preset(given["preset"], given)
        for key, needed in FILLED.items():
            if key in given and key not in taken:
                raise ValueError(
                    f"`{key}` belongs to `preset: never-seen`; give that preset or remove it"
                )
            if needed and key in taken and key not in given:
                raise ValueError(f"preset {given['preset']} needs `{key}`; add it to the block")
        return presets.merged(preset, given)

    @model_validator(mode="after")
    def _join_phases(self) -> UnlearnArgs:
        """With phases, ``forget`` and ``retain`` hold the objectives of all of them."""
        if self.phases and (self.forget or self.retain):
            raise ValueError("give `phases`, or `forget` and `retain`, not both")
        for side in SIDES if self.phases else ():
            self.__dict__[side] = [e for phase in self.phases for e in getattr(phase, side)]
        return self

    def extension_kinds(self) -> list[Any]:
        """Their classes, without modules that only register objectives."""
        return [one.kind for one in self.extensions if one.kind is not None]

    def references(self) -> list[ReferenceArgs]:
        """What the objectives that compare are compared with, each once."""
        entries = (entry for _, entry in self.entries() if OBJECTIVES[entry.objective].reference)
        return list(dict.fromkeys(entry.reference or self.reference for entry in entries))

    @property
    def trains(self) -> bool:
        """False for a block that only describes data (memorisation runs)."""
        return bool(self.forget or self.retain)

    def expanded(self) -> str:
        """The block with its preset written out, as YAML."""
        block = self.model_dump(exclude_unset=True, exclude_none=True, exclude={"preset", *FILLED})
        return yaml.safe_dump({"unlearn": block}, sort_keys=False, default_flow_style=None)


def parse_unlearn(block: Any) -> UnlearnArgs:
    """Validate a raw block.

    Raises:
        UnlearnError: One sentence naming every faulty key and, for unknown ones, the nearest name.
    """
    if isinstance(block, UnlearnArgs):
        return block
    if not isinstance(block, dict):
        raise UnlearnError(
            "`unlearn:` must be a block of keys such as `forget:` and `retain:`, "
            f"not {type(block).__name__}."
        )
    try:
        return UnlearnArgs.model_validate(_plain(block))
    except ValidationError as error:
        raise UnlearnError(_sentence(error)) from None


def unlearn_config(cfg: Any) -> UnlearnArgs | None:
    """The validated block of an Axolotl config, or None if the config has none."""
    block = cfg.get("unlearn") if isinstance(cfg, dict) else getattr(cfg, "unlearn", None)
    return None if block is None else parse_unlearn(block)


def _plain(value: Any) -> Any:
    """DictDefault (Axolotl's dict, which answers None for missing keys) to plain containers."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def nearest(name: str, known: Any) -> str:
    match = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _keys_at(location: tuple) -> list[str]:
    """The keys of the block in which an unknown one stands, which it might have meant."""
    block: Any = UnlearnArgs
    for part in location[:-1]:
        if isinstance(part, str) and part in block.model_fields:
            kinds = [block.model_fields[part].annotation]
            while kinds and not (isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel)):
                kinds[:0] = get_args(kinds.pop(0))
            block = kinds[0] if kinds else block
    return list(block.model_fields)


def _sentence(error: ValidationError) -> str:
    faults = []
    for fault in error.errors():
        path = ".".join(["unlearn", *map(str, fault["loc"])])
        said = f": {fault['msg'].removeprefix('Value error, ')}"
        if fault["type"] == "extra_forbidden":
            said = f" is not a key of the block{nearest(fault['loc'][-1], _keys_at(fault['loc']))}"
        elif fault["type"] == "missing" and isinstance(fault["input"], dict):
            near = difflib.get_close_matches(str(fault["loc"][-1]), map(str, fault["input"]), n=1)
            said = " is missing" + (f" (is `{near[0]}` meant to be it?)" if near else "")
        faults.append(f"`{path}`{said}")
    return "; ".join(faults) + "."


class UnlearnPluginArgs(BaseModel):
    """What the plugin adds to Axolotl's config schema."""

    unlearn: dict[str, Any] | None = Field(
        default=None, description="unlearning: objectives, reference, data format, pairing"
    )

    @model_validator(mode="after")
    def _check_block(self) -> UnlearnPluginArgs:
        if self.unlearn is not None:
            parse_unlearn(self.unlearn)
        return self
