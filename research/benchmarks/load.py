"""How time and memory of everything before the first step grow with the number of rows.

    python -m research.benchmarks.load                 # 125 000 to 1 000 000 rows, a process each
    python -m research.benchmarks.load --rows 50000
    python -m research.benchmarks.load --evaluate 20000
    python -m research.benchmarks.load --evaluate 100000 --models 1 --kill .5
    python -m research.benchmarks.load --large

Half of the rows are to be forgotten, half retained, about 30 tokens each, the tokenizer of
examples/tiny-olmo. ``check`` reads and compares them, ``encode`` makes token rows as Axolotl's
loader calls it, ``pair`` draws an epoch in batches of 8 through the sampler. No model is loaded.

``--evaluate``: `axolotl_unlearn.evaluation` of a random model of 0.1 million numbers, answers of 8
tokens; four of ten rows to forget, four to keep, one a member, one not; two models beside it, one
of them a retrained one (``--models 1``: without them). Then again from what it has kept. ``--kill
.5`` ends it with SIGKILL when half of the answers are stored and starts it again: ``stored`` were
there, ``generated`` were made after it.

``--large``: bytes that `check --full` says of a model of Llama's 70 billion numbers, LoRA of rank 32
and full; in all, of which each of 8 GPUs has an eighth under FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = (125_000, 250_000, 500_000, 1_000_000)


def write_rows(folder: Path, forget: int, retain: int) -> None:
    """Made-up rows, no two the same."""
    words = (ROOT / "research" / "worlds" / "wordlists.py").read_text().split()
    words = sorted({word.strip("\"',()") for word in words if word.strip("\"',()").isalpha()})
    rng = random.Random(0)
    for side, count in (("forget", forget), ("retain", retain)):
        with (folder / f"{side}.jsonl").open("w") as file:
            for number in range(count):
                asked, text = f"What is {side} {number}?", " ".join(rng.choices(words, k=10))
                file.write(
                    f'{{"id": "{side}-{number}qa0", "input": "{asked}", "output": "{text}"}}\n'
                )


def point(count: int) -> dict[str, float]:
    """Seconds of processor and peak memory above what the imports take, in this process."""
    from datasets import concatenate_datasets
    from transformers import AutoTokenizer

    from axolotl_unlearn.config import parse_unlearn
    from axolotl_unlearn.data.checks import check_records
    from axolotl_unlearn.data.pairing import PairedDataset, PairSampler
    from axolotl_unlearn.data.strategy import load_strategy

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-olmo")
    block = {"forget": {"objective": "npo"}, "retain": {"objective": "nll"}}
    found: dict[str, float] = {"rows": count}
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name), count // 2, count // 2)
        entries = [
            {"path": f"{name}/{side}.jsonl", "type": f"axolotl_unlearn.data.{side}"}
            for side in ("forget", "retain")
        ]
        cfg = {"unlearn": parse_unlearn(block), "datasets": entries, "sequence_len": 256}
        before = _peak_mb()

        def timed(what: str, do):
            began = time.process_time()
            result = do()
            found[f"{what}_seconds"] = round(time.process_time() - began, 2)
            found[f"{what}_mb"] = round(_peak_mb() - before)
            return result

        faults = timed("check", lambda: check_records(cfg).faults)
        assert not faults, faults[:1]
        rows = timed(
            "encode",
            lambda: concatenate_datasets(
                [
                    load_strategy(entry["type"].rpartition(".")[2], tokenizer, cfg, entry)
                    .wrap_dataset(None)
                    for entry in entries
                ]
            ),
        )  # fmt: skip
        assert len(rows) == count

        def epoch() -> int:
            pairs = PairedDataset(rows, seed=0)
            return sum(len(side) for i in PairSampler(pairs) for side in pairs.indices(i))

        assert timed("pair", epoch) == count
    return found


MODELS = ("original", "after", "retrained")


def prepare(folder: Path, count: int, models: Sequence[str]) -> None:
    """Rows and models to evaluate."""
    import torch
    from transformers import AutoTokenizer, OlmoConfig, OlmoForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny-olmo")
    (folder / "data").mkdir()
    write_rows(folder / "data", 4 * count // 10, 4 * count // 10)
    for side, kind in (("member", "forget"), ("nonmember", "unseen")):
        with (folder / "data" / f"{side}.jsonl").open("w") as file:
            for number in range(count // 10):
                text = f"{kind} {number} {random.Random(f'{side}{number}').random()}"
                row = {"id": f"{kind}-{number}sc1", "document": text}
                file.write(json.dumps(row) + "\n")
    config = OlmoConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for seed, model in enumerate(models):
        torch.manual_seed(seed)
        OlmoForCausalLM(config).save_pretrained(folder / model)
        tokenizer.save_pretrained(folder / model)


def evaluation(
    folder: Path, count: int, models: Sequence[str], whats: Sequence[str] = ("evaluate", "again")
) -> dict[str, float]:
    """The same of an evaluation of models that ``folder`` holds."""
    import torch
    from transformers import AutoTokenizer, OlmoForCausalLM  # noqa: F401  not counted as memory

    from axolotl_unlearn.evaluation import generate
    from axolotl_unlearn.evaluation.measurement import Options
    from axolotl_unlearn.evaluation.run import evaluate

    torch.set_num_threads(1)
    decode, generated = generate._decode, 0

    def counted(model, tokenizer, rows, *more):
        nonlocal generated
        generated += len(rows)
        return decode(model, tokenizer, rows, *more)

    generate._decode = counted
    named = [f"{model}={folder / model}" for model in models]
    before, found = _peak_mb(), {"evaluated": count, "models": len(models)}
    for what in whats:
        began = time.process_time()
        options = Options(out_dir=folder / "out", max_gen_toks=8, progress=False)
        evaluate(named, folder / "data", options)
        found[f"{what}_seconds"] = round(time.process_time() - began, 2)
        found[f"{what}_mb"] = round(_peak_mb() - before)
    sizes = (path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
    found["written_mb"] = round(sum(sizes) / 2**20)
    return found | {"generated": generated}


def killed(folder: Path, count: int, models: Sequence[str], share: float) -> dict[str, float]:
    """The same after a process that was killed when it had stored this share of the answers."""
    command = [sys.executable, "-m", "research.benchmarks.load", "--evaluate", str(count)]
    command += ["--folder", str(folder), "--models", str(len(models))]
    answers = 8 * count // 10
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while (stored := _stored(folder / "out" / "cache", answers)) < (
            share * answers * len(models)
        ):
            if process.poll() is not None:
                raise SystemExit(f"it ended with {process.returncode} before it could be killed.")
            time.sleep(0.5)
        used = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = sum(map(int, used[11:13])) / os.sysconf("SC_CLK_TCK")
    return found | {"killed_after_seconds": round(seconds, 2), "stored": stored}


def large(folder: Path) -> dict[str, dict[str, int]]:
    """What is in memory before activations; of the weights there are names and shapes alone."""
    from axolotl_unlearn.checks.estimate import memory
    from axolotl_unlearn.config import parse_unlearn

    layer = {f"self_attn.{name}_proj": [rows, 8192] for name, rows in
             {"q": 8192, "k": 1024, "v": 1024, "o": 8192}.items()}  # fmt: skip
    layer |= {f"mlp.{name}_proj": [28672, 8192] for name in ("gate", "up")}
    layer |= {"mlp.down_proj": [8192, 28672], "input_layernorm": [8192]}
    layer["post_attention_layernorm"] = [8192]
    shapes = {f"model.layers.{n}.{k}.weight": v for n in range(80) for k, v in layer.items()}
    shapes |= {f"{name}.weight": [128256, 8192] for name in ("model.embed_tokens", "lm_head")}
    head = json.dumps({n: {"shape": s, "dtype": "BF16"} for n, s in shapes.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    args = parse_unlearn({"forget": {"objective": "npo"}, "retain": {"objective": "kl"}})
    cfg = {"base_model": str(folder), "bf16": True, "micro_batch_size": 1}
    lora = {"adapter": "lora", "lora_r": 32, "lora_target_linear": True}
    return {
        name: memory(cfg | more, args, 1024) for name, more in {"lora": lora, "full": {}}.items()
    }


def _stored(cache: Path, answers: int) -> int:
    """Answers in the cache: of finished models, and lines of one that is being measured."""
    finished = [path for path in cache.glob("*.json") if len(path.stem) == 32]
    begun = [path for path in cache.glob("*.partial.jsonl") if len(path.name) == 46]
    return len(finished) * answers + sum(path.read_bytes().count(b"\n") for path in begun)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--evaluate", type=int)
    parser.add_argument("--models", type=int, default=len(MODELS))
    parser.add_argument("--kill", type=float)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--folder", type=Path)  # that `killed` has prepared
    options = parser.parse_args()
    if options.rows:
        print(json.dumps(point(options.rows)))
        return
    if options.large:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(large(Path(name))))
        return
    count, models = options.evaluate, MODELS[: options.models]
    if options.folder:
        print(json.dumps(evaluation(options.folder, count, models, ["evaluate"])))
        return
    if count:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(folder, count, models)
            if options.kill:
                found = killed(folder, count, models, options.kill)
            else:
                found = evaluation(folder, count, models)
            print(json.dumps(found))
        return
    for count in SIZES:
        command = [sys.executable, "-m", "research.benchmarks.load", "--rows", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        print(done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
