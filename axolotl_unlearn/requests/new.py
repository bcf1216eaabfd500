"""`axolotl-unlearn request new`: from a fine-tuning config and named rows to a request's folder."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from axolotl_unlearn.checks import axolotl_options
from axolotl_unlearn.columns import IGNORE
from axolotl_unlearn.config import MEMORISE, SHAPING
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.data.typed import Source, Typed, row_form, row_id
from axolotl_unlearn.errors import UnlearnError, counted
from axolotl_unlearn.evaluation.canaries import COIN, read_coins
from axolotl_unlearn.models import parse_models
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.choose import (
    Offered,
    Wanted,
    choose,
    corpus_of,
    offer,
    require,
    share_offered,
    shares,
    speaking,
)
from axolotl_unlearn.requests.record import SUBJECTS
from axolotl_unlearn.requests.request import (
    MAKING,
    SCHEMA,
    Ledger,
    Request,
    digest,
    fault,
    now,
    require_made,
    weights,
    write_json,
    write_lines,
    write_private,
    write_yaml,
)
from axolotl_unlearn.requests.search import words
from axolotl_unlearn.training.teacher import of_the_original, seed_of

#: Half of the held-out rows set the level, half judge: with 20 a row that stands out from all of
#: them is just significant (1/21).
LEAST_HELDOUT = 40
#: Retained rows that the evaluation asks about.
ASKED = 100
#: Words of an answer that exact match can judge.
LONG_ANSWER = 20
#: Retained rows that stay memorized; more than the steps of a run can read are of no use.
RETAIN = 4000
#: Retained rows that the teacher reads, if there are as many.
LEAST_TAUGHT = 32
#: What the forgetting run may cost: nats a retained token and share of the retained rows; and its
#: share of the fine-tuning's learning rate.
LOST, SAID, RATE = 0.1, 0.05, 0.5

#: Of the forgetting run, whatever the config says.
FORGETTING = {
    "gradient_accumulation_steps": 1,
    "lr_scheduler": "linear",
    "warmup_ratio": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "logging_steps": 10,
}
PLUGIN = "axolotl_unlearn.UnlearnPlugin"


@dataclass(frozen=True)
class Options:
    """What a user may say beside the rows.

    Attributes:
        model: The model before; default what the config wrote, or the last one of the ledger.
        heldout: File of rows that the model never saw.
        canaries: File of rows by coin (`evaluation.canaries`), by which the result is tested.
        with_near, with_mentions: Also delete what was offered.
        retain: Retained rows at most.
        steps: Budget of the forgetting run.
        subjects: Who asks, where they are several: a record for each.
    """

    model: Path | None = None
    heldout: Path | None = None
    canaries: Path | None = None
    with_near: bool = False
    with_mentions: bool = False
    retain: int = RETAIN
    steps: int = 400
    subjects: Mapping[str, Wanted] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """A new request, and what was offered beside it."""

    request: Request
    offered: Offered


def new_request(
    config_path: Path,
    out: Path,
    wanted: Wanted,
    options: Options = Options(),  # noqa: B008
) -> Made:
    """Write the folder ``out`` of a request.

    Raises:
        UnlearnError: Whatever is wrong with config, model, data, rows or disk; nothing is written.
    """
    empty = out.is_dir() and not any(out.iterdir())
    if os.path.lexists(out) and not empty:
        raise _exists(out)
    require(wanted)
    config = rows_of.read_config(config_path)
    speaking([out.name, *options.subjects], wanted)
    ledger = Ledger(out.parent)
    newest = next(reversed(ledger.accepted()), None)
    before = model_before(config, config_path, out.parent, options.model)
    files = weights(Path(before["adapter"] or before["model"])).values()
    trained = rows_of.trained_rows(config_path, out.parent)
    every = [*trained.rows, *trained.heldout, *trained.dropped]
    read: dict[str, Any] = {}
    whose = shares(options.subjects, every, read)
    named = choose(every, wanted, corpus_of(every if wanted.people else (), read))
    taken = {row.id for row in named}
    # Rows of earlier requests may be chosen again, but never kept.
    gone = rows_of.deleted_rows(out.parent, every)
    others = [row for row in every if row.id not in taken | gone]
    offered = offer(named, others, wanted, read)
    told = {one: row.id for row in named for one in trained.said.get(row.id, ())}
    for row in others:  # whatever else stands in its fields
        own = trained.said.get(row.id)
        if own and own <= told.keys() and row.id not in offered.near:
            offered.near[row.id] = like = told[min(own)]
            offered.reasons.setdefault(row.id, []).append(f"token for token the same as {like}")
    mentioned = {name for ids in offered.mentions.values() for name in ids}
    more = {*(offered.near if options.with_near else ())}
    more |= mentioned if options.with_mentions else set()
    if whose:
        share_offered(options.subjects, whose, named, offered, more)
    learned, chosen = {row.id for row in trained.rows}, taken | more
    kept = [row for row in others if row.id in learned - more]
    if not kept:
        says = "no row that the model has learned would be kept; choose fewer."
        raise fault("requests.none-kept", says)
    forget = [row for row in trained.rows if row.id in chosen]
    dropped = [row for row in trained.dropped if row.id in chosen]
    if dropped:
        says = f"of the chosen rows the training had left out {len(dropped)}"
        trained.limits.append(f"{says}, or learned nothing of them: deleted, too")
    tested = [*(row for row in trained.heldout if row.id in chosen), *dropped]
    if not forget:
        says = f"{config_path}: the model has learned none of the {len(tested)} chosen rows: they"
        what = "stand in validation data, are longer than `sequence_len`, or have nothing to learn"
        raise fault("requests.tested-alone", f"{says} {what}; remove them from those files.")
    seed = seed_of(config)
    apart = trained.apart(kept, forget)  # `match` could not forget what it retains
    if not apart:
        says = "every row that would be kept says what a chosen one says, token for token"
        raise fault("requests.none-kept", f"{says}; give `--with-near`, or choose fewer.")
    retain = random.Random(f"{seed}/retain").sample(apart, min(options.retain, len(apart)))
    if options.heldout is None:
        unseen = [row for row in trained.heldout if row.id not in chosen | gone]
        unseen = trained.apart(unseen, trained.rows)  # a test file may hold a copy by another id
    else:
        unseen = _given(options.heldout, trained, config_path, forget[0].entry)
    deleted = [*forget, *tested]
    level, judge, limits = _heldout(unseen, deleted, wanted, out, seed, read)
    parts = {"forget": forget, "tested": tested, "retain": retain, "heldout": level, "judge": judge}
    coins: dict[str, bool] = {}
    if options.canaries:
        parts["canaries"], coins = _canaries(options.canaries, trained, chosen)
    documents = {str(r.row.get("document") or r.row.get("id") or r.id) for r in forget}
    counts = {name: len(rows) for name, rows in parts.items()}
    hints = {row for rows in offered.hints.values() for row in rows}
    facts = {
        "schema": SCHEMA,
        "id": out.name,
        "created": now(),
        "config": {"path": str(config_path), "digest": digest(config_path)},
        "base": str(config["base_model"]),
        "adapter": before["adapter"] is not None,
        "before": before | {"files": sorted(one["sha256"] for one in files)},
        "chosen": {
            "near": len(offered.near),
            "mentions": len(mentioned),
            "hints": len(hints),
            "taken_of_these": len(more),
        },
        "counts": counts | {"documents": len(documents), "trained": len(forget) + len(kept)},
        "digests": {},
        "bound": bound.facts(config, rows_of.remaining(config_path, config, trained.learned)),
        "root": os.path.relpath(Path.cwd(), out.resolve()),
        "after_request": newest,
        "limits": [*trained.limits, *limits],
    }
    _make(out, empty)
    try:
        write_private(out / MAKING, "")
        for name, rows in parts.items():  # envelopes, which `axolotl_unlearn.data.typed` reads
            if rows:
                path = out / "data" / f"{name}.jsonl"
                write_lines(path, [{"id": r.id, "dataset": r.entry, "row": r.row} for r in rows])
        write_private(out / "finetune.yml", config_path.read_bytes())
        if whose:
            write_json(out / SUBJECTS, whose)
        reasons = [{"id": row, "reasons": why} for row, why in offered.reasons.items()]
        frequent = list(offered.frequent.values())
        write_json(out / "offered.json", {"rows": reasons, "frequent": frequent})
        if offered.passages:  # texts of rows, which go with the rows
            write_json(out / "data" / "offered.json", offered.passages)
        head, types = "Written by `axolotl-unlearn request new`.", trained.types
        teacher = teacher_config(config, retain, types, out, len(trained.rows))
        write_yaml(out / "teacher.yml", head, teacher)
        write_yaml(out / "forget.yml", head, forget_config(config, facts, types, out, options))
        write_evaluation(out, seed)
        if coins:  # texts as the model learned, or would have learned, them
            tokenizer = rows_of.load_tokenizer_of(out / "finetune.yml")
            texts = documents_of(rows_of.encoded(out, "canaries", tokenizer), tokenizer)
            canaries = [one | {COIN: coins[one["id"]]} for one in texts]
            write_lines(out / "eval-data" / "canaries.jsonl", canaries)
        every_file = sorted(out.glob("*data/*.jsonl"))  # what trains and what is asked
        facts["digests"] = {one.relative_to(out).as_posix(): digest(one) for one in every_file}
        if trained.split:
            rows_of.keep_split(ledger, *trained.split)
        write_json(out / "request.json", facts)  # last: a folder without it is no request
        (out / MAKING).unlink()
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # all of a request or nothing
        raise
    return Made(Request.load(out), offered)


def _exists(out: Path) -> UnlearnError:
    require_made(out)
    return fault("requests.exists", f"{out} already exists; give --out a new folder.")


def _make(out: Path, empty: bool) -> None:
    """Of two at once the second ends here. Raises `UnlearnError`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if empty:
            out.rmdir()
        out.mkdir(0o700)
    except FileExistsError:
        raise _exists(out) from None


