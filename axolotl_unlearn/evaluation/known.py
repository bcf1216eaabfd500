"""What does a model know of these documents? `axolotl-unlearn audit` as a function.

Asked of a folder, a GGUF file or a server, with nothing but the documents: no training data, no
other model. Each document is read three ways, or it is said why not:

    said        its questions: the answer is in what the model writes, in whole words
    recited     its texts (and long answers): after the first half the model writes `WORDS` words
                or more of the rest in a row; or, where log-probs of a text are to be had, `TOKENS`
                tokens in a row are each the likeliest
    recognised  its log-probs stand out among those of held-out texts, which no model saw

Nothing is read from what is *not* found: a model may know a document and not say it.
"""

from __future__ import annotations

import importlib.util
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import false_discovery_control

from axolotl_unlearn.data.documents import PAIRS, Answer
from axolotl_unlearn.data.records import document_id, document_of, read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.served import Cut, Served
from axolotl_unlearn.metrics import membership as lab
from axolotl_unlearn.metrics.intervals import LEVEL
from axolotl_unlearn.metrics.memorisation import longest_run
from axolotl_unlearn.metrics.words import contains_answer, words
from axolotl_unlearn.models import SERVERS, ModelSpec, check_tokenizer, parse_models
from axolotl_unlearn.normal_form import normal_form
from axolotl_unlearn.report.terminal import grid

#: Worst first.
READINGS = ("recited", "said", "recognised", "nothing found", "not measured")
#: In a row, of what follows, that chance does not write; a rest of fewer words than `FEW` is not
#: judged. Of an exact answer to a question fewer do: it is *said*.
WORDS, FEW, TOKENS = 10, 5, 32
#: Why what was not found is not measured.
CUT = "what is written was cut short; raise --max-new-tokens, or the server's own limit"
#: Held-out texts from which documents can be told by log-probs.
HELD = 20


@dataclass
class Item:
    """What is asked: the model goes on from the prompt, ``rest`` is what it should not say; then
    what it did: ``facts`` of its tokens (None where there are none), and ``told``, p and side of
    its log-probs among held-out texts."""

    document: str
    prompt: str
    rest: str
    question: bool
    wrote: str = ""
    facts: Any = None
    told: tuple[float | None, str] = (None, "")

    @property
    def text(self) -> str:
        """What is scored: the whole text, or the answer after its question."""
        return Answer(self.rest, self.prompt) if self.question else self.prompt + self.rest

    @cached_property
    def words(self) -> int:
        """Words of the rest that come out in a row."""
        ours, theirs = words(self.rest), words(self.wrote)
        match = SequenceMatcher(None, ours, theirs, autojunk=False)
        return match.find_longest_match(0, len(ours), 0, len(theirs)).size

    @property
    def tokens(self) -> int | None:
        """Tokens in a row that are each the likeliest after the true ones before."""
        return None if self.facts is None else longest_run(self.facts)

    @property
    def cut(self) -> bool:
        """Was the model let write fewer words than a recited text, or the answer, has?"""
        needed = len(words(self.rest))
        needed = needed if self.question else min(WORDS, needed)
        return isinstance(self.wrote, Cut) and len(words(self.wrote)) < needed

    @property
    def recited(self) -> bool | None:
        """By the rule above; None where too little follows, or is written, to say."""
        length = len(words(self.rest))
        if length < FEW and (self.tokens is None or self.question):
            return None
        by_words = length >= FEW and self.words >= min(WORDS, length)
        if by_words or (self.tokens or 0) >= TOKENS:
            return True
        return None if self.cut or (not self.wrote.strip() and self.tokens is None) else False


