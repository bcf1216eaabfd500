"""Watching the level while the policy moves: targets are refitted, the run ends by itself.

Every few steps forget, retain and held-out rows are scored under the policy. The held-out rows set
the level (`axolotl_unlearn.reference.level`), and attacks compare the forget documents with them
(`axolotl_unlearn.training.stopping`). Other texts that were never seen have to judge the result.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F

from axolotl_unlearn.attacks.target import collate
from axolotl_unlearn.columns import IGNORE, KINDS, ROLES
from axolotl_unlearn.config import LevelArgs
from axolotl_unlearn.data.coverage import level_faults, named
from axolotl_unlearn.data.overlap import READS
from axolotl_unlearn.data.strategy import load_strategy
from axolotl_unlearn.engine.batch import Batch, to_device, to_host
from axolotl_unlearn.engine.needs import HEAD, ForwardSpec, label_positions, targets
from axolotl_unlearn.engine.observe import observe
from axolotl_unlearn.engine.token_scoring import Query, score_queries
from axolotl_unlearn.engine.views import Entry, rows_of
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import declare, replacing, write_json
from axolotl_unlearn.metrics.learned import learned_attack, text_features, token_features
from axolotl_unlearn.metrics.membership import attack_scores
from axolotl_unlearn.metrics.memorisation import TokenFacts
from axolotl_unlearn.models import input_device
from axolotl_unlearn.objectives import OBJECTIVES
from axolotl_unlearn.reference.base import evaluating, row_keys
from axolotl_unlearn.reference.heldout import HeldoutDistribution
from axolotl_unlearn.reference.level import NEAR, Calibration, Level, entropy_without
from axolotl_unlearn.training.extensions import Extension, Run
from axolotl_unlearn.training.stopping import (
    Scores,
    Stopping,
    attack_aucs,
    sampling_error,
    told_apart,
)

LOG = logging.getLogger(__name__)

#: Retained rows that are scored at a watch, at most, and the most steps between two watches.
RETAIN_ROWS, EVERY = 100, 30
#: Rows of each kind and task that a look scores on either side, at most.
ROWS = 100
#: Share of the steps before targets are moved and the run may end.
SETTLE = 0.25
#: Rows of a side that the learned attack sees at a watch, at most.
LEARNED_ROWS = 1000
#: Rows in a forward that takes their hidden states.
STATE_ROWS = 16
#: Attacks that see nothing but label log-probs, which is all that is known of the level.
OF_LABELS = ("loss", "zlib", "min_k_20")
#: Columns that a row is known by, and those by which a reference is asked.
KEYED = ("input_ids", "attention_mask", "labels")
ASKED = (*KEYED, "role", "kind", "task")


class LevelledReference:
    """A reference whose label log-probs, or with ``tempered`` whose distributions, are read in the
    policy's scale."""

    def __init__(self, reference: Any, level: Level, tempered: bool) -> None:
        self.reference, self.level, self.tempered = reference, level, tempered

    def look_up(self, model: Any, unwrapped: Any, batch: Mapping[str, Tensor], needs: Any) -> Any:
        """As the reference, with the rows' labels at the level to aim at, or its logits divided by
        the temperature."""
        answer = self.reference.look_up(model, unwrapped, batch, needs)
        if self.tempered:
            return replace(answer, logits=lambda x: answer.logits(x) / self.level.temperature)
        # On the host, which knows them all: an accelerator would be waited for in every row.
        known, batch = answer.known.copy(), Batch.of(batch)
        kinds, tasks = batch.on_host("kind"), batch.on_host("task")
        for row in needs.labels.any(-1).nonzero()[0].tolist():
            where, group = needs.labels[row], (int(kinds[row]), int(tasks[row]))
            aim = self.level.aim(torch.from_numpy(known[row, where]), group)
            known[row, where] = aim.numpy()
        return replace(answer, logp=to_device(known, answer.logp.device), known=known)


def forget_rows(path: str, tokenizer: Any, cfg: Any) -> Dataset:
    """Rows of a file, encoded as forget rows are."""
    strategy = load_strategy("forget", tokenizer, cfg, {"path": path})
    return strategy.wrap_dataset(None)


