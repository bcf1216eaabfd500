"""`make never-seen`: its stages, what the attacks find, and the page's table, on made-up scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.intervals import auc
from axolotl_unlearn.metrics.memorisation import TokenFacts
from axolotl_unlearn.metrics.semeval import CELLS
from research.analysis.attacked import (
    RANKS,
    attacked,
    learned_scores,
    learned_spread,
    rank_curve,
)
from research.analysis.never_seen import main, marks, pooled, read_seed, tables, yardstick


def facts(loss: float, n: int, seed: int, tokens: int = 40, tail: float = 1.0) -> list[TokenFacts]:
    """Texts whose token losses are exponential around `loss`, to the power `tail`."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        logp = -loss * rng.exponential(size=tokens) ** tail
        found.append(
            TokenFacts(logp, np.zeros(tokens, bool), np.full(tokens, -2.0), np.full(tokens, 1.5))
        )
    return found


def test_a_rank_curve_is_the_mean_of_sorted_losses():
    """Two texts of three tokens: sorted losses (3, 2, 1) and (5, 0, 0); mean (4, 1, .5), linear
    between ranks 0, .5 and 1."""
    texts = [
        TokenFacts(np.array(logp, float), *(np.zeros(3) for _ in range(3)))
        for logp in ([-1, -3, -2], [0, -5, 0])
    ]
    curve = rank_curve(texts)
    assert len(curve) == len(RANKS)
    assert (curve[0], curve[10], curve[20], curve[5]) == (4.0, 1.0, 0.5, 2.5)


def test_a_learned_attack_finds_a_tail_that_the_mean_hides():
    """Members with the same mean loss and a longer tail: E[x^1.5] = 1.329, so .7523 as much."""
    members, unseen = facts(0.7523, 80, 0, tail=1.5), facts(1.0, 80, 1)
    a, b = learned_scores(members, unseen)
    assert np.mean(a[:, None] > b) > 0.8
    a, b = learned_scores(facts(1.0, 80, 2), facts(1.0, 80, 3))
    assert abs(np.mean(a[:, None] > b) - 0.5) < 0.15


def test_the_learned_attacks_spread_is_that_of_models_that_tell_nothing(monkeypatch):
    """Pairs of models that never saw either side, another choice of texts each time: DeLong's
    standard error of out-of-fold scores was .063 where their differences spread by .085."""
    rng = np.random.default_rng(0)
    pairs = []
    for seed in range(24):
        same = facts(1.0, 120, seed)
        both = [
            [replace(one, logp=one.logp * rng.uniform(0.5, 2, len(one.logp))) for one in same]
            for _ in range(2)
        ]
        pairs.append([(one[:40], one[40:]) for one in both])
    gaps = [np.subtract(*(auc(*learned_scores(*side, divisions=2)) for side in p)) for p in pairs]
    monkeypatch.setattr("research.analysis.attacked.PERMUTATIONS", 40)
    spread = learned_spread(*pairs[0])
    assert spread == pytest.approx(np.std(gaps), rel=0.5)  # two standard errors of both


