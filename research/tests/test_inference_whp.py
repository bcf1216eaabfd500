"""Who's Harry Potter: the subtraction by hand, and lm-eval's answers against uncached forwards."""

from __future__ import annotations

import eval_model
import pytest
import torch
from test_eval_lm import requests


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("whp")
    eval_model.train_model(home / "model", eval_model.made_up_rows(2)["retain"], steps=8)
    return home


def test_generic_logits_by_hand():
    """alpha 2: a logit that training raised by 1 falls by 2, one that it lowered stays."""
    from research.inference.whos_harry_potter import generic_logits

    baseline, reinforced = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([2.0, -5.0, 3.5])
    assert generic_logits(baseline, reinforced, 2.0).tolist() == [-1.0, 0.0, 2.0]


def test_whp_scores_and_generates_from_both_models(home):
    """Against one uncached forward of either model a token; prompts of unequal length."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from research.inference.whos_harry_potter import WhpLM

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
