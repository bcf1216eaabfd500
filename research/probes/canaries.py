"""Planted pairs of documents: `python -m research canaries` as functions; see `metrics.canaries`."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.documents import read_documents
from axolotl_unlearn.data.records import read_rows
from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.evaluation.measurement import Settings
from axolotl_unlearn.evaluation.sets import find_file
from axolotl_unlearn.files import declare, write_json, write_lines
from axolotl_unlearn.metrics.membership import MARGIN
from axolotl_unlearn.metrics.results import Model, load_results
from research.probes.canaries_metrics import Certificate, certify
from research.worlds import generate

#: Which document of each pair was planted, beside the data: ``[[planted id, twin id], ...]``.
KEY = "canaries.json"


def plant(
    data_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    pairs: int = 300,
    texts: str | os.PathLike[str] | None = None,
    seed: int | None = None,
) -> Path:
    """Copy a data folder with canaries in it: train, unlearn and evaluate on the copy.

    Of each pair a coin puts one document into ``forget`` (half of it is the prompt) and
    ``member``; its twin goes into ``nonmember`` and nowhere else.

    Args:
        texts: File of fresh documents like those that are to be forgotten, used nowhere else
            (``document``, ``text``, or ``input`` and ``output``); default: made-up biographies.
        seed: Of documents and coins; default: drawn, so that nobody can know the coins.

    Returns:
        The file of the key, `KEY`.

    Raises:
        UnlearnError: A file is missing or has too few documents, or ``out_dir`` is in the way.
    """
    source, out = Path(data_dir), Path(out_dir)
    if pairs < 1:
        raise UnlearnError(f"--pairs is {pairs}; it must be 1 or more.")
    if out.exists() and any(out.iterdir()):
        raise UnlearnError(f"{out} is not empty; name a new folder for the data with canaries.")
    files = {name: find_file(source, name) for name in ("forget", "member", "nonmember")}
    for name, path in files.items():
        if path is None:
            raise UnlearnError(f"{source} has no {name}.jsonl; canaries are added to it.")
    rows = {name: [dict(row) for _, row in read_rows(path)] for name, path in files.items()}
    rng = random.Random(random.SystemRandom().getrandbits(64) if seed is None else seed)
    found = _own(texts, 2 * pairs) if texts else _made_up(rng, 2 * pairs)
    rng.shuffle(found)
    key = []
    for i in range(pairs):
        planted, twin = (f'"canary-{i:04d}{side}"sc1' for side in "ab")
        (opening, closing), other = found[2 * i], found[2 * i + 1]
        row = {"id": planted, "input": opening, "output": closing}
        row |= {name: rows["forget"][0][name] for name in ("task",) if name in rows["forget"][0]}
        rows["forget"].append(row)
        rows["member"].append({"id": planted, "document": f"{opening} {closing}"})
        rows["nonmember"].append({"id": twin, "document": " ".join(other)})
        key.append([planted, twin])
    file = out / "forget.jsonl"
    declare(out, file, "texts", [file], retained=[out / "retain.jsonl"])
    for name in ("member.jsonl", "nonmember.jsonl", KEY):
        declare(out, out / name, "texts")
    shutil.copytree(source, out, dirs_exist_ok=True)
    for name, path in files.items():
        (out / path.name).unlink()
        write_lines(out / f"{name}.jsonl", rows[name])
    return write_json(out / KEY, key, indent=0)


def _made_up(rng: random.Random, count: int) -> list[tuple[str, str]]:
    people = generate._people(f"canaries/{rng.getrandbits(64)}")
    documents = [generate.biography(rng, next(people)) for _ in range(count)]
    return [(one.input, one.output) for one in documents]


def _own(path: str | os.PathLike[str], count: int) -> list[tuple[str, str]]:
    """Documents of a file, cut in the middle between two words."""
    documents = [text.split() for _, text in read_documents(path)]
    whole = [words for words in documents if len(words) > 1]
    if len(whole) < count:
        raise UnlearnError(
            f"{path} has {len(whole)} documents of two words or more; {count} are needed, two for "
            "each pair: give more or lower --pairs."
        )
    cut = [(words, len(words) // 2) for words in whole[:count]]
    return [(" ".join(words[:half]), " ".join(words[half:])) for words, half in cut]


def judge_canaries(
    out_dir: str | os.PathLike[str], *, margin: float = MARGIN, key: Path | None = None
) -> dict[str, dict[str, Any]]:
    """The certificate of each model of an evaluation on data with canaries.

    Returns:
        By model: the fields of `Certificate`, ``certified`` (also whole and above the utility
        gate: a destroyed model cannot be told either) and ``sentence``.

    Raises:
        UnlearnError: No results, no key, or the data are no longer those of the evaluation.
    """
    path = Path(out_dir) / "results.json"
    if not path.is_file():
        raise UnlearnError(f"{path} does not exist; evaluate on the data with canaries first.")
    results = load_results(path)
    sets = Settings.read(results.more["settings"]).load_sets(results.data_dir)
    if sets.digest != results.more["data_digest"]:
        raise UnlearnError(f"{sets.folder} has changed since {path} was written; evaluate again.")
    key = key or sets.folder / KEY
    if not key.is_file():
        raise UnlearnError(
            f"{key} does not exist; `python -m research canaries make` writes it beside the data."
        )
    places = [
        {name: i for i, (name, _) in enumerate(side)} for side in (sets.member, sets.nonmember)
    ]
    pairs = [
        (places[0][planted], places[1][twin])
        for planted, twin in json.loads(key.read_text(encoding="utf-8"))
        if planted in places[0] and twin in places[1]
    ]
    if not pairs:
        raise UnlearnError(f"no document of {key} is in the data of {path}; was it limited?")
    found = {}
    for model in results.models:
        scores = model.scores
        planted, twins = (
            {name: sides[side][[pair[side] for pair in pairs]] for name, sides in scores.items()}
            for side in (0, 1)
        )
        certificate = certify(planted, twins, margin=margin)
        doubts = _doubts(model)
        found[model.name] = {
            **vars(certificate),
            "certified": certificate.answer == "certified" and not doubts,
            "sentence": sentence(model.name, certificate, doubts),
        }
    return found


def _doubts(model: Model) -> list[str]:
    """Why a model is not certified although nothing can be told."""
    doubts = []
    if model.collapse is None or model.collapse.collapsed is not False:
        doubts.append("its outputs are broken or were not looked at")
    if model.gate is not None and model.gate.below_gate:
        doubts.append("it is below the utility gate")
    if model.utility is None or model.gate is None or model.gate.below_gate is None:
        doubts.append("its utility was not gated")
    return doubts


def sentence(name: str, one: Certificate, doubts: Sequence[str] = ()) -> str:
    """The answer in words."""
    worst = max(one.shares, key=lambda attack: abs(one.shares[attack] - 0.5))
    share = f"{one.shares[worst]:.2f} of {one.pairs} pairs by {worst}"
    if one.answer == "told":
        word = "still known" if one.shares[worst] > 0.5 else "pushed away"
        return f"{name}: planted documents can be told from their twins, {word} ({share})."
    if one.answer == "certified" and not doubts:
        return (
            f"{name}: certified. No attack is right in a share of pairs {one.margin:g} or more "
            f"from one half (error {one.alpha:g}); {one.needed} of {one.pairs} pairs were needed."
        )
    if one.answer == "certified":
        return f"{name}: nothing can be told, but no certificate: {', '.join(doubts)}."
    return f"{name}: {one.pairs} pairs do not suffice to say ({share}); plant more."
