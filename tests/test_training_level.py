"""Stopping by itself on made-up scores, and a real run that watches its level."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from axolotl.utils.dict import DictDefault
from conftest import tiny_llama
from datasets import Dataset
from fault_codes import fails
from safetensors.torch import load_file
from test_train_axolotl import run, tiny_olmo
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from axolotl_unlearn.config import LevelArgs, parse_unlearn
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.memorisation import TokenFacts
from axolotl_unlearn.reference.level import COLDEST, Level, entropy_without
from axolotl_unlearn.training import level
from axolotl_unlearn.training.level import (
    LevelCallback,
    LevelledReference,
    ScoredRows,
    entropy_excluding_label,
    forget_rows,
    judged,
    learned_auc,
)
from axolotl_unlearn.training.stopping import (
    Stopping,
    attack_aucs,
    sampling_error,
    told_apart,
)

ARGS = LevelArgs(heldout="-")


def scores(*groups: tuple[float, int], attacks=("loss", "min_k_20"), seed=0):
    """Group g has n scores around a mean."""
    rng = np.random.default_rng(seed)
    return {
        g: {name: mean + 0.1 * rng.standard_normal(n) for name in attacks}
        for g, (mean, n) in enumerate(groups)
    }


def test_documents_are_compared_within_their_kind():
    """Kinds at -1 and -3 nats, forget documents .2 above held-out ones in both: an AUC of about
    .92 in each kind. Pooled over kinds of unequal numbers it would be something else."""
    forget = scores((-0.8, 40), (-2.8, 10))
    unseen = scores((-1.0, 10), (-3.0, 40), seed=1)
    for value in attack_aucs(forget, unseen).values():
        assert 0.85 < value <= 1
    same = attack_aucs(scores((-1, 200), (-3, 200)), scores((-1, 200), (-3, 200), seed=1))
    assert all(abs(value - 0.5) < 0.1 for value in same.values())
    # Weights are the forget documents: group 0 is told apart fully, group 1 not at all.
    told = attack_aucs(
        {0: {"loss": np.ones(30)}, 1: {"loss": np.zeros(10)}, 2: {"loss": np.ones(5)}},
        {0: {"loss": np.zeros(3)}, 1: {"loss": np.zeros(4)}},
    )
    assert told == {"loss": pytest.approx((30 * 1.0 + 10 * 0.5) / 40)}


HARDER = {"expected": {"loss": 0.42}}
DRIFT = [(1.0, 0.2), (0.75, 0.2), (0.58, 0.2), (0.59, 0.2), (0.6, 0.25)]
#: Name -> (rule, looks of AUCs, loss of retained rows and what else is seen, is this the best state
#: so far, may the run end).
RULES = {
    "no attack tells, twice in a row": ({"margin": 0.1, "tolerance": 0.1, "patience": 2}, [
        ({"loss": 1.0, "min_k": 1.0}, 0.2, {}, (True, False)),
        ({"loss": 0.55, "min_k": 0.75}, 0.25, {}, (True, False)),  # one attack still tells
        ({"loss": 0.52, "min_k": 0.58}, 0.25, {}, (True, False)),
        ({"loss": 0.25, "min_k": 0.40}, 0.25, {}, (False, False)),  # over-forgotten: told as well
        ({"loss": 0.47, "min_k": 0.56}, 0.25, {}, (True, False)),
        ({"loss": 0.45, "min_k": 0.55}, 0.25, {}, (True, True)),
    ]),
    "nothing better comes": ({"stale": 2}, [
        ({"loss": auc}, loss, {}, (n < 3, n == 4)) for n, (auc, loss) in enumerate(DRIFT)
    ]),
    "that is not good enough to end with": ({"stale": 2, "margin": 0.03}, [  # .08 off
        ({"loss": auc}, loss, {}, (n < 3, False)) for n, (auc, loss) in enumerate(DRIFT)
    ]),
    # What chance gives is no reason to go on: within both margins here, too.
    "nothing better comes of few documents": ({"stale": 2}, [
        ({"loss": auc}, 0.2, {"error": 0.12}, (n < 2, n == 3))
        for n, auc in enumerate((0.8, 0.7, 0.72, 0.71))
    ]),
    "the best state is the start, which knows everything": ({"stale": 2}, [
        ({"loss": 1.0}, 0.2, {}, (True, False)), *[({"loss": 0.5}, 0.5, {}, (False, False))] * 4,
    ]),
    # Forget documents are harder than the held-out ones for every model: .42 is right, .50 is not.
    "the goal is what the level gives": ({"margin": 0.05, "tolerance": 0.1, "patience": 1}, [
        ({"loss": 0.50}, 0.2, HARDER, (True, False)), ({"loss": 0.44}, 0.2, HARDER, (True, True)),
        ({"loss": 0.43, "reference": 0.56}, 0.2, HARDER, (False, False)),
    ]),
    "retained rows are lost": ({"margin": 0.1, "tolerance": 0.1, "patience": 1}, [
        ({"loss": 1.0}, 0.2, {}, (True, False)), ({"loss": 0.8}, 0.25, {}, (True, False)),
        ({"loss": 0.5}, 0.45, {}, (False, False)),  # .15 nats too many
        ({"loss": 0.6}, 0.30, {}, (True, True)),
    ]),
    # .02 nats a token are nothing, but one answer in four was lost.
    "they are no longer said": ({"margin": 0.1, "tolerance": 0.1, "patience": 1, "said": 0.05}, [
        ({"loss": 1.0}, 0.02, {"said": 0.99}, (True, False)),
        ({"loss": 0.5}, 0.04, {"said": 0.75}, (False, False)),
        ({"loss": 0.6}, 0.04, {"said": 0.96}, (True, True)),
    ]),
    "a single document is told": ({"margin": 0.05, "patience": 1}, [
        ({"loss": 0.6}, 0.2, {}, (True, False)),
        ({"loss": 0.6}, 0.2, {"told": 1, "error": 0.12}, (False, False)),
        ({"loss": 0.6}, 0.2, {"error": 0.12}, (False, True)),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_when_a_run_ends_and_which_state_is_kept(name):
    how, looks = RULES[name]
    rule, kept = Stopping(**how), 0
    for step, (aucs, loss, more, wanted) in enumerate(looks):
        assert rule.see(step, aucs, loss, **more) == wanted, step
        kept = step if wanted[0] else kept
        shown = {key: more[key] for key in ("told", "expected") if key in more}
        seen = {"step": step, **aucs, "retain_loss": loss, "retain_said": more.get("said", 0.0)}
        assert rule.best_step == kept and rule.history[step] == seen | shown


def test_a_look_scores_some_rows_of_each_kind_and_task(monkeypatch):
    monkeypatch.setattr(level, "ROWS", 3)
    rows = Dataset.from_dict({"kind": [0] * 10 + [1] * 3, "task": [1] * 6 + [2] * 7})
    args = LevelArgs(heldout="h")
    assert level._drawn(rows, range(13), args) == [0, 2, 4, 6, 8, 10, 11, 12]
    assert level._drawn(rows, [1, 2, 12], args) == [1, 2, 12]
    args = LevelArgs(heldout="h", per_document=True)  # none may be told by itself
    assert level._drawn(rows, range(13), args) == list(range(13))


def test_the_learned_attack_sees_what_label_log_probs_do_not(monkeypatch):
    """The same log-probs of the labels on both sides; forget rows have flatter distributions."""
    rng = np.random.default_rng(0)

    def rows(n: int, flatter: float) -> level.ScoredRows:
        logp = -rng.exponential(1.0, (n, 30))
        mean = -2.0 - flatter + 0.3 * rng.standard_normal((n, 30))
        one = level.ScoredRows([], tokenizer=None)
        one.groups = [(0, int(i % 2)) for i in range(n)]
        one.facts = [
            TokenFacts(a, a > -0.5, m, np.ones(30)) for a, m in zip(logp, mean, strict=True)
        ]
        return one

    groups = {(0, 0), (0, 1)}
    heldout = rows(60, 0.0)
    assert learned_auc(rows(60, 0.5), heldout, groups) > 0.9
    assert 0.5 <= learned_auc(rows(60, 0.0), heldout, groups) < 0.65
    assert learned_auc(rows(12, 0.5), heldout, groups) is None
    # Of many rows it sees some, evenly: its memory grows with their square.
    monkeypatch.setattr(level, "LEARNED_ROWS", 50)
    assert learned_auc(rows(60, 0.5), heldout, groups) > 0.9
    monkeypatch.setattr(level, "LEARNED_ROWS", 19)
    assert learned_auc(rows(60, 0.5), heldout, groups) is None


def test_a_single_document_that_is_told():
    """With few documents an AUC is rough (8 against 20: sqrt(29 / 1920) = .12), so that no
    document may be told by itself."""
    few = scores((-1.0, 8))
    assert sampling_error(few, scores((-1.0, 20))) == pytest.approx((29 / 1920) ** 0.5)
    unseen = scores((-1.0, 200), seed=3)  # 8 / 201 < .05: one document can be told
    assert told_apart(few, unseen) == 0
    few[0]["loss"][3] = -0.2  # far more likely than any held-out document
    assert told_apart(few, unseen) == 1


def test_a_start_in_weight_space_is_measured_by_the_model_that_is_to_be_kept():
    """Halfway to the teacher retained rows were .1 nats likelier than to the model itself, so every
    state that forgot was beyond the limit, and one that had forgotten nothing was kept without a
    word."""
    seen = [(0, 1.0, 0.97), (30, 1.0, 1.04), (300, 0.55, 1.10), (410, 0.52, 1.08)]

    def run(rule):
        for step, auc, loss in seen:
            rule.see(step, {"loss": auc}, loss)
            if not step:
                rule.forget_the_best()
        return rule

    alone = run(Stopping())
    assert alone.best_step == 30
    for part in ("step 30 is kept", "0.50 off", "as at step 410 (0.02)", "0.1 nats above 0.97"):
        assert part in alone.fault()
    own = run(Stopping(start=1.08))
    assert own.best_step == 410 and own.fault() is None


@pytest.mark.parametrize("aucs, error, told", [
    ((1.0, 0.97, 0.95), 0.0, True), ((1.0, 0.8, 0.62), 0.05, True), ((1.0, 0.8, 0.62), 0.1, False),
    ((1.0, 0.7, 0.55), 0.0, False), ((0.1, 0.2), 0.0, True),
])  # fmt: skip
def test_a_best_state_that_is_still_told_is_said(aucs, error, told):
    """A run whose teacher knew the rows ended without a word."""
    rule = Stopping()
    for step, auc in enumerate(aucs):
        rule.see(30 * step, {"loss": auc}, 0.2, error=error)
    assert bool(rule.fault()) == told


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """A small life, and its original: a tiny OLMo that memorized four documents."""
    from research.worlds.life import LifeSizes, make_life

    out = tmp_path_factory.mktemp("life")
    sizes = LifeSizes(
        stories=2, pii=2, facts_forget=3, facts_retain=2, nonmembers=2, general=4, replay=2,
        replay_rows=4, heldout=(4, 4, 4), background=(3, 3, 3), base_passes=1, passes=1,
    )  # fmt: skip
    make_life(out / "data", sizes=sizes)
    for seed, name in enumerate(("original", "teacher")):
        tiny_olmo(out / name, seed)
    return out


def example(life: Path, name: str, **level) -> dict:
    """The example, from the original itself instead of halfway to its teacher."""
    text = (ROOT / "examples/match.yml").read_text().replace("out/never-seen", str(life))
    config = yaml.safe_load(text)
    config |= {"output_dir": str(life / name), "dataset_prepared_path": str(life / "prepared")}
    config["base_model"] = str(life / "original")
    for entry in config["unlearn"]["retain"]:
        entry.pop("reference", None)
    config["unlearn"]["level"] |= level
    return config | {"max_steps": 6, "num_epochs": 1, "logging_steps": 1}


def train(life: Path, config: dict) -> Path:
    return run(life / f"{Path(config['output_dir']).name}.yml", config)


OFTEN = {"every": 2}
TRAINED = {"all": {}, "lora": {"adapter": "lora", "lora_r": 4, "lora_alpha": 4,
                               "lora_target_linear": True}}  # fmt: skip


@pytest.fixture(scope="module")
def matched(life):
    """The example with all weights or an adapter, looked at every two of six steps."""
    return functools.cache(
        lambda kind: train(life, example(life, f"match-{kind}", **OFTEN) | TRAINED[kind])
    )


@pytest.mark.parametrize("kind", TRAINED)
def test_the_example_watches_its_level_and_keeps_the_best_state(matched, kind):
    """Looks at steps 0, 2, 4, 6; the state of the best of them is what is saved."""
    out, lora = matched(kind), kind == "lora"
    report = json.loads((out / "level.json").read_text())
    assert [seen["step"] for seen in report["watched"]] == [0, 2, 4, 6]
    attacks = {"loss", "zlib", "min_k_20", "min_k_plus_20", "entropy", "reference"}
    assert all(attacks < set(seen) for seen in report["watched"])
    assert report["kept_step"] in (2, 4, 6)
    assert (out / ("adapter_model.safetensors" if lora else "model.safetensors")).is_file()


def test_a_run_that_ends_before_its_first_look_says_which_step_it_hands_over(tmp_path, caplog):
    """It named step 0, which is the state from before."""
    row = {"kind": 0, "task": 0, "input_ids": [3, 4, 5], "labels": [-100, 4, 5]}
    rows = ScoredRows([row], SimpleNamespace(decode=lambda ids, **_: "word"))
    rows.teacher = [torch.full((2,), -2.0)]
    callback = LevelCallback(ARGS, Level(), rows, rows, rows, out=tmp_path)
    model, state = tiny_llama(), SimpleNamespace(global_step=3, is_world_process_zero=True)
    callback.on_train_begin(None, state, None, model=model)
    callback.on_train_end(None, state, None, model=model)
    assert json.loads((tmp_path / "level.json").read_text())["kept_step"] == 3
    assert "before its first look" in caplog.text


@pytest.mark.parametrize("rows, scored", [(1, 1), (100, 100), (101, 100), (199, 100), (250, 100)])
def test_a_look_scores_a_hundred_retained_rows(rows, scored):
    """Of 199 it scored all."""
    some = level.some_of(np.arange(rows))
    assert len({*some.tolist()}) == len(some) == scored and (np.diff(some) > 0).all()
    assert some[0] == 0 and some[-1] > rows * 0.98 - 1


def test_what_the_retained_texts_lose_is_not_thinned_by_rows_that_are_only_held(life, matched):
    """The watched loss is that of the rows that an `nll` entry trains, by plain forwards: replay
    rows, which `kl` alone holds, are many and never memorized."""
    from axolotl_unlearn.data.strategy import load_strategy

    report = json.loads((matched("all") / "level.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(life / "original")
    config = DictDefault(example(life, "unused"))
    path = {"path": str(life / "data/retain.jsonl")}
    rows = load_strategy("retain", tokenizer, config, path).wrap_dataset(None)
    model = AutoModelForCausalLM.from_pretrained(life / "original").eval()
    facts = ScoredRows(list(rows), tokenizer).score(model)
    loss = -np.concatenate([one.logp for one in facts]).mean()
    assert report["retained"]["loss"] == pytest.approx(loss, abs=1e-4)


def test_retained_rows_are_measured_by_the_model_that_the_run_holds_them_to(life, matched):
    """Started from another model: the loss and the share that are to be kept are those of the
    reference of both `kl` entries, as a run from that model sees them itself."""
    own = json.loads((matched("all") / "level.json").read_text())
    start = shutil.copytree(life / "teacher", life / "start")
    config = example(life, "held", every=9) | {"max_steps": 1, "base_model": str(start)}
    for entry in config["unlearn"]["retain"][2:]:
        entry["reference"] = {"model": str(life / "original")}
    seen = json.loads((train(life, config) / "level.json").read_text())
    assert own["retained"] == {
        "loss": own["watched"][0]["retain_loss"], "said": own["watched"][0]["retain_said"],
    }  # fmt: skip
    assert seen["retained"]["loss"] == pytest.approx(own["retained"]["loss"], abs=1e-4)
    assert seen["watched"][0]["retain_loss"] != pytest.approx(own["retained"]["loss"], abs=1e-3)


def test_matching_draws_from_the_first_look_after_the_settling(life):
    """Nothing is drawn before that look, so a run that looks at its end alone ends at the very
    weights of the run without the entries; one that looks at every second step does not, with
    either."""

    def weights(name, *objectives, **level):
        config = example(life, name, **OFTEN | level)
        forget = [
            e for e in config["unlearn"]["forget"] if not e["objective"].endswith("_matching")
        ]
        entries = [{"objective": objective, "kinds": "completion"} for objective in objectives]
        config["unlearn"]["forget"] = forget + entries
        return load_file(train(life, config) / "model.safetensors")

    def same(one, other):
        return all(torch.equal(one[name], other[name]) for name in one)

    both, late = ("feature_matching", "hidden_matching"), {"every": 9}
    assert same(weights("plain", **late), weights("late", *both, **late))
    corrected = weights("corrected")
    assert not any(same(corrected, weights(f"drawn-{one}", one)) for one in both)


@pytest.mark.parametrize("kind", TRAINED)
def test_killed_between_two_looks_it_goes_on_as_if_nothing_had_happened(
    life, matched, monkeypatch, kind
):
    """Killed before step 4 of 6, looked at every two: the run that goes on has the start, the
    targets, the temperature, what `feature_matching` knows and the best state of the whole run."""
    from axolotl_unlearn.training.trainer import UnlearnTrainer

    whole, real = matched(kind), UnlearnTrainer.training_step

    def dying(self, *args, **options):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    killed = example(life, f"killed-{kind}", **OFTEN) | TRAINED[kind]
    killed |= {"save_strategy": "steps", "save_steps": 1}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(UnlearnTrainer, "training_step", dying)
        train(life, killed)
    resumed = train(life, killed | {"auto_resume_from_checkpoints": True})
    seen = [json.loads((out / "level.json").read_text()) for out in (whole, resumed)]
    assert seen[0] == seen[1] and len(seen[0]["watched"]) == 4
    weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    one, other = (load_file(out / weights) for out in (whole, resumed))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_level_is_that_of_held_out_rows_under_the_policy(life):
    """Against plain forwards: the teacher's numbers are those of a separately run model, and the
    first calibration maps its held-out quantiles on the policy's."""
    from axolotl_unlearn.objectives.matching import log_odds

    config = example(life, "unused")
    args = parse_unlearn(config["unlearn"])
    tokenizer = AutoTokenizer.from_pretrained(life / "original")
    rows = list(forget_rows(args.level.heldout, tokenizer, DictDefault(config)))
    assert len(rows) == 4 * 2 + 4 * 6 + 4 * 2 and {row["role"] for row in rows} == {0}
    policy, teacher = (
        AutoModelForCausalLM.from_pretrained(life / name).eval() for name in ("original", "teacher")
    )

    def label_logp(model, row):
        ids = torch.tensor(row["input_ids"])[None]
        logp = model(ids).logits[0].double().log_softmax(-1)
        return torch.stack(
            [logp[t, y] for t, y in enumerate(row["labels"][1:]) if y != -100]
        ).detach()

    watched = ScoredRows(rows, tokenizer)
    ours = watched.score(policy)
    for row, facts in zip(rows[:6], ours[:6], strict=True):
        assert_close(
            torch.as_tensor(facts.logp).double(), label_logp(policy, row), atol=1e-4, rtol=0
        )
    asked = [label_logp(teacher, row) for row in rows]
    level = Level()
    watched.teacher = asked
    callback = LevelCallback(ARGS, level, *[watched] * 3)
    callback.watch(policy, 0, correct=False)
    for group in set(watched.groups):
        chosen = [i for i, other in enumerate(watched.groups) if other == group]
        mine = torch.cat([label_logp(policy, rows[i]) for i in chosen])
        theirs = torch.cat([asked[i] for i in chosen])
        mapped = log_odds(level.aim(theirs, group))
        # Quantile on quantile, so the sorted values agree but for the spacing of the knots.
        assert_close(mapped.sort().values.float(), log_odds(mine).sort().values.float(),
                     atol=0.35, rtol=0.05)  # fmt: skip


