"""Pairing is a pure function of (seed, epoch, position), and every row gets its turn."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from fault_codes import fails
from torch.utils.data import DataLoader

from axolotl_unlearn.data.collator import PairCollator
from axolotl_unlearn.data.pairing import PairedDataset, PairSampler


def merged(forget: int, retain: int, seed: int = 0):
    """Forget and retain rows in mixed order, as Axolotl merges them; lengths 2 to 40."""
    generator = np.random.default_rng(seed)
    rows = []
    for role, count in ((0, forget), (1, retain)):
        for row in range(count):
            length = int(generator.integers(2, 41))
            tokens = [100 * role + row] * length
            rows.append(
                {
                    "input_ids": tokens,
                    "attention_mask": [1] * length,
                    "labels": tokens,
                    "role": role,
                    "kind": row % 2,
                    "task": 1,
                    "row": row,
                    "length": length,
                }
            )
    return Dataset.from_list([rows[i] for i in generator.permutation(len(rows))])


def epoch_rows(pairs: PairedDataset, epoch: int, **options):
    """[(forget row, retain rows)] of an epoch, by number in the file."""
    sampler = PairSampler(pairs)
    sampler.set_epoch(epoch)
    items = [pairs[index] for index in sampler]
    return [(item["forget"][0]["row"], [row["row"] for row in item["retain"]]) for item in items]


def test_forget_rows_come_once_an_epoch_in_a_fresh_order():
    pairs = PairedDataset(merged(7, 4), seed=3)
    orders = [[forget for forget, _ in epoch_rows(pairs, epoch)] for epoch in range(4)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize(
    ("forget", "retain", "ratio"), [(5, 8, 1), (5, 3, 1), (4, 3, 2), (6, 6, 1), (1, 9, 4)]
)
def test_every_retain_row_is_used_equally(forget, retain, ratio):
    """After each pair the uses of any two rows differ by at most one, however sizes relate;
    after ``retain`` epochs (forget * ratio * retain slots) all have forget * ratio uses."""
    pairs = PairedDataset(merged(forget, retain), seed=1, retain_per_forget=ratio)
    uses = Counter({row: 0 for row in range(retain)})
    for epoch in range(retain):
        for _, rows in epoch_rows(pairs, epoch):
            uses.update(rows)
            assert max(uses.values()) - min(uses.values()) <= 1
    assert set(uses.values()) == {forget * ratio}


def test_same_seed_same_pairs_other_seed_other_pairs():
    rows = merged(6, 6)
    orders = [epoch_rows(PairedDataset(rows, seed=seed), 2) for seed in (5, 5, 6)]
    assert orders[0] == orders[1] != orders[2]


def test_evaluation_pairs_stay_the_same():
    """accelerate counts evaluations as epochs; their numbers must be comparable."""
    pairs = PairedDataset(merged(3, 5), shuffle=False)
    assert epoch_rows(pairs, 0) == epoch_rows(pairs, 4)


@pytest.mark.parametrize(
    ("forget", "retain", "ratio", "length", "repeats"),
    [
        (3, 5, 1, 3, 1),
        (3, 7, 1, 6, 2),
        (3, 14, 2, 6, 2),
        (5, 3, 1, 3, 1),
        (7, 3, 2, 6, 2),
        (4, 4, 1, 4, 1),
    ],
)
def test_evaluation_is_even(forget, retain, ratio, length, repeats):
    """3 forget and 7 retain rows, one each: 3 * (7 // 3) = 6 pairs, so that a forget row comes
    twice and a retain row once; every pair has both."""
    pairs = PairedDataset(merged(forget, retain), retain_per_forget=ratio, shuffle=False)
    assert len(pairs) == length
    uses = {"forget": Counter(), "retain": Counter()}
    for index in range(length):
        for side, rows in pairs[index].items():
            assert rows
            uses[side].update(row["row"] for row in rows)
    counts = {"forget": forget, "retain": retain}
    smaller = min(counts, key=counts.get)
    for side, rows in counts.items():
        times = repeats if side == smaller else 1
        assert uses[side] == dict.fromkeys(range(rows), times), side


def test_without_retain_rows():
    pairs = PairedDataset(merged(3, 0), retain_per_forget=0)
    assert pairs[1]["retain"] == [] and len(pairs) == 3
    pairs = PairedDataset(merged(3, 2), retain_per_forget=0, shuffle=False)
    assert pairs[1]["retain"] == [] and len(pairs) == 3


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        (merged(2, 2).remove_columns("role"), "data.foreign-columns"),
        (merged(0, 2), "data.no-forget-rows"),
        (merged(2, 0), "data.no-retain-rows"),
    ],
)
def test_faults(rows, code):
    with fails(code):
        PairedDataset(rows)


# -- through accelerate, as Trainer uses it -------------------------------------------------


def loader(rows, process: int = 0, processes: int = 1, batch: int = 2, **options):
    """A DataLoader prepared as Trainer does, seen from one of several processes."""
    pairs = PairedDataset(rows, seed=7, **options)
    sampler = PairSampler(pairs, together=batch * processes)
    plain = DataLoader(pairs, batch_size=batch, sampler=sampler, collate_fn=PairCollator(257))
    return prepare_data_loader(
        plain, num_processes=processes, process_index=process, put_on_device=False
    )


def batches(prepared, epoch: int, skip: int = 0) -> list[list[tuple[int, int]]]:
    """[(role, row)] of every batch of an epoch, in the order of Trainer._run_epoch."""
    from accelerate import skip_first_batches

    if skip:
        prepared = skip_first_batches(prepared, skip)
    prepared.set_epoch(epoch)
    return [
        list(zip(batch["role"].tolist(), batch["row"].tolist(), strict=True)) for batch in prepared
    ]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_resume_at_any_step_gives_the_same_batches(processes):
    rows = merged(13, 9)
    for process in range(processes):
        prepared = loader(rows, process, processes)
        for epoch in range(3):
            whole = batches(prepared, epoch)
            for step in range(1, len(whole)):
                resumed = loader(rows, process, processes)  # a new program
                assert batches(resumed, epoch, skip=step) == whole[step:]
                if step == 1:  # and the next epoch of the same resumed program
                    assert batches(resumed, epoch + 1) == batches(
                        loader(rows, process, processes), epoch + 1
                    )


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_out_one_process_batches(processes):
    """12 pairs: two processes of batch 2 are one process of batch 4, step by step."""
    rows = merged(12, 24)
    single = batches(loader(rows, batch=2 * processes), 1)
    parts = [batches(loader(rows, process, processes), 1) for process in range(processes)]
    assert {len(single)} == {12 // (2 * processes)} == {*map(len, parts)}
    for whole, *shares in zip(single, *parts, strict=True):
        drawn = [row for share in shares for row in share]
        assert sorted(whole) == sorted(drawn) and len(drawn) == len({*drawn})  # nobody's twice


def with_alternatives(forget: int = 4, each: int = 2, retain: int = 3):
    """Forget row i answers to id i; its alternatives are rows i, i + forget ... of their file."""
    rows = [r | {"pair": -1 if r["role"] else r["row"]} for r in merged(forget, retain).to_list()]
    for number in range(forget * each):
        tokens, own = [900 + number] * 50, number % forget
        rows.append(
            {"input_ids": tokens, "attention_mask": [1] * 50, "labels": tokens, "role": 2}
            | {"kind": own % 2, "task": 1, "row": number, "length": 50, "pair": own}
        )
    order = np.random.default_rng(1).permutation(len(rows))
    return Dataset.from_list([rows[i] for i in order])


def test_an_alternative_comes_with_its_forget_row_and_the_next_one_in_the_next_pass():
    pairs = PairedDataset(with_alternatives(), seed=3, alternatives=True)
    seen = {turn: {} for turn in range(3)}
    for index in range(12):
        item = pairs[index]
        own, other = item["forget"][0], item["alternative"][0]
        assert other["pair"] == own["pair"] and len(item["alternative"]) == 1
        seen[index // 4][own["row"]] = other["row"]
    assert seen == {0: {i: i for i in range(4)}, 1: {i: i + 4 for i in range(4)}, 2: seen[0]}
    batch = PairCollator(0)([pairs[0], pairs[1]])
    assert batch["role"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["row"][4:].tolist() == batch["row"][:2].tolist()


def test_evaluation_pairs_have_the_first_alternative():
    pairs = PairedDataset(with_alternatives(), shuffle=False, alternatives=True)
    for index in range(len(pairs)):
        item = pairs[index]
        assert [a["row"] for a in item["alternative"]] == [f["row"] for f in item["forget"]]


@pytest.mark.parametrize(
    "column, role, value, code",
    [
        ("pair", 2, 77, "data.alternative-without-forget"),
        ("kind", 2, 7, "data.alternative-without-forget"),
        ("pair", 0, 3, "data.alternatives-ambiguous"),
    ],
)
def test_alternatives_that_do_not_match_are_refused(column, role, value, code):
    def spoiled(row):
        return {column: value if (row["role"], row["row"]) == (role, 0) else row[column]}

    with fails(code):
        PairedDataset(with_alternatives().map(spoiled), alternatives=True)


def test_a_forget_row_without_an_alternative_is_refused():
    rows = with_alternatives(each=1).filter(lambda row: (row["role"], row["row"]) != (2, 2))
    with fails("data.forget-without-alternative"):
        PairedDataset(rows, alternatives=True)
