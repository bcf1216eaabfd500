"""TOFU's likelihood metrics from one forward a text, against one pass of the model for each metric.

    TOFU_DIR=../shared/tofu python -m research.benchmarks.tofu [--rows 24] [--out research/benchmarks/tofu.json]

Three ways over the same rows, in turn in one process, on an OLMo with random weights and a
vocabulary of 50304: ours; *a pass a metric* by our own scorer, which asks again for texts that an
earlier metric has seen; and *plain*, a pass a metric as frameworks write it (padded batches in the
file's order, whole logits, log-softmax at every position). Times are CPU seconds of one thread.
Each value of both is compared with ours. Generation (ROUGE-L) costs the same in all and is left
out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from axolotl_unlearn.engine.token_scoring import Query, encode_continuation, score_queries
from axolotl_unlearn.metrics import memorisation
from axolotl_unlearn.metrics.memorisation import TokenFacts
from eval_tasks.tofu import utils as tofu
from eval_tasks.tofu.utils import tofu_documents
from eval_tasks.unlearn_likelihood.utils import all_likelihood_metrics
from research.benchmarks.evaluation import TOKENIZER, timed
from research.benchmarks.models import Shape, olmo

BATCH = 16
Row = dict[str, Any]
Facts = Sequence[TokenFacts]


def right(row: Row) -> list[tuple[str, str]]:
    return [(row["prompt"], row["paraphrased_answer"] or row["answer"])]


def answer(row: Row) -> list[tuple[str, str]]:
    return [(row["prompt"], row["answer"])]


def options(row: Row) -> list[tuple[str, str]]:
    return [*answer(row), *((row["prompt"], wrong) for wrong in row["perturbed_answer"])]


def mean(facts: TokenFacts) -> float:
    return float(np.mean(facts.logp))


def attack(name: str) -> Callable[[Row, Facts], float]:
    return lambda row, found: all_likelihood_metrics(found[0], row["answer"], ks=(0.4,))[name]


def ratio(row: Row, found: Facts) -> float:
    return tofu.truth_ratio(mean(found[0]), [mean(one) for one in found[1:]])


#: Metric -> sets it is of, its texts, its value.
METRICS: dict[str, tuple[Sequence[str], Callable, Callable]] = {
    "probability": (("forget", "retain"), answer, lambda row, f: math.exp(mean(f[0]))),
    "option_probability": (
        ("real_authors", "world_facts"),
        options,
        lambda row, f: tofu.option_probability(mean(f[0]), [mean(one) for one in f[1:]]),
    ),
    "paraphrased_probability": (("forget",), right, lambda row, f: math.exp(mean(f[0]))),
    "truth_ratio": (
        ("forget", "retain", "real_authors", "world_facts"),
        lambda row: right(row) + options(row)[1:],
        ratio,
    ),
    "extraction_strength": (
        ("forget", "retain"),
        answer,
        lambda row, f: memorisation.extraction_strength(f[0]),
    ),
    "extraction_strength_paraphrased_question": (
        ("forget",),
        lambda row: [(row["paraphrased_prompt"], row["answer"])],
        lambda row, f: memorisation.extraction_strength(f[0]),
    ),
    **{
        name: (("forget", "holdout"), answer, attack(name))
        for name in ("loss", "zlib_ratio", "min_k_0.4", "min_k_plus_0.4")
    },
}


class Texts:
    """Texts of rows as token ids; each pair (context, answer) is encoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.known = tokenizer, {}

    def query(self, pair: tuple[str, str]) -> Query:
        if pair not in self.known:
            context, text = pair
            end = self.tokenizer.eos_token
            self.known[pair] = Query.of(
                *encode_continuation(self.tokenizer, context, f" {text}{end}")
            )
        return self.known[pair]


def asked(rows: Sequence[Row], metric: str) -> list[tuple[Row, list[tuple[str, str]]]]:
    sets, texts, _ = METRICS[metric]
    return [(row, texts(row)) for row in rows if row["set"] in sets]


def values_of(rows: Sequence[Row], metric: str, facts: dict) -> list[float]:
    return [
        METRICS[metric][2](row, [facts[pair] for pair in pairs])
        for row, pairs in asked(rows, metric)
    ]


