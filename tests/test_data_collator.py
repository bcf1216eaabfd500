"""The batch against literal tensors."""

from __future__ import annotations

import pytest
import torch
from data_tokenizers import EOS, PAD, byte_tokenizer
from torch.utils.data import DataLoader

from axolotl_unlearn.data.collator import PairCollator


def row(tokens, labels, role, kind, task, number):
    return {
        "input_ids": tokens,
        "attention_mask": [1] * len(tokens),
        "labels": labels,
        "role": role,
        "kind": kind,
        "task": task,
        "row": number,
        "length": len(tokens),
    }


F0 = row([1, 2, 3], [-100, 2, 3], 0, 1, 2, 10)
F1 = row([4], [4], 0, 0, 1, 11)
R0 = row([5, 6], [5, 6], 1, 0, 3, 20)
R1 = row([7, 8], [-100, 8], 1, 1, 0, 21)


def test_forget_rows_first_then_retain_rows():
    batch = PairCollator(9)([{"forget": [F0], "retain": [R0]}, {"forget": [F1], "retain": [R1]}])
    expected = {
        "input_ids": [[1, 2, 3], [4, 9, 9], [5, 6, 9], [7, 8, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]],
        "labels": [[-100, 2, 3], [4, -100, -100], [5, 6, -100], [-100, 8, -100]],
        "role": [0, 0, 1, 1],
        "kind": [1, 0, 0, 1],
        "task": [2, 1, 3, 0],
        "row": [10, 11, 20, 21],
    }
    said = batch.pop("host")
    assert batch.keys() == said.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(batch[name], torch.tensor(values)), name
        assert said[name].tolist() == values


def test_without_retain_and_plain_rows():
    assert PairCollator(9)([{"forget": [F0], "retain": []}])["role"].tolist() == [0]
    plain = PairCollator(9)([R0, F0])
    assert plain["row"].tolist() == [20, 10]
    assert plain["input_ids"].tolist() == [[5, 6, 9], [1, 2, 3]]
    bare = PairCollator(9)([{"input_ids": [1], "labels": [1]}])
    assert bare["role"].tolist() == bare["kind"].tolist() == [-1]


def test_pad_to_multiple_and_axolotl_arguments():
    collator = PairCollator(
        byte_tokenizer(), padding=True, pad_to_multiple_of=4, return_tensors="pt"
    )
    batch = collator([{"forget": [F0], "retain": [R0]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, PAD], [5, 6, PAD, PAD]]


def test_pad_equal_to_eos_keeps_the_real_eos():
    """The mask follows lengths: the EOS that ends a row is a label, the same id as pad is not."""
    collator = PairCollator(byte_tokenizer(pad_token=None))
    ended = row([1, EOS], [1, EOS], 0, 0, 1, 0)
    batch = collator([F0, ended])
    assert batch["input_ids"][1].tolist() == [1, EOS, EOS]
    assert batch["attention_mask"][1].tolist() == [1, 1, 0]
    assert batch["labels"][1].tolist() == [1, EOS, -100]


def test_no_pad_token():
    """It was an error after the weights were loaded, of which `check` had said nothing."""
    collator = PairCollator(byte_tokenizer(pad_token=None, eos_token=None))
    batch = collator([{"forget": [F0], "retain": [R0]}])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["input_ids"][1].tolist() == [5, 6, 0] and batch["labels"][1, 2] == -100


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_host_knows_is_what_the_tensors_hold(workers):
    """A worker moves a tensor's memory when it sends it; arrays that shared it came as garbage,
    and a step on a GPU was computed from them."""
    rows = [
        {"input_ids": [number] * (3 + number % 5), "labels": [number] * (3 + number % 5), "role": 0}
        for number in range(64)
    ]
    loader = DataLoader(rows, batch_size=4, num_workers=workers, collate_fn=PairCollator(0))
    for number, batch in enumerate(loader):
        host = batch.pop("host")
        assert set(host) == set(batch)
        assert all((batch[name].numpy() == host[name]).all() for name in host), number
        assert host["input_ids"][:, 0].tolist() == list(range(4 * number, 4 * number + 4))
