"""The one-forward scorer against full logits in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from test_performance_engine import changed_logits_model

from axolotl_unlearn.engine.token_scoring import Query, score_options, score_queries, score_texts
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.metrics import memorisation as mem

VOCABULARY = 23


def sequences(seed: int = 0, count: int = 9) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, int(n)).tolist() for n in rng.integers(2, 30, count)]


def plain_facts(model, ids: list[int], start: int = 1) -> list[tuple[float, bool, float, float]]:
    """One text, alone, unpadded, all logits in float64, token by token."""
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    rows = []
    for t in range(start, len(ids)):
        row = logp[t - 1]
        p = row.exp()
        mean = sum(float(a * b) for a, b in zip(p, row, strict=True))
        variance = sum(float(a) * (float(b) - mean) ** 2 for a, b in zip(p, row, strict=True))
        rows.append((float(row[ids[t]]), int(row.argmax()) == ids[t], mean, math.sqrt(variance)))
    return rows


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocabulary=VOCABULARY)


def assert_facts(found: mem.TokenFacts, expected) -> None:
    columns = np.array([(a, float(b), c, d) for a, b, c, d in expected])
    assert found.logp == pytest.approx(columns[:, 0], abs=1e-5)
    assert found.greedy.tolist() == (columns[:, 1] == 1).tolist()
    assert found.mean == pytest.approx(columns[:, 2], abs=1e-5)
    assert found.sd == pytest.approx(columns[:, 3], abs=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
@pytest.mark.parametrize("chunk_mib", [0, 64])
def test_facts_do_not_depend_on_batches_and_chunks(model, batch_tokens, chunk_mib):
    texts = sequences()
    found = score_queries(
        model, [Query.of(ids) for ids in texts], batch_tokens=batch_tokens, chunk_mib=chunk_mib
    )
    for ids, one in zip(texts, found, strict=True):
        assert_facts(one, plain_facts(model, ids))


def test_an_option_without_a_token_of_its_own(model):
    """A tokenizer that merges across spaces: the option would have the best score of all, 0."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"?": 0, " ": 1, "A": 2, " A": 3, "? A": 4}
    joined = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [(" ", "A"), ("?", " A")]))
    )
    with pytest.raises(UnlearnError, match="joins the end of a question and the start of an opti"):
        score_options(model, joined, [("?", [" A", " ?"])])


def test_loss_is_the_models_own(model):
    ids = sequences(2, 1)[0]
    with torch.no_grad():
        own = model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    for loss_only in (False, True):
        (found,) = score_queries(model, [Query.of(ids)], loss_only=loss_only)
        assert mem.loss(found) == pytest.approx(own, abs=1e-6)


def test_teacher_forced_extraction_equals_free_greedy_decoding(model):
    """The shortest prefix after which greedy generation writes exactly the rest."""
    for ids in sequences(3, 4):
        # Let the model continue its own text, so that some suffixes can be extracted.
        prompt = ids[:2]
        with torch.no_grad():
            text = model.generate(
                torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None
            )[0].tolist()
        text[3] = 3 if text[3] != 3 else 4
        n = len(text) - 2
        needed = n
        for k in range(n, -1, -1):
            rest = n - k
            if rest:
                with torch.no_grad():
                    free = model.generate(
                        torch.tensor([text[: 2 + k]]),
                        max_new_tokens=rest,
                        do_sample=False,
                        eos_token_id=None,
                    )[0].tolist()
                if free != text:
                    break
            needed = k
        (found,) = score_queries(model, [Query.of(text, 2)])
        assert mem.extraction_strength(found) == 1 - needed / n


class Letters:
    """A tokenizer of single characters, BOS-free."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [3 + (ord(c) % 20) for c in text]}


def test_options_equal_one_forward_each(model):
    """Options of one token share a forward; longer ones do not; the sums are the same."""
    tokenizer = Letters()
    questions = [("question one", ("a", "b", "c", "d")), ("two", ("ab", "c", "dbca", "b"))]
    found = score_options(model, tokenizer, questions)
    for (context, options), sums in zip(questions, found, strict=True):
        for option, value in zip(options, sums, strict=True):
            ids = tokenizer(context + option)["input_ids"]
            rows = plain_facts(model, ids, len(context))
            assert value == pytest.approx(sum(row[0] for row in rows), abs=1e-4)


def test_models_that_cap_their_logits():
    """Gemma 2 treats its logits after the head; the facts are those of its final logits."""
    capped, texts = changed_logits_model("gemma2"), sequences(4, 3)
    found = score_queries(capped, [Query.of(ids) for ids in texts])
    for ids, one in zip(texts, found, strict=True):
        assert_facts(one, plain_facts(capped, ids))


def test_a_text_longer_than_the_model_takes_is_refused(model):
    with pytest.raises(UnlearnError, match="130 tokens but the model takes 128"):
        score_queries(model, [Query.of([5] * 130)])


def test_memory_grows_with_the_chunk_not_with_the_vocabulary():
    """16 x 64 positions, V = 50 000: all logits are 205 MB. In chunks of 8 MiB no tensor of more
    than 3 chunks is made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    wide = tiny_llama(vocabulary=50_000)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor) and value.shape[-1:] == (50_000,):
                    largest = max(largest, value.numel() * value.element_size())
            return result

    texts = [np.random.default_rng(i).integers(3, 50_000, 64).tolist() for i in range(16)]
    with Watch():
        score_queries(wide, [Query.of(ids) for ids in texts], chunk_mib=8)
    assert 0 < largest <= 8 * 2**20


def test_an_answer_is_scored_after_its_prompt_and_the_prompt_is_not():
    """ids are bytes; of 'ab' + 'cd' the log-probs of c and d alone, by full logits."""
    import pickle

    from data_tokenizers import byte_tokenizer

    from axolotl_unlearn.data.documents import Answer

    large, tokenizer = tiny_llama(vocabulary=259), byte_tokenizer()
    answer = pickle.loads(pickle.dumps(Answer("cd", "ab")))  # as other processes get it
    found = score_texts(large, tokenizer, [answer, "abcd"])
    expected = plain_facts(large, list(b"abcd"))
    assert_facts(found[0], expected[1:])
    assert_facts(found[1], expected)