def test_the_state_of_the_first_process_is_the_best_one(monkeypatch):
    """Its shard: by the last bits of its own figures another process left the last step's."""
    row = {"kind": 0, "task": 0, "input_ids": [3, 4, 5], "labels": [-100, 4, 5]}
    rows = ScoredRows([row], SimpleNamespace(decode=lambda ids, **_: "word"))
    callback = LevelCallback(ARGS, Level(), rows, rows, rows, stopping=Stopping(start=1.0), rank=1)
    model = torch.nn.Linear(1, 1)
    own, first = {1: (False, False), 2: (True, False)}, {1: (True, False), 2: (False, False)}

    def watch(model, step, correct):
        if own[step][0]:
            callback.stopping.best_step = step
        return own[step]

    callback.watch = watch
    state = SimpleNamespace(max_steps=2, is_world_process_zero=False)
    for state.global_step in own:
        monkeypatch.setattr(level, "broadcast_object_list", lambda _: [first[state.global_step]])
        torch.nn.init.constant_(model.weight, state.global_step)
        callback.on_step_end(None, state, SimpleNamespace(should_log=False), model=model)
    callback.on_train_end(None, state, SimpleNamespace(), model=model)
    assert model.weight.item() == 1.0


def test_answers_are_judged_where_no_document_is_to_be_forgotten():
    """A forget set of questions alone (TOFU): no attack was made, and the rule failed on nothing.
    Beside documents they are still left out."""
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "word " * len(ids))
    rng = torch.Generator().manual_seed(0)

    def rows(kinds):
        for kind in kinds:
            ids = torch.randint(3, 23, (9,), generator=rng).tolist()
            yield {"kind": kind, "task": 0, "input_ids": ids, "labels": [-100] * 3 + ids[3:]}

    forget, heldout, retain = (ScoredRows(rows([1] * n), tokenizer) for n in (5, 6, 2))
    for side in (forget, heldout):
        side.teacher = [torch.full((6,), -2.0)] * len(side.rows)
    callback = LevelCallback(ARGS, Level(), forget, heldout, retain, stopping=Stopping())
    callback.watch(tiny_llama(), 0, correct=False)
    assert {"loss", "zlib", "min_k_20"} <= set(callback.stopping.history[0])
    assert judged(ScoredRows(rows([1, 0, 1]), tokenizer)) == {(0, 0)}