def model_before(
    config: Mapping[str, Any], config_path: Path, requests: Path, given: Path | None
) -> dict[str, Any]:
    """``{"model", "adapter"}``: what was given, the last model of the ledger, or the config's.

    Raises:
        UnlearnError: It is not there, of another base, or the ledger's and of another config.
    """
    ledger = Ledger(requests)
    current = ledger.current()
    if current and not given:
        last = Request.load([*ledger.folders()][-1])
        was = str(rows_of.read_config(last.path("finetune.yml"))["output_dir"])
        out = str(config["output_dir"])
        if (last.root / was).resolve() != Path(out).resolve():
            says = f"{config_path} writes to {out}, but the last model of the ledger"
            cure = f"({current['path']}) is of a config that writes to {was}"
            raise fault("requests.other-output", f"{says} {cure}; name the model with --model.")
    path = given or Path(current["path"] if current else str(config["output_dir"]))
    base = str(config["base_model"])
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        wrong = "has no weights (*.safetensors)" if path.is_dir() else "is not there"
        says = f"{config_path}: the model {path} {wrong}"
        cure = "name the right one with --model"  # no run of the config makes these
        if not given and not current:
            cure = (
                f"train it with `axolotl train {quote(str(config_path))}`, or name it with --model"
            )
        raise fault("requests.no-model-before", f"{says}; {cure}.")
    spec = parse_models([str(path)])[0]
    if spec.adapter is None:
        return {"model": str(path), "adapter": None}
    there = Path(spec.model).exists() and Path(base).exists()
    same = Path(spec.model).samefile(base) if there else spec.model.rstrip("/") == base.rstrip("/")
    if not same:
        says = f"{path} is an adapter of {spec.model}, but `base_model` of {config_path} is {base}"
        raise fault("requests.adapter-of-another", f"{says}; give the config that made it.")
    return {"model": base, "adapter": str(path)}