def seed_folder(path, seed: int):
    """What a finished job leaves, on made-up scores: match is like retrained, merged is not."""
    sides = {
        "original": (0.2, 2.0), "retrained": (2.0, 2.0), "merged": (2.6, 2.1), "match": (2.0, 2.0),
    }  # fmt: skip
    known = {
        name: (facts(m, 80, seed + 10 * i), facts(n, 160, seed + 10 * i + 5))
        for i, (name, (m, n)) in enumerate(sides.items())
    }
    texts = ([f"member {i}" for i in range(80)], [f"text {i}" for i in range(160)])
    found = attacked(known, (facts(1.2, 80, 90), facts(1.2, 160, 91)), texts)
    cells = dict.fromkeys(CELLS, 0.9)
    models = [
        {
            "name": name,
            "cells": cells | ({"retain_task1_knowledge": 0.5} if name == "merged" else {}),
            "task_aggregate": 0.9,
            "utility": 0.6,
            "n": {"utility": 60},
            "distance": {c: {"value": 0.0, "p": 0.9} for c in CELLS}
            | {"forget": {"value": -0.1, "p": 0.001}},  # the side as a whole is no cell
            "collapse": {"forget": {"broken": 0.0, "nonsense": 0.4 if name == "merged" else 0.01}},
        }
        for name in sides
    ]
    (path / "eval").mkdir(parents=True)
    (path / "match").mkdir()
    (path / "data").mkdir()
    (path / "data/manifest.json").write_text(json.dumps({"seed": seed}))
    results = {"schema": 2, "seed": 42, "stages": {}, "models": models}  # 42: of the training
    (path / "results.json").write_text(json.dumps(results))
    (path / "attacked.json").write_text(json.dumps(found))
    level = {"kept_step": 360, "watched": [{"step": 0}, {"step": 369}]}
    (path / "match/level.json").write_text(json.dumps(level))
    rows = [{"x": x, "above_control": {"recalled": {"value": 0.01 * x}}} for x in (0, 1, 5)]
    (path / "eval/quantise-match.json").write_text(json.dumps({"rows": rows[:2]}))
    depth = {"models": {"match": {"score": 0.9, "low": 0.8, "high": 1.0, "sentence": ""}}}
    (path / "eval/uds.json").write_text(json.dumps(depth))
    (path / "eval/relearn-forget-match.json").write_text(json.dumps({"rows": rows}))
    if seed == 202:  # earlier seeds were not looked into
        gap = {"value": 0.3, "low": 0.2, "high": 0.4}
        view = {"title": "gradient norms", "auc": 0.8, "control": 0.5, "difference": gap}
        (path / "eval/inside-match.json").write_text(json.dumps({"views": {"gradients": view}}))
    return path


