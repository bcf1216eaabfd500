"""Tables 1 and 3 of arXiv 2503.21088 with our values beside the paper's, and its table 2.

The paper's model is OLMo-7B on the task's own data; patterns can be compared, values cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from research.analysis.seeds import count_of_seeds, interval_over_seeds, with_half_width

#: Table 1, local results: model1 (over), model2 (under) and their merge.
TABLE_1 = {
    "over": {
        "aggregate": 0.481, "task_aggregate": 0.968, "mia_auc": 0.022, "mia_score": 0.045,
        "utility": 0.431,
    },
    "under": {
        "aggregate": 0.504, "task_aggregate": 0.659, "mia_auc": 0.818, "mia_score": 0.364,
        "utility": 0.491,
    },
    "merged": {
        "aggregate": 0.806, "task_aggregate": 0.939, "mia_auc": 0.501, "mia_score": 0.997,
        "utility": 0.480,
    },
}  # fmt: skip
#: Table 2, Aggregate of each merge of LoRA factors.
TABLE_2 = {
    "linear": 0.244,
    "dare_linear": 0.440,
    "dare_ties": 0.561,
    "magnitude_prune": 0.558,
    "ties": 0.806,
}
#: Table 3: parameter, model1 (over), model2 (under).
TABLE_3 = {
    "batch_size": (1, 2),
    "gradient_accumulation": (4, 4),
    "num_epochs": (5, 5),
    "lr": (1e-4, 1e-4),
    "max_length": (256, 256),
    "weight_decay": (0.01, 0.01),
    "seed": (42, 42),
    "objective of the forget set": ("npo", "npo"),
    "ga_ratio (forget)": (0.4, 0.3),
    "gd_ratio (retain NLL)": (0.4, 0.3),
    "gk_ratio (retain KL)": (0.2, 0.4),
    "LoRA_r": (32, 32),
    "LoRA_alpha": (32, 32),
    "LoRA_dropout": (0.05, 0.05),
}
COLUMNS = ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility")


def table_one(seeds: Mapping[int, Mapping[str, Mapping]], merged: str = "merged") -> list[str]:
    """Our over, under and merged (the model called ``merged``) above the paper's, as markdown.

    Args:
        seeds: seed -> model -> score -> value.
    """
    lines = [
        "",
        f"## Table 1 of the paper ({count_of_seeds(len(seeds))})",
        "",
        "| model | whose | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for name, paper in TABLE_1.items():
        mine = [models[merged if name == "merged" else name] for models in seeds.values()]
        ours = [with_half_width(interval_over_seeds([one[c] for one in mine])) for c in COLUMNS]
        lines.append(f"| {name} | ours | {' | '.join(ours)} |")
        lines.append(f"| {name} | paper's | {' | '.join(f'{paper[c]:.3f}' for c in COLUMNS)} |")
    return lines


def table_three(over: Path, under: Path) -> list[str]:
    """The hyperparameters of two Axolotl configs beside the paper's, as markdown."""
    ours = [_hyperparameters(yaml.safe_load(path.read_text("utf-8"))) for path in (over, under)]
    lines = [
        "",
        "## Table 3 of the paper (hyperparameters)",
        "",
        "| parameter | our over | paper's model1 | our under | paper's model2 |",
        "|---|---|---|---|---|",
    ]
    for name in ours[0]:
        first, second = (one[name] for one in ours)
        one, two = TABLE_3.get(name, ("", ""))
        lines.append(f"| {name} | {first} | {_plain(one)} | {second} | {_plain(two)} |")
    return lines


def _hyperparameters(config: Mapping) -> dict[str, str]:
    forget = config["unlearn"]["forget"]
    forget = [forget] if isinstance(forget, Mapping) else forget
    retain = config["unlearn"]["retain"]
    by_name = {name: [t for t in retain if t["objective"] == name] for name in ("nll", "kl")}
    values = {
        "batch_size": config["micro_batch_size"],
        "gradient_accumulation": config["gradient_accumulation_steps"],
        "num_epochs": config["num_epochs"],
        "lr": config["learning_rate"],
        "max_length": config["sequence_len"],
        "weight_decay": config["weight_decay"],
        "seed": config["seed"],
        "objective of the forget set": _of_terms(forget, "objective", ""),
        "ga_ratio (forget)": _of_terms(forget, "weight", 1.0),
        "gd_ratio (retain NLL)": _of_terms(by_name["nll"], "weight", 1.0),
        "gk_ratio (retain KL)": _of_terms(by_name["kl"], "weight", 1.0),
        "beta": _of_terms(forget, "beta", ""),
        "LoRA_r": config["lora_r"],
        "LoRA_alpha": config["lora_alpha"],
        "LoRA_dropout": config["lora_dropout"],
    }
    return {name: _plain(value) for name, value in values.items()}


def _of_terms(terms: Sequence[Mapping], key: str, default: object) -> str:
    """A value of one term, or of each with its kind of rows; "0" without terms."""
    values = [_plain(term.get(key, default)) for term in terms]
    if len(set(values)) == 1:
        return values[0]
    kinds = [f" ({term['kinds']})" if "kinds" in term else "" for term in terms]
    return ", ".join(v + kind for v, kind in zip(values, kinds, strict=True)) or "0"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