def _given(path: Path, trained: rows_of.Trained, config_path: Path, entry: int) -> list[Source]:
    """Rows of a file that the model never saw, but those that Axolotl would drop.

    Raises:
        UnlearnError: They are in the training data.
    """
    rows = {row_id(row): Source(row_id(row), row, entry) for _, row in read_rows(path)}
    read = rows_of.said_in(config_path, [*rows.values()], trained.types)
    given = [row for row in rows.values() if row.id in read]
    both = replace(trained, said=trained.said | read)
    unseen = {row.id for row in both.apart(given, trained.rows)}
    known = {row.form for row in trained.rows}
    if seen := [row.id for row in given if row.id not in unseen or row.form in known]:
        says = f"--heldout {path}: {len(seen)} of {len(rows)} rows are in the training data"
        cure = f"(the first is {seen[0]}); give rows that the model never saw"
        raise fault("requests.heldout-seen", f"{says} {cure}.")
    return given


def _heldout(
    rows: Sequence[Source],
    deleted: Sequence[Source],
    wanted: Wanted,
    out: Path,
    seed: int,
    read: dict[str, Any],
) -> tuple[list[Source], list[Source], list[str]]:
    """Rows that the model never saw: those that set the level, those that judge, and what is not
    claimed. Of fewer than `LEAST_HELDOUT` all judge; the report says what they could have found.

    Args:
        read: As of `names.Corpus`.
    """
    same = offer(deleted, rows, wanted, read).ids | rows_of.deleted_rows(out.parent, rows)
    left = [row for row in rows if row.id not in same]
    limits = []
    if same:
        few = counted(len(same), "held-out row")
        limits.append(f"left out of the comparison: {few} with what is deleted")
    if not left:
        limits.append(
            "there are no held-out rows (validation split, `test_datasets` or --heldout), so "
            "nothing is known of the level of text that was never seen: whether the rows can still "
            "be told from it is not claimed"
        )
    elif len(left) < LEAST_HELDOUT:
        limits.append(
            f"only {counted(len(left), 'held-out row')}: `match` has no level to stop at, and one "
            f"row that stands out is found only with {LEAST_HELDOUT // 2 - 1} that judge (an exact "
            "way needs none)"
        )
    random.Random(f"{seed}/heldout").shuffle(left)
    half = len(left) // 2 if len(left) >= LEAST_HELDOUT else 0
    return left[:half], left[half:], limits


