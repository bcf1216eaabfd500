"""Search for the best merge: chosen on the validation half, reported on the test half.

Candidates are merged in memory on one resident model and scored teacher-forced, with ROUGE put on
the scale of generated text (`scores.corrected`); the best few are then scored with free generation
on validation, as are the fixed recipe (TIES, density .8, 1:1) and each parent by itself. The winner
among them is written, and only then the test half is looked at, once.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import replacing, write, write_json
from axolotl_unlearn.merging.recipe import METHODS, SCALES, SPACES, Recipe
from axolotl_unlearn.merging.weights import read_json
from axolotl_unlearn.metrics.intervals import auc_interval, ideal_membership
from axolotl_unlearn.store import Store, content_key, versions
from research.merging.lab import Lab, merged_model
from research.merging.scores import Scorer, corrected

FIXED = Recipe(method="ties", space="delta", density=0.8, scale="average")
ADVISED_MEMBERS = 80
#: Raised when a score changes its meaning.
_VERSION = 3
STUDY, RESULT, PLOT = "study.journal", "tune.json", "pareto.png"


#: Known good merges to begin with: method, scale, density, strength of a sum.
STARTS = (
    ("ties", "average", 0.8, None),
    ("ties", "average", 1.0, None),
    ("ties", "average", 0.5, None),
    ("linear", "average", None, None),
    ("linear", "sum", None, 0.75),
    ("magnitude_prune", "sum", 0.5, 0.75),
)
#: The same for one parent, whose average is itself: its task vector at other scales.
SINGLE_STARTS = (
    ("linear", "sum", None, 0.75),
    ("linear", "sum", None, 1.25),
    ("linear", "sum", None, 0.5),
    ("magnitude_prune", "sum", 0.5, 1.0),
)


@dataclass(frozen=True)
class Objective:
    """What is maximised: a weighted mean of scores, below a gate on utility.

    ``weights``: score name -> weight; high must be good (use mia_score, not mia_auc: it targets an
    AUC of .5 from both sides). A candidate whose utility is below ``gate`` times the original's
    loses 1, so that it is worse than any candidate above the gate.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"aggregate": 1.0})
    gate: float = 0.75

    def __post_init__(self) -> None:
        if not self.weights or not all(
            isinstance(w, int | float) and math.isfinite(w) and w >= 0
            for w in self.weights.values()
        ):
            raise UnlearnError("objective weights must be numbers of 0 or more, at least one.")
        if not any(self.weights.values()):
            raise UnlearnError("all objective weights are 0: nothing to maximise.")
        if "mia_auc" in self.weights:
            raise UnlearnError("mia_auc is best at .5, not high: use mia_score in the objective.")
        if not 0 <= self.gate <= 1:
            raise UnlearnError(f"gate {self.gate!r} is not in [0, 1]: it is a share of utility.")

    @classmethod
    def parse(cls, text: str, gate: float = 0.75) -> Objective:
        """From "task_aggregate=1,mia_score=2"; a name alone has weight 1."""
        weights = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                weights[name] = float(value) if value else 1.0
            except ValueError as error:
                raise UnlearnError(
                    f"objective {part.strip()!r} is not name=number, as in mia_score=2."
                ) from error
        return cls(weights, gate)

    def value(self, scores: Mapping[str, float | None], original: float | None) -> float:
        """The number to maximise; ``original``: utility of the original model, None if unknown."""
        total = 0.0
        for name, weight in self.weights.items():
            score = scores.get(name)
            if score is None:
                known = ", ".join(sorted(k for k, v in scores.items() if v is not None))
                raise UnlearnError(
                    f"the validation data give no {name!r}: choose from {known}, or add the data."
                )
            total += weight * score
        value = total / sum(self.weights.values())
        utility = scores.get("utility")
        if utility is not None and original is not None and utility < self.gate * original:
            value -= 1.0
        return value