def test_the_temperature_follows_the_entropies():
    """Less sure of forget rows than of unseen ones: colder, by the root of the ratio; not while the
    labels are far from their level, and never beyond its limits."""
    from axolotl_unlearn.engine.needs import ForwardResult

    level = Level()
    level.sharpen(1.6, 0.9)
    assert level.temperature == pytest.approx((0.901 / 1.601) ** 0.5)
    for _ in range(50):
        level.sharpen(1.0, 0.0)
    assert level.temperature == COLDEST

    found = ForwardResult(torch.zeros(1, 2), logits=lambda states: 3 * states)
    reference = SimpleNamespace(look_up=lambda *_: found)
    colder = LevelledReference(reference, level, tempered=True).look_up(None, None, {}, None)
    assert_close(colder.logits(torch.ones(2)), torch.full((2,), 3 / COLDEST))

    def facts(logp, entropy):
        return [
            TokenFacts(np.full(4, logp), np.zeros(4, bool), np.full(4, -entropy), np.ones(4))
        ] * 3

    rows = [{"kind": 0, "task": 0, "input_ids": list(range(5)), "labels": [-100, 1, 2, 3, 4]}] * 3
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "a text")
    level, forget, heldout = Level(), ScoredRows(rows, tokenizer), ScoredRows(rows, tokenizer)
    forget.teacher = heldout.teacher = [torch.full((4,), -2.0)] * 3
    heldout.facts = facts(-2.0, 0.9)
    callback = LevelCallback(ARGS, level, forget, heldout, heldout)
    callback.fit()
    forget.facts = facts(-0.1, 1.6)
    callback.sharpen()
    assert level.temperature == 1
    forget.facts = facts(-2.1, 1.6)
    callback.sharpen()
    assert level.temperature == pytest.approx((0.901 / 1.601) ** 0.5)