def _canaries(
    path: Path, trained: rows_of.Trained, chosen: set[str]
) -> tuple[list[Source], dict[str, bool]]:
    """Rows whose place in the training data a coin decided, and how it fell, by id. Raises
    `UnlearnError`: the coins are not what the model was trained by, or a row that it was trained on
    is not to be forgotten."""
    coins, rows = {}, []
    known = {name: row for row in trained.rows for name in (row.id, row.form)}
    given = [{k: v for k, v in row.items() if k != COIN} for _, row in read_rows(path)]
    found = [known.get(row_id(row)) or known.get(row_form(row)) for row in given]
    # All alike, or how they are read would tell the coin.
    entry = next(filter(None, found), trained.rows[0]).entry
    for row, there, coin in zip(given, found, read_coins(path), strict=True):
        if coin != (there is not None):
            says = f"the row {row_id(row)} is {'not ' * coin}in the training data, against its coin"
            cure = "give the file of the coins that this model was trained by"
            raise fault("requests.other-coins", f"--canaries {path}: {says}; {cure}.")
        if there and there.id not in chosen:
            says = f"--canaries {path}: its rows that were trained on are not to be forgotten"
            cure = "give also `--rows` with the train.jsonl beside it"
            raise fault("requests.canaries-kept", f"{says}; {cure}.")
        rows.append(Source(row_id(row), row, entry))
        coins[rows[-1].id] = coin
    return rows, coins


