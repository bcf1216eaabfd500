"""How alike are scores of one author, or of one document? Real rows, a tiny model.

    python -m research.benchmarks.clusters --tofu DIR --lume DIR --epochs 10

A Llama of 1.5 million random weights reads rows of TOFU (arXiv 2401.06121) or LUME (2502.15097);
*learned* has seen members and retained rows, *retrained* the retained rows only. Scored are the
answers of members and of rows that neither has seen; an author's twenty rows, or the rows of a
document, are one cluster. The scores go into research/results/row-scores.json, without any text;
`table` makes the page's table of them. A tiny model says how alike the *texts* make scores, not
what a pretrained model's scores are like.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from axolotl_unlearn.data.records import document_id, read_records
from axolotl_unlearn.engine.token_scoring import Query, encode_continuation, score_queries
from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.intervals import area_of, auc, intraclass_correlation
from axolotl_unlearn.metrics.membership import attack_scores, equivalence, gap_of
from eval_tasks.tofu.utils import TEMPLATE, read_set

RESULTS = Path("research/results/row-scores.json")
#: Rows of an author in TOFU, one after the other.
AUTHOR = 20
Row = tuple[str, str, str]  # cluster, prompt, answer


def tofu(folder: Path) -> dict[str, list[Row]]:
    """forget05 (ten authors); ten others are retained, ten others never seen."""
    parts = {
        "member": read_set("forget10_perturbed", folder, ("question", "answer"))[200:],
        "retain": read_set("retain90", folder, ("question", "answer"))[:200],
        "nonmember": read_set("retain90", folder, ("question", "answer"))[-200:],
    }
    return {
        side: [
            (f"{side} {i // AUTHOR}", TEMPLATE.format(**row), f" {row['answer']}")
            for i, row in enumerate(rows)
        ]
        for side, rows in parts.items()
    }


def lume(folder: Path, each: int = 25) -> dict[str, list[Row]]:
    """``each`` documents of each of the three tasks a side."""
    found: dict[str, list[Row]] = {}
    for side, part, start in (("member", "forget", 0), ("retain", "retain", 0),
                              ("nonmember", "forget", each)):  # fmt: skip
        rows: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for record in read_records(folder / "train" / f"{part}.jsonl"):
            name = document_id(record.id)
            row = (f"{record.task} {name}", record.input, f" {record.output}")
            rows[record.task][name].append(row)
        found[side] = [
            row
            for task in sorted(rows)
            for name in sorted(rows[task])[start : start + each]
            for row in rows[task][name]
        ]
    return found


def tokenizer_of(texts: list[str]) -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=2048, special_tokens=["<eos>"], show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        made.save(f"{folder}/tokenizer.json")
        return PreTrainedTokenizerFast(
            tokenizer_file=f"{folder}/tokenizer.json", eos_token="<eos>", pad_token="<eos>"
        )


def trained(tokenizer: Any, rows: list[Row], epochs: int, seed: int) -> Any:
    """From random weights; every token of prompt and answer counts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    ids = [tokenizer(p + a)["input_ids"][:512] + [0] for _, p, a in rows]
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    batches = [by_length[k : k + 12] for k in range(0, len(ids), 12)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    order = random.Random(seed)
    for _ in range(epochs):
        for batch in order.sample(batches, len(batches)):
            width = max(len(ids[i]) for i in batch)
            labels = torch.full((len(batch), width), -100)
            for k, i in enumerate(batch):
                labels[k, : len(ids[i])] = torch.tensor(ids[i])
            loss = model(
                input_ids=labels.clamp(min=0), attention_mask=(labels >= 0).long(), labels=labels
            ).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    print(f"{len(rows)} rows, {epochs} epochs, last loss {float(loss.detach()):.2f}", flush=True)
    return model.eval()


def facts_of(model: Any, tokenizer: Any, rows: list[Row]) -> Any:
    queries = []
    for _, prompt, answer in rows:
        ids, start = encode_continuation(tokenizer, prompt, answer)
        cut = max(0, len(ids) - 900)
        queries.append(Query.of(ids[cut:], start - cut))
    return score_queries(model, queries)


def measure(rows: dict[str, list[Row]], epochs: int, seed: int) -> dict[str, Any]:
    tokenizer = tokenizer_of([p + a for side in rows.values() for _, p, a in side])
    seen = {"retrained": rows["retain"], "learned": rows["retain"] + rows["member"]}
    models = {name: trained(tokenizer, read, epochs, seed) for name, read in seen.items()}
    sides = ("member", "nonmember")
    facts = {
        name: {side: facts_of(model, tokenizer, rows[side]) for side in sides}
        for name, model in models.items()
    }
    names = {side: {c: i for i, c in enumerate(dict.fromkeys(r[0] for r in rows[side]))}
             for side in sides}  # fmt: skip
    return {
        "cluster": {s: [names[s][r[0]] for r in rows[s]] for s in sides},
        # Of LUME: the task of a row, whose kinds of text differ.
        "kind": {s: [r[0].split()[0] for r in rows[s]] for s in sides},
        "scores": {
            name: {
                side: {
                    attack: [round(float(v), 4 if attack != "zlib" else 7) for v in values]
                    for attack, values in attack_scores(
                        facts[name][side],
                        [answer for _, _, answer in rows[side]],
                        facts["retrained"][side] if name == "learned" else None,
                    ).items()
                }
                for side in sides
            }
            for name in models
        },
    }


def within(values: np.ndarray, kinds: list[str]) -> np.ndarray:
    """Without the mean of each kind of text."""
    out = values.copy()
    for kind in set(kinds):
        mask = np.array(kinds) == kind
        out[mask] -= out[mask].mean()
    return out


def table(results: dict[str, Any]) -> list[dict[str, Any]]:
    """A line an attack and data set: correlations, and intervals by rows and by clusters."""
    lines = []
    for name, one in results["data"].items():
        clusters = tuple([f"{s} {c}" for c in one["cluster"][s]] for s in ("member", "nonmember"))
        kinds = one["kind"] if name == "lume" else None
        learned, retrained = one["scores"]["learned"], one["scores"]["retrained"]
        for attack in retrained["member"]:
            pair, other = (
                tuple(np.array(model[side][attack]) for side in ("member", "nonmember"))
                for model in (learned, retrained)
            )
            gap = pair[0] - other[0]
            line = {"data": name, "attack": attack, "auc": auc(*other)}
            line |= {
                f"{what} {side}": intraclass_correlation(values, clusters[i])
                for what, values, side, i in (
                    ("alone", other[0], "members", 0),
                    ("alone", other[1], "nonmembers", 1),
                    ("difference", gap, "members", 0),
                    ("difference", pair[1] - other[1], "nonmembers", 1),
                )
            }
            if kinds:
                line["within kind"] = intraclass_correlation(
                    within(other[0], kinds["member"]), clusters[0]
                )
            for by, names in (("rows", None), ("clusters", clusters)):
                low, high = area_of(*other, names).interval()
                line[f"half width by {by}"] = (high - low) / 2
                paired = equivalence(gap_of(pair, other, names)[1], len(pair[0]))
                line[f"half width paired by {by}"] = (paired["high"] - paired["low"]) / 2
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tofu", type=Path, required=True)
    parser.add_argument("--lume", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start, data = time.time(), {}
    for name, rows in (("tofu", tofu(args.tofu)), ("lume", lume(args.lume))):
        print(name, {side: len(part) for side, part in rows.items()}, flush=True)
        data[name] = measure(rows, args.epochs, args.seed)
    facts = {"seed": args.seed, "epochs": args.epochs, "seconds": round(time.time() - start)}
    write_json(RESULTS, {"facts": facts, "data": data})
    for line in table(json.loads(RESULTS.read_text())):
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()})


if __name__ == "__main__":
    main()
