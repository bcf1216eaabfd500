"""Rows by coin: every fall enumerated, null and power by simulation, and a real run."""

from __future__ import annotations

import itertools
import json
import random

import eval_model
import numpy as np
import pytest
import torch
import yaml
from attack_models import fit, payments
from click.testing import CliRunner
from conftest import tiny_llama
from data_tokenizers import byte_tokenizer
from fault_codes import fails
from test_requests_new import TRAIN, config, people, write

from axolotl_unlearn.attacks.target import collate
from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.data.documents import read_documents
from axolotl_unlearn.evaluation.canaries import add_canaries, coin_test, draw, read_coins
from axolotl_unlearn.evaluation.measurement import Options
from axolotl_unlearn.evaluation.run import evaluate
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.new import Options as NewOptions
from axolotl_unlearn.requests.new import new_request
from axolotl_unlearn.requests.rows import encoded


@pytest.fixture(autouse=True)
def tossed(monkeypatch):
    """The same coins in every run: by chance a model that knows nothing tells one in twenty."""
    monkeypatch.setattr("secrets.randbits", random.Random(1).getrandbits)


@pytest.mark.parametrize("scores", [
    [0.3, 0.1, 0.9, 0.4, 0.7, 0.2, 0.5], [1, 1, 2, 2, 2, 3, 5, 5], [4] * 6,
])  # fmt: skip
def test_every_fall_of_the_coins(scores):
    """Against all 2^n falls, ties too: the share with a sum of centred ranks as high."""
    n = len(scores)
    below = [2 * sum(s < x for s in scores) + sum(s == x for s in scores) - n for x in scores]
    falls = list(itertools.product([False, True], repeat=n))
    sums = [sum(w if c else -w for w, c in zip(below, fall, strict=True)) for fall in falls]
    for fall, value in list(zip(falls, sums, strict=True))[::7]:
        found = coin_test(scores, fall)
        assert found["p_known"] == pytest.approx(np.mean([one >= value for one in sums]))
        assert found["p_pushed"] == pytest.approx(np.mean([one <= value for one in sums]))
    assert coin_test(scores, [True] * n)["auc"] is None


def test_the_null_is_uniform_whatever_the_scores_are():
    """2000 falls over scores with outliers and ties: p <= alpha in at most alpha of them."""
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.standard_cauchy(30), np.repeat(3.0, 10)])
    p = np.array([coin_test(scores, rng.random(40) < 0.5)["p"] for _ in range(2000)])
    for alpha in (0.01, 0.05, 0.2, 0.5):
        assert (p <= alpha).mean() == pytest.approx(alpha, abs=3 * np.sqrt(alpha / 2000))


@pytest.mark.parametrize("shift, side", [(1.0, "p_known"), (-1.0, "p_pushed")])
def test_sixty_rows_find_what_is_half_known(shift, side):
    """One standard deviation apart: power above .9, and the right side."""
    rng, found = np.random.default_rng(1), []
    for _ in range(300):
        coins = rng.random(60) < 0.5
        found.append(coin_test(rng.normal(size=60) + shift * coins, coins))
    assert np.mean([one["p"] < 0.05 for one in found]) > 0.9
    assert all(one[side] < 0.5 for one in found if one["p"] < 0.05)


def test_what_makes_a_row_hard_cancels_with_a_model_that_never_saw_it():
    rng = np.random.default_rng(2)
    hard, coins = 10 * rng.normal(size=60), rng.random(60) < 0.5
    losses = {name: hard - knows * coins + 0.3 * rng.normal(size=60)
              for name, knows in (("original", 2), ("after", 1), ("retrained", 0))}  # fmt: skip
    roles = {"original": "original", "after": "candidate", "retrained": "retrained"}
    entries = [{"name": name, "role": role} for name, role in roles.items()]
    add_canaries(entries, losses, coins)
    found = {entry["name"]: entry["canaries"] for entry in entries}
    assert found["after"]["p_known"] < 1e-4 and "they are known" in found["after"]["sentence"]
    assert found["retrained"]["p"] > 0.01
    blind = [entry for entry in entries if entry["name"] != "retrained"]
    add_canaries(blind, {name: hard for name in ("original", "after")}, coins)
    assert "can show nothing" in blind[1]["canaries"]["sentence"]