def test_faults_of_the_block_name_the_cure(life, monkeypatch):
    from axolotl_unlearn.checks.config import faults

    config = example(life, "fault")
    assert faults(config) == []
    config["unlearn"]["level"] |= {"heldout": str(life / "nowhere.jsonl"), "certainty": True}
    config["unlearn"] |= {"forget": [{"objective": "npo"}], "retain": []}
    found = faults(config | {"deepspeed": "zero3.json", "optimizer": "schedule_free_adamw"})
    for part in (
        "trains at other weights than those that it hands over",  # of the best state, mixed with z
        "unlearn.level.heldout",
        "looks at retained rows too",  # the first look ended in a traceback
        "no forget objective is `match`",
        "DeepSpeed",
        "no forget objective is `nckd`",
    ):
        assert any(part in fault for fault in found), part
    config = example(life, "fault")
    config["unlearn"]["forget"][0]["reference"] = "cached"
    assert any("one reference" in fault for fault in faults(config))
    config["unlearn"]["forget"] = [{"objective": "match", "reference": "auto"}]
    level = config["unlearn"].pop("level") | {"certainty": False}
    assert any("nothing would be forgotten" in fault for fault in faults(config))
    config["unlearn"]["level"] = level
    config["unlearn"]["forget"][0]["reference"] = "cached"
    assert any("nothing would be forgotten" in fault for fault in faults(config))
    config["unlearn"]["forget"][0]["reference"] = {"model": str(life / "teacher")}
    assert faults(config) == []
    for name in ("feature_matching", "hidden_matching"):
        config["unlearn"]["forget"] += [{"objective": name}]
        assert faults(config) == []
        level = config["unlearn"].pop("level")
        assert any(f"`{name}` compares with held-out rows" in fault for fault in faults(config))
        config["unlearn"]["level"] = level
        config["unlearn"]["forget"].pop()
    config = example(life, "fault")
    one = life / "one.jsonl"
    one.write_text((life / "data/heldout.jsonl").read_text().splitlines()[0] + "\n")
    config["unlearn"]["level"]["heldout"] = str(one)
    assert any("no completions of task 2" in fault for fault in faults(config))
    monkeypatch.setattr("axolotl_unlearn.data.checks._heldout_faults", lambda *_: [])
    with pytest.raises(UnlearnError, match="completions of task 2"):  # rows that are no local file
        train(life, config)