def test_the_page_says_which_marks_are_reached(tmp_path, monkeypatch):
    monkeypatch.setattr("research.analysis.attacked.PERMUTATIONS", 5)
    folders = [seed_folder(tmp_path / f"ns-{seed}", seed) for seed in (201, 202)]
    seeds = {"201": read_seed(folders[0]), "202": read_seed(folders[1])}
    found = marks(seeds)
    assert found["columns"] == ["mark", "seed 201", "seed 202", "all seeds, 90 % interval"]
    # By hand: halves of the seeds' intervals are added as squares, and halved.
    gaps = [s["models"]["match"]["attacks"]["zlib"]["from_retrained"] for s in seeds.values()]
    spans = [(gap["interval"][1] - gap["interval"][0]) / 2 for gap in gaps]
    value, half = pooled(seeds, "zlib")
    assert value == pytest.approx((gaps[0]["value"] + gaps[1]["value"]) / 2)
    assert half == pytest.approx((spans[0] ** 2 + spans[1] ** 2) ** 0.5 / 2)
    (row,) = [row for row in found["rows"] if "gradient norms" in row[0]]
    assert row[1:] == ["", "+0.30 no", ""]
    (row,) = [row for row in found["rows"] if row[0].startswith("AUC zlib")]
    assert row[-1].startswith(f"{value:+.2f} ± {half:.2f}")
    assert row[-1].endswith("equivalent") == (abs(value) + half < 0.1)
    assert {len(row) for row in found["rows"]} == {4}
    # By hand: 60 questions, .6 right, two models and two seeds.
    (row,) = [row for row in found["rows"] if row[0].startswith("general knowledge against *orig")]
    assert row[-1] == f"+0.00 ± {1.645 * (4 * 0.6 * 0.4 / 60) ** 0.5 / 2:.2f}"
    assert marks({"201": seeds["201"]})["columns"] == ["mark", "seed 201"]
    said = {row[0]: row[1] for row in found["rows"]}
    assert said["AUC loss within .10 of *retrained*"].endswith("yes")
    assert said["relearned in 5 steps above control (+.05)"] == "+0.050 yes"
    assert said["recalled after rounding to 8 or 4 bits, above control (+.05)"] == "+0.010 yes"
    assert said["erased from the layers, share of *retrained* (UDS)"] == "0.90"
    assert said["forget cells told from *retrained* (p < .05 / 6)"] == "0 of 6 yes"
    assert said["worst retain cell, share of *retrained*'s (.95)"] == "1.00 yes"
    assert "of 7 " in said["attacks equivalent to *retrained* at this n (margin .10, 5 %)"]
    row = {r[0]: r for r in tables(seeds)["models"]["rows"]}
    assert row["*original*"][1] == "1.00" and row["*merged*"][-2] == "0% / 40%"
    assert float(row["*merged*"][1]) < 0.2  # told by their high loss
    assert "rivals" not in tables(seeds)
    of_first = seeds["201"]["models"]
    assert "membership was not measured" in of_first["match"]["verdict"]
    turned = {"201": seeds["201"] | {"models": dict(reversed(of_first.items()))}}
    assert [r[0] for r in tables(turned)["models"]["rows"]] == list(row)
    more = seeds | {"201": seeds["201"] | {"models": of_first | {"tnpo": of_first["merged"]}}}
    assert [r[0] for r in tables(more)["rivals"]["rows"]] == ["*tnpo*"]
    assert tables(more)["models"] == tables(seeds)["models"]
    words = [*map(str, folders), "--docs", str(tmp_path / "docs"), "--results", str(tmp_path)]
    main(words)
    plots = {path: path.read_bytes() for path in tmp_path.glob("docs/images/*/*.svg")}
    main(words)
    assert plots and plots == {path: path.read_bytes() for path in plots}
    stored = json.loads((tmp_path / "never-seen.json").read_text())
    assert list(stored["seeds"]) == ["201", "202"]
    assert stored["seeds"]["201"]["kept_step"] == 360 and "tables" in stored
    for name in ("attacks", "ranks"):
        assert "<svg" in (tmp_path / f"docs/images/never-seen/{name}.svg").read_text()
    with pytest.raises(UnlearnError, match="never-seen"):
        read_seed(tmp_path)
    # The seeds of a data file, and one more.
    third = str(seed_folder(tmp_path / "ns-203", 203))
    data = tmp_path / "never-seen.json"
    main([str(data), third, "--docs", str(tmp_path / "docs"), "--results", str(tmp_path)])
    assert list(json.loads(data.read_text())["seeds"]) == ["201", "202", "203"]


def test_a_yardstick_is_another_model_that_never_saw_the_texts():
    """Two seeds: teacher .3 and -.4 from retrained, mean .35; match .1 and .2, mean .15: nearer
    by .2 both times. With .1 in the second seed too, by .2 and .3: standard error .05, and
    t(.95, 1) = 6.314. A seed without a teacher does not count."""
    aucs = [(0.5, 0.8, 0.6), (0.6, 0.2, 0.8), (0.5, None, 0.9)]
    names = ("retrained", "teacher", "match")
    seeds = {
        str(seed): {
            "models": {
                name: {"attacks": {"loss": {"auc": auc}}}
                for name, auc in zip(names, of_seed, strict=True)
                if auc is not None
            }
        }
        for seed, of_seed in enumerate(aucs)
    }
    assert yardstick(seeds)["rows"] == [["loss", "0.350", "0.150", "-0.200 ± 0.000"]]
    seeds["1"]["models"]["match"]["attacks"]["loss"]["auc"] = 0.5
    assert yardstick(seeds)["rows"] == [["loss", "0.350", "0.100", "-0.250 ± 0.316"]]


