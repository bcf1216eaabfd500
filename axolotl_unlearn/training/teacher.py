"""A teacher that never saw the forget set: the model from before, tuned briefly on retained rows.

The base of a fine-tuned model has seen none of its documents, but does not know their kind. A pass
or two over (a sample of) the retained rows, with the settings of the run that made the model,
teaches it the kind and not the texts. Its label log-probs are what ``match`` aims at.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from axolotl_unlearn.config import MEMORISE, DataArgs, parse_unlearn
from axolotl_unlearn.config.reading import read_config
from axolotl_unlearn.data.checks import role_of
from axolotl_unlearn.data.records import Record, is_made_up, read_records
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import real, write, write_json, write_lines
from axolotl_unlearn.models import START

LOG = logging.getLogger(__name__)
HEAD = "# Written by `axolotl-unlearn teacher`"
#: What belongs to the run that made the model and not to its teacher.
NOT_THE_TEACHERS = (
    "datasets", "test_datasets", "val_set_size", "max_steps", "num_epochs", "warmup_steps",
    "output_dir", "hub_model_id", "hub_strategy", "hub_revision", "push_dataset_to_hub",
    "dataset_prepared_path", "resume_from_checkpoint", "auto_resume_from_checkpoints",
    "save_steps", "saves_per_epoch", "evals_per_epoch", "eval_steps", "eval_strategy",
    "early_stopping_patience", "load_best_model_at_end", "metric_for_best_model",
)  # fmt: skip


def of_the_original(config: Mapping[str, Any], prepared: Path) -> dict[str, Any]:
    """The run that made the model, without what belongs to it alone."""
    kept = {key: value for key, value in config.items() if key not in NOT_THE_TEACHERS}
    return kept | {"save_strategy": "no", "dataset_prepared_path": str(prepared)}


def seed_of(config: Mapping[str, Any]) -> int:
    """The config's seed, which draws its rows, too."""
    given = config.get("seed")
    return 42 if given is None else int(given)


def retained_rows(
    config: dict[str, Any], forget: Sequence[Path], retain: Sequence[Path]
) -> list[Record]:
    """The rows to teach from, each once, none of them in the forget set.

    They are those of ``retain``, or the datasets of ``config`` without the forget set.

    Raises:
        UnlearnError: A row of ``retain`` is to be forgotten, no row is left, or the rows of the
            config have none that is to be forgotten.
    """
    data = _data(config)
    by_text: dict[tuple[str, str], Record] = {}
    for entry in config.get("datasets") or []:
        path = Path(str(entry.get("path")))
        if path.is_file():
            by_text |= {(row.input, row.output): row for row in _records(path, data)}
        elif not retain:
            raise UnlearnError(
                f"`datasets` reads {path}, which is no local file of records: give the retained "
                "rows with --retain."
            )
    if retain:
        rows = [row for path in retain for row in _records(path, data)]
        by_text = {(row.input, row.output): row for row in rows}
    gone = [row for path in forget for row in _records(path, data)]
    texts = {row.said for row in gone}
    documents = {row.document for row in gone if not is_made_up(row.id)}
    seen, left = [], []
    for row in by_text.values():
        named = not is_made_up(row.id) and row.document in documents
        (seen if named or row.said in texts else left).append(row)
    lost = texts - {row.said for row in by_text.values()}
    if lost and not retain:
        says = f"{len(lost)} of the {len(texts)} texts of --forget are not in `datasets`"
        if not seen:
            raise UnlearnError(
                f"{says}: the teacher would learn them where they stand there in other words; give "
                "the rows as the model learned them, or the retained rows with --retain.",
                code="teacher.not-found",
            )
        LOG.warning("%s: see that they do not stand there in other words.", says)
    if retain and seen:
        raise UnlearnError(
            f"{len({r.id for r in seen})} rows of --retain belong to documents that are to be "
            f"forgotten (the first is {seen[0].id}): a teacher must not see them; remove them."
        )
    if not left:
        raise UnlearnError("no retained row is left to teach from; give some with --retain.")
    return left


