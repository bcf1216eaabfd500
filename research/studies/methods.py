"""Methods as data: one table for `make leaderboard` and `make tofu`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from axolotl_unlearn.errors import UnlearnError

#: The retain losses of all methods but those that bring their own.
RETAIN = [{"objective": "nll"}, {"objective": "kl", "weight": 0.5, "direction": "reverse"}]


class Tried:
    """What has a knob whose ``values`` a leaderboard tries."""

    knob: str
    values: Sequence[float]

    def tried(self, trials: int) -> Sequence[float]:
        """The middle ones of its strengths."""
        first = (len(self.values) - trials) // 2
        return self.values[first : first + trials]


@dataclass(frozen=True)
class Applied(Tried):
    """A way to forget that is no training: a command of `research` on the original.

    Attributes:
        words: Of the command; ORIGINAL, DATA, and CHOSEN (what was chosen of ``after``) are put in.
        knob: Name of the option whose ``values`` a leaderboard tries.
    """

    words: Sequence[str]
    knob: str
    values: Sequence[float]
    after: str = ""


@dataclass(frozen=True)
class Method(Tried):
    """A way to forget.

    Attributes:
        forget: the objective with what is fixed; ``knob``: the key whose ``values`` a leaderboard
            tries.
        retain: its own retain losses.
        block: further keys of `unlearn`.
        beside: further entries of ``forget:``.
        rows: further forget rows: a kind of `axolotl-unlearn augment`.
        published: changes of an example that are its published settings; empty without.

    `layer`, `reference` and `heldout`, wherever they stand, are those of the tiny model; `placed`
    gives another run's.
    """

    forget: Mapping[str, Any]
    knob: str
    values: Sequence[float]
    retain: Sequence[Mapping[str, Any]] = field(default_factory=lambda: RETAIN)
    block: Mapping[str, Any] = field(default_factory=dict)
    beside: Sequence[Mapping[str, Any]] = ()
    rows: str = ""
    published: Mapping[str, Any] = field(default_factory=dict)

    def changes(self, value: float) -> dict[str, Any]:
        """Of an example, with one value of the knob."""
        first = {**self.forget, self.knob: value}
        return {
            **{f"unlearn.{key}": more for key, more in self.block.items()},
            "unlearn.forget": [first, *self.beside] if self.beside else first,
            "unlearn.retain": list(self.retain),
        }

    def placed(self, **where: Any) -> Method:
        """The same with these values of keys, wherever they stand."""

        def put(part: Any) -> Any:
            if isinstance(part, Mapping):
                return {key: where.get(key, put(value)) for key, value in part.items()}
            return [put(one) for one in part] if isinstance(part, (list, tuple)) else part

        parts = ("forget", "retain", "block", "beside", "published")
        return replace(self, **{part: put(getattr(self, part)) for part in parts})

    @property
    def alternatives(self) -> bool:
        """Whether it needs other answers to forget rows."""
        from axolotl_unlearn.objectives import OBJECTIVES

        return "alternative" in OBJECTIVES[self.forget["objective"]].roles("forget")

    @property
    def teacher(self) -> bool:
        """Whether it compares with a teacher."""
        return "reference" in self.forget


def _weighed(objective: str, *values: float, preset: str = "", **fixed: Any) -> Method:
    published = {"unlearn.preset": preset} if preset else {}
    return Method({"objective": objective, **fixed}, "weight", values, published=published)


_NPO = {"objective": "npo", "weight": 0.1}
_BETAS = (0.01, 0.02, 0.045, 0.1, 0.2, 0.4)
_FIRST = {"layer": 0, "positions": "all"}
_HIDDEN = [{"objective": "hidden_mse", "layer": 0, "weight": 10.0, "positions": "all"}]
_MATCH = {"objective": "match", "reference": {"model": "out/teacher"}}
_NCKD = {"objective": "nckd", "temperature": 0.7, "reference": {"model": "out/teacher"}}

METHODS: dict[str, Method] = {
    "GradDiff": _weighed("ga", 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, preset="tofu-graddiff"),
    "NPO": Method(_NPO, "beta", _BETAS, published={"unlearn.preset": "tofu-npo"}),
    "NPO + GU": Method(_NPO, "beta", _BETAS, block={"surgery": "gu"}),
    "NPO + PCGrad": Method(_NPO, "beta", _BETAS, block={"surgery": "pcgrad"}),
    "NPO + GRU": Method(_NPO, "beta", _BETAS, block={"surgery": "gru"}),
    "NPO-SAM": Method(_NPO, "beta", _BETAS, block={"sharpness": 0.01}),
    "RepSelect": Method(
        {"objective": "ga"},
        "weight",
        (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        block={"flatten": {"components": 8}},
    ),
    "SimNPO": _weighed("simnpo", 0.3, 0.8, 2.0, 5.0, 12.0, 30.0, preset="tofu-simnpo"),
    "WGA": _weighed("wga", 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, preset="g-effect-wga"),
    "TNPO": _weighed("tnpo", 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, beta=1.0),
    "WTNPO": _weighed("wtnpo", 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, beta=1.0),
    "SatImp": _weighed("satimp", 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
    "UNDIAL": Method(
        {"objective": "undial"},
        "beta",
        (1.5, 3.0, 5.0, 10.0, 30.0, 60.0),
        published={"unlearn.preset": "undial-lora", "unlearn.retain": {"objective": "nll"}},
    ),
    "SHRED": _weighed("shred", 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "CE-U": _weighed("ceu", 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "Clamped entropy": Method(
        {"objective": "clamped_entropy"}, "tau", (0.15, 0.3, 0.5, 0.7, 0.9, 0.97)
    ),
    "MASC": _weighed("masc", 0.002, 0.01, 0.05, 0.2, 1.0, 5.0),
    "IHL": _weighed("ihl", 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    "Unilogit": _weighed("unilogit", 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "Flat logits": _weighed("flat_logits", 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "BS-T": _weighed("bst", 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "BS-S": Method({"objective": "bst"}, "weight", (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), rows="self"),
    "RMU": Method(
        {"objective": "rmu", "layer": 0, "positions": "all"},
        "coefficient",
        (1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
        _HIDDEN,
        published={
            "unlearn.preset": "rmu-zephyr",
            "unlearn.forget": {"objective": "rmu", "coefficient": 6.5, **_FIRST},
            "unlearn.retain": {"objective": "hidden_mse", "weight": 1200, **_FIRST},
        },
    ),
    "Adaptive RMU": Method(
        {"objective": "adaptive_rmu", "layer": 0, "positions": "all"},
        "scale",
        (0.5, 1.0, 2.0, 5.0, 10.0, 20.0),
        _HIDDEN,
    ),
    "PO (IdkNLL)": _weighed("po", 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "IdkDPO": Method({"objective": "dpo", "weight": 0.1}, "beta", (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
    "FLAT": _weighed("flat", 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    "Match": Method(
        _MATCH,
        "weight",
        (0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
        published={
            "unlearn.preset": None,
            "unlearn.forget": [
                _MATCH,
                _NCKD | {"temperature": 1.0},  # its teacher is well-read
                {"objective": "feature_matching", "weight": 0.05},
                {"objective": "hidden_matching", "weight": 2},
            ],
            "unlearn.retain": [{"objective": "nll"}, {"objective": "kl", "direction": "reverse"}],
            # All as in examples/smollm2/match.yml, for nothing is tuned again.
            "unlearn.level": {"heldout": "heldout.jsonl", "certainty": True, "retain": 0.03},
            "unlearn.pairing": {"retain_per_forget": 2},
            "learning_rate": 0.002,
            "lora_r": 64,
            "lora_alpha": 64,
        },
    ),
    "Match + NCKD": Method(_MATCH, "weight", (0.1, 0.3, 1.0, 3.0, 10.0, 30.0), beside=[_NCKD]),
}


#: On the tiny model's two layers; `layers` and `rank` of your own model are others.
APPLIED: dict[str, Applied] = {
    "MRP": Applied(
        ("mrp", "ORIGINAL", "--data", "DATA", "--layers", "0,1", "--merge"),
        "directions",
        (4, 8, 16, 32, 48, 64),
    ),
    "GUARD-IT": Applied(
        ("guard-it", "ORIGINAL", "--data", "DATA", "--layer", "0"),
        "amount",
        (-0.3, 0.5, 1.0, 2.0, 4.0, 6.0),
    ),
    "SkillPack of NPO": Applied(
        ("graft", "--base", "ORIGINAL", "--unlearned", "CHOSEN", "--next", "ORIGINAL", "--pack"),
        "energy",
        (0.3, 0.5, 0.7, 0.9, 0.95, 0.99),
        after="NPO",
    ),
}


def slug(name: str) -> str:
    """The name of a method in stages and files."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-").replace("--", "-")


def chosen_methods(names: str | None) -> dict[str, Any]:
    """Those whose names (or slugs), separated by commas, were given; all of `METHODS` without.

    Raises:
        UnlearnError: There is no such method.
    """
    if not names:
        return dict(METHODS)
    every: dict[str, Tried] = METHODS | APPLIED
    known = {slug(name): name for name in every}
    wanted = [slug(name.strip()) for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UnlearnError(
            f"the leaderboard has no method {unknown[0]!r}; there are {', '.join(known)}."
        )
    return {known[name]: every[known[name]] for name in wanted}
