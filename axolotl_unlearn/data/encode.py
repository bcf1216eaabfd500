"""A record becomes tokens: the way the model saw it when it memorised it.

    prompt      tokenizer(input)                     with the BOS the tokenizer adds by itself
    completion  tokenizer(join + output) [+ EOS]     without special tokens

A prompt that is too long loses tokens on its left (after the BOS), so that prompt, completion and
EOS fit; ZJUKLAB cuts the same side (arXiv 2503.21088, released code). A completion that does not
fit by itself is an error: cutting it would forget less than the config says. So is a cut of a row
that is labelled whole, unless `cut_documents` asks for it (`axolotl_unlearn.data.strategy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from axolotl_unlearn.data.columns import IGNORE, Kind
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError


class DataOptions(Protocol):
    """The part of `axolotl_unlearn.args.DataArgs` that shapes tokens."""

    join: str
    template: str | None
    chat_template: bool
    eos: bool
    max_length: int | None
    cut_documents: bool
    labels: Any


class AnswerTooLong(UnlearnError):
    """The completion alone exceeds the maximum length; ``needed`` tokens would hold it."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Encoded:
    """Tokens of one record.

    Attributes:
        prompt: Token ids before the completion, BOS included, after truncation.
        completion: Token ids of the completion, EOS included.
        truncated: Prompt tokens cut off on the left.
    """

    prompt: list[int]
    completion: list[int]
    truncated: int

    @property
    def input_ids(self) -> list[int]:
        return self.prompt + self.completion


class Encoder:
    """Encodes records with one tokenizer and one set of options.

    Raises:
        UnlearnError: On construction, if tokenizer and options do not go together.
    """

    def __init__(self, tokenizer: Any, options: DataOptions, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.max_length = max_length
        if options.eos and tokenizer.eos_token_id is None:
            raise UnlearnError(
                "the tokenizer has no end-of-sequence token; set `special_tokens: "
                "{eos_token: ...}` or `unlearn.data.eos: false`."
            )
        if options.chat_template and not getattr(tokenizer, "chat_template", None):
            raise UnlearnError(
                "`unlearn.data.chat_template` is true but the tokenizer has no chat template; set "
                "Axolotl's `chat_template:` or use `unlearn.data.template`."
            )
        if options.template is not None:
            _split_template(options.template)
        self.bos = self._leading_special_tokens()
        self.adds_space = self._adds_space()

    def encode(self, record: Record) -> Encoded:
        """Tokens of a record.

        Raises:
            AnswerTooLong: BOS, completion and EOS exceed ``max_length``.
        """
        prompt_text, completion_text = self.texts(record)
        # A chat template writes its own special tokens.
        bos = [] if self.options.chat_template else self.bos
        prompt = self._plain(prompt_text)
        completion = self._completion(prompt_text, prompt, completion_text)
        if self.options.eos:
            completion = completion + [self.tokenizer.eos_token_id]
        room = self.max_length - len(bos) - len(completion)
        if room < 0:
            needed = self.max_length - room
            raise AnswerTooLong(
                f"row {record.id!r}: the answer needs {needed} tokens but at most "
                f"{self.max_length} fit; raise `sequence_len` (or `unlearn.data.max_length`).",
                needed,
            )
        truncated = max(0, len(prompt) - room)
        return Encoded(bos + prompt[truncated:], completion, truncated)

    def labelled(self, kind: Kind) -> Literal["document", "answer"]:
        """What of a row of this kind has labels; never the headers of a chat template."""
        return "answer" if self.options.chat_template else getattr(self.options.labels, kind)

    def labels(self, encoded: Encoded, labelled: str) -> list[int]:
        """Labels of an encoded record: ``labelled`` is "document" (all tokens) or "answer".

        The model predicts a token from those before it, so the label of the very first token is
        there but never used.
        """
        if labelled == "document":
            return encoded.input_ids
        return [IGNORE] * len(encoded.prompt) + encoded.completion

    def texts(self, record: Record) -> tuple[str, str]:
        """Prompt and completion as texts, before special tokens.

        Spaces at the end of a template's prompt go to the completion, where tokenizers expect
        them: "Answer: {output}" gives the tokens of " Paris", not those of "Paris".
        """
        if self.options.chat_template:
            return self._chat_texts(record)
        if self.options.template is not None:
            head, tail = _split_template(self.options.template)
            head = head.replace("{input}", record.input)
            prompt = head.rstrip(" ")
            return prompt, head[len(prompt) :] + record.output + tail
        join = self.options.join if record.input else ""
        return record.input, join + record.output

    def _chat_texts(self, record: Record) -> tuple[str, str]:
        user = [{"role": "user", "content": record.input}]
        both = [*user, {"role": "assistant", "content": record.output}]
        apply = self.tokenizer.apply_chat_template
        prompt = apply(user, tokenize=False, add_generation_prompt=True)
        whole = apply(both, tokenize=False)
        if not whole.startswith(prompt):
            raise UnlearnError(
                "the tokenizer's chat template does not begin a conversation with its own "
                "generation prompt, so the answer's tokens are unknown; use "
                "`unlearn.data.template`."
            )
        completion = whole[len(prompt) :].rstrip()
        if self.tokenizer.eos_token:
            # `eos` decides whether it is there, as without a chat template.
            completion = completion.removesuffix(self.tokenizer.eos_token)
        return prompt, completion

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _completion(self, prompt_text: str, prompt: list[int], text: str) -> list[int]:
        if self.adds_space and prompt:
            whole = self._plain(prompt_text + text)
            if whole[: len(prompt)] == prompt:
                return whole[len(prompt) :]
        return self._plain(text)

    def _leading_special_tokens(self) -> list[int]:
        """What the tokenizer puts before a plain text by itself; never what it puts after it."""
        plain = self._plain("a")
        full = list(self.tokenizer("a")["input_ids"])
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start]
        return []

    def _adds_space(self) -> bool:
        """True for SentencePiece tokenizers, which put a space before any text.

        A completion encoded apart would get two spaces (legacy), or one that is not in the text.
        """
        apart = self._plain("a") + self._plain(" b")
        return self._plain("a b") != apart or self._plain(" b") == self._plain("b")