def _derived(config: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """`of_the_original`, from the base."""
    dropped = ("rl", "unlearn", "lora_model_dir")
    kept = {key: value for key, value in config.items() if key not in dropped}
    return of_the_original(kept, out / "work" / "prepared")


def teacher_config(
    config: Mapping[str, Any],
    retain: Sequence[Source],
    types: Sequence[Mapping],
    out: Path,
    trained: int,
) -> dict[str, Any]:
    """A sample of the retained rows from the base, by the config's own means.

    As many passes as the model has had, so that the teacher is as sure of itself as the model is,
    also where it errs (docs/never-seen.md); of a third of the rows, and of so few that it reads at
    most `RETAIN` rows in all, but not under `LEAST_TAUGHT`. A model of one pass has a teacher that
    reads them all.
    """
    whole = passes(config, trained)
    if whole > 1:
        count = max(LEAST_TAUGHT, min(len(retain) // 3, RETAIN // whole))
        retain = retain[:count]  # a sample in random order
    datasets = []
    for number, kind in enumerate(types):
        if rows := [row.row for row in retain if row.entry == number]:
            path = out / "data" / f"teacher-{number}.jsonl"
            write_lines(path, rows)
            datasets.append({"path": str(path), "ds_type": "json"})
            datasets[-1] |= {key: value for key, value in kind.items() if key != "rl"}
            datasets[-1] |= {"split": "train"} if kind.get("rl") else {}  # preference data say so
    made = {"datasets": datasets, "num_epochs": whole, "output_dir": str(out / "work" / "teacher")}
    made |= {"unlearn": {"data": own}} if (own := _shaping(config, types)) else {}
    return _derived(config, out) | ({"rl": config["rl"]} if config.get("rl") else {}) | made


def _shaping(config: Mapping[str, Any], types: Sequence[Mapping]) -> dict[str, Any]:
    """How rows of our own type were read."""
    data = (config.get("unlearn") or {}).get("data") or {}
    ours = any(kind.get("type") == MEMORISE for kind in types)
    return {key: value for key, value in data.items() if ours and key in SHAPING}


def passes(config: Mapping[str, Any], trained: int) -> int:
    """`times` in whole passes."""
    return max(1, round(times(config, trained)))


def times(config: Mapping[str, Any], trained: int) -> float:
    """How often the fine-tuning read each of its ``trained`` rows, about."""
    steps = int(config.get("max_steps") or 0)
    if steps > 0:
        batch = int(config.get("micro_batch_size") or 1)
        batch *= int(config.get("gradient_accumulation_steps") or 1)
        return steps * batch / max(1, trained)
    return float(config.get("num_epochs") or 1)


def forget_config(
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
    types: Sequence[Mapping],
    out: Path,
    options: Options,
) -> dict[str, Any]:
    """`preset: never-seen` on the request's rows, from the model as it stands.

    At half the learning rate of the fine-tuning: at the whole of it retained answers were lost.
    """
    refused = [group["options"] for group in axolotl_options.TABLE["refused"]]
    # Steps of pairs are packed by themselves.
    packing = {"sample_packing", "eval_sample_packing", "batch_flattening"}
    dropped = packing.union(*refused)
    made = {key: value for key, value in _derived(config, out).items() if key not in dropped}
    optimizer, wrong = str(made.get("optimizer")), axolotl_options.TABLE["refused"]
    wrong = [name for group in wrong for name in group.get("values", {}).get("optimizer", ())]
    if optimizer in wrong or optimizer.startswith("schedule_free"):  # goes with no `level`
        made = {k: v for k, v in made.items() if k != "optim_args"} | {"optimizer": "adamw_torch"}
    before, adapter = facts["before"], facts["before"]["adapter"]
    if adapter is None:
        lora = ("adapter", "lora_", "peft", "load_in_4bit", "load_in_8bit", "loraplus")
        made = {key: value for key, value in made.items() if not key.startswith(lora)}
    reference = {"adapter" if config.get("adapter") else "model": str(out / "work" / "teacher")}
    if config.get("adapter") and adapter is None:  # merged since: the teacher has its own base
        reference["model"] = str(config["base_model"])
    retain = [{"objective": "nll"}, {"objective": "kl", "direction": "reverse"}]
    block: dict[str, Any] = {
        # A chosen answer was preferred, not memorized: it is held where it is.
        "retain": retain[1:] if config.get("rl") else retain,
        "data": _shaping(config, types) | {"rows": [dict(kind) for kind in types]},
    }
    if facts["counts"]["heldout"]:
        level = {"per_document": True, "retain": LOST, "said": SAID}
        level["every"] = max(1, min(30, options.steps // 5))
        block |= {"preset": "never-seen", "teacher": reference, "level": level}
        block["heldout"] = str(out / "data" / "heldout.jsonl")
    else:
        block["forget"] = [{"objective": o, "reference": reference} for o in ("match", "nckd")]
        block["pairing"] = {"retain_per_forget": 2}
    batch = min(8, facts["counts"]["forget"])
    made |= {
        "base_model": before["model"],
        "output_dir": str(out / "work" / "model"),
        "plugins": list(dict.fromkeys([*(config.get("plugins") or []), PLUGIN])),
        "unlearn": block,
        "datasets": [
            {"path": str(out / "data" / f"{role}.jsonl"), "ds_type": "json"}
            | {"type": f"axolotl_unlearn.data.{role}"}
            for role in ("forget", "retain")
        ],
        "num_epochs": -(-options.steps * batch // facts["counts"]["forget"]),
        "max_steps": options.steps,
        "micro_batch_size": batch,
        **FORGETTING,
    }
    made |= {"lora_model_dir": adapter} if adapter else {}
    rate = RATE * float(config.get("learning_rate") or 0)
    return made | ({"learning_rate": rate} if rate else {})


def write_evaluation(out: Path, seed: int) -> None:
    """``eval-data``: what `axolotl-unlearn eval` asks and scores, from the token rows.

    Every labelled stretch of a row (a turn of the assistant, a text) is a record; what stands
    before it is the prompt. A row counts as a document: what follows its first prompt.
    """
    tokenizer = rows_of.load_tokenizer_of(out / "finetune.yml")
    data = {
        part: rows_of.encoded(out, part, tokenizer)
        for part in ("forget", "retain", "judge")
        if (out / "data" / f"{part}.jsonl").is_file()
    }
    asked = random.Random(f"{seed}/asked").sample(data["retain"], min(ASKED, len(data["retain"])))
    records = {
        part: [record for row in rows for record in records_of(row, tokenizer)]
        for part, rows in (("forget", data["forget"]), ("retain", asked))
    }
    for record in records["retain"]:
        if len(words(record["output"])) > LONG_ANSWER:  # hardly ever said exactly: ROUGE judges
            record["kind"] = "completion"
    if "judge" in data:
        records["member"] = documents_of(data["forget"], tokenizer)
        records["nonmember"] = documents_of(data["judge"], tokenizer)
    for name, rows in records.items():
        write_lines(out / "eval-data" / f"{name}.jsonl", rows)


def records_of(row: Typed, tokenizer: Any) -> list[dict[str, Any]]:
    """The labelled stretches of a token row as records with their prompts."""
    labelled = [label != IGNORE for label in row.labels] + [False]
    starts = [i for i, on in enumerate(labelled) if on and not (i and labelled[i - 1])]
    records = []
    for number, start in enumerate(starts):
        end = labelled.index(False, start)
        # Of a text without a prompt: from its first half the model has to go on.
        prompt, first = _text(row.input_ids[:start], tokenizer), start
        if not prompt:
            first = start + max(1, (end - start) // 2)
            prompt = _text(row.input_ids[:first], tokenizer)
        answer = _text(row.input_ids[:end], tokenizer, first, skip_special_tokens=True)
        if answer.strip():
            records.append(
                {"id": f"{row.id}-{row.part}-{number}", "input": prompt, "output": answer}
                | {"kind": "question" if start else "completion", "document": row.id}
            )
    return records


def documents_of(rows: Sequence[Typed], tokenizer: Any) -> list[dict[str, str]]:
    """Rows as documents: what follows their prompt; the parts of a long text joined."""
    documents: dict[str, dict[str, str]] = {}
    before: Sequence[int] = ()
    for row in rows:
        first = row.id not in documents
        start = next(i for i, label in enumerate(row.labels) if label != IGNORE) if first else 0
        one = documents.setdefault(row.id, {"id": row.id, "prompt": "", "document": ""})
        one["prompt"] = one["prompt"] or _text(row.input_ids[:start], tokenizer)
        if first or row.input_ids[0] == tokenizer.bos_token_id:
            before = ()
        one["document"] += _text([*before, *row.input_ids], tokenizer, len(before) + start)
        before = row.input_ids
    for one in documents.values():
        text = one["document"]
        one["document"] = text.lstrip()
        one["prompt"] += text[: len(text) - len(text.lstrip())] if one["prompt"] else ""
    return list(documents.values())


def _text(ids: Sequence[int], tokenizer: Any, start: int = 0, **how: Any) -> str:
    """Text of the tokens from ``start`` on, of which the tokenizer makes them again after the
    others, with a BOS if it adds one by itself."""
    ids, bos = list(ids), tokenizer.bos_token_id
    adds = bos is not None and tokenizer("a")["input_ids"][0] == bos
    while adds and ids and ids[0] == bos:
        ids, start = ids[1:], max(0, start - 1)
    how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False} | how
    whole, before, alone = (
        tokenizer.decode(some, **how) for some in (ids, ids[:start], ids[start:])
    )
    # Alone the first word has lost its space with Llama's and Mistral's decoders.
    return whole.removeprefix(before) if whole.startswith(before) else alone
