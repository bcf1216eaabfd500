"""Search for the best merge: chosen on the validation half, reported on the test half.

Candidates are merged in memory on one resident model and scored teacher-forced; the best few and
the fixed recipe (TIES, density .8, 1:1) are then scored with free generation on validation, the
winner among them is written, and only then the test half is looked at, once.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.merging.lab import Lab
from axolotl_unlearn.merging.recipe import METHODS, SCALES, SPACES, Recipe

FIXED = Recipe(method="ties", space="delta", density=0.8, scale="average")
ADVISED_MEMBERS = 80
CANDIDATES, STUDY, RESULT, PLOT = "candidates.jsonl", "study.journal", "tune.json", "pareto.png"


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
    """A recipe with its proxy scores and what it cost."""

    name: str
    recipe: Recipe
    scores: dict
    value: float
    merge_seconds: float
    score_seconds: float


def key_of(recipe: Recipe) -> str:
    """One text a merge: recipes that differ only in what they do not use share it."""
    values = recipe.to_dict()
    if recipe.method == "linear":
        values["density"] = 1.0
    if not recipe.random:
        values["seed"] = 0
    return json.dumps(values, sort_keys=True)


def suggest(
    trial: Any,
    parents: int,
    methods: Sequence[str],
    spaces: Sequence[str],
    scales: Sequence[str],
    seed: int,
) -> Recipe:
    """One recipe from an Optuna trial. Weights have mean 1 times the strength of a sum."""
    method = trial.suggest_categorical("method", list(methods))
    space = trial.suggest_categorical("space", list(spaces))
    scale = trial.suggest_categorical("scale", list(scales))
    density = trial.suggest_float("density", 0.1, 1.0, step=0.05) if method != "linear" else 1.0
    shares = [
        trial.suggest_float(f"share_{number}", 0.1, 1.0, step=0.05) for number in range(parents)
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
    shares = {f"share_{number}": 1.0 for number in range(parents)}
    points = []
    for method, scale, density, strength in (
        ("ties", "average", 0.8, None),
        ("ties", "average", 1.0, None),
        ("ties", "average", 0.5, None),
        ("linear", "average", None, None),
        ("linear", "sum", None, 0.75),
        ("magnitude_prune", "sum", 0.5, 0.75),
    ):
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
    scales: Sequence[str] = SCALES,
    objective: Objective | None = None,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    device: str = "cpu",
    names: Sequence[str] | None = None,
    overwrite: bool = False,
    force: bool = False,
    log: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> dict:
    """Search; write best/ (model, recipe), tune.json, candidates.jsonl and pareto.png to ``out``.

    ``data_dir`` holds validation/ and test/ (or give both folders). ``seconds``: time budget of the
    search; ``patience``: stop after that many candidates without a better one. A search that was
    interrupted goes on when it is called again with the same settings.
    Returns what tune.json holds. The fixed recipe is always a candidate and a finalist.
    """
    import torch

    from axolotl_unlearn.evaluation.sets import load_sets
    from axolotl_unlearn.merging.run import merge
    from axolotl_unlearn.merging.scores import Scorer

    out, objective = Path(out), objective or Objective()
    if trials < 1 or finalists < 1:
        raise UnlearnError("tune-merge needs at least 1 trial and 1 finalist.")
    for given, allowed, what in (
        (methods, METHODS, "method"),
        (spaces or (), SPACES, "space"),
        (scales, SCALES, "scale"),
    ):
        for value in given:
            if value not in allowed:
                raise UnlearnError(f"unknown {what} {value!r}: use {', '.join(allowed)}.")
    folders = {
        "validation": Path(validation or Path(data_dir) / "validation"),
        "test": Path(test or Path(data_dir) / "test"),
    }
    for name, folder in folders.items():
        if not folder.is_dir():
            raise UnlearnError(
                f"{folder} does not exist: tune-merge chooses on validation/ and reports on test/, "
                f"`axolotl unlearn make-data` writes both, or give --{name}."
            )
    sets = {name: load_sets(folder) for name, folder in folders.items()}
    check_apart(sets["validation"], sets["test"], folders)
    for name, given in sets.items():
        few = min(len(given.member), len(given.nonmember))
        if few < ADVISED_MEMBERS:
            log(
                f"Warning: {folders[name]} has {few} members or non-members; a choice made on "
                f"membership wants {ADVISED_MEMBERS} a side (its AUC has an error of about "
                f"{0.5 / math.sqrt(few):.2f})."
            )

    lab = Lab(base, parents, force=force)
    for warning in lab.warnings:
        log(f"Warning: {warning}")
    spaces = tuple(spaces or (SPACES if lab.factors_possible else ("delta",)))
    names = list(names or [Path(str(parent).removeprefix("negate:")).name for parent in parents])
    settings = {
        "base": lab.base.fingerprint,
        "parents": [f"{'-' if p.negated else ''}{p.fingerprint}" for p in lab.parents],
        "validation": sets["validation"].digest,
        "test": sets["test"].digest,
        "objective": asdict(objective),
        "methods": list(methods),
        "spaces": list(spaces),
        "scales": list(scales),
        "seed": seed,
    }
    store = _Store(out, settings, overwrite)

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(lab.base.path)
    options = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    scorer = Scorer(sets["validation"], tokenizer, **options)
    model = lab.resident_model(device)
    parent_scores = {
        name: store.remember(f"proxy {name}", lambda i=i: scorer.proxy(lab.load(model, i)))
        for i, name in enumerate(names)
    }
    original = store.remember("proxy original", lambda: scorer.proxy(lab.load(model, None)))
    gate_of = original.get("utility")
    objective.value(original, gate_of)  # a missing score ends here, not after the search

    # --- search -----------------------------------------------------------------------------------
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = store.study(seed)
    for point in starting_points(len(parents), methods, spaces, scales):
        study.enqueue_trial(point, skip_if_exists=True)
    candidates: dict[str, Candidate] = {}
    started, since_best, best = time.perf_counter(), 0, -math.inf

    def consider(recipe: Recipe) -> Candidate:
        recipe = recipe.for_parents(len(parents))
        key = key_of(recipe)
        if key in candidates:
            return candidates[key]
        row = store.known.get(key)
        if row is None:
            begun = time.perf_counter()
            lab.load(model, recipe)
            merged = time.perf_counter()
            scores = scorer.proxy(model)
            row = {
                "key": key,
                "recipe": recipe.to_dict(),
                "scores": scores,
                "merge_seconds": merged - begun,
                "score_seconds": time.perf_counter() - merged,
            }
            store.add(row)
        candidates[key] = Candidate(
            name=label(recipe),
            recipe=recipe,
            scores=row["scores"],
            value=objective.value(row["scores"], gate_of),
            merge_seconds=row["merge_seconds"],
            score_seconds=row["score_seconds"],
        )
        return candidates[key]

    fixed = consider(FIXED)
    done = sum(trial.state.is_finished() for trial in study.trials)
    stopped = "all trials done"
    while done < trials:
        if seconds is not None and time.perf_counter() - started > seconds:
            stopped = "time budget"
            break
        if patience is not None and since_best >= patience:
            stopped = f"no better candidate in {patience} trials"
            break
        trial = study.ask()
        candidate = consider(suggest(trial, len(parents), methods, spaces, scales, seed))
        study.tell(trial, candidate.value)
        done += 1
        if candidate.value > best:
            best, since_best = candidate.value, 0
        else:
            since_best += 1
        progress(done, trials, f"best {best:.3f}")
    # Trials of an earlier, interrupted call count too.
    for row in store.known.values():
        consider(Recipe.from_dict(row["recipe"]))

    # --- finalists, then the one look at the test half ------------------------------------------
    ranked = sorted(candidates.values(), key=lambda c: -c.value)
    chosen = ranked[:finalists] + ([fixed] if fixed not in ranked[:finalists] else [])
    rows = []
    for candidate in chosen:
        scores = store.remember(
            f"full {key_of(candidate.recipe)}",
            lambda c=candidate: scorer.full(lab.load(model, c.recipe)),
        )
        value = objective.value(scores, gate_of)
        rows.append({"candidate": candidate, "scores": scores, "value": value})
        log(f"finalist {candidate.name}: {value:.3f} with generation, {candidate.value:.3f} proxy")
    winner = max(rows, key=lambda row: row["value"])
    recipe = winner["candidate"].recipe

    tester = Scorer(sets["test"], tokenizer, **options)
    reported = {"original": None, **{name: i for i, name in enumerate(names)}}
    reported |= {"fixed": FIXED.for_parents(len(parents)), "winner": recipe}
    test_scores = {
        name: store.remember(
            f"test {name} {key_of(source) if isinstance(source, Recipe) else ''}",
            lambda s=source: _with_interval(tester, lab.load(model, s)),
        )
        for name, source in reported.items()
    }
    merge(
        parents, base, out / "best", output="model", overwrite=True, force=force,
        **recipe.to_dict(),
    )  # fmt: skip
    points = [
        {"name": c.name, "kind": "candidate", "scores": c.scores} for c in candidates.values()
    ]
    points += [{"name": n, "kind": "parent", "scores": s} for n, s in parent_scores.items()]
    points.append({"name": "fixed", "kind": "fixed", "scores": fixed.scores})
    points.append({"name": "winner", "kind": "winner", "scores": winner["candidate"].scores})
    _plot(points, out / PLOT)
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
                "proxy_value": row["candidate"].value,
            }
            for row in rows
        ],
        "validation_proxy": {"original": original, **parent_scores},
        "test": test_scores,
        "candidates": [
            {
                "recipe": c.recipe.to_dict(),
                "value": c.value,
                "scores": c.scores,
                "merge_seconds": round(c.merge_seconds, 4),
                "score_seconds": round(c.score_seconds, 4),
            }
            for c in ranked
        ],
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"torch": torch.__version__, "optuna": optuna.__version__},
    }
    (out / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    return result


def label(recipe: Recipe) -> str:
    """A short name for plots and logs."""
    weights = ":".join(f"{weight:.2g}" for weight in recipe.weights or ())
    return f"{recipe.method} {recipe.space} {recipe.density:g} {recipe.scale} {weights}"


def check_apart(validation, test, folders: Mapping[str, Path]) -> None:
    """Choice and report may share neither a document nor a text."""
    from axolotl_unlearn.data.records import document_id

    def content(sets) -> tuple[set[str], set[str]]:
        records = [*sets.forget, *sets.retain]
        documents = [*sets.member, *sets.nonmember]
        # Ids of member files often just number the rows; their texts say whether they are apart.
        ids = {document_id(r.id) for r in records}
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


def _with_interval(scorer, model) -> dict:
    """Full scores with the DeLong interval of the AUC."""
    from axolotl_unlearn.metrics.statistics import auc_interval

    scores = scorer.full(model)
    if scorer.documents:
        losses = scorer.losses(model)
        if all(math.isfinite(loss) for side in losses.values() for loss in side):
            members, nonmembers = ([-v for v in losses[s]] for s in ("member", "nonmember"))
            scores["mia_auc_interval"] = list(auc_interval(members, nonmembers))
    return scores


def _plot(points: Sequence[Mapping], path: Path) -> None:
    from axolotl_unlearn.analysis.figures import pareto_figure

    pareto_figure(points).savefig(path, dpi=130)


class _Store:
    """What survives a kill: settings, candidates one a line, other scores, Optuna's journal."""

    def __init__(self, out: Path, settings: dict, overwrite: bool):
        self.out = out
        if overwrite and out.exists():
            shutil.rmtree(out)
        mark = out / "settings.json"
        text = json.dumps(settings, indent=1, sort_keys=True) + "\n"
        if out.is_dir() and any(out.iterdir()):
            if not mark.exists():
                raise UnlearnError(f"{out} is not empty and holds no search: choose another --out.")
            if mark.read_text() != text:
                raise UnlearnError(
                    f"{out} holds a search with other models, data or settings: choose another "
                    "--out, or --overwrite."
                )
        out.mkdir(parents=True, exist_ok=True)
        mark.write_text(text)
        self.known = {row["key"]: row for row in self._lines(CANDIDATES)}
        self.other = {row["what"]: row["scores"] for row in self._lines("scores.jsonl")}
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    def _lines(self, name: str) -> list[dict]:
        path = self.out / name
        rows = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:  # the last line of a killed run
                continue
        return rows

    def _append(self, name: str, row: dict) -> None:
        with open(self.out / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def add(self, row: dict) -> None:
        self.known[row["key"]] = row
        self._append(CANDIDATES, row)

    def remember(self, what: str, compute: Callable[[], dict]) -> dict:
        if what not in self.other:
            self.other[what] = compute()
            self._append("scores.jsonl", {"what": what, "scores": self.other[what]})
        return self.other[what]

    def study(self, seed: int):
        """The Optuna study of this search; trials that a kill left running count as failed."""
        import warnings

        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate sampling is marked experimental
            storage = JournalStorage(JournalFileBackend(str(self.out / STUDY)))
            finished = len(self.known)
            sampler = optuna.samplers.TPESampler(
                seed=seed + finished, multivariate=True, group=True, n_startup_trials=12
            )
            study = optuna.create_study(
                storage=storage,
                study_name=self.digest,
                sampler=sampler,
                direction="maximize",
                load_if_exists=True,
            )
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        return study