def ours(model: Any, texts: Texts, rows: Sequence[Row]) -> dict[str, list[float]]:
    pairs = {p for m in METRICS for _, found in asked(rows, m) for p in found}
    pairs = sorted(pairs)
    queries = [texts.query(pair) for pair in pairs]
    longest = max(len(query.ids) for query in queries)
    facts = score_queries(model, queries, batch_tokens=BATCH * longest)
    known = dict(zip(pairs, facts, strict=True))
    return {metric: values_of(rows, metric, known) for metric in METRICS}


def a_pass_a_metric(
    model: Any, texts: Texts, rows: Sequence[Row], forward: Callable
) -> dict[str, list[float]]:
    found = {}
    for metric in METRICS:
        pairs = list(dict.fromkeys(p for _, those in asked(rows, metric) for p in those))
        facts = forward(model, [texts.query(pair) for pair in pairs], metric)
        found[metric] = values_of(rows, metric, dict(zip(pairs, facts, strict=True)))
    return found


def by_our_scorer(model: Any, queries: Sequence[Query], metric: str) -> Facts:
    longest = max(len(query.ids) for query in queries)
    return score_queries(model, queries, batch_tokens=BATCH * longest)


@torch.inference_mode()
def plain(model: Any, queries: Sequence[Query], metric: str) -> Facts:
    """Padded batches in the given order, whole logits; only what the metric needs of them."""
    found = []
    for start in range(0, len(queries), BATCH):
        chosen = queries[start : start + BATCH]
        rows = [torch.tensor(query.ids) for query in chosen]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        logp = logits.log_softmax(-1)
        for row, query in enumerate(chosen):
            times, targets = torch.tensor(list(query.times)), torch.tensor(query.targets)
            at = logp[row, times]
            picked = at.gather(1, targets[:, None])[:, 0].numpy()
            unknown = np.full(len(picked), np.nan)
            greedy, mu, sd = np.zeros(len(picked), bool), unknown, unknown
            if metric.startswith("extraction"):
                greedy = (at.argmax(-1) == targets).numpy()
            if metric.startswith("min_k_plus"):
                p = at.exp()
                mu = (p * at).sum(-1, keepdim=True)
                sd = (p * (at - mu).square()).sum(-1).sqrt().numpy()
                mu = mu[:, 0].numpy()
            found.append(TokenFacts(picked, greedy, mu, sd))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=24, help="of each set")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--data", type=Path, default=Path("../shared/tofu"), help="TOFU's rows")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    texts = Texts(AutoTokenizer.from_pretrained(TOKENIZER))
    shape = Shape(hidden=256, layers=4, mlp=768, heads=4)
    model = olmo(shape).eval()
    holdout = given.data / "retain90.jsonl"
    table = tofu_documents(data_dir=given.data, max_rows=given.rows, holdout=holdout)["test"]
    rows = list(table)
    ways = {
        "ours": lambda: ours(model, texts, rows),
        "a_pass_a_metric": lambda: a_pass_a_metric(model, texts, rows, by_our_scorer),
        "plain": lambda: a_pass_a_metric(model, texts, rows, plain),
    }
    values = {name: way() for name, way in ways.items()}  # and warms up
    differences = {
        name: max(float(np.max(np.abs(np.subtract(found[m], values["ours"][m])))) for m in METRICS)
        for name, found in values.items()
        if name != "ours"
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, way in ways.items():
            seconds[name].append(timed(way)[1])
    ratios = {
        name: [other / one for other, one in zip(seconds[name], seconds["ours"], strict=True)]
        for name in differences
    }
    per_metric = sum(
        len({p for _, those in asked(rows, metric) for p in those}) for metric in METRICS
    )
    report = {
        "rows": len(rows),
        "texts": len({p for m in METRICS for _, those in asked(rows, m) for p in those}),
        "texts_asked_a_metric": per_metric,
        "cpu_s": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "ratios": ratios,
        "largest_difference": differences,
        "model": {"hidden": shape.hidden, "layers": shape.layers, "vocabulary": shape.vocabulary},
        "batch": BATCH,
        "torch": torch.__version__,
        "threads": 1,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
