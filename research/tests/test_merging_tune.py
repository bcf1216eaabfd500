"""tune-merge on a tiny OLMo that memorised made-up rows, with two LoRA parents that forget them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click.testing import CliRunner
from eval_model import made_up_rows, train_model, write_folder
from merging_models import weights

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.sets import load_sets
from axolotl_unlearn.merging import Recipe
from axolotl_unlearn.metrics import semeval
from axolotl_unlearn.requests.search import Texts, search
from research.cli.tune_merge import verdict
from research.merging.lab import Lab
from research.merging.scores import Scorer, corrected
from research.merging.tune import (
    FIXED,
    Objective,
    alone,
    key_of,
    starting_points,
    suggest,
    tune,
)

NAMES = 8  # documents a task and side; the first half is validation


def forget_run(base, folder, rows, *, strength: float, steps: int = 25):
    """A LoRA run (seed 0) that lowers log p of the forget rows and keeps the retain rows."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]),
    )
    batches = {}
    for side in ("forget", "retain"):
        texts = [f"{row['input']} {row['output']}{tokenizer.eos_token}" for row in rows[side]]
        batches[side] = tokenizer(texts, return_tensors="pt", padding=True)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(steps):
        losses = {}
        for side, batch in batches.items():
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
            losses[side] = model(**inputs, labels=labels).loss
        (losses["retain"] - strength * losses["forget"].clamp(max=4.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def texts_of(rows) -> dict[str, list[str]]:
    """All forget texts as members; retain texts stand in for non-members."""
    joined = {k: [f"{r['input']} {r['output']}" for r in given] for k, given in rows.items()}
    return {"member": joined["forget"], "nonmember": joined["retain"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("tune")
    rows = made_up_rows(NAMES)
    train_model(root / "base", [*rows["forget"], *rows["retain"]], steps=150)
    for name, strength in (("over", 0.5), ("under", 0.02)):
        forget_run(root / "base", root / name, rows, strength=strength)
    for half, first in (("validation", True), ("test", False)):
        part = {
            side: [
                r for r in given if (int(r["id"].split("-")[2].split('"')[0]) < NAMES / 2) == first
            ]
            for side, given in rows.items()
        }
        write_folder(root / "data" / half, part, texts_of(part), general=4)
    return root


def options(made, **changes):
    return {
        "parents": [made / "over", made / "under"],
        "base": made / "base",
        "data_dir": made / "data",
        "trials": 8,
        "finalists": 2,
        "max_new_tokens": 24,
        **changes,
    }


@pytest.fixture(scope="module")
def tuned(made, tmp_path_factory):
    out = tmp_path_factory.mktemp("result") / "tuned"
    lines: list[str] = []
    return out, tune(**options(made), out=out, log=lines.append), lines


def test_proxy_is_exact_where_it_claims_to_be(made):
    """Questions, membership and utility teacher-forced equal the generated evaluation."""
    from transformers import AutoTokenizer

    lab = Lab(made / "base", [made / "over", made / "under"])
    sets = load_sets(made / "data/validation")
    scorer = Scorer(sets, AutoTokenizer.from_pretrained(made / "base"), max_new_tokens=48)
    model = lab.resident_model()
    spread = set()
    torch.manual_seed(0)
    partly = [  # noise spoils some answers and not others
        {name: own + size * torch.randn_like(own) for name, own in lab.base_weights.items()}
        for size in (0.03, 0.06, 0.1, 0.15, 0.2)
    ]
    for source in (None, 0, 1, Recipe(), *partly):
        lab.load(model, source)
        proxy, full = scorer.proxy(model), scorer.full(model)
        for name in semeval.CELLS:
            if name.endswith("knowledge"):
                assert proxy[name] == full[name], name
                spread.add(full[name])
        for name in ("mia_auc", "mia_score", "utility"):
            assert proxy[name] == full[name]
        assert full["aggregate"] == pytest.approx(
            (full["task_aggregate"] + full["mia_score"] + full["utility"]) / 3
        )
        retain = [full[name] for name in semeval.CELLS if name.startswith("retain")]
        expected = 0.0 if min(retain) == 0 else 6 / sum(1 / value for value in retain)
        assert full["retain"] == pytest.approx(expected)
    assert len(spread) > 2  # the models do differ

    lab.load(model, None)
    memorised = scorer.full(model)
    assert memorised["retain"] == 1.0 and memorised["task_aggregate"] == 0.0
    assert memorised == {**scorer.proxy(model)}


def test_correction_by_hand():
    """Points (0, 0), (.5, .8): .25 -> .4 on the line, .7 -> .8 beyond its end. Points that fall
    ((.2, .6), (.4, .4)) are pooled to their mean .5. Knowledge cells stay."""

    def scores(regurgitation, knowledge=0.5):
        return dict.fromkeys(semeval.CELLS) | {
            "forget_task1_regurgitation": regurgitation,
            "forget_task1_knowledge": knowledge,
            "mia_score": 0.9,
            "utility": 0.6,
        }

    both = [(scores(0.0), scores(0.0)), (scores(0.5), scores(0.8))]
    result = corrected(scores(0.25), both)
    assert result["forget_task1_regurgitation"] == pytest.approx(0.4)
    assert result["forget_task1_knowledge"] == 0.5 and result["forget_task2_knowledge"] is None
    task = 2 / (1 / 0.4 + 1 / 0.5)
    assert result["task_aggregate"] == result["forget"] == pytest.approx(task)
    assert result["aggregate"] == pytest.approx((task + 0.9 + 0.6) / 3)
    assert corrected(scores(0.7), both)["forget_task1_regurgitation"] == pytest.approx(0.8)
    pooled = [(scores(0.2), scores(0.6)), (scores(0.4), scores(0.4))]
    assert corrected(scores(0.3), pooled)["forget_task1_regurgitation"] == pytest.approx(0.5)
    assert corrected(scores(0.3), [])["forget_task1_regurgitation"] == 0.3


def test_membership_is_the_loss_without_the_first_token(made):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "base")
    model = AutoModelForCausalLM.from_pretrained(made / "base")
    sets = load_sets(made / "data/validation")
    losses = Scorer(sets, tokenizer).losses(model)
    text = sets.member[0][1]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss
    assert losses["member"][0] == pytest.approx(float(expected), abs=1e-5)


def test_search_writes_what_it_promises(made, tuned):
    out, result, lines = tuned
    assert {path.name for path in out.iterdir()} >= {
        "best", "tune.json", "pareto.png", "study.journal",
    }  # fmt: skip
    assert json.loads((out / "tune.json").read_text())["winner"] == result["winner"]
    assert set(result["test"]) == {"original", "over", "under", "fixed", "winner"}
    assert len(result["candidates"]) >= 6
    # sqrt((n + m + 1) / (12 n m)), by hand for the halves of this test
    sets = load_sets(made / "data/validation")
    n, m = len(sets.member), len(sets.nonmember)
    error = f"{math.sqrt((n + m + 1) / (12 * n * m)):.3f}"
    assert any("wants 80 a side" in line and error in line for line in lines)
    low, high = result["test"]["winner"]["mia_auc_interval"]
    assert low <= result["test"]["winner"]["mia_auc"] <= high

    # by how much the winner differs on the test half, paired by document
    assert set(result["test_differences"]) == {"original", "over", "under", "fixed"}
    for name, gaps in result["test_differences"].items():
        for metric in (
            "aggregate",
            "task_aggregate",
            "mia_auc",
            "utility",
            "retain_task1_knowledge",
        ):
            gap = result["test"]["winner"][metric] - result["test"][name][metric]
            assert gaps[metric]["value"] == pytest.approx(gap, abs=1e-12)
            assert gaps[metric]["low"] <= gaps[metric]["high"]

    # the winner is the best finalist by the generated validation score, and the fixed recipe is one
    values = [row["value"] for row in result["finalists"]]
    assert result["winner"]["value"] == max(values)
    finalists = [Recipe.from_dict(row["recipe"]) for row in result["finalists"]]
    assert FIXED.for_parents(2) in finalists
    assert {alone(0, 2), alone(1, 2)} <= set(finalists)
    assert len(finalists) == len(set(finalists)) == 2 + 3  # options(finalists=2), and those

    # best/ is the winning recipe
    lab = Lab(made / "base", [made / "over", made / "under"])
    model = lab.load(lab.resident_model(), Recipe.from_dict(result["winner"]["recipe"]))
    best = weights(out / "best")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(best[name], tensor, rtol=0, atol=1e-6)
    assert (out / "best/mergekit_config.yml").exists()


def test_the_same_seed_gives_the_same_search(made, tuned, tmp_path):
    _, first, _ = tuned
    again = tune(**options(made), out=tmp_path / "again")
    assert [c["recipe"] for c in again["candidates"]] == [c["recipe"] for c in first["candidates"]]
    assert again["test"] == first["test"]


def test_a_killed_search_goes_on(made, tuned, tmp_path):
    """Killed in a candidate of the search: what was scored is not scored again, the rest is."""
    calls = []
    real = Scorer.proxy

    class Kill(Exception):
        pass

    def counted(self, model):
        calls.append(1)
        if len(calls) == 8:  # original, over, under, fixed and three more are on disk
            raise Kill
        return real(self, model)

    out = tmp_path / "killed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "proxy", counted)
        with pytest.raises(Kill):
            tune(**options(made), out=out)
        with open(out / "study.journal", "a") as file:
            file.write('{"op_code": 2, "half a li')
        result = tune(**options(made), out=out)
    assert result["stopped"] == "all trials done"
    keys = [key_of(Recipe.from_dict(c["recipe"])) for c in result["candidates"]]
    assert len(keys) == len(set(keys)) >= 6
    assert len(calls) == 1 + 1 + len(keys)  # the original, the killed one, each candidate once

    # a finished search answers at once and is the same
    with pytest.MonkeyPatch.context() as patch:
        for name in ("full", "measure", "proxy"):
            patch.setattr(Scorer, name, None)
        assert tune(**options(made), out=out)["test"] == result["test"]

    with pytest.raises(UnlearnError, match="other models, data or settings"):
        tune(**options(made, seed=5), out=out)


def test_scores_belong_to_what_was_scored(made, tmp_path):
    """Other settings, parents or lengths in one folder: old scores go to the same merges only."""
    calls = []
    real = Scorer.proxy

    def counted(self, model):
        calls.append(1)
        return real(self, model)

    out, few = tmp_path / "search", options(made, trials=2, finalists=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "proxy", counted)
        tune(**few, out=out)
        first = len(calls)
        tune(**few | {"seed": 5, "methods": ["linear"]}, out=out, overwrite=True)
        again = len(calls) - first
        # original, parents and fixed recipe are known; two linear merges are new
        assert again == 2
        calls.clear()
        turned = [made / "under", made / "over"]
        result = tune(**few | {"parents": turned}, out=out, overwrite=True)
        assert len(calls) == first
        fresh = tune(**few | {"parents": turned}, out=tmp_path / "fresh")
        assert (
            fresh["test"] == result["test"]
            and fresh["candidates"][0]["scores"] == (result["candidates"][0]["scores"])
        )
        # shorter answers are other scores of the finalists
        short = few | {"parents": turned, "max_new_tokens": 3}
        with pytest.raises(UnlearnError, match="other models, data or settings"):
            tune(**short, out=out)
        other = tune(**short, out=out, overwrite=True)
        assert other["finalists"] == tune(**short, out=tmp_path / "fresh_short")["finalists"]
        assert other["test"] != result["test"]


def test_one_parent_is_searched_over_the_scale_of_its_task_vector(made, tmp_path):
    result = tune(
        **options(made, parents=[made / "over"], trials=6, finalists=1, methods=["linear"]),
        out=tmp_path / "x",
    )
    assert set(result["test"]) == {"original", "over", "fixed", "winner"}
    scales = [c["recipe"]["weights"] for c in result["candidates"]]
    assert {0.5, 0.75, 1.0, 1.25} <= {w[0] for w in scales}
    assert len(scales) == len({key_of(Recipe.from_dict(c["recipe"])) for c in result["candidates"]})
    assert {c["recipe"]["scale"] for c in result["candidates"]} == {"sum", "average"}
    (weight,) = result["winner"]["recipe"]["weights"]
    if result["winner"]["recipe"]["method"] == "linear":
        base, best = weights(made / "base"), weights(tmp_path / "x/best")
        lab = Lab(made / "base", [made / "over"])
        for name, tensor in lab.parent_weights(0):
            expected = base[name] + weight * (tensor - base[name])
            torch.testing.assert_close(best[name], expected, rtol=0, atol=1e-6)


def test_a_parent_may_win(made, tmp_path):
    """Merged with the memorised model itself, a mean can only forget less than its parent."""
    lines: list[str] = []
    weak = [made / "over", made / "base"]
    result = tune(
        **options(
            made, parents=weak, trials=3, methods=["linear"], scales=["average"],
            objective=Objective({"forget": 1.0}, gate=0.0),
        ),
        out=tmp_path / "x",
        log=lines.append,
    )  # fmt: skip
    assert result["winner"]["recipe"] == alone(0, 2).to_dict()
    assert any("no merge is better on validation than the parent 'over'" in line for line in lines)
    assert result["test"]["winner"]["aggregate"] == pytest.approx(
        result["test"]["over"]["aggregate"], abs=0.02
    )


def test_time_budget_and_patience_stop_early(made, tmp_path):
    result = tune(**options(made, seconds=0.0), out=tmp_path / "budget")
    assert result["stopped"] == "time budget" and result["trials"] == 0
    # What no search is needed for: the fixed recipe and the parents.
    assert {key_of(Recipe.from_dict(c["recipe"])) for c in result["candidates"]} == {
        key_of(recipe.for_parents(2)) for recipe in (FIXED, alone(0, 2), alone(1, 2))
    }
    result = tune(**options(made, patience=1, methods=["linear"]), out=tmp_path / "patience")
    assert "no better candidate in 1 trials" in result["stopped"]


def test_verdict_in_words(tuned):
    _, result, _ = tuned
    assert "the winner" in verdict(result).lower()
    fixed = FIXED.for_parents(2).to_dict()
    assert verdict({**result, "winner": {"recipe": fixed}}) == "The winner is the fixed recipe."
    other = {**result, "winner": {"recipe": alone(0, 2).to_dict()}}
    sure = {"aggregate": {"value": 0.2, "low": 0.1, "high": 0.3, "p": 0.01}}
    assert "the winner is higher in aggregate (+0.200 [+0.100, +0.300])" in verdict(
        {**other, "test_differences": {"fixed": sure}}
    )
    assert "Nobody can say" in verdict({**other, "test_differences": {}})


# --- objective ------------------------------------------------------------------------------------


def test_objective_by_hand():
    """(1 * .8 + 3 * .4) / 4 = .5; utility .5 is below .75 * .8 = .6, which costs 1."""
    objective = Objective.parse("task_aggregate, mia_score=3")
    scores = {"task_aggregate": 0.8, "mia_score": 0.4, "utility": 0.5}
    assert objective.value(scores, original=0.6) == pytest.approx(0.5)
    assert objective.value(scores, original=0.8) == pytest.approx(-0.5)
    assert objective.value({**scores, "utility": None}, original=0.8) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mia_auc", "best at .5"),
        ("aggregate=x", "not name=number"),
        ("aggregate=-1", "0 or more"),
        ("aggregate=0", "all objective weights are 0"),
    ],
)
def test_bad_objectives(text, message):
    with pytest.raises(UnlearnError, match=message):
        Objective.parse(text)


def test_an_unknown_score_ends_before_the_search(made, tmp_path):
    with pytest.raises(UnlearnError, match="give no 'mmlu': choose from aggregate"):
        tune(**options(made, objective=Objective({"mmlu": 1.0})), out=tmp_path / "x")


def test_choice_and_report_share_nothing(made, tmp_path):
    with pytest.raises(UnlearnError, match="share .* documents, for example"):
        tune(**options(made, test=made / "data/validation"), out=tmp_path / "x")
    with pytest.raises(UnlearnError, match="does not exist: tune-merge chooses on"):
        tune(**options(made, data_dir=made), out=tmp_path / "x")
    with pytest.raises(UnlearnError, match="unknown method 'tie'"):
        tune(**options(made, methods=["tie"]), out=tmp_path / "x")


# --- candidates -----------------------------------------------------------------------------------


def test_suggested_recipes_are_valid_and_starting_points_are_what_they_say():
    import optuna

    from axolotl_unlearn.merging.recipe import METHODS, SCALES, SPACES

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    points = starting_points(3, METHODS, SPACES, SCALES)
    for point in points:
        study.enqueue_trial(point)
    recipes = []
    for _ in range(60):
        trial = study.ask()
        recipes.append(suggest(trial, 3, METHODS, SPACES, SCALES, 4).for_parents(3))
        study.tell(trial, 0.0)
    assert recipes[0] == Recipe(weights=(1.0, 1.0, 1.0), seed=4)
    assert recipes[4].weights == (0.75, 0.75, 0.75) and recipes[4].scale == "sum"
    for recipe in recipes:
        mean = sum(recipe.weights) / 3
        assert math.isclose(mean, 1.0, abs_tol=1e-5) or recipe.scale == "sum"
    assert {recipe.method for recipe in recipes} == set(METHODS)


def test_equal_merges_share_a_key():
    one = Recipe(method="linear", density=0.3, seed=1).for_parents(2)
    two = Recipe(method="linear", density=0.9, seed=2).for_parents(2)
    assert key_of(one) == key_of(two)
    assert key_of(Recipe(seed=1)) == key_of(Recipe(seed=2))
    dare = Recipe(method="dare_ties")
    assert key_of(dare) != key_of(Recipe(method="dare_ties", seed=2))


def test_command_line(made, tmp_path):
    from research.__main__ import research

    arguments = ["tune-merge", "--parents", made / "over", made / "under", "--base", made / "base",
                 "--data", made / "data", "--out", tmp_path / "out", "--trials", "2",
                 "--finalists", "1", "--methods", "ties", "linear", "--spaces", "delta",
                 "--max-new-tokens", "16"]  # fmt: skip
    result = CliRunner().invoke(research, [str(word) for word in arguments])
    assert result.exit_code == 0, result.output
    assert "winner" in result.output and "Best merge:" in result.output
    forget = [json.loads(row) for row in (made / "data/test/forget.jsonl").read_text().splitlines()]
    texts = Texts.of([f"{row['input']} {row['output']}" for row in forget])
    assert texts.windows and not texts.among(result.output)
    assert not search([tmp_path / "out"], texts).left  # scores are kept, answers are not
    methods = {
        c["recipe"]["method"]
        for c in json.loads((tmp_path / "out/tune.json").read_text())["candidates"]
    }
    assert methods <= {"ties", "linear"}
    assert "python -m research tune-merge --parents" in " ".join(
        CliRunner().invoke(research, ["tune-merge", "--help"]).output.split()
    )
    result = CliRunner().invoke(research, ["tune-merge", "--out", str(tmp_path / "y")])
    assert result.exit_code == 2 and "--parents and --base" in result.output
