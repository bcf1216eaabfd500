"""hf-unlearn: HFLM's log-likelihoods, plus the facts of each token."""

from __future__ import annotations

import pickle

import eval_model
import numpy as np
import pytest
import torch

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics.memorisation import all_likelihood_metrics, loss

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("lm")
    sides = eval_model.made_up_rows(2)
    eval_model.train_model(home / "model", sides["retain"], steps=8)
    texts = eval_model.documents_of(sides)
    eval_model.write_folder(home / "data", sides, texts)
    return home


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

    from axolotl_unlearn.evaluation.lm import UnlearnLM

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
    from lm_eval import simple_evaluate
    from lm_eval.caching import cache
    from lm_eval.tasks import TaskManager

    import axolotl_unlearn.evaluation.lm  # noqa: F401
    from axolotl_unlearn.evaluation.tasks import task_folder

    monkeypatch.setattr(cache, "PATH", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    sides = eval_model.made_up_rows(2, retain_years=50)
    eval_model.write_folder(tmp_path / "other", sides, eval_model.documents_of(sides))

    def loss_of(data, cached: bool) -> float:
        metadata = {"data_dir": str(data), "min_members": 1}
        return simple_evaluate(
            "hf-unlearn",
            model_args={"pretrained": str(home / "model"), "dtype": "float32"},
            tasks=["unlearn_likelihood"],
            task_manager=TaskManager(include_path=str(task_folder()), metadata=metadata),
            cache_requests=cached, device="cpu", batch_size=4, bootstrap_iters=0,
        )["results"]["unlearn_likelihood"]["retain_loss,none"]  # fmt: skip

    first = loss_of(home / "data", True)
    assert list((tmp_path / "cache").iterdir()), "it keeps them"
    assert loss_of(tmp_path / "other", True) == loss_of(tmp_path / "other", False) != first


def test_a_continuation_without_a_token_is_an_error(home):
    """Its sum over no token, 0, would be the best of all options (lm-evaluation-harness#1297)."""
    from axolotl_unlearn.evaluation.lm import UnlearnLM

    model = UnlearnLM(pretrained=str(home / "model"), device="cpu", dtype="float32")
    with pytest.raises(UnlearnError, match="has none of its own and no probability"):
        model._loglikelihood_tokens([(("a", "b"), [3, 4], [5]), (("a", ""), [3, 4], [])])


def test_likelihood_task_equals_the_scorer(home):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import axolotl_unlearn.evaluation.lm  # noqa: F401 (registers hf-unlearn)
    from axolotl_unlearn.engine.token_scoring import Query, score_queries
    from axolotl_unlearn.evaluation.sets import load_sets
    from axolotl_unlearn.evaluation.tasks import task_folder

    path, data = str(home / "model"), str(home / "data")
    metadata = {"data_dir": data, "min_members": 1}
    results = simple_evaluate(
        "hf-unlearn",
        model_args={"pretrained": path, "dtype": "float32"},
        tasks=["unlearn_likelihood"],
        task_manager=TaskManager(include_path=str(task_folder()), metadata=metadata),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )["results"]["unlearn_likelihood"]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    values: dict[str, list[float]] = {}
    for row in load_sets(data, min_members=1).rows:
        context, answer = row.record.input, f" {row.record.output}"
        ids = tokenizer(context + answer)["input_ids"]
        (facts,) = score_queries(model, [Query.of(ids, len(tokenizer(context)["input_ids"]))])
        for name, value in all_likelihood_metrics(facts, answer, ks=(0.2,)).items():
            values.setdefault(f"{row.side}_{name}", []).append(value)
        with torch.no_grad():
            labels = torch.tensor([ids])
            labels = labels.masked_fill(torch.arange(len(ids)) < len(ids) - len(facts), -100)
            own = model(input_ids=torch.tensor([ids]), labels=labels).loss.item()
        assert loss(facts) == pytest.approx(own, abs=1e-5)
    for name, expected in values.items():
        assert results[f"{name},none"] == pytest.approx(np.mean(expected), abs=1e-5), name


# --- hf-whp ---------------------------------------------------------------------------------------


def test_generic_logits_by_hand():
    """alpha 2: a logit that training raised by 1 falls by 2, one that it lowered stays."""
    from axolotl_unlearn.experimental.whos_harry_potter import generic_logits

    baseline, reinforced = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([2.0, -5.0, 3.5])
    assert generic_logits(baseline, reinforced, 2.0).tolist() == [-1.0, 0.0, 2.0]


def test_whp_scores_and_generates_from_both_models(home):
    """Against one uncached forward of either model a token; prompts of unequal length."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from axolotl_unlearn.experimental.whos_harry_potter import WhpLM

    sides = eval_model.made_up_rows(2)
    eval_model.train_model(home / "reinforced", sides["forget"], steps=8)
    options = {"pretrained": str(home / "model"), "device": "cpu", "dtype": "float32"}
    lm = WhpLM(**options, reinforced=str(home / "reinforced"), alpha=1.5, batch_size=4)
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    models = [
        AutoModelForCausalLM.from_pretrained(home / name, dtype=torch.float32).eval()
        for name in ("model", "reinforced")
    ]

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            b, r = (model(torch.tensor([ids])).logits[0] for model in models)
        return b - 1.5 * (r - b).clamp(min=0)

    (value, _), *_ = lm.loglikelihood(requests()[:1])
    context, rest = requests()[0].args
    ids, first = tokenizer(context + rest)["input_ids"], len(tokenizer(context)["input_ids"])
    logp = logits(ids).log_softmax(-1)
    expected = sum(float(logp[t - 1, ids[t]]) for t in range(first, len(ids)))
    assert value == pytest.approx(expected, abs=1e-4)

    prompts = ["When did Ada R1 begin?", "Ada", "Who walks by the long river in the year"]
    wanted = {"until": [], "do_sample": False, "max_gen_toks": 8}
    asked = [
        Instance("generate_until", doc={}, arguments=(prompt, wanted), idx=n)
        for n, prompt in enumerate(prompts)
    ]
    said = lm.generate_until(asked)
    for prompt, text in zip(prompts, said, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        start = len(ids)
        while len(ids) < start + 8 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            ids.append(int(logits(ids)[-1].argmax()))
        assert text == tokenizer.decode(ids[start:], skip_special_tokens=True)
    plain = HFLM(**options, batch_size=4).generate_until(asked)
    lm.alpha = 0.0
    assert lm.generate_until(asked) == plain and plain != said
