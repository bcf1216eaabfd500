"""Other answers to forget rows, which `po`, `dpo` and `flat` need.

``idk``: a sentence that declines (PO, IdkDPO, FLAT). ``alternatives``: plausible answers with other
facts (AltPO, arXiv 2409.13474), written by a model that follows instructions.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from axolotl_unlearn.config import DataArgs, unlearn_config
from axolotl_unlearn.data import checks
from axolotl_unlearn.data.records import Record
from axolotl_unlearn.device import device_name
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import declare, read_manifest, real, write_lines
from axolotl_unlearn.models import load_model, load_tokenizer, parse_models, weights_digest

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


def augment(
    kind: Literal["idk", "alternatives"],
    config: Mapping[str, Any],
    out: Path,
    *,
    model: str | None = None,
    number: int = 1,
    seed: int = 42,
    progress: Callable[[Sequence[Record]], Iterator[Record]] = iter,
    **options: Any,
) -> tuple[int, int]:
    """Write ``number`` rows for each forget row of a config, as JSON lines in the order of them.

    Args:
        config: raw Axolotl config with the forget rows, `unlearn.data` and ``base_model``.
        model: writes ``alternatives``; default ``base_model``. ``options``: of ``generate``.

    Returns:
        Rows written, forget rows.

    Raises:
        UnlearnError: No forget rows that are local files, a model without a usable answer, or a
            file at ``out`` that holds something else.
    """
    records, data = forget_records(config, out)
    _check_place(config, out)
    if kind == "idk":
        if number > len(IDK):
            raise UnlearnError(f"there are {len(IDK)} ways to decline; ask for so many or fewer.")
        write = lambda one: random.Random(f"{seed} {one.id}").sample(IDK, number)  # noqa: E731
    else:
        writer = Writer(model or config.get("base_model"), seed=seed, number=number, **options)
        write = lambda record: writer.other_answers(record, OTHER_ANSWER)  # noqa: E731
    rows = [row_of(one, text, data) for one in progress(records) for text in write(one)]
    return save(rows, out), len(records)


def _check_place(config: Mapping[str, Any], out: Path) -> None:
    """Only other answers that were written before are replaced."""
    given = [one for key in checks.KEYS for one in config.get(key) or []]
    entries = [one for one in given if isinstance(one, Mapping)]
    roles = {checks.role_of(e) for e in entries if real(str(e.get("path"))) == real(str(out))}
    written = [one["path"] for one in read_manifest(out.parent)["entries"]]
    if roles - {"alternative"} or (out.exists() and out.name not in written):
        raise UnlearnError(
            f"{out} would be replaced, which this command has not written; name a new file with "
            "--out.",
            code="augment.exists",
        )


def row_of(record: Record, text: str, data: DataArgs) -> dict[str, str]:
    """A row for the config's own field names; its id is that of its forget row."""
    fields = data.fields
    row = {fields.id: record.id, fields.input: record.input, fields.output: text}
    return row | {fields.task: record.task, "kind": record.kind}


def save(rows: Sequence[dict[str, str]], out: Path) -> int:
    """Write the rows, which hold prompts of the forget rows."""
    declare(out.parent, out, "texts")
    write_lines(out, rows, private=True)
    return len(rows)


def forget_records(config: Mapping[str, Any], out: Path) -> tuple[list[Record], DataArgs]:
    """The forget rows of a config, and `unlearn.data`.

    An entry that takes what is written to ``out`` has nothing to say of it.

    Raises:
        UnlearnError: None, or not records in local files.
    """
    args, own = unlearn_config(dict(config)), out.absolute()
    data = DataArgs() if args is None else args.data
    if data.rows:
        raise UnlearnError(
            "`unlearn.data.rows` holds rows of Axolotl's own types, which have no prompt and "
            "answer here; write their alternatives as rows of the same type, with the ids of the "
            "forget rows.",
            code="augment.typed-rows",
        )
    entries = [e for e in config.get("datasets") or [] if checks.role_of(e) == "forget"]
    paths = {Path(str(e.get("path"))): e for e in entries}
    paths = {path: entry for path, entry in paths.items() if path.absolute() != own}
    for path in paths:
        if not path.is_file():
            raise UnlearnError(f"`datasets` reads {path}, which is no local file of records.")
    records = [one for entry in paths.values() for one in checks.records_of(entry, data)]
    if not records:
        raise UnlearnError(
            "`datasets` has no forget rows; add an entry with `type: axolotl_unlearn.data.forget`.",
            code="augment.no-forget-rows",
        )
    return records, data


class Writer:
    """A model that writes ``number`` different texts for a prompt; ``options``: of ``generate``."""

    def __init__(self, model: str | None, *, seed: int, number: int, **options: Any) -> None:
        if not model:
            raise UnlearnError(
                "`base_model` is not set; name the model that writes (--model).",
                code="augment.no-model",
            )
        (self.spec,) = parse_models([model])
        self.tokenizer = load_tokenizer(self.spec)
        self.seed, self.number, self.options = seed, number, options

    @cached_property
    def digest(self) -> str:
        return weights_digest(self.spec)

    @cached_property
    def model(self) -> Any:
        import torch

        place = device_name()
        dtype = torch.float32 if place == "cpu" else "auto"
        return load_model(self.spec, dtype=dtype, device=place)

    def other_answers(self, record: Record, instruction: str) -> list[str]:
        """What the model writes for a row.

        Raises:
            UnlearnError: Nothing else than the answer itself, after several draws.
        """
        text = instruction.format(input=record.input, output=record.output)
        if getattr(self.tokenizer, "chat_template", None):
            turn = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(
                turn, tokenize=False, add_generation_prompt=True
            )
        texts = self.write(text, [record.output])
        if len(texts) < self.number:
            raise UnlearnError(
                f"row {record.id!r}: the model wrote {len(texts)} of {self.number} other answers "
                f"in {DRAWS} draws; give a model that follows instructions (--model), a higher "
                "--temperature or a smaller --number.",
                code="augment.nothing-else",
            )
        return texts

    def write(self, prompt: str, not_these: Sequence[str]) -> list[str]:
        """Up to ``number`` different texts that follow the prompt, none of ``not_these``."""
        different: list[str] = []
        for draw in range(DRAWS):
            for text in self._sample(prompt, draw):
                if text and text not in different and text not in not_these:
                    different.append(text)
            if len(different) >= self.number:
                break
        return different[: self.number]

    def _sample(self, prompt: str, draw: int) -> list[str]:
        """One call of ``generate`` with a seed of this prompt's own: other rows change nothing."""
        import torch

        facts = (self.digest, prompt, self.seed, draw, self.number, sorted(self.options.items()))
        own = hashlib.blake2b(repr(facts).encode("utf-8", "surrogatepass"), digest_size=6).digest()
        special = not getattr(self.tokenizer, "chat_template", None)
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=special)
        ids = {name: ids[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(int.from_bytes(own, "big"))
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
