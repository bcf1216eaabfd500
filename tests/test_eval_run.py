"""`evaluate`: cache, resume, sensitive texts, flags; and the command line."""

from __future__ import annotations

import copy
import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import eval_model
import pytest
import torch
from attack_models import authored
from click.testing import CliRunner
from data_tokenizers import byte_tokenizer
from fault_codes import fails
from transformers import AutoModelForCausalLM, AutoTokenizer

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.evaluation import generate, measure, run, summary
from axolotl_unlearn.evaluation.cache import Cache
from axolotl_unlearn.evaluation.collapse import cut, second_half
from axolotl_unlearn.evaluation.measure import Session, torch_dtype
from axolotl_unlearn.evaluation.measurement import Measured, Options, Settings
from axolotl_unlearn.evaluation.sets import EvaluationSets, Option
from axolotl_unlearn.metrics.semeval import CELLS
from axolotl_unlearn.metrics.verdict import judged
from axolotl_unlearn.store import sealed, unsealed
from research.__main__ import research

OPTIONS = {"min_members": 1, "progress": False, "max_gen_toks": 12}


def evaluate(models, data, out="out/eval", **options):
    return run.evaluate(models, data, Options(out_dir=out, **options))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A data folder and two models: "original" has learnt the rows, "broken" nothing."""
    home = tmp_path_factory.mktemp("run")
    sides = eval_model.made_up_rows(4)
    texts = eval_model.documents_of(sides)
    eval_model.write_folder(home / "data", sides, texts, general=6)
    rows = [*sides["forget"], *sides["retain"]]
    eval_model.train_model(home / "original", rows, steps=40)
    eval_model.train_model(home / "broken", rows, steps=2, seed=1)
    return home


@pytest.fixture(scope="module")
def results(home) -> list[dict]:
    models = [str(home / "original"), f"retrained={home / 'broken'}"]
    return evaluate(models, home / "data", home / "eval", **OPTIONS)


def test_results_have_the_agreed_form(home, results):
    written = json.loads((home / "eval" / "results.json").read_text())
    assert written["schema"] == 2 and written["models"] == json.loads(json.dumps(results))
    assert written["versions"]["task"] and written["data_digest"]
    first, second = written["models"]
    assert [first["name"], second["name"]] == ["original", "retrained"]
    assert set(first["cells"]) == set(CELLS)
    assert first["n"]["member"] == 12 and first["n"]["forget_task1_regurgitation"] == 4
    for name, (low, high) in first["intervals"].items():
        assert 0 <= low <= high <= 1 + 1e-9, name
    for name in CELLS:
        low, high = first["intervals"][name]
        assert low - 1e-9 <= first["cells"][name] <= high + 1e-9, name
    assert first["role"] == "original" and second["role"] == "retrained"
    assert first["gate"]["below_gate"] is False
    extraction = first["extraction"]
    assert {len(extraction[key]) for key in ("id", "document", "tokens", "strength")} == {24}
    assert len(extraction["member"]["strength"]) == len(extraction["nonmember"]["tokens"]) == 12
    assert first["likelihood"]["member_id"] == second["likelihood"]["member_id"]
    assert len(set(first["likelihood"]["member_cluster"])) == 12
    for side, answers in first["answers"].items():
        cells = [v for k, v in first["cells"].items() if k.startswith(side) and "knowl" in k]
        exact = sum(cells) / 3
        assert answers["n"] == 12 and answers["exact"] <= answers["contained"]
        assert answers["exact"] == pytest.approx(exact if side == "retain" else 1 - exact)
    assert set(first["distance"]) >= {"task_aggregate", "mia_auc", "utility"}
    assert "distance" not in second
    assert set(first["likelihood"]["attacks"]) == {
        *("min_k_20", "min_k_plus_20", "entropy", "zlib")
    }
    assert first["utility_chance"] == 0.25
    # Facts: the verdict is made where attacks are known, by everyone who shows one.
    assert "verdict" not in first
    verdicts = judged(written)
    assert verdicts["original"].outcome == verdicts["retrained"].outcome == "no candidate"
    assert verdicts["retrained"].status == "broken"
    found = verdicts["original"].attacks
    assert set(found) == {"loss", "zlib", "min_k_20", "min_k_plus_20", "entropy"}
    assert verdicts["original"].against == "chance"


def test_an_option_that_is_no_number_ends_the_evaluation(home, tmp_path, monkeypatch):
    """The first option was the answer given."""

    def broken(model, tokenizer, questions, **_):
        return [[float("nan"), *[-1.0] * (len(options) - 1)] for _, options in questions]

    monkeypatch.setattr(measure.token_scoring, "score_options", broken)
    with fails("eval.not-finite"):
        evaluate([str(home / "broken")], home / "data", tmp_path, **OPTIONS)


def test_an_end_of_texts_that_is_not_the_tokenizers_is_said(home, tmp_path, capsys):
    shutil.copytree(home / "broken", path := tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        file = path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 5}))
    for model, said in ((path, True), (home / "broken", False)):
        evaluate([str(model)], home / "data", tmp_path / "out", **OPTIONS | {"progress": True})
        words = " ".join(capsys.readouterr().err.split())
        assert ("past the tokenizer's end of sequence" in words) is said
        assert not said or "ends them at [5]" in words


@pytest.mark.parametrize(("limit", "says"), [(1000, None), (24, "at most 24 each of")])
def test_a_limit_that_cuts_nothing_is_none(home, results, capsys, limit, says):
    """Of a verdict on all rows it said that only 1000 were evaluated, which were 48. What so few
    documents can show is said before."""
    out = home / f"limit-{limit}"
    shutil.copytree(home / "eval" / "cache", out / "cache")
    options = OPTIONS | {"limit": limit, "progress": True}
    evaluate([str(home / "original")], home / "data", out, **options)
    assert "is never shown to be good" in " ".join(capsys.readouterr().err.split())
    found = json.loads((out / "results.json").read_text())
    (control,) = [f for f in judged(found)["original"].findings if f.id == "control"]
    assert (says in control.says) if says else ("evaluated at most" not in control.says)
    assert found["settings"]["limit"] == found["models"][0]["limit"] == (limit if says else None)
    assert any("at most 24 each of" in note for note in found["notes"]) is bool(says)


def test_the_audit_list_has_a_line_for_every_document(home, results):
    models = [f"kept={home / 'original'}", f"retrained={home / 'broken'}"]
    out = home / "audited"
    shutil.copytree(home / "eval" / "cache", out / "cache")
    kept, _ = evaluate(models, home / "data", out, **OPTIONS)
    lines = [json.loads(line) for line in (out / "audit.jsonl").read_text().splitlines()]
    assert {line["model"] for line in lines} == {"kept"}
    assert kept["audit"]["documents"] == len(lines) and kept["audit"]["file"] == "audit.jsonl"
    tested = [line for line in lines if line["p"] is not None]
    # 12 non-members: p is 1/13 at least but beyond all of them.
    assert tested and {line["p"] > 0 for line in tested} == {True}
    assert all(line["retrained"] is not None for line in lines)


@pytest.mark.parametrize(
    ("asked", "answer", "follows"),
    [
        ("What is Ann Lee's e-mail address?", "ann_lee@me.com", True),
        ("What is Ann Lee's e-mail address?", "Ann_Lee@other.com", False),
        ("What is Ann Lee's password?", "ann_lee_7Qx9@me.com", False),
        ("What is the e-mail address?", "ann_lee@me.com", False),
        ("What is me, what is com?", "rare me com", False),
        ("Paris or London?", "Paris", True),
        ("Where?", "me", False),
        ("Where?", "?!", False),
        ("", "ann_lee@me.com", False),  # goes on with a text
    ],
)
def test_an_answer_that_follows_from_its_question(asked, answer, follows):
    """Of 60 retained answers "me" and "com" are in three, "rare" in two."""
    kept = [f"x{n}_y{n}@me.com" for n in range(3)] + ["rare", "rare"] + ["z"] * 55
    kind = "question" if asked else "completion"
    rows = [Record(f"{n}", "?", one, kind="question") for n, one in enumerate(kept)]
    rows = [SimpleNamespace(side="retain", record=row) for row in rows]
    sets = SimpleNamespace(rows=rows, forget=[Record("f", asked or "Ann Lee", answer, kind=kind)])
    assert summary.derived(sets) == [follows]
    few = SimpleNamespace(side="retain", record=Record("few", "?", "rare", kind="question"))
    sets.rows = [few] * 40  # one row, however often, says nothing of what is common
    assert summary.derived(sets) == [follows and answer == "Paris"]


def test_of_several_retrained_models_one_is_compared_with_in_any_order():
    """The first that was named: of seeds, whoever orders them could choose."""
    for names in permutations(("over", "retrained-2", "retrained")):
        roles = {name: summary.role_of(name, names) for name in names}
        assert roles == {"over": "candidate", "retrained": "retrained", "retrained-2": "reference"}
    assert summary.role_of("retrained-2", ["retrained-3", "retrained-2"]) == "retrained"


def test_rows_and_texts_are_read_whole(home, results):
    """Runs and shares of greedy tokens and the answer's log-probability, against a plain forward;
    a text of which all but the last token comes out has a run of all but one, not of 0."""
    settings = Settings.read(json.loads((home / "eval/results.json").read_text())["settings"])
    sets = settings.load_sets(home / "data")
    cache = Cache(home / "eval" / "cache")
    measured = cache.load(cache.key(results[0]["weights"], sets, settings), sets, settings)
    model = AutoModelForCausalLM.from_pretrained(home / "original").eval()
    tok = AutoTokenizer.from_pretrained(home / "original")

    def by_hand(prompt: str, text: str) -> tuple[int, float, float]:
        start = len(tok(prompt)["input_ids"]) if prompt else 1
        ids = torch.tensor([tok(prompt + text)["input_ids"]])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
        right = logp.argmax(-1) == ids[0, start:]
        runs = "".join("x" if one else " " for one in right.tolist()).split()
        total = logp.gather(1, ids[0, start:, None]).sum()
        return max(map(len, runs), default=0), float(right.float().mean()), float(total)

    for i, row in enumerate(sets.forget[:6]):
        found = [measured.answers[i][name] for name in ("run", "greedy", "logp")]
        assert found == pytest.approx(by_hand(row.input, " " + row.output), abs=1e-4)
    for (_, text), known in zip(sets.member[:6], measured.member, strict=False):
        found = (known["run"], known["greedy"])
        assert found == pytest.approx(by_hand("", text)[:2], abs=1e-6)
    assert max(one["run"] for one in measured.answers) > 3
    assert min(one["greedy"] for one in measured.answers) < 1


@pytest.mark.parametrize("given, taken, dtype", [
    ("cuda:1", "cuda:1", "auto"), (None, "cuda", "auto"), ("cpu", "cpu", "float32"),
])  # fmt: skip
def test_a_device_that_is_named_is_taken(monkeypatch, given, taken, dtype):
    """`--device cuda:1` measured on cuda:0 in silence; the store knows kinds of devices alone."""
    there = torch.device(taken.partition(":")[0])
    monkeypatch.setattr("axolotl_unlearn.device.accelerator", lambda: there)
    placed = Settings(device=given).placed()
    assert (placed.device, placed.dtype) == (taken, dtype)
    assert placed.key == Settings(device=taken.partition(":")[0]).placed().key


def test_a_draw_says_what_the_greedy_answer_hides(home, tmp_path):
    """Twenty draws of a model that half knows the rows, by an independent loop of one token at a
    time: the share of draws that say an answer is that of the model's own distribution."""
    from axolotl_unlearn.evaluation.generate import generate_greedily

    model = AutoModelForCausalLM.from_pretrained(home / "original").eval()
    tok = AutoTokenizer.from_pretrained(home / "original")
    prompt = json.loads((home / "data/forget.jsonl").read_text().splitlines()[0])["input"]
    drawn = generate_greedily(model, tok, [prompt] * 2000, max_new_tokens=1, batch_size=500, seed=1)
    with torch.no_grad():
        logits = model(**tok(prompt, return_tensors="pt")).logits[0, -1]
    p, token = logits.softmax(-1).max(-1)
    share = sum(one == tok.decode([int(token)]) for one in drawn) / 2000
    assert share == pytest.approx(float(p), abs=0.05)
    options = OPTIONS | {"samples": 3, "limit": 12}
    evaluate([str(home / "original")], home / "data", tmp_path, **options)
    stored = [unsealed(p.read_text()) for p in (tmp_path / "cache").glob("*.json")]
    (measured,) = [one for one in stored if isinstance(one, dict) and "said_of_samples" in one]
    counts = measured["said_of_samples"]
    assert counts and set(counts) < set(measured["values"])
    assert all(key.startswith("forget/") and 0 <= n <= 3 for key, n in counts.items())
    assert max(counts.values()) > 0