def read_items(path: Path) -> list[Item]:
    """Rows of ``question`` and ``answer`` (or ``input`` and ``output``), or of ``document`` (or
    ``text``), which is cut into two halves between words; ``document`` beside a question, else the
    id, says what belongs together.

    Raises:
        UnlearnError: The first fault of the file.
    """
    items = []
    for number, (place, row) in enumerate(read_rows(path)):
        name = str(row.get("id", f"row{number}"))
        text = row.get("document") or row.get("text")
        if pair := next((p for p in PAIRS if all(row.get(one) for one in p)), None):
            asked, answer = (str(row[one]) for one in pair)
            of = document_of(row.get("document")) or document_id(name)
            items.append(Item(of, asked.rstrip(), f" {answer.strip()}", True))
        elif isinstance(text, str) and text.strip():
            ends = [word.end() for word in re.finditer(r"\S+", text)]
            half = ends[(len(ends) - 1) // 2]
            items.append(Item(document_id(name), text[:half], text[half:], False))
        else:
            raise UnlearnError(
                f"{path}, {place}: no text; a row has `document` (or `text`), or `question` and "
                "`answer` (or `input` and `output`).",
                code="audit.no-text",
            )
    return items


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def check_inputs(documents: Path, model: str, heldout: Path | None) -> ModelSpec | Path:
    """All that is missing, in one sentence, before any library is loaded.

    Returns:
        The model: a spec, or the path of a GGUF file.
    """
    found: ModelSpec | Path = Path(model)
    faults = [
        f"{name}: {path} is no file"
        for name, path in (("DOCUMENTS", documents), ("--held-out", heldout))
        if path is not None and not path.is_file()
    ]
    if not model.endswith(".gguf") or model.startswith(SERVERS):
        try:
            (found,) = parse_models([model])
            check_tokenizer(found)
        except UnlearnError as error:
            faults.append(f"--model: {str(error).rstrip('.')}")
    elif not found.is_file():
        faults.append(f"--model: {model} is no file")
    elif not _begins(found, b"GGUF"):
        faults.append(f"--model: {model} does not begin as a GGUF file; download it again")
    elif importlib.util.find_spec("xllamacpp") is None:
        faults.append(
            "--model: a GGUF file is run by xllamacpp, which is not installed (`pip install "
            f"xllamacpp`, or `llama-server -m {model}` and --model http://localhost:8080/v1)"
        )
    if faults:
        raise UnlearnError(f"{'; '.join(faults)}.", code="audit.missing-input")
    return found


@contextmanager
def llamacpp(file: Path, room: int) -> Iterator[str]:
    """The address of llama.cpp's server for a GGUF file, within this process (xllamacpp).

    Args:
        room: Tokens of the longest request.
    """
    import xllamacpp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), room, 1
    params.hostnames, params.port = ["127.0.0.1"], port
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        raise UnlearnError(
            f"--model: {file} cannot be loaded by llama.cpp ({error}).", code="audit.bad-gguf"
        ) from None
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        del server