def _drawn(rows: Dataset, chosen: Iterable[int], args: LevelArgs) -> list[int]:
    """Of these rows at most `ROWS` of each kind and task, evenly; with
    ``per_document`` all, for each has to be looked at."""
    groups = defaultdict(list)
    kinds, tasks = rows["kind"][:], rows["task"][:]
    for row in map(int, chosen):
        groups[kinds[row], tasks[row]].append(row)
    most = len(rows) if args.per_document else ROWS
    return sorted(i for group in groups.values() for i in group[:: -(-len(group) // most)])


def some_of(rows: np.ndarray) -> np.ndarray:
    """At most `RETAIN_ROWS` of them, evenly."""
    count = min(len(rows), RETAIN_ROWS)
    return rows[np.arange(count) * len(rows) // max(1, count)]


class ScoredRows:
    """Rows of one set, ready to be scored: queries, groups, texts of the documents.

    Attributes:
        teacher: What the teacher says of their labels, ``[T]`` log-probs a row.
        facts: How they stood under the policy when they were last scored.
    """

    teacher: Sequence[Tensor] = ()
    facts: Sequence[TokenFacts] = ()

    def __init__(self, rows: Sequence[dict[str, Any]], tokenizer: Any) -> None:
        self.rows = list(rows)
        self.groups = [(int(row["kind"]), int(row["task"])) for row in self.rows]
        self.queries, self.texts = [], []
        for row in self.rows:
            ids, labels = list(row["input_ids"]), list(row["labels"])
            times = [t for t in range(len(ids) - 1) if labels[t + 1] != IGNORE]
            self.queries.append(Query(ids, times, [ids[t + 1] for t in times]))
            self.texts.append(tokenizer.decode(ids, skip_special_tokens=True))

    @cached_property
    def keys(self) -> list[bytes]:
        tensors = ({name: torch.tensor([row[name]]) for name in KEYED} for row in self.rows)
        return [row_keys(row)[0] for row in tensors]

    def score(self, model: nn.Module) -> Sequence[TokenFacts]:
        self.facts = score_queries(model, self.queries)
        return self.facts

    @property
    def logps(self) -> list[Tensor]:
        """Of `facts`."""
        return [torch.as_tensor(np.asarray(one.logp, np.float64)) for one in self.facts]

    def by_group(self, values: Sequence[Any]) -> dict[Hashable, list[Any]]:
        grouped = defaultdict(list)
        for group, value in zip(self.groups, values, strict=True):
            grouped[group].append(value)
        return dict(grouped)


def judged(forget: ScoredRows) -> set[Hashable]:
    """Groups that attacks compare: documents (questions are short), or all where there is none."""
    documents = {g for g in forget.groups if g[0] == KINDS["completion"]}
    return documents or set(forget.groups)


def document_scores(rows: ScoredRows, facts: Sequence[TokenFacts], groups: set[Hashable]) -> Scores:
    """The six attacks on the rows of ``groups`` (`judged`), by group."""
    seen, texts = rows.by_group(facts), rows.by_group(rows.texts)
    known = rows.by_group(list(map(_facts, rows.teacher)))
    return {g: attack_scores(seen[g], texts[g], known[g]) for g in seen if g in groups}


def learned_auc(forget: ScoredRows, heldout: ScoredRows, groups: set[Hashable]) -> float | None:
    """AUC of the learned attack on the rows of ``groups``, at least .5; None with too few of them.

    It sees what the others do not: a label at its level between neighbours that are surer, or
    flatter, than those of an unseen text. Features are centred in each group, over both sides.
    """
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    known, unknown = (
        {group: list(map(text_features, facts[group])) for group in groups}
        for facts in (rows.by_group(rows.facts) for rows in (forget, heldout))
    )
    for group in groups:
        centre = np.mean(known[group] + unknown[group], axis=0)
        for side, features in zip(sides, (known, unknown), strict=True):
            side.append(np.array(features[group]) - centre)
    # Its memory grows with the square of the rows.
    members, nonmembers = (
        (rows := np.concatenate(side))[:: max(1, -(-len(rows) // LEARNED_ROWS))] for side in sides
    )
    attack = learned_attack(members, nonmembers, permutations=0)
    return None if attack is None else max(0.5, attack.auc)


def _facts(logp: Tensor) -> TokenFacts:
    unknown = np.full(len(logp), np.nan)
    return TokenFacts(logp.double().numpy(), np.zeros(len(logp), bool), unknown, unknown)


def entropy_excluding_label(facts: TokenFacts) -> np.ndarray:
    """``(1 - p) H`` of each token, nats: p of the label, H the entropy of all others.

    The rest of the whole entropy is that of "the label or not".
    """
    logp = np.minimum(np.asarray(facts.logp, float), 0.0)
    p, other = np.exp(logp), -np.expm1(logp)
    label = -p * logp - other * np.log(np.maximum(other, 1e-300))
    return np.maximum(-np.asarray(facts.mean, float) - label, 0.0)


def _asked(
    row: dict[str, Any], entries: Sequence[tuple[Entry, Any]], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Logits ``[T, V]`` at a row's labels by the first reference that was asked about it, and the
    labels; ``device`` is that of its head."""
    batch = Batch.sent({name: np.asarray(row[name])[None] for name in ASKED}, device)
    for entry, reference in entries:
        if entry.args.positions == "answer" and rows_of(entry, batch).any():
            where = label_positions(batch)
            answer = reference.look_up(None, None, batch, ForwardSpec(states={HEAD: where}))
            with torch.no_grad():
                logits = answer.logits(answer.states[HEAD].values)
            return logits, to_device(targets(batch)[where], logits.device)
    return None


def _meant_by(entries: Sequence[Entry], rows: Dataset) -> np.ndarray:
    """Rows that any of the entries is for, ``[R]`` bool."""
    batch = {name: torch.tensor(rows[name][:]) for name in ("role", "kind", "task")}
    meant = np.zeros(len(rows), dtype=bool)
    for entry in entries:
        meant |= rows_of(entry, batch)
    return meant


@torch.no_grad()
def profiles(model: nn.Module, rows: Sequence[dict[str, Any]]) -> list[Tensor]:
    """`ForwardResult.profiles` of each row at its labels, ``[S]`` each."""
    device = input_device(model)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    values: dict[int, Tensor] = {}
    for chosen in (order[i : i + STATE_ROWS] for i in range(0, len(order), STATE_ROWS)):
        batch = collate([(rows[i]["input_ids"], rows[i]["labels"]) for i in chosen], device)
        seen = observe(model, batch, ForwardSpec(profiles=label_positions(batch))).profiles
        values |= zip(chosen, seen.cpu().double(), strict=True)
    return [values[i] for i in range(len(rows))]


def _kept(
    rows: Sequence[dict[str, Any]], entries: Sequence[tuple[Entry, Any]], device: torch.device
) -> dict[str, float]:
    """`Stopping.start` and its share said of the model that rows are held to; empty if that is not
    known of all of them."""
    asked = [_asked(row, entries, device) for row in rows]
    if not asked or None in asked:
        return {}
    losses = [F.cross_entropy(x.float(), y, reduction="none") for x, y in asked]
    said = [bool((x.argmax(-1) == y).all()) for x, y in asked]
    return {"start": float(torch.cat(losses).mean()), "said_at_start": float(np.mean(said))}


@dataclass(eq=False)
class LevelCallback(Extension):
    """Fits, watches, corrects, stops, and brings the best state back.

    Attributes:
        args: The config's ``unlearn.level``.
        level: In whose scale objectives with a `Objective.level` read their reference.
        forget, heldout, retain: Rows to watch.
        also_asked: The held-out rows as references are asked about them.
        stopping: The rule, from `on_start` on.
        out: Folder for ``level.json``, what was seen at each look.
        log: Gets what the attacks tell.
        rest: For each held-out row `entropy_without` of what the reference says of it, ``[T, K]``,
            or None: the temperature begins where that is as much as the policy is. Else at 1.
        distributions: By what is seen of them, those that get the features of all judged rows at
            each such look.
        rank: Of this process.
    """

    args: LevelArgs
    level: Level
    forget: ScoredRows
    heldout: ScoredRows
    retain: ScoredRows
    also_asked: Dataset | None = None
    stopping: Stopping = field(default_factory=Stopping)
    out: Path | None = None
    log: Callable[[dict[str, float]], None] = lambda _: None
    rest: Sequence[Tensor | None] | None = None
    distributions: Mapping[str, HeldoutDistribution] = field(default_factory=dict)
    rank: int = 0
    resumed: bool = field(default=False, init=False)
    kept: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.judged = judged(self.forget)
        self._levelled: dict[tuple[int, bool], LevelledReference] = {}
        if lacking := level_faults(self.forget.groups, self.heldout.groups):
            raise UnlearnError(*lacking)

    @classmethod
    def of(cls, run: Run) -> LevelCallback:
        """For a run, before references are asked."""
        args, rows, tokenizer = run.args.level, run.rows, run.tokenizer
        unseen = forget_rows(args.heldout, tokenizer, run.cfg)
        seen = np.isin(unseen[READS], rows[READS])
        if seen.any():
            says = f"`unlearn.level.heldout: {args.heldout}` has {seen.sum()} rows that are, token "
            says += "for token, rows of `datasets`"
            if seen.all():
                cure = "give rows that the model never sees"
                raise UnlearnError(f"{says}: {cure}.", code="level.seen")
            LOG.warning("%s: they are left out.", says)
            unseen = unseen.select(np.flatnonzero(~seen))
        unseen = unseen.select(_drawn(unseen, range(len(unseen)), args))
        entries = run.entries
        roles = np.asarray(rows["role"][:])
        matched = _meant_by([one for one in entries if one.objective.level == "labels"], rows)
        if len(unmatched := np.flatnonzero(~matched & (roles == ROLES["forget"]))):
            groups = named((row["kind"], row["task"]) for row in rows.select(unmatched))
            levelled = [name for name, one in OBJECTIVES.items() if one.level == "labels"]
            raise UnlearnError(
                f"`unlearn.level` watches all forget rows, but no entry of {' or '.join(levelled)} "
                f"is for {groups}: add one for them, or forget them in a run of their own."
            )
        seen = dict.fromkeys(e.objective.sees for e in entries if e.objective.against_heldout)
        forget = [rows[i] for i in _drawn(rows, np.flatnonzero(roles == ROLES["forget"]), args)]
        # What rows lose that are trained word by word is not diluted by rows that are only held.
        words = [e for e in entries if e.side == "retain" and not e.objective.reference]
        trained = _meant_by(words, rows)
        retain = np.flatnonzero(trained if trained.any() else roles == ROLES["retain"])
        kept = [rows[int(i)] for i in some_of(retain)]
        return cls(
            args,
            Level(),
            *(ScoredRows(own, tokenizer) for own in (forget, [*unseen], kept)),
            also_asked=unseen,
            out=run.out,
            log=run.log,
            distributions={
                sees: HeldoutDistribution(sees != "profiles", args.least_rows) for sees in seen
            },
            rank=run.rank,
        )

    def on_start(self, run: Run, resumed: Path | None) -> None:
        """What references have said is read; on resume, what `on_checkpoint` wrote."""
        args, entries, device = self.args, run.entries, run.device
        source = next(e.source for e in entries if e.objective.level == "labels")
        asked = run.references[source]
        for one in (self.forget, self.heldout):
            one.teacher = [asked.label_logp(row) for row in one.rows]
        by_teacher = [
            (entry, run.references[entry.source])
            for entry in entries
            if entry.objective.sees == "distributions" and entry.source and entry.source.is_teacher
        ]
        if args.certainty:
            instead = [pair for pair in by_teacher if pair[0].objective.level == "distribution"]
            some = max(1, len(self.heldout.rows) // RETAIN_ROWS)  # one number is made of them
            heldout = enumerate(self.heldout.rows)
            told = (None if i % some else _asked(row, instead, device) for i, row in heldout)
            self.rest = [one and entropy_without(*one).cpu() for one in told]
        held = [pair for pair in by_teacher if pair[0].side == "retain"]
        kept = _kept(self.retain.rows, held, device)
        self.stopping = Stopping(tolerance=args.retain, said=args.said, **kept)
        if resumed:
            self.load(resumed)

    def on_compared(self, entry: Entry, reference: Any) -> Any:
        objective = entry.objective
        if objective.against_heldout:
            return self.distributions[objective.sees]
        tempered = objective.level == "distribution"
        if objective.level is None or (tempered and not self.args.certainty):
            return reference
        levelled = LevelledReference(reference, self.level, tempered)
        return self._levelled.setdefault((id(reference), tempered), levelled)

    def fit(self) -> None:
        """The level as the policy stands, from its label log-probs of the held-out rows."""
        rows = self.heldout
        self.level.fit(rows.by_group(rows.teacher), rows.by_group(rows.logps))

    def begin(self) -> None:
        """The temperature to begin with, from what is compared of the held-out rows."""
        ours, theirs = [], []
        rows = zip(self.heldout.groups, self.heldout.facts, self.rest, strict=True)
        for group, facts, rest in rows:
            if group in self.judged and rest is not None:
                other = -np.expm1(np.asarray(facts.logp, float))
                ours.append(entropy_excluding_label(facts))
                theirs.append(other[:, None] * rest.numpy())
        if ours:
            self.level.begin(float(np.concatenate(ours).mean()), np.concatenate(theirs).mean(0))

    def sharpen(self) -> None:
        """Follow the entropies of what attacks compare, once the labels are near their level."""
        forget = self.forget
        both = [rows.by_group(rows.facts) for rows in (forget, self.heldout)]
        known, now = forget.by_group(forget.teacher), forget.by_group(forget.logps)
        sides, gaps = ([], []), []
        for group in self.judged:
            for side, facts in zip(sides, both, strict=True):
                side += [-np.asarray(f.mean) for f in facts[group]]
            aims = torch.cat([self.level.unmoved(logp, group) for logp in known[group]])
            gaps.append(float((torch.cat(now[group]) - aims).mean()))
        if max(map(abs, gaps)) <= 2 * NEAR:
            self.level.sharpen(*(float(np.concatenate(side).mean()) for side in sides))

    def gather(self, model: nn.Module) -> None:
        """Show each distribution how all judged rows stand."""
        keys = self.forget.by_group(self.forget.keys)

        def stand(rows: ScoredRows, what: str) -> dict:
            if what == "features":
                columns = [map(torch.as_tensor, (f.logp, f.mean, f.sd)) for f in rows.facts]
                return rows.by_group([token_features(*one) for one in columns])
            asked = [i for i, group in enumerate(rows.groups) if group in self.judged]
            values = profiles(model, [rows.rows[i] for i in asked])
            by_row = dict(zip(asked, values, strict=True))
            return rows.by_group([by_row.get(i) for i in range(len(rows.rows))])

        for what, distribution in self.distributions.items():
            seen, unseen = stand(self.forget, what), stand(self.heldout, what)
            distribution.look(
                {group: dict(zip(keys[group], seen[group], strict=True)) for group in self.judged},
                {group: torch.stack(unseen[group]) for group in self.judged},
            )

    def expected(self) -> dict[str, float]:
        """AUC of each attack if every document were at its level: the teacher knows which are
        harder than others for a model that saw neither."""
        sides = []
        for rows in (self.forget, self.heldout):
            aims = map(self.level.unmoved, rows.teacher, rows.groups)
            sides.append(document_scores(rows, list(map(_facts, aims)), self.judged))
        return {name: value for name, value in attack_aucs(*sides).items() if name in OF_LABELS}

    def watch(self, model: nn.Module, step: int, correct: bool) -> tuple[bool, bool]:
        """One look at all rows; (best so far, may end)."""
        forget, heldout = both = self.forget, self.heldout
        for rows in both:
            rows.score(model)
        self.fit()
        if step == 0 and self.rest:
            self.begin()
        if correct:
            self.level.correct(forget.by_group(forget.teacher), forget.by_group(forget.logps))
            if self.args.certainty:
                self.sharpen()
            self.gather(model)
        seen, unseen = (document_scores(rows, rows.facts, self.judged) for rows in both)
        aucs = attack_aucs(seen, unseen)
        learned = learned_auc(forget, heldout, self.judged)
        if learned is not None:
            aucs["learned"] = learned
        kept = self.retain.score(model)
        loss = -float(torch.cat(self.retain.logps).mean())
        said = float(np.mean([one.greedy.all() for one in kept]))
        few = {}
        if self.args.per_document:
            few = {"told": told_apart(seen, unseen), "error": sampling_error(seen, unseen)}
        verdict = self.stopping.see(step, aucs, loss, self.expected(), said=said, **few)
        self.log(
            {f"level/auc_{name}": round(value, 3) for name, value in aucs.items()}
            | {"level/retain_nll": round(loss, 4), "level/retain_said": round(said, 3)}
            | {"level/temperature": round(self.level.temperature, 3)}
        )
        return verdict

    def _moving(self) -> list[Any]:
        return [self.level, self.stopping, *self.distributions.values()]

    def on_checkpoint(self, out: Path, folder: Path) -> None:
        """What a resumed run needs to go on bit by bit."""
        declare(out, folder, "log-probs", folder=True)
        with replacing(folder / f"level-{self.rank}.pt") as draft:
            torch.save((self.kept, [vars(one) for one in self._moving()]), draft)

    def load(self, folder: Path) -> None:
        """What `on_checkpoint` wrote.

        Raises:
            UnlearnError: There is none.
        """
        path = folder / f"level-{self.rank}.pt"
        if not path.is_file():
            raise UnlearnError(
                f"{path} is missing: without it the half-forgotten model would count as the start "
                "of `unlearn.level`; start the run again from its beginning."
            )
        with torch.serialization.safe_globals([Calibration]):
            self.kept, moved = torch.load(path, "cpu", weights_only=True)
        self.resumed = True
        for one, values in zip(self._moving(), moved, strict=True):
            vars(one).update(values)

    def on_train_begin(self, args, state, control, model=None, **_):
        if self.resumed:
            return
        with evaluating(model):
            self.watch(model, 0, correct=False)
        self.stopping.forget_the_best()  # the start is what is to go

    def on_step_end(self, args, state, control, model=None, **_):
        step = state.global_step
        last = step >= state.max_steps
        every = self.args.every or max(1, min(EVERY, state.max_steps // 5))
        if step % every and not last:
            return control
        settled = step > SETTLE * state.max_steps
        with evaluating(model):
            loss_is_due = control.should_log
            mine = self.watch(model, step, correct=settled and not last)
            # The first process's: last bits differ, and all must end at one step.
            better, stop = broadcast_object_list([mine])[0]
            control.should_log = loss_is_due  # which a log of one's own takes back
        if better:
            moving = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
            copies = to_host([*moving.values()])  # of a CPU's they are the same tensors
            self.kept = {n: copy.clone() for n, copy in zip(moving, copies, strict=True)}
        if stop and settled and not last:
            stalled = self.stopping.stalled
            why = "nothing better came" if stalled else "no attack tells forget documents"
            LOG.info("step %d: %s; done.", step, why)
            control.should_training_stop = True
        return control

    @torch.no_grad()
    def on_train_end(self, args, state, control, model=None, **_):
        rule = self.stopping
        handed = state.global_step if rule.best_step is None else rule.best_step
        if self.kept and handed != state.global_step:
            LOG.info("the state of step %s is the best one and is kept.", handed)
        for name, p in model.named_parameters():  # the first process's best, whatever one's own is
            if name in self.kept:
                p.copy_(self.kept[name])
        if fault := rule.fault():
            LOG.warning(fault)
        if self.out is not None and state.is_world_process_zero:
            to_keep = {"loss": rule.start, "said": rule.said_at_start}
            report = {"kept_step": handed, "retained": to_keep, "watched": rule.history}
            write_json(self.out / "level.json", report)
        return control
