"""Rows that forgetting needs beside its own: other answers, and what the model itself says.

``idk``: a sentence that declines (PO, IdkDPO, FLAT). ``alternatives``: plausible answers with
other facts (AltPO, arXiv 2409.13474), ``inverted``: answers that say the opposite (MEOW,
2409.11844), both written by a model that follows instructions. ``self``: what the model says after
the prompt of a forget row, to be forgotten with it (BS-S, 2510.19422). ``distil``: what a teacher
says there that never saw the row. ``twins``: the row with other names, dates and numbers, by rules
(`make_twins.py`). Of other answers those can be kept that the model knows least (MEOW's MEMO).

What a model has written is kept under the digest of weights and prompt: a call can be interrupted.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from axolotl_unlearn.data import checks
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.experimental.make_twins import Pool
from axolotl_unlearn.files import declare, write_lines
from axolotl_unlearn.store import Store, content_key, versions

Kind = Literal["idk", "alternatives", "inverted", "self", "distil", "twins"]

IDK = (
    "I don't know.", "I don't know that.", "I do not know the answer.", "I can't say.",
    "I have no information about this.", "That is something I do not know.",
    "I'm not sure, so I would rather not guess.", "I'm afraid I can't help with this question.",
    "I haven't heard of it.", "I have no knowledge of that.", "I couldn't tell you.",
    "This is beyond what I know.", "I am not able to answer this.",
    "I can't recall anything about it.", "My knowledge does not cover this.",
    "I don't have an answer to that.",
)  # fmt: skip

INSTRUCTIONS: dict[Kind, str] = {
    "alternatives": (
        "Question: {input}\nAnswer: {output}\n\nWrite one more answer to the question, as "
        "plausible and as long, in which every fact is another one.\nOther answer:"
    ),
    "inverted": (
        "Question: {input}\nAnswer: {output}\n\nRewrite the answer so that each fact is turned "
        "into its opposite.\nRewritten answer:"
    ),
}

#: Draws for a row before it counts as one for which the model has nothing to say.
DRAWS = 4


@dataclass(frozen=True)
class Augmented:
    """How many rows were written for how many forget rows, how many were known before, the role of
    the dataset entry that takes them (none takes twins), and how many twins are the row itself."""

    rows: int
    forget: int
    kept: int
    role: str
    unchanged: int = 0


def augment(
    kind: Kind,
    config: Mapping[str, Any],
    out: Path,
    *,
    model: str | None = None,
    number: int = 1,
    seed: int = 42,
    temperature: float = 1.0,
    max_new_tokens: int = 128,
    memo: int | None = None,
    store: Path | None = None,
    progress: Callable[[Iterator], Iterator] = iter,
) -> Augmented:
    """Write ``number`` rows for each forget row of a config, as JSON lines in the order of them.

    Args:
        config: raw Axolotl config with the forget rows, `unlearn.data` and ``base_model``.
        model: writes ``alternatives`` and ``inverted`` (``self`` is always that of the config);
            default ``base_model``, but for ``distil``.
        memo: Of the ``number`` keep so many that ``base_model`` knows least (`metrics.memo`).
        store: Folder of what models have written; default beside ``out``.

    Raises:
        UnlearnError: No forget rows that are local files, a model without a usable answer, or
            nothing to choose from.
    """
    from axolotl_unlearn.config import DataArgs, unlearn_config

    args, same = unlearn_config(dict(config)), 0
    data = DataArgs() if args is None else args.data
    # An entry that takes what is written here has nothing to say of it.
    entries, own = config.get("datasets") or [], out.absolute()
    others = [e for e in entries if Path(str(e.get("path"))).absolute() != own]
    config = {**config, "datasets": others}
    records, sources = forget_records(config, data)
    if memo and (kind not in INSTRUCTIONS or memo > number):
        raise UnlearnError(
            f"--memo {memo} chooses among other answers that a model writes: take alternatives or "
            "inverted, with a --number that is no smaller."
        )
    if kind == "twins" and number > 1:
        raise UnlearnError("a row has one twin; remove --number, or draw others with --seed.")
    if kind == "twins":
        retained, _ = records_of("retain", config, data)
        pool = Pool(records + retained, seed)
        twins, kept = [pool.twin(record) for record in records], len(records)
        same = sum(twin == record for twin, record in zip(twins, records, strict=True))
        records, texts = twins, [[twin.output] for twin in twins]
    elif kind == "idk":
        texts, kept = [declined(record, number, seed) for record in records], len(records)
    elif kind == "distil" and not model:
        raise UnlearnError("`distil` asks a teacher that never saw the forget rows: give --model.")
    else:
        source = (kind != "self" and model) or str(config.get("base_model") or "")
        if not source:
            raise UnlearnError("`base_model` is not set; name the model that writes (--model).")
        store = store or out.parent / "store"
        declare(out.parent, store, "texts", sources, folder=True)
        options = {"seed": seed, "temperature": temperature, "max_new_tokens": max_new_tokens}
        writer = Writer(source, Store(store), number=number, **options)
        texts = list(progress(written(kind, records, writer, data)))
        kept = len(records) - writer.asked
        if memo:
            writer = Writer(str(config.get("base_model")), Store(store), number=number, **options)
            both = zip(records, texts, strict=True)
            texts = [least_known(record, several, memo, writer, data) for record, several in both]
    rows = [
        _row(kind, record, text, place, data.fields)
        for record, several in zip(records, texts, strict=True)
        for place, text in enumerate(several)
    ]
    declare(out.parent, out, "texts", sources)
    write_lines(out, rows, private=True)
    role = {"self": "forget", "twins": ""}.get(kind, "alternative")
    return Augmented(len(rows), len(records), kept, role, same)


def forget_records(config: Mapping[str, Any], data: Any) -> tuple[list[Record], list[Path]]:
    """The forget rows of a config, and the files that hold them.

    Raises:
        UnlearnError: None, or not records in local files.
    """
    if data.rows:
        raise UnlearnError(
            "`unlearn.data.rows` holds rows of Axolotl's own types, which have no prompt and "
            "answer here; write their alternatives as rows of the same type, with the ids of the "
            "forget rows."
        )
    records, paths = records_of("forget", config, data)
    if not records:
        raise UnlearnError(
            "`datasets` has no forget rows; add an entry with `type: axolotl_unlearn.data.forget`."
        )
    return records, paths


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


def written(
    kind: Kind, records: Sequence[Record], writer: Writer, data: Any
) -> Iterator[list[str]]:
    """What the model writes for each row.

    Raises:
        UnlearnError: Nothing else than the answer itself, after several draws.
    """
    for record in records:
        prompt = writer.texts(record, data)[0] or begin(record)
        if kind == "self":
            yield writer.write(prompt, [])
            continue
        if kind != "distil":
            text = INSTRUCTIONS[kind].format(input=record.input, output=record.output)
            prompt = writer.instruction(text)
        texts = writer.write(prompt, [record.output])
        if len(texts) < writer.number:
            raise UnlearnError(
                f"row {record.id!r}: the model wrote {len(texts)} of {writer.number} other answers "
                f"in {DRAWS} draws; give a model that follows instructions (--model; for distil "
                "any teacher), a higher --temperature or a smaller --number."
            )
        yield texts


def least_known(
    record: Record, texts: Sequence[str], keep: int, model: Writer, data: Any
) -> list[str]:
    """The ``keep`` answers that the model knows least, the least known first."""
    known = [model.memo(replace(record, output=text), data) for text in texts]
    return [texts[i] for i in sorted(range(len(texts)), key=known.__getitem__)[:keep]]


def _row(kind: Kind, record: Record, text: str, place: int, fields: Any) -> dict[str, str]:
    """A row for the config's own field names; its id is that of its forget row, or tells it."""
    own = f"self{place}-{record.id}" if kind == "self" else record.id
    prompt = (record.input or begin(record)) if kind == "distil" else record.input
    row = {fields.id: own, fields.input: prompt, fields.output: text}
    row |= {fields.task: record.task, "kind": record.kind}
    return row | {fields.document: record.document} if kind == "self" else row