@dataclass(frozen=True)
class Candidate:
    """A recipe with its teacher-forced scores, the value they promise, and what it cost."""

    name: str
    recipe: Recipe
    scores: dict
    value: float
    merge_seconds: float
    score_seconds: float

    def row(self) -> dict:
        return {**asdict(self), "recipe": self.recipe.to_dict()}


def key_of(recipe: Recipe) -> str:
    """One text a merge: recipes that differ only in what they do not use share it."""
    values = recipe.to_dict()
    if recipe.method == "linear":
        values["density"] = 1.0
    if not recipe.random:
        values["seed"] = 0
    return json.dumps(values, sort_keys=True)


def alone(parent: int, parents: int) -> Recipe:
    """The merge that is one of its parents."""
    weights = tuple(float(number == parent) for number in range(parents))
    return Recipe(method="linear", scale="sum", density=1.0, weights=weights)


def suggest(
    trial: Any,
    parents: int,
    methods: Sequence[str],
    spaces: Sequence[str],
    scales: Sequence[str],
    seed: int,
) -> Recipe:
    """One recipe from an Optuna trial. Weights have mean 1 times the strength of a sum.

    A single parent has no shares: its sum is its task vector at the scale ``strength``.
    """
    method = trial.suggest_categorical("method", list(methods))
    space = trial.suggest_categorical("space", list(spaces))
    scale = trial.suggest_categorical("scale", list(scales))
    density = trial.suggest_float("density", 0.1, 1.0, step=0.05) if method != "linear" else 1.0
    shares = [
        trial.suggest_float(f"share_{number}", 0.1, 1.0, step=0.05) if parents > 1 else 1.0
        for number in range(parents)
    ]
    strength = trial.suggest_float("strength", 0.3, 1.5, step=0.05) if scale == "sum" else 1.0
    mean = sum(shares) / len(shares)
    return Recipe(
        method=method,
        space=space,
        scale=scale,
        density=round(density, 4),
        weights=tuple(round(strength * share / mean, 6) for share in shares),
        seed=seed,
    )


def starting_points(
    parents: int, methods: Sequence[str], spaces: Sequence[str], scales: Sequence[str]
) -> list[dict]:
    """The fixed recipe, and a few known good ones, as Optuna parameters of ``suggest``."""
    shares = {f"share_{number}": 1.0 for number in range(parents) if parents > 1}
    points = []
    for method, scale, density, strength in SINGLE_STARTS if parents == 1 else STARTS:
        if method in methods and scale in scales and "delta" in spaces:
            point = {"method": method, "space": "delta", "scale": scale, **shares}
            if density is not None:
                point["density"] = density
            if strength is not None:
                point["strength"] = strength
            points.append(point)
    return points