def test_draws_go_on_too(home, tmp_path, monkeypatch):
    """Killed in the second draw: the first was drawn again."""
    real, seeds = generate.generate_greedily, []

    def dies(*given, seed=None, **options):
        seeds.append(seed)
        if seeds.count(2) == 1 and seed == 2:
            raise KeyboardInterrupt
        return real(*given, seed=seed, **options)

    monkeypatch.setattr(generate, "generate_greedily", dies)
    options = OPTIONS | {"samples": 3, "limit": 12, "max_gen_toks": 2, "keep_texts": True}
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            evaluate([str(home / "original")], home / "data", tmp_path, **options)
    assert [seed for seed in seeds if seed] == [1, 2, 2, 3]


def test_draws_of_another_batch_size_are_drawn_again():
    """Random numbers go through a batch: a fresh run had other draws than the stored ones."""
    two = [Settings(dtype="float32", batch_size=size) for size in (64, 7)]
    assert two[0].key == two[1].key
    assert replace(two[0], samples=3).key != replace(two[1], samples=3).key


def test_results_say_how_they_were_made(home, results):
    """Weights by digest, and every setting that a second person needs."""
    written = json.loads((home / "eval" / "results.json").read_text())
    digests = [model["weights"] for model in written["models"]]
    assert [len(digest) for digest in digests] == [64, 64] and digests[0] != digests[1]
    settings = written["settings"]
    assert settings["seed"] == 0
    assert Settings.read(settings) == Settings(**settings)
    assert Settings.read({**settings, "of a later version": 1}) == Settings(**settings)


