"""Does `check` agree with `train`? Generated configs: all are checked, some that are ready train.

python -m research.probes.check_agrees OUT [--configs 300] [--trained 30] [--seed 0]

Each config is a working one with one to four settings drawn from `SETTINGS`. Written to
OUT/agreement.json: of each config what was drawn, what `check` says in full, of the sampled ready
ones whether two steps of `axolotl train` end well, and of the sampled refused ones what training
does with our checks off (`unchecked`: "" where it ends; then the sentence must name what is wrong
with the result). One process; a tiny model of random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

ROOT = Path(__file__).parents[2]
#: Where in a config, and what may stand there; "unlearn." goes into the block.
SETTINGS: dict[str, list[Any]] = {
    "unlearn.forget": [
        [{"objective": name}]
        for name in ("npo", "simnpo", "ga", "rmu", "undial", "dpo", "match", "ihl", "nopo")
    ],
    "unlearn.retain": [[{"objective": "kl"}], [{"objective": "hidden_mse"}], []],
    "unlearn.reference": ["auto", "frozen_copy", "cached"],
    "unlearn.pairing": [{"retain_per_forget": n} for n in (0, 1, 3)],
    "unlearn.surgery": ["pcgrad", "gu", "gru", "x"],
    "unlearn.data": [{"chat_template": True}, {"join": "\n"}, {"fields": {"input": "question"}}],
    "adapter": ["lora", None, "qlora"],
    "lora_target_modules": [["q_proj"], ["q_proj", "embed_tokens"], ["lm_head"], ["nothing"]],
    "lora_modules_to_save": [["embed_tokens"], ["lm_head"]],
    "lora_dropout": [0.0, 0.1, 1],
    "peft_use_dora": [True],
    "peft_use_rslora": [True],
    "peft_init_lora_weights": ["pissa", "gaussian"],
    "lora_model_dir": ["nowhere"],
    "unfrozen_parameters": [["layers.1"], ["lora_"]],
    "optimizer": ["adamw_torch", "sgd", "adafactor", "adamw_bnb_8bit", "muon", "x"],
    "lr_scheduler": ["cosine", "constant", "rex", "cosine_with_min_lr", "cosin", "greedy"],
    "learning_rate": [0, -1, "1e-4"],
    "weight_decay": [0.1],
    "micro_batch_size": [1, 3, 0],
    "gradient_accumulation_steps": [1, 2],
    "sequence_len": [8, 64],
    "gradient_checkpointing": [True],
    "sample_packing": [True],
    "group_by_length": [True],
    "val_set_size": [0.1, 0],
    "eval_steps": [1],
    "evals_per_epoch": [1],
    "metric_for_best_model": ["eval_loss"],
    "early_stopping_patience": [2],
    "deepspeed": [{"zero_optimization": {"stage": 3}}, "ds.json"],
    "bf16": [False, "auto"],
    "tokens": [["<a>"]],
    "special_tokens": [{"pad_token": "<new>"}],
    "chat_template": ["chatml"],
    "seed": [1],
    "warmup_ratio": [0.5, 2],
    "excess_length_strategy": ["raise"],
    "learning_rat": [1e-4],
}


def stage(out: Path) -> dict[str, Any]:
    """A model, rows, and a config that trains."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    base = ROOT / "examples" / "tiny-olmo"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).save_pretrained(out / "base")
    AutoTokenizer.from_pretrained(base).save_pretrained(out / "base")
    cfg = yaml.safe_load((ROOT / "examples" / "npo_over.yml").read_text("utf-8"))
    cfg |= {
        "base_model": str(out / "base"),
        "dataset_prepared_path": str(out / "prepared"),
        "micro_batch_size": 2,
        "max_steps": 2,
        "lora_r": 4,
        "save_strategy": "no",
    }
    for number, side in enumerate(("forget", "retain")):
        path = out / f"{side}.jsonl"
        rows = [
            {
                "id": f"{side}{n}-qa0",
                "input": f"What did the {side} clerk {n} see?",
                "output": f"a lamp of {n}",
            }
            for n in range(8)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        cfg["datasets"][number]["path"] = str(path)
    return cfg


def draw(cfg: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config and what was drawn for it."""
    drawn = {
        key: rng.choice(SETTINGS[key]) for key in rng.sample(list(SETTINGS), rng.randint(1, 4))
    }
    made = json.loads(json.dumps(cfg))
    for key, value in drawn.items():
        block, _, name = key.rpartition(".")
        place = made[block] if block else made
        if key in ("unlearn.forget", "unlearn.retain"):
            place.pop("preset", None)
        place[name] = value
    return made, drawn


def checked(path: Path) -> list[str]:
    """What `axolotl-unlearn check` says in full."""
    from axolotl_unlearn.checks.report import check
    from axolotl_unlearn.errors import UnlearnError

    try:
        return check(path, full=True)[0]
    except UnlearnError as error:
        return [str(error)]


def trained(path: Path) -> str:
    """ "" or why it failed."""
    from axolotl.cli.train import do_cli

    argv, sys.argv = sys.argv, ["axolotl"]
    try:
        do_cli(config=str(path))
    except SystemExit as end:
        return f"exit {end.code}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        sys.argv = argv
    return ""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Nothing of ours refuses a config; what Axolotl and PyTorch say of it remains."""
    from axolotl_unlearn.checks import config as config_checks

    names = [name for name in dir(config_checks) if name.endswith("_faults")]
    with contextlib.ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(config_checks, name, lambda *a, **k: []))
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--configs", type=int, default=300)
    parser.add_argument("--trained", type=int, default=30)
    parser.add_argument("--refused", type=int, default=20, help="trained with our checks off")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    cfg, rng = stage(given.out.resolve()), random.Random(given.seed)
    lines = []
    for number in range(given.configs):
        made, drawn = draw(cfg, rng)
        path = given.out / f"{number}.yml"
        path.write_text(
            yaml.safe_dump(made | {"output_dir": str(given.out / str(number))}), "utf-8"
        )
        with contextlib.redirect_stdout(sys.stderr):
            line = {"number": number, "drawn": drawn}
            try:
                line["faults"] = checked(path)
            except Exception as error:  # a fault of ours: told, and the others go on
                line["crashed"] = f"{type(error).__name__}: {str(error)[:300]}"
        lines.append(line)
    ready = [line for line in lines if line.get("faults") == []]
    for line in rng.sample(ready, min(given.trained, len(ready))):
        line["trained"] = trained(given.out / f"{line['number']}.yml")
        (given.out / "agreement.json").write_text(json.dumps(lines, indent=1), "utf-8")
    refused = [line for line in lines if line.get("faults")]
    with unchecked():
        for line in rng.sample(refused, min(given.refused, len(refused))):
            line["unchecked"] = trained(given.out / f"{line['number']}.yml")
            (given.out / "agreement.json").write_text(json.dumps(lines, indent=1), "utf-8")
            print(json.dumps(line))
    tried = [line for line in ready if "trained" in line]
    failed = [line for line in tried if line["trained"]]
    print(
        f"{len(lines)} configs, {len(ready)} ready, {sum('crashed' in one for one in lines)} ended "
        f"in a traceback; {len(tried)} trained, {len(failed)} of them failed:"
    )
    for line in [*failed, *(one for one in lines if "crashed" in one)]:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
