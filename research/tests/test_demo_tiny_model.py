"""The committed tiny OLMo: what a run needs, nothing more, made by the code beside it."""

from pathlib import Path

import pytest

from research.worlds.generate import make_corpus
from research.worlds.tiny_model import make_tiny_model

FOLDER = Path(__file__).parents[2] / "examples" / "tiny-olmo"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def test_committed_files_are_what_the_code_makes(tmp_path):
    make_tiny_model(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in FOLDER.iterdir()}
    committed = (FOLDER / "tokenizer.json").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == committed
    assert len(committed) < 150_000


def test_model_has_the_measured_shape():
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))
    # 2 x 1536 x 256 (embedding, head) + 2 layers x (4 x 256^2 + 3 x 256 x 768); no norm weights
    assert sum(p.numel() for p in model.parameters()) == 786_432 + 2 * 851_968


def test_tokenizer_round_trips_and_cuts_at_the_join(tokenizer):
    """encode(input) ++ encode(" " + output) is encode of the whole text: no BOS, no seam."""
    assert tokenizer.bos_token is None
    assert {tokenizer.eos_token_id, tokenizer.pad_token_id} == {0, 1}
    corpus = make_corpus(0)
    for document in corpus.forget + corpus.nonmembers:
        first = tokenizer(document.input).input_ids
        second = tokenizer(" " + document.output).input_ids
        assert first + second == tokenizer(document.text).input_ids
        assert tokenizer.decode(first + second) == document.text
        assert len(first) + len(second) + 1 <= 128
    assert tokenizer.decode(tokenizer("Zoë, 日本").input_ids) == "Zoë, 日本"
