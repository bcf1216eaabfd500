"""Pairs become one flat batch: forget rows, retain rows, alternatives, padded on the right."""

from __future__ import annotations

from typing import Any

import torch

from axolotl_unlearn.columns import FACTS, IGNORE, NOBODYS, ROLES


class PairCollator:
    """Collate pairs ``{"forget": [rows], "retain": [rows], "alternative": [rows]}``, the last of
    which may be absent, or plain rows. Nobody's rows are left out, unless there are no others.
    Alternatives are in the order of their forget rows.

    The attention mask follows the rows' own lengths, never the pad id, so a tokenizer whose pad
    token is its EOS, or that has neither, does no harm.

    Args:
        tokenizer: A tokenizer, or the pad id itself.
        pad_to_multiple_of: Round the padded length up to a multiple of this.
        padding, return_tensors: As Axolotl passes them to every collator; they change nothing.

    Returns of a call (b rows, t tokens):
        input_ids, attention_mask, labels: int64 [b, t]; labels are -100 on padding.
        role (0 forget, 1 retain, 2 alternative), kind, task, row: int64 [b].
        host: all of these as arrays, which stay on the host when the tensors go to a device.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        pad_to_multiple_of: int | None = None,
        padding: bool | str = True,
        return_tensors: str = "pt",
    ) -> None:
        ids = [tokenizer]
        if not isinstance(tokenizer, int):
            ids = [tokenizer.pad_token_id, tokenizer.eos_token_id]
        self.pad = int(next((one for one in ids if one is not None), 0))
        self.multiple = pad_to_multiple_of or 1

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        if items and "forget" in items[0]:
            rows = [row for role in ROLES for item in items for row in item.get(role, ())]
            rows = [row for row in rows if row["role"] != NOBODYS] or rows[:1]
        else:
            rows = items
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.multiple) * self.multiple
        batch = {
            "input_ids": torch.full((len(rows), width), self.pad, dtype=torch.long),
            "attention_mask": torch.zeros((len(rows), width), dtype=torch.long),
            "labels": torch.full((len(rows), width), IGNORE, dtype=torch.long),
        }
        for number, row in enumerate(rows):
            length = len(row["input_ids"])
            batch["input_ids"][number, :length] = torch.as_tensor(row["input_ids"])
            batch["attention_mask"][number, :length] = 1
            batch["labels"][number, :length] = torch.as_tensor(row["labels"])
        for name in FACTS:
            batch[name] = torch.tensor([int(row.get(name, -1)) for row in rows])
        # Copies: a worker of the data loader moves a tensor's memory when it sends the tensor.
        return batch | {"host": {name: tensor.numpy().copy() for name, tensor in batch.items()}}
