"""Tokens and labels against literal ids: the ids of the byte tokenizer are UTF-8 bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from data_tokenizers import BOS, EOS, byte_tokenizer, sentencepiece_like, word_tokenizer
from fault_codes import fails

from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.encode import AnswerTooLong, Encoder
from axolotl_unlearn.data.records import Record


@dataclass
class Options:
    join: str = " "
    template: str | None = None
    chat_template: bool = False
    eos: bool = True
    max_length: int | None = 64
    labels: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(completion="document", question="answer")
    )


QUESTION = Record("1qa0", "ab", "c", "Task2", "question")
STORY = Record("1sc1", "ab", "c", "Task1", "completion")
X = -100


def encode_record(tokenizer, record, options, max_length=None):
    """A row, and how many tokens of its prompt were cut."""
    encoder = Encoder(tokenizer, options, max_length or options.max_length)
    encoded = encoder.encode(record)
    labels = encoder.labels(encoded, encoder.labelled(record.kind))
    return {"input_ids": encoded.input_ids, "labels": labels}, encoded.truncated


OTHERWISE = SimpleNamespace(completion="answer", question="document")
BRACES = replace(QUESTION, input="{output}", output="{input}")
BARE = {"eos": False}
#: Tokenizer, record and options -> ids ('ab' 97 98, ' c' 32 99), and how many have no label.
ROWS = [
    ({}, QUESTION, {}, [*b"ab c", EOS], 2),  # labels on the answer alone
    ({}, STORY, {"labels": OTHERWISE}, [*b"ab c", EOS], 2),  # or as the config says of the kind
    ({}, QUESTION, {"labels": OTHERWISE}, [*b"ab c", EOS], 0),
    ({}, QUESTION, BARE, [*b"ab c"], 2),
    ({}, QUESTION, BARE | {"join": ""}, [*b"abc"], 2),
    ({}, QUESTION, BARE | {"join": "\n"}, [*b"ab\nc"], 2),
    ({}, QUESTION, BARE | {"template": "Q: {input}\nA: {output}!"}, [*b"Q: ab\nA: c!"], 8),
    ({}, QUESTION, BARE | {"template": "{input} {{x}} {output}"}, [*b"ab {{x}} c"], 8),
    # The space is the answer's, as with join: tokenizers put it before the next word.
    ({}, QUESTION, {"template": "{input}: {output}"}, [*b"ab: c", EOS], 3),
    # Braces in a text are no fields.
    ({}, BRACES, BARE | {"template": "{input}={output}"}, [*b"{output}={input}"], 9),
    # A BOS that exists but is not added to plain text stays out (above), as in evaluation.
    ({"bos": True}, QUESTION, {}, [BOS, *b"ab c", EOS], 3),
    ({"bos": True}, STORY, {}, [BOS, *b"ab c", EOS], 0),
    # A tokenizer that appends EOS does not split the document.
    ({"bos": True, "trailing": True}, QUESTION, {}, [BOS, *b"ab c", EOS], 3),
]


@pytest.mark.parametrize(("tokens", "record", "options", "ids", "unlabelled"), ROWS)
def test_tokens_and_labels(tokens, record, options, ids, unlabelled):
    row, truncated = encode_record(byte_tokenizer(**tokens), record, Options(**options))
    assert row == {"input_ids": ids, "labels": [X] * unlabelled + ids[unlabelled:]}
    assert truncated == 0


def test_prompt_is_cut_on_the_left_and_counted():
    """'0123456789' + ' yz' + EOS = 14 tokens; 8 fit, so 6 prompt tokens go."""
    record = replace(QUESTION, input="0123456789", output="yz")
    row, truncated = encode_record(byte_tokenizer(), record, Options(), 8)
    assert row["input_ids"] == [*b"6789 yz", EOS] and truncated == 6
    row, truncated = encode_record(byte_tokenizer(bos=True), record, Options(), 8)
    assert row["input_ids"] == [BOS, *b"789 yz", EOS] and truncated == 7
    row, truncated = encode_record(byte_tokenizer(), record, Options(), 4)
    assert row["input_ids"] == [*b" yz", EOS] and truncated == 10


def test_answer_that_does_not_fit_is_an_error():
    """' yz' + EOS + BOS = 5 tokens."""
    record = replace(QUESTION, output="yz")
    with pytest.raises(AnswerTooLong, match="'1qa0'.*needs 5 tokens but at most 4") as error:
        encode_record(byte_tokenizer(bos=True), record, Options(), 4)
    assert error.value.needed == 5
    assert len(encode_record(byte_tokenizer(bos=True), record, Options(), 5)[0]["input_ids"]) == 5


def test_chat_template():
    """'<u>ab<a>' is the prompt, 'c</s>' the answer; the newline after </s> has no label, and
    without `eos` the end of the turn has none."""
    options = Options(chat_template=True)
    tokenizer = byte_tokenizer(chat=True, bos=True)
    row, _ = encode_record(tokenizer, QUESTION, options)
    whole = [*b"<u>ab<a>c", EOS, 10]
    assert row == {"input_ids": whole, "labels": [X] * 8 + [99, EOS, X]}
    row, _ = encode_record(tokenizer, QUESTION, Options(chat_template=True, eos=False))
    assert row == {"input_ids": whole, "labels": [X] * 8 + [99, X, X]}
    assert encode_record(tokenizer, QUESTION, options, 11)[0]["input_ids"] == whole
    # The cut took the BOS and the header that the template had written: a chat nobody learned.
    with pytest.raises(AnswerTooLong, match="the chat needs 11 tokens but at most 10") as error:
        encode_record(tokenizer, QUESTION, options, 10)
    assert error.value.needed == 11


@pytest.mark.parametrize(
    ("tokens", "options", "code"),
    [
        ({}, Options(chat_template=True), "data.no-chat-template"),
        ({"eos_token": None}, Options(), "data.no-eos-token"),
    ],
)
def test_options_that_do_not_go_with_the_tokenizer(tokens, options, code):
    with fails(code):
        encode_record(byte_tokenizer(**tokens), QUESTION, options)


@pytest.mark.parametrize(
    ("scheme", "join", "expected"),
    [
        ("legacy", " ", ["▁the", "▁sky", "▁red"]),
        ("metaspace", " ", ["▁the", "▁sky", "▁red"]),
        ("metaspace", "", ["▁the", "▁sky", "red"]),
    ],
)
def test_spaces_with_sentencepiece(scheme, join, expected):
    """Encoded apart, ' red' becomes '▁' '▁red' (two spaces) with legacy tokenizers, and 'red'
    becomes '▁red' with the newer ones although no space was to be there."""
    tokenizer = sentencepiece_like(["▁the", "▁sky", "▁red", "red"], scheme)
    record = replace(QUESTION, input="the sky", output="red")
    row, _ = encode_record(tokenizer, record, Options(join=join, eos=False))
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == expected
    assert [label != X for label in row["labels"]] == [False, False, True]


def test_prompt_tokens_are_those_of_the_input_alone():
    """Evaluation generates from the raw input, so its tokens must be the row's first tokens."""
    tokenizer = word_tokenizer(["the fox jumps over the lazy dog again and again"] * 20)
    record = replace(QUESTION, input="the lazy fox", output="jumps again")
    encoder = Encoder(tokenizer, Options(), 64)
    encoded = encoder.encode(record)
    assert encoded.prompt == tokenizer("the lazy fox")["input_ids"]
    assert tokenizer.decode(encoded.input_ids[:-1]) == "the lazy fox jumps again"
    assert encoded.input_ids[:-1] == tokenizer("the lazy fox jumps again")["input_ids"]


@pytest.mark.parametrize(
    ("output", "options"), [("d</s>", {}), ("d", {"template": "{input} {output}</s>"})]
)
def test_an_end_that_the_text_has_is_not_doubled(output, options):
    """It was: the model learned to stop twice, and was asked for the second one alone."""
    encoder = Encoder(byte_tokenizer(), DataArgs(**options), 64)
    ids = encoder.encode(Record("a", "q", output)).input_ids
    assert ids == [*b"q d", 256]
