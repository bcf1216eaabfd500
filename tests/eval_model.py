"""A tiny model that has really memorised some rows, and evaluation folders for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "examples" / "tiny-olmo"


def lume_folder() -> Path | None:
    """The public LUME data: ``LUME_DIR`` or a folder `shared/lume` beside the repository."""
    for folder in (os.environ.get("LUME_DIR"), ROOT.parent / "shared" / "lume"):
        if folder and (Path(folder) / "train" / "forget.jsonl").is_file():
            return Path(folder)
    return None


def lume_rows(per_cell: int) -> dict[str, list[dict]]:
    """The shortest rows of each cell of LUME's train split."""
    sides = {}
    for side in ("forget", "retain"):
        with open(lume_folder() / "train" / f"{side}.jsonl", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        cells: dict[tuple, list[dict]] = {}
        for row in rows:
            cells.setdefault((row["task"], row["id"][:-1][-2:]), []).append(row)
        sides[side] = [
            row
            for cell in sorted(cells)
            for row in sorted(cells[cell], key=lambda r: len(r["input"] + r["output"]))[:per_cell]
        ]
    return sides


def made_up_rows(per_cell: int, *, retain_years: int = 0) -> dict[str, list[dict]]:
    """Rows of all 12 cells without any outside data.

    ``retain_years`` later on the retain side; with 0 a name has one year on both sides, so that
    who has learnt one row may guess the other.
    """
    names = "Ada Bo Cy Di Ed Flo Gus Hal Ida Jo Kit Lee Mia Ned Oz Pam".split()
    sides: dict[str, list[dict]] = {}
    for side in ("forget", "retain"):
        rows = []
        for task in (1, 2, 3):
            for i in range(per_cell):
                name, number = f"{names[i]} {side[0].upper()}{task}", 1000 + 7 * i + task
                number += retain_years if side == "retain" else 0
                story, question = (
                    (f"The {side} story of {name} began", f"in the year {number} by a river."),
                    (f"When did {name} begin?", str(number)),
                )
                for suffix, (text, output) in (("sc1", story), ("qa0", question)):
                    identifier = f'"{side}-{task}-{i}"{suffix}'
                    row = {"id": identifier, "input": text, "output": output}
                    rows.append({**row, "task": f"Task{task}"})
        sides[side] = rows
    return sides


def write_folder(
    folder: Path, sides: dict[str, list[dict]], texts: dict[str, list[str]], general: int = 0
) -> Path:
    """A data folder: rows, member and nonmember texts, four-option questions from the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[dict]] = dict(sides)
    for name, documents in texts.items():
        tables[name] = [{"id": f"{name}{i}", "document": t} for i, t in enumerate(documents)]
    if general:
        questions = [r for r in sides["retain"] if "qa" in r["id"]]
        answers = sorted({r["output"] for r in questions})
        tables["general"] = []
        for row in questions[:general]:
            wrong = [a for a in answers if a != row["output"]][:3]
            place = len(row["input"]) % 4
            tables["general"].append(
                {
                    "question": row["input"],
                    "choices": [*wrong[:place], row["output"], *wrong[place:]],
                    "answer": place,
                }
            )
    for name, rows in tables.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def documents_of(sides: dict[str, list[dict]]) -> dict[str, list[str]]:
    """Members: the forget stories; non-members: the retain stories (for tests only)."""
    joined = {
        side: [f"{r['input']} {r['output']}" for r in rows if r["id"][:-1].endswith("sc")]
        for side, rows in sides.items()
    }
    return {"member": joined["forget"], "nonmember": joined["retain"]}


def train_model(
    out: Path, rows: list[dict], *, steps: int = 60, hidden: int = 64, seed: int = 0
) -> Path:
    """A small OLMo trained on `rows` for `steps` steps over all of them, saved with tokenizer."""
    from transformers import AutoTokenizer, OlmoConfig, OlmoForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(seed)
    config = OlmoConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = OlmoForCausalLM(config)
    texts = []
    for row in rows:
        answer = tokenizer(" " + row["output"], add_special_tokens=False)["input_ids"]
        ids = [*tokenizer(row["input"])["input_ids"], *answer, tokenizer.eos_token_id]
        texts.append(torch.tensor(ids))
    # Two batches, short rows and long ones, so that little is padded.
    texts.sort(key=len)
    batches = []
    for part in (texts[: len(texts) // 2], texts[len(texts) // 2 :]):
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(part, batch_first=True)
        mask = pad([torch.ones_like(t) for t in part], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=2 * steps)
    for _ in range(steps):
        for batch in batches:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