def test_the_job_is_a_life_and_only_judges_with_the_retrained_model(tmp_path):
    from research.analysis import never_seen as page
    from research.studies.never_seen import ATTACKS, RIVALS, plan_never_seen

    assert set(ATTACKS) == {*page.ATTACKS, "inside"}  # each has a mark
    plan = plan_never_seen(tmp_path, 3, full=True)
    stages = {stage.name: stage for stage in plan.job.stages}
    assert set(RIVALS) <= set(stages)
    configs = {p.stem: yaml.safe_load(p.read_text()) for p in (tmp_path / "configs").glob("*.yml")}
    assert configs["base"]["reinit_weights"] and "reinit_weights" not in configs["original"]
    assert configs["original"]["base_model"] == configs["retrained"]["base_model"]
    assert configs["retrained"]["datasets"][0]["path"].endswith("retrain.jsonl")
    for name in ("match", "match_lora"):
        block = configs[name]["unlearn"]
        asked, matching = block["forget"][:4], block["forget"][4:]
        kin = ["feature_matching", "hidden_matching", "gradient_norm_matching"]
        assert [entry["objective"] for entry in matching] == kin
        assert not any("reference" in entry for entry in matching)
        teachers = {entry["reference"]["model"] for entry in asked}
        assert len(teachers) == 1 and teachers.pop().endswith("teacher")
        assert block["level"]["heldout"].endswith("data/heldout.jsonl")
        assert configs[name]["base_model"] == str(tmp_path / "start")
        kept = [entry.get("reference") for entry in block["retain"]]
        assert kept == [None, None, *[{"model": str(tmp_path / "original")}] * 2]
    assert {"original", "teacher"} <= set(stages["start"].needs)
    assert configs["match_lora"]["adapter"] == "lora" and "adapter" not in configs["match"]
    assert configs["tnpo"]["unlearn"]["forget"]["objective"] == "tnpo"
    everything = json.dumps({k: v for k, v in configs.items() if k != "retrained"})
    assert "retrain" not in everything  # it teaches nobody
    attacks = {"relearn-match", "quantise-match", "prompt-merged", "depth", "inside-match"}
    assert attacks <= set(stages)
    words = [str(word) for word in stages["depth"].command()]
    assert any(w.startswith("match=") for w in words) and words[words.index("--retrained") + 1]

    alone = plan_never_seen(tmp_path / "alone", 3, pair=False)
    names = {stage.name for stage in alone.job.stages}
    assert {"match", "retrained", "attacked", "relearn-match"} <= names
    assert not names & {"over", "under", "merged", "relearn-merged", "prompt-merged"}
    words = next(s for s in alone.job.stages if s.name == "eval").command()
    assert not any(word.startswith("merged=") for word in words)


def test_the_tiny_model_by_the_recipe_of_smollm2(tmp_path):
    """All settings are those of the example; what differs are places and bfloat16."""
    from research.studies.never_seen import plan_never_seen

    plan = plan_never_seen(tmp_path, 3, pair=False, recipe="smollm2/match")
    stages = {stage.name: stage for stage in plan.job.stages}
    config = yaml.safe_load((tmp_path / "configs" / "match.yml").read_text())
    example = yaml.safe_load(Path("examples/smollm2/match.yml").read_text())
    places = ("base_model", "output_dir", "dataset_prepared_path", "seed", "datasets", "unlearn")
    theirs = {k: v for k, v in example.items() if k not in places} | {"bf16": False}
    assert {k: v for k, v in config.items() if k not in places} == theirs
    ours, theirs = config["unlearn"], example["unlearn"]
    assert ours["level"] | {"heldout": ""} == theirs["level"] | {"heldout": ""}
    for side in ("forget", "retain"):
        for mine, its in zip(ours[side], theirs[side], strict=True):
            assert {k: v for k, v in mine.items() if k != "reference"} == {
                k: v for k, v in its.items() if k != "reference"
            }
            assert ("reference" in mine) == ("reference" in its)
    assert "smollm2" not in json.dumps(ours)
    words = [str(word) for word in stages["attacked"].command()]
    assert any(w.startswith("match=") and w.endswith("merged") for w in words)