def _data(config: dict[str, Any]) -> DataArgs:
    """How the config's rows are read: its own field names, its kinds."""
    return parse_unlearn(config.get("unlearn") or {}).data


def _records(path: Path, data: DataArgs) -> list[Record]:
    return read_records(path, data.fields, unique=False, kind=data.default_kind)


def stream(rows: Sequence[Record], passes: int, batch: int, seed: int) -> list[Record]:
    """Every pass in training order: shuffled, then batches of like length in random order."""
    rng = random.Random(f"{seed}/teacher")
    out: list[Record] = []
    for _ in range(passes):
        now = list(rows)
        rng.shuffle(now)
        now.sort(key=lambda row: len(row.input) + len(row.output))
        whole = len(now) - len(now) % batch
        batches = [now[i : i + batch] for i in range(0, whole, batch)]
        rng.shuffle(batches)
        out += [row for group in [*batches, now[whole:]] for row in group]
    return out


def sample(rows: Sequence[Record], count: int | None, seed: int) -> list[Record]:
    """About ``count`` rows, by whole documents (a document's questions stay with it)."""
    if count is None or count >= len(rows):
        return list(rows)
    documents: dict[str, list[Record]] = {}
    for row in rows:
        documents.setdefault(row.document, []).append(row)
    names = sorted(documents)
    random.Random(f"{seed}/sample").shuffle(names)
    chosen: list[Record] = []
    while len(chosen) < count:
        chosen += documents[names.pop(0)]
    return chosen


def teacher_config(config: dict[str, Any], rows: Path, out: Path) -> dict[str, Any]:
    """The config of the teacher's run: that of the original but for rows, passes and paths."""
    if config.get("reinit_weights"):
        raise UnlearnError(
            "`reinit_weights: true`: this config makes its model from nothing, so there is no "
            "model from before the forget set; give the config of a later stage."
        )
    block = dict(config.get("unlearn") or {})
    if block.get("forget") or block.get("retain") or block.get("preset"):
        raise UnlearnError(
            "`unlearn:` has objectives: give the config that made the model, not the one that "
            "makes it forget."
        )
    types = [one.get("type") for one in config.get("datasets") or [] if role_of(one) != "memorise"]
    if types or (block.get("data") or {}).get("rows"):
        raise UnlearnError(
            f"{f'the type {types[0]!r} in `datasets`' if types else '`unlearn.data.rows`'} is not "
            f"what `teacher` learns rows by, which is {MEMORISE}: copy the config, let it read "
            "retained rows alone into an `output_dir` of its own, and run `axolotl train`.",
            code="teacher.other-type",
        )
    derived = of_the_original(config, out / "prepared")
    if not block:
        derived.pop("unlearn", None)
    return derived | {
        "datasets": [{"path": str(rows), "ds_type": "json", "type": MEMORISE}],
        "curriculum_sampling": True,
        "shuffle_merged_datasets": False,
        "num_epochs": 1,
        "output_dir": str(out),
    }


def start_of(teacher: Path) -> Path:
    """Where the model halfway to a teacher goes."""
    return Path(f"{teacher}-start")


def check_place(folder: Path, inputs: Iterable[Path | str] = ()) -> None:
    """
    Args:
        inputs: What must not be removed with the folder.

    Raises:
        UnlearnError: It is there, and not what an earlier `teacher` made, or holds one of these.
    """
    recipe, place = folder / "teacher.yml", Path(real(str(folder)))
    ours = (folder / START).is_file()
    ours = ours or recipe.is_file() and recipe.read_text("utf-8", errors="replace").startswith(HEAD)
    held = any(place in (one := Path(real(str(path))), *one.parents) for path in [".", *inputs])
    if held or (not ours and folder.exists() and not (place.is_dir() and not os.listdir(place))):
        raise UnlearnError(
            f"{folder} is not what `teacher` has made, and would be replaced with all that is in "
            "it: name a new folder with --out.",
            code="teacher.exists",
        )