def tune(
    parents: Sequence[str | Path],
    base: str | Path,
    data_dir: str | Path,
    out: str | Path,
    *,
    trials: int = 40,
    finalists: int = 3,
    seconds: float | None = None,
    patience: int | None = None,
    seed: int = 0,
    methods: Sequence[str] = METHODS,
    spaces: Sequence[str] | None = None,
    scales: Sequence[str] | None = None,
    objective: Objective | None = None,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    device: str = "cpu",
    names: Sequence[str] | None = None,
    store: str | Path | None = None,
    overwrite: bool = False,
    force: bool = False,
    log: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> dict:
    """Search; write best/ (model, recipe), tune.json, study.journal and pareto.png to ``out``.

    ``store``: folder of scores by content that searches may share; default ``out/store``.

    ``data_dir`` holds validation/ and test/ (or give both folders). One parent is searched as
    several are, over the scale of its task vector: a single run then has had the selection that a
    merge has. ``seconds``: time budget of the search; ``patience``: stop after that many candidates
    without a better one. A search that was interrupted goes on when it is called again with the
    same settings; one with other settings scores again only what the last one has not.
    Returns what tune.json holds. The fixed recipe and each parent by itself are always finalists,
    so the winner is a parent if no merge was better on validation; ``log`` says so.
    """
    out, objective = Path(out), objective or Objective()
    if trials < 1 or finalists < 1:
        raise UnlearnError("tune-merge needs at least 1 trial and 1 finalist.")
    _known(methods, METHODS, "method")
    _known(spaces or (), SPACES, "space")
    _known(scales or (), SCALES, "scale")
    scales = tuple(scales or (SCALES if len(parents) > 1 else ("sum",)))
    halves = {
        "validation": Path(validation or Path(data_dir) / "validation"),
        "test": Path(test or Path(data_dir) / "test"),
    }
    sets = load_halves(halves, log)
    lab = Lab(base, parents, force=force)
    for warning in lab.warnings:
        log(f"Warning: {warning}")
    spaces = tuple(spaces or (SPACES if lab.factors_possible else ("delta",)))
    names = list(names or [Path(str(parent).removeprefix("negate:")).name for parent in parents])
    # What a score depends on, and what else a search does.
    content = {
        "base": [
            lab.base.fingerprint,
            content_key((lab.base.path / "tokenizer.json").read_text("utf-8")),
        ],
        "parents": [f"{'-' if p.negated else ''}{p.fingerprint}" for p in lab.parents],
        "validation": sets["validation"].digest,
        "test": sets["test"].digest,
        "device": device.split(":")[0],
        "max_new_tokens": max_new_tokens,
    }
    settings = content | {
        "objective": asdict(objective),
        "methods": list(methods),
        "spaces": list(spaces),
        "scales": list(scales),
        "seed": seed,
    }
    check_place(out, settings, overwrite)
    study = open_study(out / STUDY, settings, seed, known=len(parents) + 1)
    search = _Search(
        lab=lab,
        model=lab.resident_model(device),
        store=Store(store or out / "store"),
        content=content,
        objective=objective,
        names=names,
        options={"max_new_tokens": max_new_tokens, "batch_size": batch_size},
        log=log,
    )
    search.open(sets["validation"])
    started = time.perf_counter()

    def draw(trial) -> Recipe:
        return suggest(trial, len(parents), methods, spaces, scales, seed)

    starts = starting_points(len(parents), methods, spaces, scales)
    done, stopped = search.run(study, draw, starts, trials, seconds, patience, progress)
    finals = search.finals(finalists)
    winner = max(finals, key=lambda row: row["value"])
    recipe = winner["candidate"].recipe
    for name, candidate in search.parents.items():
        if candidate is winner["candidate"]:
            log(f"Warning: no merge is better on validation than the parent {name!r} by itself.")
    test_scores, differences = search.report(sets["test"], recipe)
    merged_model(parents, base, out / "best", recipe, overwrite=True, force=force)
    search.plot(winner["candidate"], out / PLOT)
    result = {
        "settings": settings,
        "parents": {name: str(parent) for name, parent in zip(names, parents, strict=True)},
        "base": str(base),
        "stopped": stopped,
        "trials": done,
        "winner": {
            "recipe": recipe.to_dict(),
            "proxy": winner["candidate"].scores,
            "validation": winner["scores"],
            "value": winner["value"],
        },
        "finalists": [
            {
                "recipe": row["candidate"].recipe.to_dict(),
                "validation": row["scores"],
                "value": row["value"],
                "expected_value": row["candidate"].value,
            }
            for row in finals
        ],
        "validation_proxy": {
            "original": search.original,
            **{name: parent.scores for name, parent in search.parents.items()},
        },
        "test": test_scores,
        "test_differences": differences,
        "candidates": [candidate.row() for candidate in search.ranked()],
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {name: version(name) for name in ("torch", "optuna", "mergekit")},
    }
    write_json(out / RESULT, result)
    return result


def _known(given: Sequence[str], allowed: Sequence[str], what: str) -> None:
    for value in given:
        if value not in allowed:
            raise UnlearnError(f"unknown {what} {value!r}: use {', '.join(allowed)}.")


def load_halves(folders: Mapping[str, Path], log: Callable[[str], None]) -> dict:
    """The validation and the test set, checked to be apart."""
    from axolotl_unlearn.evaluation.sets import load_sets

    for name, folder in folders.items():
        if not folder.is_dir():
            raise UnlearnError(
                f"{folder} does not exist: tune-merge chooses on validation/ and reports on test/, "
                f"`python -m research make-data` writes both, or give --{name}."
            )
    sets = {name: load_sets(folder) for name, folder in folders.items()}
    check_apart(sets["validation"], sets["test"], folders)
    for name, given in sets.items():
        sides = len(given.member), len(given.nonmember)
        if 0 < min(sides) < ADVISED_MEMBERS:
            error = ideal_membership(*sides).standard_error
            log(
                f"Warning: {folders[name]} has {sides[0]} members and {sides[1]} non-members; a "
                f"choice made on membership wants {ADVISED_MEMBERS} a side (the AUC of a model "
                f"that never saw them has a standard error of {error:.3f})."
            )
    return sets


@dataclass
class _Search:
    """One resident model, its candidates so far, and what is known of parents and original."""

    lab: Lab
    model: Any
    store: Store
    content: Mapping
    objective: Objective
    names: list[str]
    options: dict
    log: Callable[[str], None]
    candidates: dict[str, Candidate] = field(default_factory=dict)
    both: list[tuple[dict, dict]] = field(default_factory=list)

    def open(self, validation) -> None:
        """Score original, parents and fixed recipe both ways.

        Ends here if the objective needs a score that is missing.
        """
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.lab.base.path)
        self.scorer = self._scorer(validation)
        self.original = self._remember("proxy original", self.scorer.proxy)
        self.gate_of = self.original.get("utility")
        self.objective.value(self.original, self.gate_of)
        count = len(self.names)
        self.parents = {n: self.consider(alone(i, count)) for i, n in enumerate(self.names)}
        self.fixed = self.consider(FIXED)
        self.both = [(self.original, self._remember("full original", self.scorer.full))]
        always = [*self.parents.values(), self.fixed]
        self.both += [(candidate.scores, self.full(candidate)) for candidate in always]

    def _scorer(self, sets):
        return Scorer(sets, self.tokenizer, **self.options)

    def _remember(self, what: str, score: Callable[[Any], dict], source=None) -> dict:
        return self._kept(what, lambda: score(self.lab.load(self.model, source)))

    def _kept(self, what: str, compute: Callable[[], dict]) -> dict:
        """From the store, under what it follows from; computed now if it is not there."""
        key = content_key("tune-merge", _VERSION, versions(), self.content, what)
        found = self.store.get(key)
        if found is None:
            found = compute()
            self.store.put(key, found)
        return found

    def full(self, candidate: Candidate) -> dict:
        """Scores with free generation on validation."""
        what = f"full {key_of(candidate.recipe)}"
        return self._remember(what, self.scorer.full, candidate.recipe)

    def value(self, scores: Mapping[str, float | None]) -> float:
        """What teacher-forced scores promise, by what is known of models scored both ways."""
        return self.objective.value(corrected(scores, self.both), self.gate_of)

    def consider(self, recipe: Recipe) -> Candidate:
        """The candidate of a recipe: merged and scored now unless it is known."""
        recipe = recipe.for_parents(len(self.lab.parents))
        key = key_of(recipe)
        if key in self.candidates:
            return self.candidates[key]

        def look() -> dict:
            begun = time.perf_counter()
            self.lab.load(self.model, recipe)
            merged = time.perf_counter()
            scores = self.scorer.proxy(self.model)
            return {
                "scores": scores,
                "merge_seconds": round(merged - begun, 4),
                "score_seconds": round(time.perf_counter() - merged, 4),
            }

        row = self._kept(f"proxy {key}", look)
        self.candidates[key] = Candidate(
            name=label(recipe), recipe=recipe, value=self.value(row["scores"]), **row
        )
        return self.candidates[key]

    def run(
        self,
        study: Any,
        draw: Callable[[Any], Recipe],
        starts: Sequence[dict],
        trials: int,
        seconds: float | None,
        patience: int | None,
        progress: Callable[[int, int, str], None],
    ) -> tuple[int, str]:
        """Ask, merge, score, tell; returns the number of trials done and why it stopped."""
        for point in starts:
            study.enqueue_trial(point, skip_if_exists=True)
        finished = _finished(study)
        for trial in finished:  # candidates of an earlier, interrupted call count too
            self.consider(Recipe.from_dict(trial.user_attrs["recipe"]))
        best = max((trial.value for trial in finished), default=-math.inf)
        done, since_best, started = len(finished), 0, time.perf_counter()
        stopped = "all trials done"
        while done < trials:
            if seconds is not None and time.perf_counter() - started > seconds:
                stopped = "time budget"
                break
            if patience is not None and since_best >= patience:
                stopped = f"no better candidate in {patience} trials"
                break
            trial = study.ask()
            candidate = self.consider(draw(trial))
            trial.set_user_attr("recipe", candidate.recipe.to_dict())
            study.tell(trial, candidate.value)
            done += 1
            since_best = 0 if candidate.value > best else since_best + 1
            best = max(best, candidate.value)
            progress(done, trials, f"best {best:.3f}")
        return done, stopped

    def ranked(self) -> list[Candidate]:
        """All candidates by the value that their scores promise now, the best first."""
        known = [replace(one, value=self.value(one.scores)) for one in self.candidates.values()]
        # Level ones in an order of their own: an interrupted search met them in another.
        return sorted(known, key=lambda candidate: (-candidate.value, key_of(candidate.recipe)))

    def finals(self, count: int) -> list[dict]:
        """The most promising few, the fixed recipe and the parents, generated on validation.

        One after the other: each tells more of what teacher-forced scores promise.
        """
        rows: list[dict] = []

        def add(candidate: Candidate) -> None:
            scores = self.full(candidate)
            value = self.objective.value(scores, self.gate_of)
            rows.append({"candidate": candidate, "scores": scores, "value": value})
            self.log(
                f"finalist {candidate.name}: {value:.3f} with generation, "
                f"{candidate.value:.3f} expected"
            )

        for candidate in (*self.parents.values(), self.fixed):
            add(candidate)
        chosen = {key_of(row["candidate"].recipe) for row in rows}
        for _ in range(count):
            rest = [one for one in self.ranked() if key_of(one.recipe) not in chosen]
            if not rest:
                break
            chosen.add(key_of(rest[0].recipe))
            add(rest[0])
            self.both.append((rest[0].scores, rows[-1]["scores"]))
        return rows

    def report(self, test, winner: Recipe) -> tuple[dict[str, dict], dict[str, dict]]:
        """The one look at the test half: original, parents, fixed recipe, winner.

        Returns:
            Their scores, and by how much the winner differs from each (paired by document).
        """
        from axolotl_unlearn.evaluation.measurement import Measured
        from axolotl_unlearn.evaluation.summary import scores_of

        scorer = self._scorer(test)
        sources: dict[str, Any] = {"original": None}
        sources |= {name: number for number, name in enumerate(self.names)}
        sources |= {"fixed": self.fixed.recipe, "winner": winner}
        found = {}
        for name, source in sources.items():
            what = f"measured on test {key_of(source) if isinstance(source, Recipe) else name}"
            found[name] = Measured(
                **self._remember(what, lambda m: vars(scorer.measure(m)), source)
            )
        scores = {name: _with_interval(scorer, one) for name, one in found.items()}
        differences = {}
        for name, one in found.items():
            # Without documents of one side, or with a model that broke, nothing is paired.
            if name != "winner" and all("mia_auc_interval" in scores[n] for n in (name, "winner")):
                both = (scores_of(some, test) for some in (found["winner"], one))
                gaps = next(both).differences(next(both))
                differences[name] = {metric: asdict(gap) for metric, gap in gaps.items()}
        return scores, differences

    def plot(self, winner: Candidate, path: Path) -> None:
        from research.analysis.figures import pareto_figure

        points = [
            {"name": c.name, "kind": "candidate", "scores": c.scores}
            for c in self.candidates.values()
            if c.name not in {parent.name for parent in self.parents.values()}
        ]
        points += [
            {"name": name, "kind": "parent", "scores": parent.scores}
            for name, parent in self.parents.items()
        ]
        points.append({"name": "fixed", "kind": "fixed", "scores": self.fixed.scores})
        points.append({"name": "winner", "kind": "winner", "scores": winner.scores})
        with replacing(path) as draft:
            pareto_figure(points).savefig(draft, dpi=130, format=path.suffix[1:])


