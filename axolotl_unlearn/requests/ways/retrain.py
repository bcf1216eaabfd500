"""Train again without the rows: the base, the config's own settings, the remaining rows.

What comes out is the model of a plain `axolotl train` of the config without the rows, to the last
bit where the machine repeats itself: ``retrain.yml`` is that config. With `val_set_size` the split
is drawn as before and the rows are left out of both sides, so the plain run is one on the files of
the two sides. `repeat` trains once more, for whoever verifies a record, and compares the SHA-256 of
the weights.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl_unlearn.device import hardware
from axolotl_unlearn.errors import counted
from axolotl_unlearn.models import ADAPTER_CONFIG
from axolotl_unlearn.requests import bound
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests.new import times
from axolotl_unlearn.requests.record import read
from axolotl_unlearn.requests.request import (
    Ledger,
    Request,
    at_root,
    digest,
    fault,
    held,
    read_json,
    shas,
    weights,
    write_json,
    write_yaml,
)
from axolotl_unlearn.requests.search import leaves
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.ways import PROOF

EXACT = True
SHOWS = "exact: plain training without the rows"
CONFIG = "retrain.yml"
#: Below ``work/``: threads and more of the training, which a later start may have others of.
TRAINED = "trained.json"
#: Keys, at any depth of a config, with which a training runs code of a model, a hub or a folder.
CODE = ("trust_remote_code", "allow_all_kernels", "torchdistx_path")


def prepare(request: Request) -> dict[str, Any]:
    """Write the remaining rows and ``retrain.yml``.

    Raises:
        UnlearnError: Of `remaining`.
    """
    made = rest(request, *remaining(request))
    config = rows_of.read_config(request.path("finetune.yml"))
    training = rows_of.training(config, request.path("work"))
    write_yaml(request.path(CONFIG), "Written by `axolotl-unlearn request run`.", training)
    base = str(config["base_model"]) if config.get("adapter") else None
    return {"way": "retrain", "base": base} | made


def remaining(request: Request) -> tuple[rows_of.Sides, dict[str, Any]]:
    """The rows without those of this request and of earlier ones, and `bound.facts` of all.

    Raises:
        UnlearnError: The training did not begin with a base that never saw the rows; base, data,
            config or packages are not those of `request new`; or nothing is left to train on.
    """
    path = request.path("finetune.yml")
    every, now = _unchanged(request)
    if missing := rows_of.forgotten(request).difference(map(rows_of.row_id, rows_of.flat(every))):
        says = f"{path}: {len(missing)} rows of the request are not in the training data any more"
        raise fault("requests.rows-missing", f"{says}; make the request again.")
    left = rows_of.without(every, rows_of.deleted(request, every))
    if not any(left["train"]):
        raise fault("requests.no-row-left", f"{path}: no row is left to train on; choose fewer.")
    return left, now


def rest(request: Request, left: rows_of.Sides, now: Mapping[str, Any]) -> dict[str, Any]:
    """Write what `remaining` found to ``work/rows``; parts of ``way.json``, for `require`."""
    rows_of.write_sides(request.path("work", "rows"), left)
    counts, kept = now["rows"], _read(request)
    return {
        "rows": {
            "trained": kept["count"],
            "removed": counts["count"] - kept["count"],
            "removed_tested": counts["tested"] - kept["tested"],
        },
        "bound": {**now, "rows": kept},
        "without": accepted(request),
    }


def _unchanged(request: Request) -> tuple[rows_of.Sides, dict[str, Any]]:
    """The rows, and what they, base and config are by digest. Raises `UnlearnError`: they are not
    those of `request new`, or the base may have read the rows."""
    path = request.path("finetune.yml")
    config = rows_of.read_config(path)
    _begins_clean(request, config)
    every = rows_of.remaining(path, config, requests=request.folder.parent)
    now = bound.facts(config, every)
    bound.require(request.facts.get("bound"), now, path)
    return every, now


def accepted(request: Request) -> list[str]:
    """Names of the requests that were carried out before this one, whose rows are left out too."""
    return [*Ledger(request.folder.parent).accepted()]


def _read(request: Request) -> dict[str, Any]:
    """Digests of the rows that the training reads, from the files that it reads."""
    return bound.of_rows(rows_of.read_sides(request.path("work", "rows")))


def _begins_clean(request: Request, config: Mapping[str, Any]) -> None:
    """Raises `UnlearnError`: what the training begins with has read the rows, or may have."""
    base, before, why = Path(str(config["base_model"])), request.facts["before"], ""
    models = [shas(Path(before["model"]))] if before["adapter"] is None else []
    for folder in Ledger(request.folder.parent).folders():  # what it made, and what it began with
        models += [shas(folder / "model"), {*Request.load(folder).facts["before"].get("files", ())}]
    own = shas(base)
    if config.get("lora_model_dir"):
        why, code = "`lora_model_dir` is an adapter that may have", "begins-with-an-adapter"
    elif (base / ADAPTER_CONFIG).is_file():
        why, code = f"`base_model: {base}` is an adapter that may have", "base-is-an-adapter"
    elif own and any(map(own.issubset, models)):
        why, code = f"`base_model: {base}` is a model of requests that has", "base-has-read"
    if why:
        says = f"{request.path('finetune.yml')}: {why} read the rows"
        cure = "an exact way needs the base from before the rows; use --way match"
        raise fault(f"requests.{code}", f"{says}; {cure}.")


def reads(request: Request) -> tuple[float, str]:
    """Rows of the one training, each pass counted."""
    left, _ = remaining(request)
    rows = sum(map(len, left["train"]))
    return rows * times(rows_of.read_config(request.path("finetune.yml")), rows), SHOWS


def make(request: Request, run: Steps) -> None:
    """Train, and write down what was shown."""
    work, config, proof = request.path("work"), request.path(CONFIG), request.path(PROOF)
    inputs = [config, *sorted(work.joinpath("rows").glob("*.jsonl"))]
    title, told = "train without the rows", work / TRAINED
    with run.step("retrain", title, inputs=inputs, settings=run.processes, output=told) as due:
        if due:
            require(request)
            shutil.rmtree(work / "prepared", ignore_errors=True)  # half, or of other rows
            rows_of.trained_rows(config)  # Axolotl reads them as it read those of the user's files
            write_json(told, bound.environment(run.threads, run.processes))
            run.train("retrain", config, work / "model")
    with run.step("exact", "what was shown", output=proof) as due:
        if due:
            require(request)
            plain = f"it is a plain `axolotl train` of {CONFIG}, the config without the rows"
            prove(request, plain, config)


def require(request: Request) -> None:
    """Raises `UnlearnError`: base, rows, config or packages are not those that `prepare` has found;
    or another request was carried out since, whose rows are among those that are read."""
    known, newer = request.way["bound"], accepted(request)
    if newer != (old := request.way["without"]):
        says = f"{request.folder}: {', '.join(map(repr, newer[len(old) :]))} was carried out since"
        cure = "the rows of this training were written, and its rows may be among them; run again"
        raise fault("requests.overtaken", f"{says} {cure}.")
    if _read(request) != known["rows"]:
        says = f"{request.path('work', 'rows')} was changed since it was written; run again."
        raise fault("requests.changed-rows", says)
    config = rows_of.read_config(request.path("finetune.yml"))
    bound.require(known, bound.facts(config), request.folder, bound.QUICK)


def prove(request: Request, because: str, config: Path) -> None:
    """Write ``exact.json``: what was read, and that no deleted row is in it.

    Args:
        because: Why the model is that of a training on these rows.

    Raises:
        UnlearnError: One is.
    """
    work = request.path("work")
    sides = rows_of.read_sides(work / "rows")
    ids = [rows_of.row_id(row) for row in rows_of.flat(sides)]
    if there := rows_of.deleted(request, sides).intersection(ids):
        says = f"{work / 'rows'} has {len(there)} rows of this request or of earlier ones"
        raise fault("requests.rows-read", f"{says}; remove {work} and run again.")
    count, without = len(rows_of.forgotten(request)), request.way["without"]
    others = f" nor of {counted(len(without), 'earlier request')}" if without else ""
    made = {
        "because": f"no step of the training that made this model read a deleted row: of the "
        f"{len(ids)} rows that it read or was tested on none is one of the {count} of this "
        f"request{others}; {because}",
        "weights": weights(work / "model"),
        "config": {"sha256": digest(config)},
        "bound": request.way["bound"],
    }
    write_json(request.path(PROOF), made | read_json(work / TRAINED))


# --- by a third party ----------------------------------------------------------------------------


def repeat(folder: Path, base: Path | None = None, rows: Path | None = None) -> str:
    """`request verify --repeat`: train again what the record says was trained, and compare the
    weights; a sentence.

    Args:
        base: The base model, if not where the config says.
        rows: Folder of the rows that were read (``train-0.jsonl``, ``test-0.jsonl``, ...); default
            the data of the config without the rows of this request and of those before it.

    Raises:
        UnlearnError: Base, rows, config, packages or device are not those of the record; or the
            training ends with other weights.
    """
    base, rows = (one and one.absolute() for one in (base, rows))
    with at_root(folder) as request:
        return _again(request, base, rows)


def _again(request: Request, base: Path | None, rows: Path | None) -> str:
    folder, recorded = request.folder, read(request.folder)["predicate"]
    way = recorded["way"]
    if way.get("way") != "retrain" or not way.get("bound"):
        says = f"{folder} is no request of --way retrain whose record holds what was read"
        raise fault("requests.repeat-not-exact", f"{says}, so there is nothing to repeat.")
    source = request.path("finetune.yml")  # which still has the entries that lost all rows
    if not source.is_file() or digest(source) != recorded["config"]["digest"]["sha256"]:
        says = f"{source} is not the config of the record; restore it."
        raise fault("requests.changed-config", says)
    config = rows_of.read_config(source)
    given = leaves(rows_of.settings(config))
    if key := next((way for way, one in given if one and way.rpartition(".")[2] in CODE), None):
        says = f"{source} sets `{key}`, so the training would run code of the base or of a folder"
        cure = "which another may have written; look at it, and train by hand"
        raise fault("requests.repeat-remote-code", f"{says}, {cure}.")
    config |= {"base_model": str(base)} if base else {}
    if rows is not None:
        sides = rows_of.read_sides(rows)
    else:
        sides = rows_of.remaining(source, rows_of.read_config(source), requests=folder.parent)
        given = [rows_of.Source(rows_of.row_id(row), row) for row in rows_of.flat(sides)]
        gone = rows_of.deleted_rows(folder.parent, given, only=[*way["without"], request.id])
        sides = rows_of.without(sides, gone)
    now = bound.facts(config, sides)
    known = way["bound"] | {"base": way["bound"]["base"] | {"name": now["base"]["name"]}}
    bound.require(known, now, folder, ("base", "rows", "versions"))
    if hardware() != way["device"]:
        says = f"{folder} was trained on {way['device']!r} and here is {hardware()!r}"
        cure = "whose last bits may differ; repeat it on such a device"
        raise fault("requests.repeat-device", f"{says}, {cure}.")
    with tempfile.TemporaryDirectory() as made, held(Path(made)) as lock:
        place = Path(made)
        rows_of.write_sides(place / "rows", sides)
        again = rows_of.training(config, place)
        write_yaml(place / CONFIG, "Written by `axolotl-unlearn request verify --repeat`.", again)
        # A record is believed no library to load, and the working folder no module.
        same = {k: one for k, one in way["environment"].items() if k in bound.ENVIRONMENT}
        cache = {"HF_DATASETS_CACHE": str(place / "cache"), "PYTHONSAFEPATH": "1", **same}
        run = Steps(place, lock, cache, way["threads"], way["processes"])
        with run.step("again", "train as the record says"):
            run.train("again", place / CONFIG, place / "model")
        if weights(place / "model") != way["weights"]:
            says = "the repeated training ended with other weights than those of the record"
            if way["device"] != "cpu" and not config.get("full_determinism"):
                says += f", as on {way['device']} it may without `full_determinism: true`"
            raise fault("requests.repeat-differs", f"{folder}: {says}.")
    return "repeated: the training ends with the weights of the record, by SHA-256"
