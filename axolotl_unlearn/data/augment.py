"""Other answers to forget rows, which `po`, `dpo` and `flat` need.

``idk``: a sentence that declines (PO, IdkDPO, FLAT). ``alternatives``: plausible answers with other
facts (AltPO, arXiv 2409.13474), written by a model that follows instructions; what it wrote is kept
under the digest of weights and prompt, so that a call can be interrupted.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from axolotl_unlearn.data import checks
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.device import device_name
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import declare, write_lines
from axolotl_unlearn.store import Store, content_key, versions

Kind = Literal["idk", "alternatives"]

IDK = (
    "I don't know.", "I don't know that.", "I do not know the answer.", "I can't say.",
    "I have no information about this.", "That is something I do not know.",
    "I'm not sure, so I would rather not guess.", "I'm afraid I can't help with this question.",
    "I haven't heard of it.", "I have no knowledge of that.", "I couldn't tell you.",
    "This is beyond what I know.", "I am not able to answer this.",
    "I can't recall anything about it.", "My knowledge does not cover this.",
    "I don't have an answer to that.",
)  # fmt: skip

OTHER_ANSWER = (
    "Question: {input}\nAnswer: {output}\n\nWrite one more answer to the question, as plausible "
    "and as long, in which every fact is another one.\nOther answer:"
)

#: Draws for a row before it counts as one for which the model has nothing to say.
DRAWS = 4


@dataclass(frozen=True)
class Augmented:
    """How many rows were written for how many forget rows, and how many were known before."""

    rows: int
    forget: int
    kept: int


def augment(
    kind: Kind,
    config: Mapping[str, Any],
    out: Path,
    *,
    model: str | None = None,
    number: int = 1,
    seed: int = 42,
    store: Path | None = None,
    progress: Callable[[Sequence[Record]], Iterator[Record]] = iter,
    **options: Any,
) -> Augmented:
    """Write ``number`` rows for each forget row of a config, as JSON lines in the order of them.

    Args:
        config: raw Axolotl config with the forget rows, `unlearn.data` and ``base_model``.
        model: writes ``alternatives``; default ``base_model``. ``options``: of `Writer`.
        store: Folder of what it wrote; default beside ``out``.

    Raises:
        UnlearnError: No forget rows that are local files, or a model without a usable answer.
    """
    records, data, sources = forget_records(config, out)
    if kind == "idk":
        texts, kept = [declined(record, number, seed) for record in records], len(records)
    else:
        writer = Writer(model, config, out, sources, store, seed=seed, number=number, **options)
        texts = [writer.other_answers(one, OTHER_ANSWER) for one in progress(records)]
        kept = len(records) - writer.asked
    rows = [
        row_of(one, text, data) for one, several in zip(records, texts, strict=True)
        for text in several
    ]  # fmt: skip
    return save(rows, out, sources, Augmented(len(rows), len(records), kept))


def row_of(record: Record, text: str, data: Any) -> dict[str, str]:
    """A row for the config's own field names; its id is that of its forget row."""
    fields = data.fields
    row = {fields.id: record.id, fields.input: record.input, fields.output: text}
    return row | {fields.task: record.task, "kind": record.kind}


def save(
    rows: Sequence[dict[str, str]], out: Path, sources: Sequence[Path], done: Augmented
) -> Augmented:
    """Write the rows, which hold prompts of the forget rows; ``sources``: the files of these."""
    declare(out.parent, out, "texts", sources)
    write_lines(out, rows, private=True)
    return done


def forget_records(config: Mapping[str, Any], out: Path) -> tuple[list[Record], Any, list[Path]]:
    """The forget rows of a config, `unlearn.data`, and the files that hold them.

    An entry that takes what is written to ``out`` has nothing to say of it.

    Raises:
        UnlearnError: None, or not records in local files.
    """
    from axolotl_unlearn.config import DataArgs, unlearn_config

    args, own = unlearn_config(dict(config)), out.absolute()
    data = DataArgs() if args is None else args.data
    if data.rows:
        raise UnlearnError(
            "`unlearn.data.rows` holds rows of Axolotl's own types, which have no prompt and "
            "answer here; write their alternatives as rows of the same type, with the ids of the "
            "forget rows.",
            code="augment.typed-rows",
        )
    entries = config.get("datasets") or []
    others = [e for e in entries if Path(str(e.get("path"))).absolute() != own]
    records, paths = records_of("forget", {**config, "datasets": others}, data)
    if not records:
        raise UnlearnError(
            "`datasets` has no forget rows; add an entry with `type: axolotl_unlearn.data.forget`.",
            code="augment.no-forget-rows",
        )
    return records, data, paths