@pytest.mark.parametrize("side", ["forget", "retain"])
def test_held_out_rows_that_the_model_sees_are_refused(life, side, monkeypatch):
    """A level at the forget rows themselves is reached at once, and all of them are still said."""
    from axolotl_unlearn.checks.config import faults

    config = example(life, f"seen-{side}")
    heldout = (life / "data/heldout.jsonl").read_text()
    row = json.loads((life / f"data/{side}.jsonl").read_text().splitlines()[0])
    file = life / f"seen-{side}.jsonl"
    config["unlearn"]["level"]["heldout"] = str(file)
    for text in (row["output"], row["output"].upper() + " "):
        file.write_text(heldout + json.dumps(row | {"id": "other", "output": text}) + "\n")
        assert [f"has 1 rows that are {side} rows" in fault for fault in faults(config)] == [True]
    file.write_text(json.dumps(row | {"id": "other"}) + "\n")
    monkeypatch.setattr("axolotl_unlearn.data.checks._heldout_faults", lambda *_: [])
    with fails("level.seen"):  # rows that are no local file, too
        train(life, config)
    few = "".join(heldout.splitlines(keepends=True)[:2])
    file.write_text(few + json.dumps(row | {"id": "other"}) + "\n")
    told = "axolotl_unlearn.training.level.level_faults"
    monkeypatch.setattr(told, lambda _, unseen: [f"{len([*unseen])} rows are left"])
    with pytest.raises(UnlearnError, match="^2 rows are left"):
        train(life, config)


