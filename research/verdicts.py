"""Old and new verdicts of finished demos, and the worst documents with their texts.

    python research/verdicts.py out/demo-0 out/demo-1 ...      write research/results/verdicts.json

Each folder is that of `python -m research demo --out`; its name ends in the seed. The texts are shown
because the demo's data are made up.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import beta

from axolotl_unlearn.data.records import read_json_lines
from axolotl_unlearn.metrics.results import Model, read
from axolotl_unlearn.metrics.verdict import bars, judge

DATA = Path(__file__).resolve().parent / "results" / "verdicts.json"
#: The last commit with the rule that `status_before` restates.
BEFORE = "cd6c3de"
MODELS = ("over", "under", "merged", "single")
SCORES = ("aggregate", "task_aggregate", "mia_auc", "utility")


def status_before(
    model: Mapping[str, Any], original: Mapping[str, Any], retrained: Mapping[str, Any]
) -> str:
    """The verdict of a candidate as it was before commit 24f84a5 (report/results.py, `status`).

    Membership by the loss alone: balanced where the interval of its AUC holds .5, then members
    beyond 99 % of the non-members counted against a cut that is taken as known (Clopper-Pearson);
    every other bar is compared with a point estimate.
    """
    if model["collapse"]["collapsed"]:
        return "collapsed"
    if model["gate"]["below_gate"]:
        return "below gate"
    low, high = model["intervals"]["mia_auc"]
    if not low <= 0.5 <= high:
        return "under-forgets" if low > 0.5 else "over-forgets"
    for sign in (1, -1):
        share, target = _found(model, sign), _found(retrained, sign)
        if share[1] > max(0.01, target[0]):
            return "recognisable"
    own, before, target = (read(Model, one) for one in (model, original, retrained))
    forget_bar, retain_bar = bars(before, target)
    answers = model["answers"]["forget"]
    if own.side("forget") < forget_bar or answers["contained"] - answers["exact"] >= 0.05:
        return "still knows"
    if own.side("retain") < retain_bar:
        return "lost knowledge"
    share, floor = (one["collapse"]["forget"]["broken"] for one in (model, retrained))
    if share > 0.1 + floor:
        return "broken answers"
    return "good" if model["utility"] is not None else "utility unknown"


def _found(model: Mapping[str, Any], sign: int) -> tuple[float, float]:
    """Share of members beyond all but 1 % of the non-members, and its lower 95 % bound."""
    members, others = (
        [sign * x for x in model["likelihood"][f"{side}_loss"]] for side in ("member", "nonmember")
    )
    cut = sorted(others)[int(0.01 * len(others))]
    hits = sum(value < cut for value in members)
    low = float(beta.ppf(0.025, hits, len(members) - hits + 1)) if hits else 0.0
    return hits / len(members), low


def verdict_rows(seed: str, models: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row a candidate: verdicts, the attack that tells most, members told, what decided."""
    roles = {read(Model, model).part: model for model in models}
    original, retrained = roles["original"], roles["retrained"]
    rows = []
    for model in sorted(models, key=lambda m: (*MODELS, m["name"]).index(m["name"])):
        if read(Model, model).part != "candidate":
            continue
        new = judge(model, original, retrained)
        attack = new.attacks[new.strongest]
        p = attack["p_corrected"]
        shown = f"{new.strongest} ({attack['auc']:.2f}, p {p:.3f})".replace("p 0.000", "p < .001")
        rows.append(
            [
                seed,
                model["name"],
                f"{model['mia_auc']:.2f}",
                status_before(model, original, retrained),
                new.status,
                shown,
                f"{model['learned']['auc']:.2f}" if "learned" in model else "",
                str(model["audit"]["tested"]),
                str(model["audit"]["told"]),
                new.worst.says if new.worst else "",
            ]
        )
    return rows


def score_rows(seed: str, models: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Scores of a seed beside those committed earlier (another machine, other runner)."""
    before = json.loads((DATA.parent / "demo.json").read_text("utf-8"))["seeds"].get(seed, {})
    rows = []
    for model in models:
        if (old := before.get(model["name"])) is None:
            continue
        pairs = [f"{model[name]:.3f} / {old[name]:.3f}" for name in SCORES]
        rows.append([seed, model["name"], *pairs])
    return rows


def worst_rows(lines: Sequence[Mapping[str, Any]], model: str, count: int = 5) -> list[list[str]]:
    """The worst documents of the audit list: a row for each of their prompts."""
    rows = []
    for line in [line for line in lines if line["model"] == model][:count]:
        for row in line["rows"]:
            if row["id"].rstrip("0123456789").endswith("sc") and row["answer_said"] is None:
                kind = "completion"
            else:
                kind = "answer said" if row["answer_said"] else "answer not said"
            rows.append(
                [
                    line["document"].strip('"')[:8],
                    line["reading"],
                    _plain(row["prompt"]),
                    _plain(row["expected"]),
                    _plain(row["generated"]),
                    f"{kind}; extraction {row['extraction_strength']:.2f}",
                ]
            )
    return rows


def worst_figures(
    lines: Sequence[Mapping[str, Any]], model: str, count: int = 5
) -> list[list[str]]:
    """The same documents in numbers: this model, before, retrained."""
    rows = []
    for line in [line for line in lines if line["model"] == model][:count]:
        triples = [
            " / ".join(_number(side.get(key)) for side in (line, line["before"], line["retrained"]))
            for key in ("loss", "rank", "extraction_strength", "answers_said")
        ]
        rows.append(
            [line["document"].strip('"')[:8], line["task"], line["reading"], *triples,
             _number(line["p"], 3), _number(line["q"], 2)]
        )  # fmt: skip
    return rows


def _number(value: Any, digits: int = 2) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.{digits}f}"


def _plain(text: str, most: int = 160) -> str:
    text = re.sub(r"\s+", " ", text).strip().replace("|", "/")
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= most else f"{text[:most]} ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--worst-of", default="under", help="The model whose worst are shown.")
    options = parser.parse_args()
    rows: list[list[str]] = []
    scores: list[list[str]] = []
    for folder in options.folders:
        results = json.loads((folder / "eval" / "results.json").read_text("utf-8"))
        seed = folder.name.rpartition("-")[2]
        rows += verdict_rows(seed, results["models"])
        scores += score_rows(seed, results["models"])
    first = options.folders[0] / "eval" / "audit.jsonl"
    lines = read_json_lines(first)
    content = {
        "as_printed_in": "research/notebook/verdicts.md",
        "command": "python -m research demo --seed N --out out/demo-N; python research/verdicts.py "
        + " ".join(f"out/{folder.name}" for folder in options.folders)
        + f" --worst-of {options.worst_of}",
        "before": BEFORE,
        "tables": {
            "verdicts": {
                "columns": ["seed", "model", "AUC", "old verdict", "new verdict",
                            "strongest attack", "AUC of the learned attack", "members", "told",
                            "what decided"],
                "rows": rows,
            },
            "scores": {"columns": ["seed", "model", *SCORES], "rows": scores},
            "worst": {
                "columns": ["document", "task", "reading", "loss", "rank", "extraction",
                            "answers said", "p", "q"],
                "rows": worst_figures(lines, options.worst_of),
            },
            "texts": {
                "columns": ["document", "reading", "prompt", "expected", "the model says", "row"],
                "rows": worst_rows(lines, options.worst_of),
            },
        },
    }  # fmt: skip
    DATA.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for row in rows:
        print(" | ".join(row))


if __name__ == "__main__":
    main()