def test_coins_are_tossed_once_and_fairly(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in payments(400, 1)))
    train, key = draw(rows, tmp_path / "out")
    documents, coins = read_documents(key), read_coins(key)
    trained = [json.loads(line)["id"] for line in train.read_text().splitlines()]
    named = [name for (name, _), coin in zip(documents, coins, strict=True) if coin]
    assert trained == named and len(documents) == 400
    assert 140 < len(trained) < 260  # six standard deviations
    for gone in (None, key):  # rows to train on are not replaced either
        if gone:
            gone.unlink()
        with fails("canaries.tossed"):
            draw(rows, tmp_path / "out")
    assert trained == [json.loads(line)["id"] for line in train.read_text().splitlines()]


@pytest.mark.parametrize("code, content", [
    ("canaries.few", [{"text": "one", "included": True}] * 3),
    ("canaries.no-coin", [{"text": "one", "included": "yes"}] * 12),
])  # fmt: skip
def test_faults(tmp_path, code, content):
    path = tmp_path / "canaries.jsonl"
    rows = [row | {"id": f"r{i}", "text": f"text {i}"} for i, row in enumerate(content)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with fails(code):
        read_coins(path)


def test_a_model_that_read_them_tells_how_the_coins_fell(tmp_path):
    """`canaries`, a training with those that fell so, `eval`: told; of one that read none, not."""

    def run(*words):  # fmt: skip
        done = CliRunner().invoke(unlearn, [*map(str, words)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    sides = eval_model.made_up_rows(2)
    texts = eval_model.documents_of(sides)
    eval_model.write_folder(tmp_path / "data", sides, texts, general=4)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in payments(60, 5)))
    run("canaries", rows, "--out", tmp_path / "c")
    trained = [json.loads(x) for x in (tmp_path / "c/train.jsonl").read_text().splitlines()]
    everything = [*sides["forget"], *sides["retain"]]
    eval_model.train_model(tmp_path / "original", [*everything, *trained], steps=40)
    eval_model.train_model(tmp_path / "clean", everything, steps=20)
    said = run("eval", tmp_path / "original", tmp_path / "clean", "--data", tmp_path / "data",
               "--out", tmp_path / "eval", "--canaries", tmp_path / "c/canaries.jsonl",
               "--min-members", 1, "--max-gen-toks", 4)  # fmt: skip
    models = json.loads((tmp_path / "eval/results.json").read_text())["models"]
    original, clean = (model["canaries"] for model in models)
    assert original["p_known"] < 1e-6 and original["auc"] > 0.9 and original["n"] == 60
    assert clean["p"] > 1e-3 and original["sentence"] in said and clean["sentence"] in said


@pytest.fixture
def coins(tmp_path):
    """Chat rows by coin, a config whose data have those that fell so, and its model."""
    write(tmp_path / "made-up.jsonl", people(500, 24))
    draw(tmp_path / "made-up.jsonl", tmp_path / "coins")
    train = [*TRAIN, *map(json.loads, (tmp_path / "coins/train.jsonl").read_text().splitlines())]
    write(tmp_path / "train.jsonl", train)
    write(tmp_path / "test.jsonl", people(100, 24))
    for name in ("base", "tuned"):
        tiny_llama(vocabulary=259, max_position_embeddings=512).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "my.yml").write_text(yaml.safe_dump(config(tmp_path, sample_packing=False)))
    return tmp_path


def request(home, name, *words):
    asked = ["request", "new", home / "my.yml", "--out", home / "requests" / name, *words]
    return CliRunner().invoke(unlearn, ["--json", *map(str, asked)])