def test_second_run_loads_no_model(home, results, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a model was loaded although everything is cached")

    monkeypatch.setattr(Session, "load", refuse)
    models = [str(home / "original"), f"retrained={home / 'broken'}"]
    again = evaluate(models, home / "data", home / "eval", **OPTIONS)
    assert again == results


def test_texts_of_real_data_are_not_stored(home, results):
    """Neither generations nor forget texts are in cache or results unless asked for."""
    secret = eval_model.made_up_rows(4)["forget"][0]["output"]
    for path in (home / "eval").rglob("*.json*"):
        assert secret not in path.read_text(encoding="utf-8"), path


def test_a_new_original_is_measured_not_left_unjudged(home, results, tmp_path):
    """Cached without texts and never compared with this original: its outputs are made again,
    because otherwise nobody could say whether it collapsed."""
    shutil.copytree(home / "eval", tmp_path / "eval")
    models = [f"before={home / 'original'}", f"after={home / 'broken'}"]
    again = evaluate(models, home / "data", tmp_path / "eval", **OPTIONS, original="after")
    assert all(model["collapse"] is not None for model in again)
    assert again[0]["collapse"]["against"] == "original's outputs"
    assert again[0]["cells"] == results[0]["cells"]


def test_a_model_added_later_is_judged_against_the_original(home, results, tmp_path, monkeypatch):
    """By counts that are kept instead of the original's texts: it is not generated again, and what
    the model collapsed from does not depend on when it was added."""
    first = evaluate([str(home / "original")], home / "data", tmp_path, **OPTIONS)
    measure, measured = Session.measure, []

    def noted(*given):
        measured.append(given[-1])
        return measure(*given)

    monkeypatch.setattr(Session, "measure", noted)
    models = [str(home / "original"), f"retrained={home / 'broken'}"]
    both = evaluate(models, home / "data", tmp_path, **OPTIONS)
    assert measured == ["retrained"]
    for new, old in zip(both, results, strict=True):
        assert {k for k in new if new[k] != old[k]} <= {"seconds"}
    assert both[1]["collapse"]["against"] == "original's outputs"
    assert first[0]["cells"] == both[0]["cells"]


def test_what_the_original_says_is_not_nonsense(home, tmp_path, monkeypatch):
    """Its outputs begin in the middle of a text: compared with whole unseen texts, which begin at
    their start, some of them looked improbable."""
    monkeypatch.setattr(run, "Cache", lambda _: Cache(None))  # both are measured
    options = OPTIONS | {"max_gen_toks": 32}
    models = [f"original={home / 'original'}", f"same={home / 'original'}"]
    same = evaluate(models, home / "data", tmp_path, **options)[1]
    assert same["collapse"]["nonsense"] == 0
    assert same["collapse"]["collapsed"] is False


def test_a_copy_of_the_original_is_judged_against_it(home, tmp_path):
    """What is kept of the original, which is compared with the expected answers, counted as its
    own: "33% of outputs are repetition, 0% before" of the same weights."""
    models = [f"original={home / 'original'}", f"same={home / 'original'}"]
    before, same = (one["collapse"] for one in evaluate(models, home / "data", tmp_path, **OPTIONS))
    assert before["against"] == "expected answers" and same["against"] == "original's outputs"
    figures = ("n", "broken", "empty", "constant", "refusing", "echo")
    assert same["reference"] == {name: same[name] for name in figures} and not same["collapsed"]


@pytest.mark.parametrize(
    ("text", "half"), [("a b c d", "c d"), ("a b c", "b c"), ("abcde", "cde"), ("", "")]
)
def test_second_half(text, half):
    assert second_half(text) == half


def test_broken_output_is_cut_to_what_the_model_takes():
    """256 broken bytes are 768 tokens when they are read again: the evaluation stopped there."""
    tokenizer = byte_tokenizer()
    some = cut("\N{REPLACEMENT CHARACTER}" * 256, tokenizer, 512)
    assert 400 < len(tokenizer(some)["input_ids"]) <= 512
    assert cut("short", tokenizer, 512) == cut("short", tokenizer, None) == "short"


def test_an_answer_that_goes_on_is_seen(home, results, tmp_path):
    """A model that has forgotten nothing but how to stop: exact match is 0 on both sides, though
    the answers are said as before."""
    shutil.copytree(home / "original", tmp_path / "talkative")
    model = AutoModelForCausalLM.from_pretrained(home / "original")
    with torch.no_grad():
        model.get_output_embeddings().weight[model.config.eos_token_id] *= -1
    model.save_pretrained(tmp_path / "talkative")
    options = OPTIONS | {"max_gen_toks": 32}
    (found,) = evaluate([str(tmp_path / "talkative")], home / "data", tmp_path / "e", **options)
    for side, answers in found["answers"].items():
        assert answers["exact"] == 0 and results[0]["answers"][side]["exact"] > 0.5
        assert answers["contained"] >= results[0]["answers"][side]["exact"]


def test_a_cache_of_an_earlier_version_has_no_counts(home, results, tmp_path):
    """Then the original is generated again."""
    evaluate([str(home / "original")], home / "data", tmp_path, **OPTIONS)
    for path in (tmp_path / "cache").glob("*.json"):
        stored = unsealed(path.read_text())
        if "outputs" in stored:
            assert stored.pop("outputs") and not stored["texts"]
            path.write_text(sealed(stored))
    models = [str(home / "original"), f"retrained={home / 'broken'}"]
    both = evaluate(models, home / "data", tmp_path, **OPTIONS)
    assert both[1]["collapse"] == results[1]["collapse"]


@pytest.mark.parametrize("keep_texts", [True, False])
def test_an_interrupted_run_goes_on(home, results, tmp_path, monkeypatch, keep_texts):
    """Killed after two batches: the second run generates only what is missing; all again where the
    texts may not be kept, or what tells a collapse would cover a part of the rows for good."""
    real, seen = generate.generate_greedily, []

    def dies(model, tokenizer, prompts, *, on_batch, **options):
        def two_batches(numbers, batch):
            on_batch(numbers, batch)
            seen.extend(numbers)
            if len(seen) >= 16:
                raise KeyboardInterrupt

        return real(model, tokenizer, prompts, on_batch=two_batches, **options)

    monkeypatch.setattr(generate, "generate_greedily", dies)
    options = {**OPTIONS, "batch_size": 8, "keep_texts": keep_texts}
    with pytest.raises(KeyboardInterrupt):
        evaluate([str(home / "original")], home / "data", tmp_path, **options)
    counts = []

    def counting(model, tokenizer, prompts, **options):
        counts.append(len(prompts))
        return real(model, tokenizer, prompts, **options)

    monkeypatch.setattr(generate, "generate_greedily", counting)
    (again,) = evaluate([str(home / "original")], home / "data", tmp_path, **options)
    assert counts == [48 - 16 if keep_texts else 48]
    assert again["cells"] == results[0]["cells"]
    assert again["collapse"] == results[0]["collapse"]
    assert not list((tmp_path / "cache").glob("*.partial.jsonl"))


def test_likelihoods_go_on_too_and_a_part_at_a_time(home, results, tmp_path, monkeypatch):
    """Killed in the second ten of 24 documents: the first ten are not scored again, and every
    number is that of a run that nobody killed. The parts of before were all or nothing."""
    from axolotl_unlearn.engine import token_scoring

    monkeypatch.setattr(measure, "_AT_ONCE", 10)
    real, sizes = token_scoring.score_texts, []

    def dies(model, tokenizer, texts, **options):
        sizes.append(len(texts))
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return real(model, tokenizer, texts, **options)

    models = [str(home / "original")]
    monkeypatch.setattr(token_scoring, "score_texts", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluate(models, home / "data", tmp_path / "killed", **OPTIONS)
    (again,) = evaluate(models, home / "data", tmp_path / "killed", **OPTIONS)
    assert sizes == [10, 10, 10, 4]
    (whole,) = evaluate(models, home / "data", tmp_path / "whole", **OPTIONS)
    assert {k: v for k, v in again.items() if k != "seconds"} == {
        k: v for k, v in whole.items() if k != "seconds"
    }
    assert whole["cells"] == results[0]["cells"] and whole["utility"] == results[0]["utility"]
    assert not list((tmp_path / "killed" / "cache").glob("*.partial*"))


def test_two_evaluations_that_share_a_store_end_at_once(tmp_path):
    """Each removes what the other has written in part: one of them ended with a traceback."""
    for number in range(1000):
        Path(tmp_path, f"k-{number}.partial.jsonl").touch()
    given = Cache(tmp_path).save, "k", Measured(), Settings()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as both:
        assert not any(one.exception() for one in [both.submit(*given) for _ in range(2)])


def test_a_finished_model_is_not_measured_again_after_a_kill(home, results, tmp_path, monkeypatch):
    """Killed in the second model, whose outputs were judged with everybody's at the end: the first
    had no judgement and was generated again, all of it."""
    measure, measured = Session.measure, []

    def dies(*given):
        measured.append(given[-1])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(Session, "measure", dies)
    models = [str(home / "original"), f"retrained={home / 'broken'}"]
    with pytest.raises(KeyboardInterrupt):
        evaluate(models, home / "data", tmp_path, **OPTIONS)
    again = evaluate(models, home / "data", tmp_path, **OPTIONS)
    assert measured == ["original", "retrained", "retrained"]
    for new, old in zip(again, results, strict=True):
        assert {k for k in new if new[k] != old[k]} <= {"seconds"}


def test_an_evaluation_is_one_process(home, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with fails("eval.several-processes"):
        evaluate([str(home / "original")], home / "data", **OPTIONS)


def test_changed_data_are_measured_again(home, results, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(home / "data", data)
    lines = (data / "retain.jsonl").read_text().splitlines()
    (data / "retain.jsonl").write_text("\n".join(lines[:-2]) + "\n")
    (again,) = evaluate([str(home / "original")], data, home / "eval", **OPTIONS)
    assert sum(again["n"][name] for name in CELLS) == 46


def test_a_cell_without_rows_is_none_and_left_out(home, results, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(home / "data", data)
    rows = [json.loads(line) for line in (data / "forget.jsonl").read_text().splitlines()]
    kept = [row for row in rows if not (row["task"] == "Task3" and "qa" in row["id"])]
    (data / "forget.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    (again,) = evaluate([str(home / "original")], data, tmp_path / "out", **OPTIONS)
    assert again["cells"]["forget_task3_knowledge"] is None
    assert again["n"]["cells"] == 11 and again["n"]["forget_task3_knowledge"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{home}/nothing"], "does not exist; train or merge it first"),
        (["{home}/original", "--data", "{home}/no"], "the data folder .*no does not exist"),
        (["{home}/original", "--data", "{home}/data", "--samples", "-1"], "-1 is not in the range"),
        (["{home}/original", "--data", "{home}/data"], "an AUC needs at least 20"),
        (
            ["{home}/original", "--data", "{home}/data", "--min-members", "1", "--original", "x"],
            "--original 'x' is none of the models",
        ),
        (  # it was judged as a candidate
            ["{home}/original", "x={home}/broken", "--data", "{home}/data", "--min-members", "1",
             "--original", "x"],
            "another model is named 'original'",
        ),
    ],
)  # fmt: skip
def test_bad_input_on_the_command_line(home, arguments, message):
    """One sentence, exit code 2, before any model is loaded."""
    import re

    filled = [argument.format(home=home) for argument in arguments]
    outcome = CliRunner().invoke(unlearn, ["eval", *filled])
    assert outcome.exit_code == 2
    assert re.search(f"Error: .*{message}", outcome.output), outcome.output
    assert "Traceback" not in outcome.output


def test_utility_is_told_by_group_of_questions(tmp_path):
    """Two of three replayed questions right, none of one held out: .667 and 0."""

    from axolotl_unlearn.evaluation.sets import read_options
    from axolotl_unlearn.evaluation.summary import _utility_groups

    groups = ["replayed", "held out", "replayed", "replayed"]
    lines = [
        json.dumps({"question": f"q{i}", "choices": ["a", "b"], "answer": 0, "group": group})
        for i, group in enumerate(groups)
    ]
    (tmp_path / "general.jsonl").write_text("\n".join(lines))
    sets = SimpleNamespace(utility=read_options(tmp_path / "general.jsonl"))
    found = _utility_groups(SimpleNamespace(options=[1, 0, 0, 1]), sets)
    assert found == {
        "held out": {"value": 0, "n": 1},
        "replayed": {"value": pytest.approx(2 / 3), "n": 3},
    }


def moved(model: Path, folder: Path, seed: int) -> Path:
    """A copy of a model with a little noise on its weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    torch.manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: w + 0.01 * w.std() * torch.randn_like(w) for name, w in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_no_command_says_or_leaves_a_text_that_is_not_listed(home, tmp_path, monkeypatch):
    """Every text of the forget rows is a canary: in no output, in no file but those of a list."""
    from axolotl_unlearn.data.records import read_records
    from axolotl_unlearn.files import MANIFEST, read_manifest
    from axolotl_unlearn.requests.search import Texts, search

    monkeypatch.chdir(tmp_path)
    # Analyses want 20 members; a row of the small folder is one of this too.
    more = eval_model.made_up_rows(7)
    folder = eval_model.write_folder(home / "more", more, eval_model.documents_of(more), general=6)
    records, kept = (read_records(folder / f"{side}.jsonl") for side in ("forget", "retain"))
    said, common = (
        [t for r in some for t in (r.input, r.output, f"{r.input} {r.output}")]
        for some in (records, kept)
    )
    texts = Texts.of(said, common)  # both sides have years in common
    assert len(texts.windows) > 50
    data = ["--data", str(home / "data")]
    model, other = str(home / "original"), str(home / "broken")
    short = ["--limit", "3", "--max-new-tokens", "4"]
    evaluated = ["--min-members", "1", "--max-gen-toks", "12"]
    near = [str(moved(home / "original", home / f"near-{seed}", seed)) for seed in (1, 2)]
    many = ["--data", str(folder), "--limit", "12"]
    good = home / "good.yml"
    entries = [
        {"path": str(home / "data" / f"{side}.jsonl"), "type": f"axolotl_unlearn.data.{side}"}
        for side in ("forget", "retain")
    ]
    good.write_text(
        json.dumps(
            {
                "base_model": model, "adapter": "lora", "lora_r": 2, "lora_alpha": 4,
                "lora_target_modules": ["q_proj"], "datasets": entries, "sequence_len": 64,
                "unlearn": {"forget": {"objective": "ceu"}, "retain": {"objective": "nll"}},
            }
        )
    )  # fmt: skip
    little = [str(good), "--max-new-tokens", "4", "--out"]
    rows = home / "rows.yml"  # YAML's own message would quote the second line
    rows.write_text(f'{{"output": "{max(said, key=len)}"}}\n' * 2)
    commands = [
        ["eval", f"original={model}", f"retrained={other}", *data, "--out", "eval", *evaluated],
        ["eval", f"original={model}", *data, "--out", "texts", "--with-text", *evaluated],
        ["report", "eval"],
        ["report", "texts"],
        ["attack", "quantise", model, *data, "--out", "eval", "--schemes", "int8", *short],
        ["attack", "prompt", model, *data, "--out", "eval", "--variants", "prefix", *short],
        ["attack", "relearn", model, *data, "--out", "eval", "--rows=2", "--steps=1", *short],
        ["analyse", "layers", "--base", model, "--parent", near[0], *many, "--out", "layers.json"],
        ["analyse", "retention", *near, "--base", model, *many, "--out", "kept.json"],
        ["augment", "idk", str(good), "--out", "augmented/idk.jsonl"],
        ["augment", "alternatives", *little, "augmented/alternatives.jsonl",
         "--temperature", "9"],
        ["audit", str(home / "data/forget.jsonl"), "--model", model, "--out", "audit.json",
         "--max-new-tokens", "4"],
        ["canaries", str(home / "data/forget.jsonl"), "--out", "coins"],
        ["eval", "nowhere", *data],
        ["eval", model, "--data", str(home)],
        ["check", str(home / "data" / "forget.jsonl")],
        ["report", str(home / "data" / "forget.jsonl")],
        ["request", "verify", str(home / "data")],
        ["analyse", "layers", "--base", model, "--parent", near[0], *data],
        ["analyse", "retention", *near, "--base", model, *data],
        ["request", "audit", model, str(home / "data")],
        ["request", "run", str(home / "data")],
        *(command + [str(rows)] for command in (["augment", "idk"], ["check"])),
        ["teacher", str(rows), "--forget", str(home / "data" / "forget.jsonl")],
        ["request", "new", str(rows), "--out", "request"],
    ]  # fmt: skip
    ended = []
    for command in commands:
        group = unlearn if unlearn.get_command(None, command[0]) else research
        done = CliRunner().invoke(group, ["--debug", *command])
        ended.append(done.exit_code and done.output[-300:])
        assert not texts.among(done.output), command
        assert isinstance(done.exception, SystemExit | None), (command, done.exc_info)
    assert ended[:11] == [0] * 11
    found = search([tmp_path], texts)
    listed = {
        (manifest.parent / entry["path"]).resolve(): entry["holds"]
        for manifest in tmp_path.rglob(MANIFEST)
        for entry in read_manifest(manifest.parent)["entries"]
    }
    holding = [p for p, holds in listed.items() if holds == "texts"]
    for path in found.left:
        real = path.resolve()
        assert any(real == one or one in real.parents for one in holding), path
    assert found.left
    for path in listed:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    assert not search([tmp_path], texts).left


def test_baselines_go_by_author_and_read_prompts(home, tmp_path):
    """Names of authors failed exchangeable texts; prompts that differ failed none."""
    data, found = tmp_path / "data", {}
    shutil.copytree(home / "data", data)
    asked = {"member": "Tell the old tale: ", "nonmember": "Recite a new one: "}
    for kind, prompts in (("authors", dict.fromkeys(asked, "")), ("prompts", asked)):
        for side, prompt in prompts.items():
            lines = (json.dumps(row | {"prompt": prompt}) + "\n" for row in authored(11, side, 2))
            (data / f"{side}.jsonl").write_text("".join(lines))
        (one,) = evaluate([str(home / "broken")], data, tmp_path / kind, **OPTIONS)
        found[kind] = one["membership"]
        assert set(one["membership"]["blind"]) == {"length", "zlib", "bag_of_words", "words_tfidf"}
    assert found["authors"]["meaningful"] and not found["prompts"]["meaningful"]


def test_a_text_that_comes_again_is_no_new_evidence():
    """Twenty non-members, ten times each, were 200: so many can show that a model has forgotten."""
    from axolotl_unlearn.data.documents import Answer

    sides = [
        [(f"{s}{i}", f"{s} says {i % n}") for i in range(200)] for s, n in (("m", 200), ("n", 20))
    ]
    members, others = summary.text_clusters(EvaluationSets(Path(), [], [], *sides))
    assert (len(set(members)), len(set(others)), len(others)) == (200, 20, 200)
    asked = [(f"n{i}", Answer("a linguist", f"Who is {i}? ")) for i in range(20)]  # other texts
    _, others = summary.text_clusters(EvaluationSets(Path(), [], [], sides[0], asked))
    assert len(set(others)) == 20


def test_a_text_of_a_document_that_comes_again_is_corrected_for_once(monkeypatch):
    """Twice in the member file its p by the learned attack was twice as large."""
    found = SimpleNamespace(auc=0.5, p=0.5, each=torch.full((4,), 0.2))
    monkeypatch.setattr(summary, "learned_attack", lambda *_: found)
    members = [('"a"sc0', "x"), ('"a"sc1', "x"), ('"b"sc0', "y"), ('"b"sc1', "z")]
    sets = EvaluationSets(Path(), [], [], members, [("n", "w")])
    one, made = {"features": [0.0]}, {"name": "m", "role": "candidate"}
    summary.add_learned([made], {"m": Measured(member=[one] * 4, nonmember=[one])}, sets)
    assert made["learned"]["documents"] == pytest.approx({'"a"': 0.2, '"b"': 0.4})


def test_a_row_that_comes_again_is_no_new_evidence():
    """Four rows, ten times each, were forty documents: what is kept had the interval of so many."""

    def made(many):
        asked = [Option("q", f"Who is {i}?", ("Ada", "Bo"), 0) for _ in range(many) for i in "abcd"]
        rows = [Record(f"{n}-{i}", f"When {i}?", f"In {i}", "Task1", "question")
                for n in range(many) for i in range(4)]  # fmt: skip
        sets = EvaluationSets(Path(), rows, rows, [], [], asked)
        answer = dict.fromkeys(("tokens", "strength", "run", "greedy", "logp"), 0.0)
        found = Measured(values={row.key: float(row.record.id[-1] > "0") for row in sets.rows})
        found.answers, found.options = [answer] * len(rows), [1, 1, 1, 0] * many
        ends = summary.scores_of(found, sets).intervals()
        return ends, summary.text_facts(found, sets)["extraction"]["cluster"]

    (once, four), (often, forty) = made(1), made(10)
    for side in ("forget_task1_knowledge", "retain_task1_knowledge", "retain", "utility"):
        assert often[side] == pytest.approx(once[side])
    assert len(set(forty)) == len(four) == 4


def test_intervals_of_membership_go_by_author():
    """They were those of independent texts: ten authors of six texts each, alike."""
    from axolotl_unlearn.data.documents import Answer
    from axolotl_unlearn.evaluation.sets import EvaluationSets
    from axolotl_unlearn.evaluation.summary import _membership

    own = [0.1 * (i // 6) + 0.01 * (i % 6) for i in range(60)]
    sides = (own, [x + 0.05 for x in own])
    found = Measured(**{
        side: [{"loss": x, "attacks": {}} for x in losses]
        for side, losses in zip(("member", "nonmember"), sides, strict=True)
    })  # fmt: skip

    def figures(authors, **blind):
        sides = [
            [(f"{s}{i}", Answer(f"text {i}", author=f"{s}{i // 6}" * authors)) for i in range(60)]
            for s in "mn"
        ]
        return _membership(found, EvaluationSets(Path(), [], [], *sides), blind)

    alone, by_author = (figures(n)["attacks"]["loss"] for n in (0, 1))
    assert alone["auc"] == by_author["auc"]
    assert by_author["interval"][0] < alone["interval"][0] < 0.5
    assert figures(1)["meaningful"]
    length = {"auc": 0.9, "low": 0.8, "high": 1.0, "separates": True}  # without any model
    apart = figures(1, length=length)
    assert apart["blind"] == {"length": length} and apart["meaningful"] is False
    assert "means nothing" in apart["sentence"]


@pytest.mark.parametrize("function, given", [
    ("loss", float("nan")), ("attack_losses", {"loss": 1.0, "entropy": float("nan")}),
])  # fmt: skip
def test_a_score_that_is_no_number_is_said(home, tmp_path, monkeypatch, function, given):
    """NaN had the same rank in all canaries: p was 1."""
    rows = [{"id": f"c{i}", "document": f"in {i}", "included": i % 2 == 0} for i in range(10)]
    (tmp_path / "canaries.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(measure, function, lambda *_: copy.copy(given))
    more = OPTIONS | {"canaries": str(tmp_path / "canaries.jsonl")}
    with fails("eval.not-finite") as fault:
        evaluate([str(home / "original")], home / "data", tmp_path, **more)
    assert ("entropy" in str(fault.value)) is (function != "loss")


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_an_answer_whose_probability_is_no_number_is_said(home, tmp_path, monkeypatch, bad):
    """It ended in a traceback when the results were written, and again from the cache."""
    score = measure.score_pairs

    def scored(*given, **how):
        facts = score(*given, **how)
        facts[0].logp[0] = bad
        return facts

    monkeypatch.setattr(measure, "score_pairs", scored)
    with fails("eval.not-finite") as fault:
        evaluate([str(home / "original")], home / "data", tmp_path, **OPTIONS | {"min_members": 0})
    assert "answers" in str(fault.value)


def test_a_stored_score_that_is_no_number_is_measured_again(home, tmp_path):
    """Earlier code kept it, and refused it when it was read: the report ended in a traceback."""
    again = partial(evaluate, [str(home / "original")], home / "data", tmp_path, **OPTIONS)
    first = again()[0]["likelihood"]["attacks"]["zlib"]
    (path,) = (
        p for p in (tmp_path / "cache").glob("*.json") if "member" in unsealed(p.read_text())
    )
    stored = unsealed(path.read_text())
    for one, name in ((stored["member"][0]["attacks"], "zlib"), (stored["answers"][0], "logp")):
        before, one[name] = one[name], float("nan")
        path.write_text(sealed(stored))
        assert again()[0]["likelihood"]["attacks"]["zlib"] == first
        one[name] = before


def test_a_dtype_that_torch_lacks():
    assert torch_dtype("bfloat16") is torch.bfloat16
    for name in ("fp16", "nn", ""):
        with fails("eval.dtype"):
            torch_dtype(name)


def test_cells_of_another_script_have_intervals_of_their_own():
    """The verdict reads them one by one where another cell says nothing."""
    rows = [Record(f"d{i}sc1", f"Ада {i} родилась", "в Лондоне зимой", "Task1") for i in range(8)]
    rows += [Record(f"e{i}sc1", f"Ada {i} was born", "in London", "Task2") for i in range(8)]
    sets = EvaluationSets(Path(), [], rows, [], [])
    measured = Measured(values={row.key: float(row.record.output.isascii()) for row in sets.rows})
    measured.any_script = {f"retain/d{i}sc1": 0.5 + 0.05 * i for i in range(8)}
    found = summary._any_script(measured, sets)
    name = "retain_task1_regurgitation"
    assert found["any_script"] == {name: pytest.approx(0.675)}
    assert found["any_script_intervals"].keys() == {"retain", name}
    low, high = found["any_script_intervals"][name]
    assert 0.3 < low < 0.675 < high < 0.95