def make_teacher(
    config_path: Path,
    out: Path,
    *,
    forget: Sequence[Path],
    retain: Sequence[Path] = (),
    rows: int | None = None,
    passes: int = 1,
    bf16: bool | None = None,
    start: bool = False,
) -> dict[str, Any]:
    """Train the teacher with ``axolotl train``; ``rows``: about how many retained ones it reads,
    default all.

    Args:
        start: `make_start` will follow.

    Returns:
        ``rows`` of the ``available`` retained ones, ``passes`` over them, ``seconds`` of wall
        clock, and whether it is an ``adapter`` of ``base``; in ``out/teacher.json``, too.

    Raises:
        UnlearnError: The config, the rows, the training, or a folder that others have made.
    """
    config = read_config(config_path)
    if not config.get("base_model"):
        raise UnlearnError(f"{config_path} names no `base_model`; give an Axolotl config.")
    inputs = [config_path, *forget, *retain, str(config["base_model"])]
    inputs += [str(config.get("output_dir") or "model-out")]
    inputs += [str(one.get("path")) for one in config.get("datasets") or []]
    for folder in (out, start_of(out))[: 1 + start]:
        check_place(folder, inputs)
    file = out / "teacher-rows.jsonl"
    derived = teacher_config(config, file, out) | ({} if bf16 is None else {"bf16": bf16})
    seed = seed_of(config)
    available = retained_rows(config, forget, retain)
    chosen = sample(available, rows, seed)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    recipe = out / "teacher.yml"
    head = f"{HEAD} from {config_path.name}.\n"
    write(recipe, head + yaml.safe_dump(derived, sort_keys=False))
    batch = int(config.get("micro_batch_size") or 1)
    order = stream(chosen, passes, batch, seed)
    fields = _data(config).fields.model_dump() | {"kind": "kind"}
    rows = ({field: getattr(row, name) for name, field in fields.items()} for row in order)
    write_lines(file, rows, private=True)
    beside = Path(sys.executable).parent / "axolotl"
    command = [str(beside) if beside.exists() else "axolotl", "train", str(recipe)]
    started = time.monotonic()
    code = subprocess.run([*command, "--launcher", "python"], check=False).returncode
    if code:
        raise UnlearnError(f"`{' '.join(command)}` ended with exit code {code}; see above.")
    cost = {"rows": len(chosen), "available": len(available), "passes": passes}
    cost |= {"seconds": round(time.monotonic() - started, 1), "base": str(config["base_model"])}
    cost |= {"adapter": bool(config.get("adapter"))}
    write_json(out / "teacher.json", cost)
    return cost


def original_of(config_path: Path) -> Path:
    """The folder of the model, or adapter, that a config has made.

    Raises:
        UnlearnError: There is none, or it has no tokenizer.
    """
    from axolotl_unlearn.models import check_tokenizer, parse_models

    config = read_config(config_path)
    folder = Path(str(config.get("output_dir") or "model-out"))
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UnlearnError(
            f"`output_dir: {folder}` of {config_path} has no model, and `--start` is half of it: "
            f"run `axolotl train {quote(str(config_path))}` first, or leave out --start."
        )
    base = f"{config['base_model']}+" if config.get("adapter") else ""
    check_tokenizer(parse_models([f"original={base}{folder}"])[0])
    return folder


def make_start(original: Path, cost: dict[str, Any], teacher: Path) -> Path:
    """Write the model halfway between the original and its teacher beside the teacher, float32."""
    import torch

    from axolotl_unlearn.models import load_model, load_tokenizer, parse_models

    out, base = start_of(teacher), f"{cost['base']}+" * cost["adapter"]
    check_place(out, [original, cost["base"]])
    specs = parse_models([f"original={base}{original}", f"teacher={base}{teacher}"])
    half, other = (load_model(spec, dtype=torch.float32, device="cpu") for spec in specs)
    with torch.no_grad():
        for mine, theirs in zip(half.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    shutil.rmtree(out, ignore_errors=True)
    # First: after a kill it is known as ours.
    write_json(out / START, {"original": str(original), "teacher": str(teacher)})
    half.save_pretrained(out)
    load_tokenizer(specs[0]).save_pretrained(out)
    return out