def encode_record(
    tokenizer: Any, record: Record, data: DataOptions, max_length: int | None = None
) -> tuple[dict[str, Any], int]:
    """One row for training, and how many prompt tokens were cut.

    Args:
        tokenizer: A Hugging Face tokenizer.
        record: The record.
        data: Format options (`axolotl_unlearn.args.DataArgs`).
        max_length: Longest row in tokens; default ``data.max_length``.

    Returns:
        ``{input_ids, attention_mask, labels, kind, task}`` and the number of truncated tokens.

    Raises:
        AnswerTooLong: The answer alone does not fit.
        UnlearnError: Tokenizer and options do not go together, or no length is given.
    """
    max_length = max_length or data.max_length
    if max_length is None:
        raise UnlearnError("no maximum length; set `sequence_len` or `unlearn.data.max_length`.")
    encoder = Encoder(tokenizer, data, max_length)
    encoded = encoder.encode(record)
    return row_of(encoder, encoded, record), encoded.truncated


def row_of(encoder: Encoder, encoded: Encoded, record: Record) -> dict[str, Any]:
    """The columns that depend on the record alone."""
    return {
        "input_ids": encoded.input_ids,
        "attention_mask": [1] * len(encoded.input_ids),
        "labels": encoder.labels(encoded, encoder.labelled(record.kind)),
        "kind": record.kind_number,
        "task": record.task_number,
    }


def _split_template(template: str) -> tuple[str, str]:
    head, found, tail = template.partition("{output}")
    if not found or "{input}" not in head:
        raise UnlearnError(
            "`unlearn.data.template` must contain {input} and, after it, {output}, e.g. "
            "'Question: {input}\\nAnswer: {output}'."
        )
    return head, tail