def audit_documents(
    documents: Path,
    model: str,
    *,
    heldout: Path | None = None,
    max_new_tokens: int = 128,
    chat: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Ask a model about documents.

    Args:
        heldout: Texts of the same kind that no model saw: they make `recognised` possible, and say
            how often the rule of `recited` fires by chance.
        chat: Ask questions as a chat model is asked: through its template.

    Returns:
        ``model``, ``address`` (of a server, with the name it was asked by), ``documents``
        [{document, reading, said, answers, words, of, tokens, p, q, not_measured {what: why}}],
        worst first, ``counts`` by reading, ``held_out`` {texts, recited, warning} or None.

    Raises:
        UnlearnError: Something is missing (all at once), or a file or the model is broken.
    """
    found = check_inputs(documents, model, heldout)
    items = read_items(documents)
    held = [] if heldout is None else read_items(heldout)
    asked_about = {normal_form(one.prompt + one.rest).strip() for one in items}
    if same := sum(normal_form(one.prompt + one.rest).strip() in asked_about for one in held):
        raise UnlearnError(
            f"{same} of {len(held)} texts of --held-out {heldout} stand in {documents} too; remove "
            "them: held-out texts are those that no model saw.",
            code="audit.held-out-overlaps",
        )
    with ExitStack() as running:
        if isinstance(found, Path):
            room = max(len(i.text.encode()) for i in (*items, *held)) + max_new_tokens + 64
            # One slot: what waits behind seven others of a slow model meets the time limit.
            url = running.enter_context(llamacpp(found, room))
            asked, name = Served(url, at_once=1), found.stem
        elif found.served:
            asked, name = Served(found.model), found.name
        else:
            from axolotl_unlearn.evaluation.measure import Local
            from axolotl_unlearn.evaluation.measurement import Settings

            settings = Settings(device=device, dtype=dtype).placed()
            asked, name = Local(found, settings), found.name
        _write(asked, [*items, *held], max_new_tokens, chat)
        if asked.scores:
            _score(asked, [*items, *held])
    why = ""
    if not asked.scores:
        why = "the server gives no log-probs of a prompt (llama.cpp's does not)"
    elif not _recognise(items, held, asked.distributions):
        why = f"needs {HELD} held-out texts of the same kind (--held-out), which no model saw"
    by_document: dict[str, list[Item]] = {}
    for one in items:
        by_document.setdefault(one.document, []).append(one)
    lines = [_line(name, some, why) for name, some in by_document.items()]
    tested = [line for line in lines if line["p"] is not None]
    q = false_discovery_control([line["p"] for line in tested], method="bh") if tested else ()
    for line, value in zip(tested, q, strict=True):
        line["q"] = float(value)
        if value <= 1 - LEVEL and line["side"] == "under" and line["reading"] == READINGS[3]:
            line["reading"] = "recognised"
    lines.sort(key=lambda one: (READINGS.index(one["reading"]), one["p"] is None, one["p"] or 0))
    about = None
    if held:
        both = [[one for one in some if not one.question] for some in (items, held)]
        sides = [[one.text for one in some] for some in both]
        # Rows without an id have the same names in both files.
        named = tuple([(i, one.document) for one in some] for i, some in enumerate(both))
        warning = lab.blind_sentence(lab.blind_baselines(*sides, named)) if tested else None
        recited = sum(bool(one.recited) for one in held)
        about = {"texts": len(held), "recited": recited, "warning": warning}
    counts = {r: sum(one["reading"] == r for one in lines) for r in READINGS}
    served = isinstance(found, ModelSpec) and found.served
    address = f"{asked.address}#{asked.name}" if served else None
    found = {"model": name, "address": address, "documents": lines, "counts": counts}
    return found | {"held_out": about}


def _line(document: str, items: Sequence[Item], why: str) -> dict[str, Any]:
    """A document's figures; the reading by log-probs comes later, from all documents."""
    asked = [one for one in items if one.question]
    texts = len({one.text for one in items if not one.question})
    best = max(items, key=lambda one: one.words)
    recited = [one.recited for one in items if one.recited is not None]
    p, side = min((one.told for one in items if one.told[1]), default=(None, ""))
    said = sum(contains_answer(one.wrote, one.rest) for one in asked)
    away = {} if asked else {"said": "no question of it is in the file"}
    if asked and not said and not any(words(one.rest) for one in asked):
        away["said"] = "its answers have neither letters nor digits"
    elif not said and any(one.cut for one in asked):
        away["said"] = CUT
    elif asked and not any(one.wrote.strip() for one in asked):
        away["said"] = "nothing is written after its questions; a chat model wants --chat"
    if not any(recited) and any(one.cut and one.recited is None for one in items):
        away["recited"] = CUT
    elif not recited:
        few = all(len(words(one.rest)) < FEW for one in items)
        away["recited"] = f"fewer than {FEW} words follow" if few else "nothing is written"
    if p is None:
        short = "its text is too short or too long for the model"
        alone = "it has questions alone; texts are compared"
        away["recognised"] = (why or short) if texts else alone
    reading = "recited" if any(recited) else "said" if said else ""
    return {
        "document": document,
        "reading": reading or ("not measured" if len(away) == 3 else "nothing found"),
        "said": None if "said" in away else said,
        "answers": len(asked),
        "words": best.words,
        "of": len(words(best.rest)),
        "tokens": max((one.tokens for one in items if one.tokens is not None), default=None),
        "p": None if p is None else min(1.0, p * texts),
        "q": None,
        "side": side,
        "not_measured": away,
    }


def _write(model: Any, items: Sequence[Item], most: int, chat: bool) -> None:
    """What the model writes after each prompt."""
    for turned in (False, True):
        some = [one for one in items if (chat and one.question) == turned]
        prompts, how = [one.prompt for one in some], {}
        if turned and isinstance(model, Served):
            how = {"chat": True}
        elif turned and some:
            template = model.tokenizer.apply_chat_template
            if not model.tokenizer.chat_template:
                raise UnlearnError(
                    "--chat: the model's tokenizer has no chat template; leave --chat out.",
                    code="audit.no-template",
                )
            turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
            prompts = [template(one, tokenize=False, add_generation_prompt=True) for one in turns]
            begin, first = model.tokenizer.bos_token or "", model.tokenizer.bos_token_id
            if model.tokenizer(begin)["input_ids"][:2] == [first, first]:  # it puts its own before
                prompts = [prompt.removeprefix(begin) for prompt in prompts]

        def take(numbers: Sequence[int], made: Sequence[Any], some: Any = some) -> None:
            for number, one in zip(numbers, made, strict=True):
                if not isinstance(model, Served):  # which cannot say why it ended
                    ids = model.tokenizer(one, add_special_tokens=False)["input_ids"]
                    one = Cut(one) if len(ids) >= most - 1 else one
                some[number].wrote = one

        if prompts:
            model.generate(prompts, most, take, **how)


def _score(model: Any, items: Sequence[Item]) -> None:
    """Facts of each text, but of those that are too short or too long. Raises `UnlearnError`: a
    log-prob is no number, of which no test could say that nothing is found."""
    try:
        facts = model.texts([one.text for one in items])
    except UnlearnError:
        facts = [None] * len(items)
        for number, one in enumerate(items):
            with suppress(UnlearnError):
                facts[number] = model.texts([one.text])[0]
    if not all(one is None or np.isfinite(one.logp).all() for one in facts):
        raise UnlearnError(
            "log-probs of the model are NaN or infinite; load it with `--dtype float32`.",
            code="audit.not-finite",
        )
    for one, known in zip(items, facts, strict=True):
        one.facts = known


def _recognise(items: Sequence[Item], held: Sequence[Item], distributions: bool) -> bool:
    """Exact p of each text by log-probs, against the held-out ones, if there are enough."""
    sides, scores = [], []
    for some in (items, held):  # an answer is no text of the kind of the held-out ones
        sides.append([one for one in some if one.facts is not None and not one.question])
        rows = [lab.attack_losses(one.facts, one.text, distributions) for one in sides[-1]]
        scores.append({name: [-row[name] for row in rows] for name in (rows or [{}])[0]})
    if sides[0] and len(sides[1]) >= HELD:
        told = lab.told_documents(*scores)
        for one, p, side in zip(sides[0], told.p, told.side, strict=True):
            one.told = (float(p), side)
    return len(sides[1]) >= HELD


def shown(path: Path, found: dict[str, Any]) -> list[Any]:
    """What was found: a table with a line a document, worst first, and sentences."""
    heads = ("document", "reading", "said", "recited", "recognised")
    made, whys = grid(f"What {found['model']} knows", (), *heads), set()
    for one in found["documents"]:
        away = one["not_measured"]
        whys |= {f"{name}: {why}" for name, why in away.items()}
        tokens = "" if one["tokens"] is None else f", {one['tokens']} tokens"
        cells = {
            "said": f"{one['said']} of {one['answers']}",
            "recited": f"{one['words']} of {one['of']} words{tokens}",
            "recognised": "" if one["p"] is None else f"p {one['p']:.2g}",
        }
        cells |= dict.fromkeys(away, "n/a")
        made.add_row(one["document"], one["reading"], *cells.values())
    made.caption = "n/a is not measured. " + "; ".join(sorted(whys)) + "." if whys else None
    counts = ", ".join(f"{count} {name}" for name, count in found["counts"].items() if count)
    lines = [made, f"{found['model']}, {len(found['documents'])} documents: {counts}."]
    if held := found["held_out"]:
        lines.append(
            f"Of {held['texts']} held-out texts this rule calls {held['recited']} recited."
        )
        lines += filter(None, [held["warning"]])
    if found["counts"]["nothing found"]:
        lines.append("Nothing found is no evidence of forgetting: a model may know and not say it.")
    return [*lines, f"Written: {path}"]