def label(recipe: Recipe) -> str:
    """A short name for plots and logs."""
    weights = ":".join(f"{weight:.2g}" for weight in recipe.weights or ())
    return f"{recipe.method} {recipe.space} {recipe.density:g} {recipe.scale} {weights}"


def check_apart(validation, test, folders: Mapping[str, Path]) -> None:
    """Choice and report may share neither a document nor a text."""

    def content(sets) -> tuple[set[str], set[str]]:
        records = [*sets.forget, *sets.retain]
        documents = [*sets.member, *sets.nonmember]
        # Ids of member files often just number the rows; their texts say whether they are apart.
        ids = {r.document for r in records}
        return ids, {r.input + "\n" + r.output for r in records} | {text for _, text in documents}

    for what, mine, theirs in zip(
        ("document", "text"), content(validation), content(test), strict=True
    ):
        if shared := sorted(mine & theirs):
            example = f", for example {shared[0]!r}" if what == "document" else ""
            raise UnlearnError(
                f"{folders['validation']} and {folders['test']} share {len(shared)} {what}s"
                f"{example}: split by document, or the report would be of the choice itself."
            )


def _with_interval(scorer: Scorer, found: Any) -> dict:
    """Scores with the DeLong interval of the AUC, where there is an AUC."""
    scores = scorer.scores_of(found)
    sides = found.member_loss, found.nonmember_loss
    if all(sides) and all(math.isfinite(loss) for side in sides for loss in side):
        members, nonmembers = ([-loss for loss in side] for side in sides)
        scores["mia_auc_interval"] = list(auc_interval(members, nonmembers))
    return scores


