"""A record becomes tokens: the way the model saw it when it memorised it.

    prompt      tokenizer(input)                     with the BOS the tokenizer adds by itself
    completion  tokenizer(join + output) [+ EOS]     without special tokens

With `chat_template` tokens and labels are those of Axolotl's own strategy of that name. Nothing of
a chat is cut: its beginning is the template's, and fine-tuning drops a chat that does not fit.

Any other prompt that is too long loses tokens on its left (after the BOS), so that prompt,
completion and EOS fit; ZJUKLAB cuts the same side (arXiv 2503.21088, released code). A completion
that does not fit by itself is an error: cutting it would forget less than the config says. So is a
cut of a row that is labelled whole (`axolotl_unlearn.data.strategy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from axolotl_unlearn.columns import IGNORE, Kind
from axolotl_unlearn.config import DataArgs
from axolotl_unlearn.data.records import Record, short
from axolotl_unlearn.errors import UnlearnError

#: Records whose texts go to the tokenizer together.
_AT_ONCE = 1000


class AnswerTooLong(UnlearnError):
    """What is never cut exceeds the maximum length; ``needed`` tokens would hold it."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Encoded:
    """Tokens of one record.

    Attributes:
        prompt: Token ids before the completion, BOS included, after truncation.
        completion: Token ids of the completion, EOS included.
        answer: Labels of the completion; a chat template may end in tokens without one.
        truncated: Prompt tokens cut off on the left.
    """

    prompt: list[int]
    completion: list[int]
    answer: list[int]
    truncated: int = 0

    @property
    def input_ids(self) -> list[int]:
        return self.prompt + self.completion


class Encoder:
    """Encodes records with one tokenizer and one set of options.

    Args:
        cfg: Axolotl config: ``chat_template``, ``chat_template_kwargs``, ``eot_tokens``.

    Raises:
        UnlearnError: On construction, if tokenizer and options do not go together.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: DataArgs,
        max_length: int,
        cfg: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.max_length = max_length
        self.cfg = cfg or {}
        if options.eos and not options.chat_template and tokenizer.eos_token_id is None:
            raise UnlearnError(
                "the tokenizer has no end-of-sequence token; set `special_tokens: "
                "{eos_token: ...}` or `unlearn.data.eos: false`.",
                code="data.no-eos-token",
            )
        if options.chat_template and not getattr(tokenizer, "chat_template", None):
            raise UnlearnError(
                "`unlearn.data.chat_template` is true but the tokenizer has no chat template; set "
                "Axolotl's `chat_template:` or use `unlearn.data.template`.",
                code="data.no-chat-template",
            )
        self.bos = self._leading_special_tokens()
        self.adds_space = self._adds_space()

    def encode(self, record: Record) -> Encoded:
        """Tokens of a record; see `fitted`."""
        (whole,) = self.tokens([record])
        return self.fitted(record, whole)

    def tokens(self, records: Iterable[Record]) -> Iterator[Encoded]:
        """Each record, before anything is cut; without BOS.

        Tokenizers are asked for a thousand records at a time, which is quicker than one by one.
        """
        if self.options.chat_template:
            yield from map(self._conversation, records)
            return
        end = [self.tokenizer.eos_token_id] if self.options.eos else []
        records = iter(records)
        while some := list(islice(records, _AT_ONCE)):
            texts = [self.texts(record) for record in some]
            prompts = self._plain([prompt for prompt, _ in texts])
            for prompt, text in zip(prompts, self._completions(texts, prompts), strict=True):
                text += end if text[-1:] != end else []  # one that the text has is enough
                yield Encoded(prompt, text, text)

    def fitted(self, record: Record, whole: Encoded) -> Encoded:
        """What `tokens` has found, with BOS, in ``max_length`` tokens.

        Raises:
            AnswerTooLong: BOS and completion exceed it, or a chat does.
        """
        # A chat template writes its own special tokens.
        chat = self.options.chat_template
        bos = [] if chat else self.bos
        length = len(bos) + len(whole.input_ids)
        needed = length if chat else len(bos) + len(whole.completion)
        if needed > self.max_length:
            raise AnswerTooLong(
                f"row {record.id!r}: the {'chat' if chat else 'answer'} needs {needed} tokens but "
                f"at most {self.max_length} fit; raise `sequence_len` (or "
                "`unlearn.data.max_length`).",
                needed,
            )
        cut = max(0, length - self.max_length)
        return Encoded(bos + whole.prompt[cut:], whole.completion, whole.answer, cut)

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
        return [IGNORE] * len(encoded.prompt) + encoded.answer

    def texts(self, record: Record) -> tuple[str, str]:
        """Prompt and completion as texts, before special tokens, without a chat template.

        Spaces at the end of a template's prompt go to the completion, where tokenizers expect
        them: "Answer: {output}" gives the tokens of " Paris", not those of "Paris".
        """
        if self.options.template is not None:
            head, _, tail = self.options.template.partition("{output}")
            head = head.replace("{input}", record.input)
            prompt = head.rstrip(" ")
            return prompt, head[len(prompt) :] + record.output + tail
        join = self.options.join if record.input else ""
        return record.input, join + record.output

    @cached_property
    def _chat_strategy(self) -> Any:
        """Axolotl's own for an entry ``{type: chat_template}``."""
        from axolotl.prompt_strategies import load

        from axolotl_unlearn.data.typed import checked
        from axolotl_unlearn.versions import DictDefault

        settings = DictDefault({**self.cfg, "sequence_len": self.max_length})
        entry = checked({"type": "chat_template"}, settings)
        return load("chat_template", self.tokenizer, settings, entry)

    def _conversation(self, record: Record) -> Encoded:
        """Tokens and labels of Axolotl's strategy; without `eos` the turn's end has no label."""
        from jinja2 import TemplateError

        from axolotl_unlearn.data.typed import template_says

        turns = (("user", record.input), ("assistant", record.output))
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            tokens = self._chat_strategy.tokenize_prompt({"messages": messages})
        except TemplateError as error:
            raise UnlearnError(
                "the chat template cannot render a question and its answer"
                f"{template_says(error, self._chat_strategy)}; use another template, or "
                "`unlearn.data.template`.",
                code="data.template-cannot-render",
            ) from None
        ids, labels = list(tokens["input_ids"]), list(tokens["labels"])
        given = [place for place, label in enumerate(labels) if label != IGNORE]
        if not self.options.eos:
            ends = {*self._chat_strategy._eot_token_ids, self.tokenizer.eos_token_id}
            while given and ids[given[-1]] in ends:
                labels[given.pop()] = IGNORE
        if not given:
            raise UnlearnError(
                f"row {short(record.id)}: Axolotl's `chat_template` finds no token of the answer; "
                "use another template, or `unlearn.data.template`.",
                code="data.no-answer-token",
            )
        start = given[0]
        return Encoded(ids[:start], ids[start:], labels[start:])

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        rows = self.tokenizer([*texts], add_special_tokens=False)["input_ids"]
        return [list(ids) if text else [] for text, ids in zip(texts, rows, strict=True)]

    def _completions(
        self, texts: Sequence[tuple[str, str]], prompts: Sequence[list[int]]
    ) -> list[list[int]]:
        alone = self._plain([text for _, text in texts])
        if not self.adds_space:
            return alone
        wholes = self._plain([prompt + text for prompt, text in texts])
        return [
            whole[len(prompt) :] if prompt and whole[: len(prompt)] == prompt else own
            for own, whole, prompt in zip(alone, wholes, prompts, strict=True)
        ]

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