def records_of(role: str, config: Mapping[str, Any], data: Any) -> tuple[list[Record], list[Path]]:
    """The rows of a config with a role, and the files that hold them.

    Raises:
        UnlearnError: Not records in local files.
    """
    entries = [e for e in config.get("datasets") or [] if checks.role_of(e) == role]
    records: list[Record] = []
    paths = [Path(str(entry.get("path"))) for entry in entries]
    for path, entry in zip(paths, entries, strict=True):
        if not path.is_file():
            raise UnlearnError(f"`datasets` reads {path}, which is no local file of records.")
        records += checks.records_of(entry, data)
    return records, paths


def declined(record: Record, number: int, seed: int) -> list[str]:
    """``number`` different refusals, drawn for this row."""
    if number > len(IDK):
        raise UnlearnError(f"there are {len(IDK)} ways to decline; ask for so many or fewer.")
    return random.Random(f"{seed} {record.id}").sample(IDK, number)


class Writer:
    """A model that is loaded when the first prompt comes whose answers are not known.

    Args:
        model: Default: the config's ``base_model``.
        out: The file that is written; ``sources``: those of the forget rows.
        store: Folder of what models wrote; default beside ``out``.
        number: Different texts wanted for a prompt; ``options``: of ``generate``.
    """

    def __init__(
        self,
        model: str | None,
        config: Mapping[str, Any],
        out: Path,
        sources: Sequence[Path],
        store: Path | None,
        *,
        seed: int,
        number: int,
        **options: Any,
    ) -> None:
        from axolotl_unlearn.models import load_tokenizer, parse_models, weights_digest

        source = model or str(config.get("base_model") or "")
        if not source:
            raise UnlearnError(
                "`base_model` is not set; name the model that writes (--model).",
                code="augment.no-model",
            )
        (self.spec,) = parse_models([source])
        self.tokenizer = load_tokenizer(self.spec)
        store = store or out.parent / "store"
        declare(out.parent, store, "texts", sources, folder=True)
        self.store, self.seed, self.number = Store(store), seed, number
        self.options = options
        self.digest = weights_digest(self.spec)
        self.asked = 0
        self._model: Any = None

    @property
    def model(self) -> Any:
        if self._model is None:
            import torch

            from axolotl_unlearn.models import load_model

            place = device_name()
            self._model = load_model(
                self.spec, dtype=torch.float32 if place == "cpu" else "auto", device=place
            )
        return self._model

    def other_answers(self, record: Record, instruction: str) -> list[str]:
        """What the model writes for a row.

        Raises:
            UnlearnError: Nothing else than the answer itself, after several draws.
        """
        text = instruction.format(input=record.input, output=record.output)
        texts = self.write(self.instruction(text), [record.output])
        if len(texts) < self.number:
            raise UnlearnError(
                f"row {record.id!r}: the model wrote {len(texts)} of {self.number} other answers "
                f"in {DRAWS} draws; give a model that follows instructions (--model), a higher "
                "--temperature or a smaller --number.",
                code="augment.nothing-else",
            )
        return texts

    def instruction(self, text: str) -> str:
        """As a turn of a chat where the tokenizer has a template."""
        if not getattr(self.tokenizer, "chat_template", None):
            return text
        turn = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)

    def write(self, prompt: str, not_these: Sequence[str]) -> list[str]:
        """Up to ``number`` different texts that follow the prompt, none of ``not_these``."""
        different: list[str] = []
        fresh = False
        for draw in range(DRAWS):
            facts = ("augment", self.digest, prompt, self.seed, draw, self.number, self.options)
            key = content_key(*facts, versions())
            texts = self.store.get(key)
            if texts is None:
                texts, fresh = self._sample(prompt, key), True
                self.store.put(key, texts)
            for text in texts:
                if text and text not in different and text not in not_these:
                    different.append(text)
            if len(different) >= self.number:
                break
        self.asked += fresh
        return different[: self.number]

    def _sample(self, prompt: str, key: str) -> list[str]:
        """One call of ``generate`` with a seed of this prompt's own."""
        import torch

        device = self.model.device
        special = not getattr(self.tokenizer, "chat_template", None)
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=special)
        ids = {name: ids[name].to(device) for name in ("input_ids", "attention_mask")}
        own = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(own)
            out = self.model.generate(
                **ids,
                do_sample=True,
                num_return_sequences=self.number,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                use_cache=True,
                **self.options,
            )
        new = out[:, ids["input_ids"].shape[1] :]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return [text.strip().split("\n\n")[0].strip() for text in texts]