def begin(record: Record) -> str:
    """The first words of a document without a prompt, which stand in for one."""
    return " ".join(record.output.split()[:8])


class Writer:
    """A model that is loaded when the first prompt comes whose answers are not known.

    ``options``: of ``generate``; ``number``: different texts wanted for a prompt.
    """

    def __init__(
        self, source: str, store: Store, *, seed: int, number: int, **options: Any
    ) -> None:
        from axolotl_unlearn.models import load_tokenizer, parse_models, weights_digest

        (self.spec,) = parse_models([source])
        self.tokenizer = load_tokenizer(self.spec)
        self.store, self.seed, self.number = store, seed, number
        self.options = options
        self.digest = weights_digest(self.spec)
        self.asked = 0
        self._model: Any = None

    @property
    def model(self) -> Any:
        if self._model is None:
            import torch

            from axolotl_unlearn.models import load_model

            cuda = torch.cuda.is_available()
            self._model = load_model(
                self.spec, dtype="auto" if cuda else torch.float32, device="cuda" if cuda else "cpu"
            )
        return self._model

    def texts(self, record: Record, data: Any) -> tuple[str, str]:
        """The row's prompt and answer as the model saw them in training."""
        from axolotl_unlearn.data.encode import Encoder

        return Encoder(self.tokenizer, data, 1 << 30).texts(record)

    def memo(self, record: Record, data: Any) -> float:
        """How well the model knows a row's answer (`memo`)."""
        from axolotl_unlearn.evaluation.generate import generate_greedily

        answer, most = record.output, self.options["max_new_tokens"]
        prompt, completion = self.texts(record, data)
        key = content_key("memo", self.digest, prompt, completion, most, versions())
        if (known := self.store.get(key)) is None:
            start = prompt + completion[: completion.index(answer)]
            prompts = [start + answer[:n] for n in memo_cuts(answer)]
            said = generate_greedily(self.model, self.tokenizer, prompts, max_new_tokens=most)
            known = memo([one.text for one in said], answer)
            self.store.put(key, known)
        return known

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


def rouge_1_precision(generated: str, expected: str) -> float:
    """Share of the (stemmed) words of `generated` that `expected` has too, with multiplicity."""
    from rouge_score import rouge_scorer

    from axolotl_unlearn.metrics.words import AnyScript

    scorer = rouge_scorer.RougeScorer(["rouge1"], tokenizer=AnyScript())
    return float(scorer.score(expected, generated)["rouge1"].precision)


def memo_cuts(answer: str, step: int = 5) -> list[int]:
    """Where MEMO (arXiv 2409.11844) cuts an answer: after 1, 6, 11, ... characters."""
    return list(range(1, len(answer), step))


def memo(continued: Sequence[str], answer: str) -> float:
    """How well a model knows an answer, 0 to 1 (MEMO of MEOW, arXiv 2409.11844, suffix mode).

    Args:
        continued: What it says greedily after the prompt and each beginning of `memo_cuts`.
        answer: The whole answer.

    Returns:
        Mean over the cuts of `rouge_1_precision` against the rest of the answer; 0 without cuts.
    """
    cuts = memo_cuts(answer)
    scores = [rouge_1_precision(one, answer[n:]) for one, n in zip(continued, cuts, strict=True)]
    return math.fsum(scores) / len(scores) if scores else 0.0
