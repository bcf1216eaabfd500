"""How near a teacher's targets are to what the retrained model says of the forget rows.

    python -m research.benchmarks.teachers out/never-seen [NAME=FOLDER ...]     # > research/results/teachers.json

Before any training: the targets of `match` at its start (`axolotl_unlearn.reference.level`), token
by token, for the teachers of a folder of `make never-seen` and further ones, and for what can be
had without a model from before. The retrained model judges.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from axolotl.utils.dict import DictDefault
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from axolotl_unlearn.data.records import read_records
from axolotl_unlearn.engine.needs import ForwardSpec, label_positions
from axolotl_unlearn.experimental.make_twins import Pool
from axolotl_unlearn.experimental.twins import Twins, own_twins
from axolotl_unlearn.files import write_json, write_lines
from axolotl_unlearn.objectives.matching import log_odds
from axolotl_unlearn.reference.level import Level
from axolotl_unlearn.training.level import ScoredRows, forget_rows

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = [
    "targets", "documents: nats", "off by (log-odds)", "correlation",
    "questions: nats", "off by (log-odds)", "correlation",
]  # fmt: skip


def label_logps(model: torch.nn.Module, rows: ScoredRows) -> list[Tensor]:
    return [torch.as_tensor(np.asarray(one.logp, np.float64)) for one in rows.score(model)]


def through(forget: Sequence[dict], twins: Sequence[dict], said: Sequence[Tensor]) -> list[Tensor]:
    """What was said of the twins, at the labels of the forget rows."""
    exchanged, found = Twins(forget, twins), []
    for row, logp in zip(forget, said, strict=True):
        columns = ("input_ids", "attention_mask", "labels")
        batch = {name: torch.as_tensor(row[name])[None] for name in columns}
        asked = exchanged.exchange(batch, ForwardSpec(label_positions(batch)))
        whole = torch.zeros(asked.batch["labels"].shape, dtype=torch.float64)
        whole[asked.needs.labels] = logp
        found.append(whole.gather(1, asked.at)[label_positions(batch)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("world", type=Path)
    parser.add_argument("teachers", nargs="*", help="NAME=FOLDER")
    parser.add_argument("--out", type=Path, default=ROOT / "research/results/teachers.json")
    given = parser.parse_args()
    world, data = given.world, given.world / "data"
    tokenizer = AutoTokenizer.from_pretrained(world / "original")
    config = DictDefault({"unlearn": {"forget": {"objective": "ga"}}, "sequence_len": 256})
    records = {name: read_records(data / f"{name}.jsonl") for name in ("forget", "retain")}
    pool = Pool(records["forget"] + records["retain"])
    file = world / "twins.jsonl"
    fields = ("id", "input", "output", "task")
    twins = map(pool.twin, records["forget"])
    write_lines(file, ({name: getattr(twin, name) for name in fields} for twin in twins))
    rows = {
        name: list(forget_rows(str(path), tokenizer, config))
        for name, path in {
            "forget": data / "forget.jsonl", "heldout": data / "heldout.jsonl", "twins": file,
        }.items()
    }  # fmt: skip
    rows["twins"] = own_twins(rows["forget"], rows["twins"])
    sets = {name: ScoredRows(part, tokenizer) for name, part in rows.items()}
    said: dict[tuple[str, str], list[Tensor]] = {}
    paths = {name: world / name for name in ("original", "retrained")}
    paths |= {name: Path(path) for name, path in (one.split("=") for one in given.teachers)}
    for name, path in paths.items():
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        for part in ("forget", "heldout") + ("twins",) * (name == "original"):
            said[name, part] = label_logps(model, sets[part])
    forget, policy = sets["forget"], sets["heldout"].by_group(said["original", "heldout"])
    want, at_twins = (
        said["retrained", "forget"],
        through(rows["forget"], rows["twins"], said["original", "twins"]),
    )

    def targets(teacher: list[Tensor], scale: dict) -> list[Tensor]:
        level = Level()
        level.fit(scale, policy)
        return [level.aim(logp, group) for logp, group in zip(teacher, forget.groups, strict=True)]

    own = said["original", "forget"]
    found = {
        "the model itself, as it is": own,
        "its twins, as they are": at_twins,
        "twins, at the held-out level": targets(at_twins, forget.by_group(at_twins)),
        "the model itself, at the held-out level": targets(own, forget.by_group(own)),
        **{
            name: targets(said[name, "forget"], sets["heldout"].by_group(said[name, "heldout"]))
            for name in paths
            if name not in ("original", "retrained")
        },
        "*retrained*": want,
    }
    table = []
    for name, aims in found.items():
        table.append([name])
        for kind in (0, 1):
            chosen = [i for i, group in enumerate(forget.groups) if group[0] == kind]
            ours, theirs = (torch.cat([x[i].double() for i in chosen]) for x in (aims, want))
            off = (log_odds(ours) - log_odds(theirs)).abs().mean()
            r = np.corrcoef(log_odds(ours), log_odds(theirs))[0, 1]
            table[-1] += [f"{float(ours.mean()):.2f}", f"{float(off):.2f}", f"{r:.2f}"]
        print(table[-1], flush=True)
    before = json.loads(given.out.read_text())["tables"] if given.out.exists() else {}
    write_json(given.out, {"tables": before | {"targets": {"columns": COLUMNS, "rows": table}}})


if __name__ == "__main__":
    main()
