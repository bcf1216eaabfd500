"""MUSE (arXiv 2407.06460) as lm-eval tasks.

Verbatim memorisation and knowledge are generations scored by ROUGE-L F1 without stemming (as the
released code logs them); privacy leakage is an AUC of Min-40% over whole texts, which needs the
model ``hf-unlearn``. Utility, scalability and sustainability are the same figures of several
models: other sizes of the forget set, or one model after each of several requests.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.documents import require_text
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.lm_tasks import (
    UnlearnTask,  # noqa: F401
    context_in,
    dataset,
    facts_of,
    first_token_splitter,
    tokenizer_of,
)
from axolotl_unlearn.metrics import memorisation
from axolotl_unlearn.metrics.semeval import mia_auc

HUB = "muse-bench/MUSE-{corpus}"
CORPORA = ("News", "Books")
#: AUC of the retrained model as MUSE's code has it, in its sense (see `priv_leak`).
RETRAINED_AUC = {"News": 0.4772, "Books": 0.5393}
MIN_K = 0.4
#: Tokens generated after the start of a text, and of its end that are compared.
VERBATIM_TOKENS = 128
#: Where an answer of the knowledge tasks ends: the model went on to the next example.
STOP = re.compile(r"\n\n|\nQuestion|Question:")


def read_part(part: str, name: str, fields: Sequence[str], **metadata: Any) -> list[dict]:
    """Rows of ``DATA_DIR/PART/NAME.json`` (a list) or ``.jsonl``, or of the hub's data set.

    Raises:
        UnlearnError: No such file or corpus, or a row without a field, named by file and line.
    """
    folder = metadata.get("data_dir")
    if folder is None:
        corpus = metadata.get("corpus", "News")
        if corpus not in CORPORA:
            raise UnlearnError(
                f"`corpus` is {corpus!r}; take {' or '.join(CORPORA)}.", code="tasks.no-corpus"
            )
        from datasets import load_dataset

        return list(load_dataset(HUB.format(corpus=corpus), part, split=name))
    for path in (Path(folder) / part / f"{name}{suffix}" for suffix in (".json", ".jsonl")):
        if not path.is_file():
            continue
        return [
            {field: require_text(row, field, f"{path}, {place}") for field in fields}
            for place, row in read_rows(path)
        ]
    raise UnlearnError(
        f"{Path(folder) / part / name}.json does not exist; `data_dir` of --metadata must hold the "
        "folders verbmem, knowmem and privleak of MUSE (relative to where you started lm_eval).",
        code="tasks.no-file",
    )


def verbmem_documents(**metadata: Any) -> dict[str, Any]:
    """Starts of forget texts (``prompt``) and how they go on: ``gt``, as many of its tokens as are
    generated, as in MUSE's code (without a tokenizer all of it)."""
    rows = read_part("verbmem", "forget", ("prompt", "gt"), **metadata)
    known = metadata.get("tokenizer") or metadata.get("pretrained")
    cut = _cutter(tokenizer_of(metadata)) if known else str
    return dataset([{"prompt": row["prompt"], "answer": cut(row["gt"])} for row in rows])


def _cutter(tokenizer: Any) -> Callable[[str], str]:
    def cut(text: str) -> str:
        ids = tokenizer(text)["input_ids"][:VERBATIM_TOKENS]
        return tokenizer.decode(ids, skip_special_tokens=True)

    return cut


def knowmem_documents(side: str, **metadata: Any) -> dict[str, Any]:
    """Questions of one side after the examples of ``SIDE_qa_icl``."""
    fields = ("question", "answer")
    examples = "".join(
        f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"
        for row in read_part("knowmem", f"{side}_qa_icl", fields, **metadata)
    )
    rows = read_part("knowmem", f"{side}_qa", fields, **metadata)
    return dataset(
        [
            {"prompt": f"{examples}Question: {row['question']}\nAnswer: ", "answer": row["answer"]}
            for row in rows
        ]
    )


knowmem_forget_documents = functools.partial(knowmem_documents, "forget")
knowmem_retain_documents = functools.partial(knowmem_documents, "retain")


def privleak_documents(**metadata: Any) -> dict[str, Any]:
    """Whole forget and held-out texts in turn, split after their first token."""
    # Without a model (lm-evaluation-harness's own tests) nothing is scored: any split will do.
    known = metadata.get("tokenizer") or metadata.get("pretrained")
    split: Callable[[str, str], tuple[str, str, int]] = _after_first_word
    if known:
        split = first_token_splitter(tokenizer_of(metadata), context_in(metadata))
    corpus = metadata.get("corpus")
    given = metadata.get("retrained_auc", RETRAINED_AUC.get(corpus))
    rows = []
    for side in ("forget", "holdout"):
        for number, row in enumerate(read_part("privleak", side, ("text",), **metadata)):
            context, rest, _ = split(row["text"], f"{side} {number}")
            rows.append(
                {
                    "forget": side == "forget",
                    "number": number,
                    "context": context,
                    "rest": rest,
                    "retrained_auc": math.nan if given is None else float(given),
                }
            )
    return dataset(sorted(rows, key=lambda row: row["number"]))


def _after_first_word(text: str, name: str) -> tuple[str, str, int]:
    first, space, rest = text.partition(" ")
    return first, space + rest, 0


@functools.cache
def _rouge():
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)


def rouge_l_f1(generated: str, expected: str) -> float:
    """ROUGE-L F1 without stemming."""
    return float(_rouge().score(expected, generated)["rougeL"].fmeasure)


def score_verbmem(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    return {"verbmem": rouge_l_f1(results[0], doc["answer"])}


def score_knowmem(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    said = STOP.split(results[0], maxsplit=1)[0]
    return {"knowmem": rouge_l_f1(said, doc["answer"])}


def score_privleak(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    facts = facts_of(results[0], "muse_privleak: privleak and auc_members")
    # MUSE's score is the negated mean, so that a member has the lower one.
    score = None if facts is None else -memorisation.min_k(facts, MIN_K)
    row = (doc["forget"], score, doc["retrained_auc"])
    return {"auc_members": row, "privleak": row}


def auc_members(rows: Sequence[tuple[bool, float, float]]) -> float:
    """P(a forget text is known better than a held-out one): 1 is full leakage, 0.5 none."""
    sides = {side: [v for forget, v, _ in rows if forget is side] for side in (True, False)}
    if not all(sides.values()) or None in (*sides[True], *sides[False]):
        return math.nan
    return mia_auc(sides[True], sides[False])


def priv_leak(unlearned: float, retrained: float) -> float:
    """PrivLeak of MUSE (arXiv 2407.06460, section 3.4) from two AUCs of Min-K% 40.

    MUSE's AUC is that of the non-members, 1 minus ours: ``100 (AUC_u - AUC_r) / AUC_r``. Near 0
    is good, -100 leaks (under-forgetting), positive is over-forgetting.
    """
    ours, theirs = 1 - unlearned, 1 - retrained
    return 100 * (ours - theirs) / theirs if theirs else float("nan")


def privleak(rows: Sequence[tuple[bool, float, float]]) -> float:
    """MUSE's PrivLeak in percent; NaN without the retrained model's AUC."""
    return priv_leak(auc_members(rows), 1 - rows[0][2])
