"""hf-unlearn: HFLM's log-likelihoods, plus the facts of each token."""

from __future__ import annotations

import pickle

import eval_model
import numpy as np
import pytest
import torch
from fault_codes import fails
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import MambaConfig, MambaForCausalLM

from axolotl_unlearn.evaluation.lm import UnlearnLM
from axolotl_unlearn.evaluation.tasks import task_folder
from axolotl_unlearn.metrics.memorisation import loss
from eval_tasks.unlearn_likelihood.utils import all_likelihood_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("lm")
    sides = eval_model.made_up_rows(2)
    eval_model.train_model(home / "model", sides["retain"], steps=8)
    texts = eval_model.documents_of(sides)
    eval_model.write_folder(home / "data", sides, texts)
    return home


def likelihoods(home, data, **how) -> dict[str, float]:
    """The results of the task, by lm-eval."""
    metadata = {"data_dir": str(data), "min_members": 1}
    return simple_evaluate(
        "hf-unlearn",
        model_args={"pretrained": str(home / "model"), "dtype": "float32"},
        tasks=["unlearn_likelihood"],
        task_manager=TaskManager(include_path=str(task_folder()), metadata=metadata),
        device="cpu", batch_size=4, bootstrap_iters=0, **how,
    )["results"]["unlearn_likelihood"]  # fmt: skip


def requests():
    from lm_eval.api.instance import Instance

    text = "When did Ada R1 begin? In the year 1001 by a river."
    pairs = [(text[:cut], text[cut:]) for cut in (4, 13, 22, 27)]
    pairs += [("Ada", " began"), ("Ada", " R1"), ("", "Ada R1 began")]
    return [
        Instance("loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(pairs)
    ]


def test_same_values_as_lm_eval_without_its_cache(home):
    """With its logits cache HFLM gives texts that are split at several points wrong values."""
    from lm_eval.models.huggingface import HFLM

    options = {"pretrained": str(home / "model"), "device": "cpu", "dtype": "float32"}
    theirs = HFLM(**options, batch_size=4, logits_cache=False).loglikelihood(requests())
    ours = UnlearnLM(**options, batch_size=4).loglikelihood(requests())
    assert [value for value, _ in ours] == pytest.approx([v for v, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    for scored in ours:
        assert float(scored.facts.logp.sum()) == scored[0]
        assert bool(scored.facts.greedy.all()) == scored[1]
        assert np.isfinite(scored.facts.sd).all()
    again = pickle.loads(pickle.dumps(ours[0]))  # processes exchange results
    assert again == ours[0] and again.facts.logp.tolist() == ours[0].facts.logp.tolist()


def test_cached_requests_of_another_folder_are_not_scored(home, tmp_path, monkeypatch):
    """`lm_eval --cache_requests true` keeps requests by the task's name alone."""
    from lm_eval.caching import cache

    monkeypatch.setattr(cache, "PATH", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    sides = eval_model.made_up_rows(2, retain_years=50)
    eval_model.write_folder(tmp_path / "other", sides, eval_model.documents_of(sides))

    def loss_of(data, cached: bool) -> float:
        return likelihoods(home, data, cache_requests=cached)["retain_loss,none"]

    first = loss_of(home / "data", True)
    assert loss_of(tmp_path / "other", True) == loss_of(tmp_path / "other", False) != first


def test_nothing_of_a_text_is_left_out(home, tmp_path):
    """lm-eval cuts the beginning of what is longer than the context: two texts that differ there
    had one likelihood, and a model was asked for the rest of half a prompt."""
    from lm_eval.api.instance import Instance

    how = {"pretrained": str(home / "model"), "device": "cpu", "dtype": "float32"}
    text = "When did Ada R1 begin? " * 3

    def ask(model, kind: str, *arguments):
        given = Instance(kind, doc={}, arguments=(text, *arguments), idx=0)
        return getattr(model, kind)([given], disable_tqdm=True)

    greedy = {"until": [], "do_sample": False, "max_gen_toks": 8}
    whole = UnlearnLM(**how)
    length = len(whole.tok_encode(text + "It began")) - 1
    prompt = len(whole.tok_encode(text))
    for kind, asked, fits in (
        ("loglikelihood", "It began", length),
        ("generate_until", greedy, prompt + 8),
    ):
        for given in (True, False):  # lm-eval's argument, or what the model's config says

            def limited(limit, given=given):
                model = UnlearnLM(**how, **({"max_length": limit} if given else {}))
                model.model.config.max_position_embeddings = limit if not given else 1024
                return model

            assert ask(limited(fits), kind, asked) == ask(whole, kind, asked)
            with fails("eval.no-room") as fault:
                ask(limited(fits - 1), kind, asked)
            assert f"1 text needs up to {fits} tokens" in str(fault.value)
    config = MambaConfig(vocab_size=len(whole.tokenizer), hidden_size=16, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path)  # its config knows no longest text
    whole.tokenizer.save_pretrained(tmp_path)
    how["pretrained"] = str(tmp_path)
    whole, other = UnlearnLM(**how), UnlearnLM(**how)
    other.tokenizer.model_max_length = 16
    assert other.max_length == 16 < whole.max_length
    for kind, asked in (("loglikelihood", "It began"), ("generate_until", greedy)):
        assert ask(other, kind, asked) == ask(whole, kind, asked)


def test_a_continuation_without_a_token_is_an_error(home):
    """Its sum over no token, 0, would be the best of all options (lm-evaluation-harness#1297)."""
    model = UnlearnLM(pretrained=str(home / "model"), device="cpu", dtype="float32")
    with fails("tasks.no-token"):
        model._loglikelihood_tokens([(("a", "b"), [3, 4], [5]), (("a", ""), [3, 4], [])])


def test_likelihood_task_equals_the_scorer(home):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from axolotl_unlearn.engine.token_scoring import Query, score_queries
    from axolotl_unlearn.evaluation.sets import load_sets

    path, data = str(home / "model"), str(home / "data")
    results = likelihoods(home, data)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    values: dict[str, list[float]] = {}
    for row in load_sets(data, min_members=1).rows:
        context, answer = row.record.input, f" {row.record.output}"
        ids = tokenizer(context + answer)["input_ids"]
        (facts,) = score_queries(model, [Query.of(ids, len(tokenizer(context)["input_ids"]))])
        for name, value in all_likelihood_metrics(facts, answer).items():
            values.setdefault(f"{row.side}_{name}", []).append(value)
        with torch.no_grad():
            labels = torch.tensor([ids])
            labels = labels.masked_fill(torch.arange(len(ids)) < len(ids) - len(facts), -100)
            own = model(input_ids=torch.tensor([ids]), labels=labels).loss.item()
        assert loss(facts) == pytest.approx(own, abs=1e-5)
    for name, expected in values.items():
        assert results[f"{name},none"] == pytest.approx(np.mean(expected), abs=1e-5), name