def test_held_out_rows_that_cannot_be_read_are_named_before_a_model_is_loaded(life):
    from axolotl_unlearn.checks.config import faults

    config = example(life, "unreadable")
    config["unlearn"]["level"]["heldout"] = str(life / "unreadable.jsonl")
    (life / "unreadable.jsonl").write_text('{"id": "a", "input": "q"}\n')
    assert ["unreadable.jsonl, line 1: field" in fault for fault in faults(config)] == [True]


@pytest.mark.parametrize("key", ["model", "adapter", "original"])
def test_a_teacher_that_knows_the_forget_rows_is_refused(life, key):
    from axolotl_unlearn.checks.config import config_faults

    config = example(life, "same") | {"adapter": "lora", "lora_model_dir": str(life / "lora")}
    if key != "adapter":
        config.pop("lora_model_dir")
    teacher = (
        {"adapter": f"{life}/lora"} if key == "adapter" else {"model": f"{life}/x/../original"}
    )
    config["unlearn"] = {"preset": "never-seen", "teacher": teacher, "heldout": "h.jsonl"}
    if key == "original":
        config |= {"base_model": str(life / "teacher")}
        config["unlearn"]["original"] = str(life / "original")
    told = [fault for fault in config_faults(config) if "that never saw them" in fault]
    assert len(told) == 1
    config["unlearn"]["teacher"] = {"model": str(life / "other"), "adapter": str(life / "lora")}
    told = [fault for fault in config_faults(config) if "that never saw them" in fault]
    assert not told


