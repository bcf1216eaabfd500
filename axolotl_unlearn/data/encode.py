"""A record becomes tokens: the way the model saw it when it memorised it.

    prompt      tokenizer(input)                     with the BOS the tokenizer adds by itself
    completion  tokenizer(join + output) [+ EOS]     without special tokens

A prompt that is too long loses tokens on its left (after the BOS), so that prompt, completion and
EOS fit; ZJUKLAB cuts the same side (arXiv 2503.21088, released code). A completion that does not
fit by itself is an error: cutting it would forget less than the config says. So is a cut of a row
that is labelled whole, unless `cut_documents` asks for it (`axolotl_unlearn.data.strategy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

from axolotl_unlearn.columns import IGNORE, Kind
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError

#: Records whose texts go to the tokenizer together.
_AT_ONCE = 1000
#: Distinct texts of which the tokens are kept: a memorisation stream repeats its rows.
_MOST_KNOWN = 10_000


class DataOptions(Protocol):
    """The part of `axolotl_unlearn.config.DataArgs` that shapes tokens."""

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
        self._known: dict[str, list[int]] = {}
        self.bos = self._leading_special_tokens()
        self.adds_space = self._adds_space()

    def encode(self, record: Record) -> Encoded:
        """Tokens of a record.

        Raises:
            AnswerTooLong: BOS, completion and EOS exceed ``max_length``.
        """
        ((prompt, completion),) = self.tokens([record])
        return self.fitted(record, prompt, completion)

    def tokens(self, records: Iterable[Record]) -> Iterator[tuple[list[int], list[int]]]:
        """Prompt and completion of each record, before anything is added or cut.

        Tokenizers are asked for a thousand records at a time, which is quicker than one by one.
        """
        records = iter(records)
        while some := list(islice(records, _AT_ONCE)):
            texts = [self.texts(record) for record in some]
            prompts = self._plain([prompt for prompt, _ in texts])
            yield from zip(prompts, self._completions(texts, prompts), strict=True)

    def fitted(self, record: Record, prompt: list[int], completion: list[int]) -> Encoded:
        """What `tokens` has found, with BOS and EOS, in ``max_length`` tokens.

        Raises:
            AnswerTooLong: BOS, completion and EOS exceed it.
        """
        # A chat template writes its own special tokens.
        bos = [] if self.options.chat_template else self.bos
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

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        known = self._known
        new = [text for text in dict.fromkeys(texts) if text and text not in known]
        if new:
            found = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            known = known | dict(zip(new, found, strict=True))
            if len(self._known) < _MOST_KNOWN:
                self._known = known
        return [list(known.get(text, ())) for text in texts]

    def _completions(
        self, texts: Sequence[tuple[str, str]], prompts: Sequence[list[int]]
    ) -> Iterator[list[int]]:
        rests: list[list[int] | None] = [None] * len(texts)
        if self.adds_space:
            wholes = self._plain([prompt + text for prompt, text in texts])
            rests = [
                whole[len(prompt) :] if prompt and whole[: len(prompt)] == prompt else None
                for whole, prompt in zip(wholes, prompts, strict=True)
            ]
        left = [text for (_, text), rest in zip(texts, rests, strict=True) if rest is None]
        alone = iter(self._plain(left))
        return (next(alone) if rest is None else rest for rest in rests)

    def _leading_special_tokens(self) -> list[int]:
        """What the tokenizer puts before a plain text by itself; never what it puts after it."""
        (plain,) = self._plain(["a"])
        full = list(self.tokenizer("a")["input_ids"])
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start]
        return []

    def _adds_space(self) -> bool:
        """True for SentencePiece tokenizers, which put a space before any text.

        A completion encoded apart would get two spaces (legacy), or one that is not in the text.
        """
        first, second, both, plain = self._plain(["a", " b", "a b", "b"])
        return both != first + second or second == plain


def _split_template(template: str) -> tuple[str, str]:
    head, found, tail = template.partition("{output}")
    if not found or "{input}" not in head:
        raise UnlearnError(
            "`unlearn.data.template` must contain {input} and, after it, {output}, e.g. "
            "'Question: {input}\\nAnswer: {output}'."
        )
    return head, tail
