"""A record as a conversation: tokens and labels of Axolotl's own `chat_template`."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.data.encode import Encoded, Encoder
from axolotl_unlearn.data.records import Record, short
from axolotl_unlearn.data.typed import checked
from axolotl_unlearn.errors import UnlearnError


class Chat:
    """Of an encoder whose options say `chat_template`."""

    def __init__(self, of: Encoder) -> None:
        self.of = of

    def texts(self, record: Record) -> tuple[str, str]:
        """Prompt and completion, before special tokens."""
        user = [{"role": "user", "content": record.input}]
        both = [*user, {"role": "assistant", "content": record.output}]
        more = self.of.cfg.get("chat_template_kwargs") or {}
        apply = partial(self.of.tokenizer.apply_chat_template, tokenize=False, **more)
        prompt, whole = apply(user, add_generation_prompt=True), apply(both)
        if not whole.startswith(prompt):
            raise UnlearnError(
                "the tokenizer's chat template does not begin a conversation with its own "
                "generation prompt, so the answer's text is unknown; use `unlearn.data.template`."
            )
        return prompt, whole[len(prompt) :].rstrip()

    @cached_property
    def _strategy(self) -> Any:
        """Axolotl's own for an entry ``{type: chat_template}``."""
        from axolotl.prompt_strategies import load
        from axolotl.utils.dict import DictDefault

        settings = DictDefault({**self.of.cfg, "sequence_len": self.of.max_length})
        entry = checked({"type": "chat_template"}, settings)
        return load("chat_template", self.of.tokenizer, settings, entry)

    def encoded(self, record: Record) -> Encoded:
        """Tokens and labels of Axolotl's strategy; without `eos` the turn's end has no label."""
        turns = (("user", record.input), ("assistant", record.output))
        messages = [{"role": role, "content": content} for role, content in turns]
        tokens = self._strategy.tokenize_prompt({"messages": messages})
        ids, labels = list(tokens["input_ids"]), list(tokens["labels"])
        given = [place for place, label in enumerate(labels) if label != IGNORE]
        if not self.of.options.eos:
            ends = {*self._strategy._eot_token_ids, self.of.tokenizer.eos_token_id}
            while given and ids[given[-1]] in ends:
                labels[given.pop()] = IGNORE
        if not given:
            raise UnlearnError(
                f"row {short(record.id)}: Axolotl's `chat_template` finds no token of the answer; "
                "use another template, or `unlearn.data.template`."
            )
        start = given[0]
        return Encoded(ids[:start], ids[start:], labels[start:])