def test_rows_that_no_match_entry_looks_at_are_named(life):
    """The level watches all forget rows: those that the teacher was never asked about stopped the
    run in the middle of its first look."""
    config = example(life, "limited")
    forget = [config["unlearn"]["forget"][0], {"objective": "npo", "kinds": "question"}]
    config["unlearn"]["forget"] = forget
    config["unlearn"]["level"].pop("certainty", None)
    with pytest.raises(UnlearnError, match="no entry of match is for questions of task 1"):
        train(life, config)


def test_the_temperature_begins_where_the_teacher_is_as_sure_as_the_policy():
    """A teacher whose logits are .6 of the policy's is as sure of what it says besides the label
    at a temperature of .6, though its labels are less likely."""
    torch.manual_seed(0)
    logits, labels = 2 * torch.randn(3, 40, 50).double(), torch.randint(0, 50, (3, 40))
    logp = logits.log_softmax(-1)
    seen = [
        TokenFacts(
            one.gather(1, y[:, None])[:, 0].numpy(),
            np.zeros(40, bool),
            (one.exp() * one).sum(-1).numpy(),
            np.ones(40),
        )
        for one, y in zip(logp, labels, strict=True)
    ]
    # By hand, for one token: the other tokens' entropy, by their share.
    one, y = logp[0, 0], int(labels[0, 0])
    rest = torch.cat([one[:y], one[y + 1 :]]).log_softmax(-1)
    share = 1 - float(one[y].exp())
    assert entropy_excluding_label(seen[0])[0] == pytest.approx(
        -share * float((rest.exp() * rest).sum())
    )
    known = [entropy_without(0.6 * x, y) for x, y in zip(logits, labels, strict=True)]
    rows = [
        {"kind": 0, "task": 0, "input_ids": list(range(41)), "labels": [-100, *range(1, 41)]}
    ] * 3
    watched = ScoredRows(rows, SimpleNamespace(decode=lambda *_, **__: "a text"))
    level, watched.facts = Level(), seen
    callback = LevelCallback(ARGS, level, *[watched] * 3, rest=known)
    callback.begin()
    assert level.temperature == pytest.approx(0.6, abs=0.005)
    # Rows that no reference was asked about (None) say nothing; with none known it stays.
    level.temperature = 1.0
    callback.rest = [None, None, known[2]]
    callback.begin()
    assert level.temperature == pytest.approx(0.6, abs=0.005)
    callback.rest = [None] * 3
    level.temperature = 1.0
    callback.begin()
    assert level.temperature == 1.0