def open_study(path: Path, settings: Mapping, seed: int, known: int) -> Any:
    """The Optuna study of these settings in a journal; each trial's recipe is in its user_attrs.

    Trials that a kill left running count as failed. ``known``: how many candidates stand
    beforehand; with the finished trials they shift the sampler's seed.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():  # Optuna stops for good at the half line of a killed run
        data = path.read_bytes()
        write(path, data[: data.rfind(b"\n") + 1])
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # journals and multivariate sampling: experimental
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path))),
            study_name=content_key(settings),
            direction="maximize",
            load_if_exists=True,
        )
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.sampler = optuna.samplers.TPESampler(
            seed=seed + known + len(_finished(study)),
            multivariate=True,
            group=True,
            n_startup_trials=12,
        )
    return study


def _finished(study: Any) -> list:
    return [trial for trial in study.trials if trial.state.name == "COMPLETE"]


def check_place(out: Path, settings: Mapping, overwrite: bool) -> None:
    """A finished search of other settings is replaced only when asked; its scores stay known."""
    if out.is_dir() and any(out.iterdir()) and not (out / STUDY).exists():
        raise UnlearnError(f"{out} is not empty and holds no search: choose another --out.")
    result = out / RESULT
    if result.exists() and not overwrite and read_json(result).get("settings") != settings:
        raise UnlearnError(
            f"{out} holds a search with other models, data or settings: choose another --out, or "
            "--overwrite."
        )