def test_a_request_is_tested_by_its_coins(coins):
    """Texts as the model learned them, template and all; its evaluation and verdict read them."""
    from axolotl_unlearn.requests.verdict import coins as said

    done = request(coins, "r1", "--rows", coins / "coins/train.jsonl",
                   "--canaries", coins / "coins/canaries.jsonl")  # fmt: skip
    assert done.exit_code == 0, done.output
    made = coins / "requests" / "r1"
    key = made / "eval-data" / "canaries.jsonl"
    documents, fell = read_documents(key), read_coins(key)
    assert len(documents) == 24 and documents[0][1].prompt.startswith("<|im_start|>user")
    assert documents[0][1].startswith("Bo500 Berg500 keeps 500 bees")
    model = tiny_llama(vocabulary=259, max_position_embeddings=512)
    rows = encoded(made, "forget", byte_tokenizer())
    assert len(rows) == sum(fell)
    fit(model, collate([(row.input_ids, row.labels) for row in rows], torch.device("cpu")), 60)
    model.save_pretrained(coins / "learned")
    byte_tokenizer().save_pretrained(coins / "learned")
    options = Options(out_dir=coins / "eval", min_members=0, join="", max_gen_toks=4, limit=2,
                      progress=False)  # fmt: skip
    models = [f"original={coins / 'learned'}", f"after={coins / 'base'}"]
    learned, clean = evaluate(models, made / "eval-data", options)
    assert learned["canaries"]["p_known"] < 1e-4 < 1e-3 < clean["canaries"]["p"]
    assert "they are known" in said(learned)[0] and "does not tell which" in said(clean)[0]


def test_rows_of_either_coin_are_read_alike(coins):
    """Those that were not trained on were read as the first entry's: their format told the coin."""
    settings = config(coins, sample_packing=False)
    (first,) = settings["datasets"]
    first["path"] = str(write(coins / "others.jsonl", TRAIN))
    second = first | {"path": str(coins / "coins/train.jsonl"), "chat_template": "llama3"}
    (coins / "my.yml").write_text(yaml.safe_dump(settings | {"datasets": [first, second]}))
    done = request(coins, "r1", "--rows", coins / "coins/train.jsonl",
                   "--canaries", coins / "coins/canaries.jsonl")  # fmt: skip
    assert done.exit_code == 0, done.output
    texts = read_documents(coins / "requests/r1/eval-data/canaries.jsonl")
    assert {text.prompt.partition("user")[0] for _, text in texts} == {"<s><|start_header_id|>"}


def test_numbers_that_arrow_changes_are_those_of_the_files(coins):
    """A 1 beside another row's 0.5 is read as 1.0: rows as they stand in the data were strange to
    it, and each coin was against its row."""
    train, drawn = coins / "coins/train.jsonl", coins / "coins/canaries.jsonl"
    for path in (train, drawn):
        rows = map(json.loads, path.read_text().splitlines())
        write(path, [row | {"score": 1} for row in rows])
    rows = [*map(json.loads, train.read_text().splitlines())]
    write(coins / "train.jsonl", [*(row | {"score": 0.5} for row in TRAIN), *rows])
    done = request(coins, "r1", "--rows", train, "--canaries", drawn)
    assert done.exit_code == 0, done.output
    made = json.loads((coins / "requests/r1/request.json").read_text())
    assert made["counts"]["forget"] == len(rows) and made["counts"]["canaries"] == 24


@pytest.mark.parametrize("code, rows, others", [
    ("requests.canaries-kept", False, False), ("requests.other-coins", True, True),
])  # fmt: skip
def test_coins_that_a_request_cannot_use(coins, code, rows, others):
    path = coins / "coins/canaries.jsonl"
    if others:  # tossed for another training
        fell = [json.loads(line) for line in path.read_text().splitlines()]
        write(path, [row | {"included": not row["included"]} for row in fell])
    named = {"rows": coins / "coins/train.jsonl"} if rows else {"where": [("id", "ada-quill")]}
    made = coins / "requests" / "r1"
    with fails(code):
        new_request(coins / "my.yml", made, Wanted(**named), NewOptions(canaries=path))
    assert not made.exists()
