"""Time and memory of merges at the shapes of OLMo-7B (random weights, nothing downloaded).

    OMP_NUM_THREADS=2 python research/benchmarks/merging.py            # writes merging.json and merging.md

Targets (issue: the merging lab): factor TIES of two rank-32 adapters <= 90 s and 3 GB on 2 cores;
delta TIES: peak memory <= 3 of the largest tensors + 2 GB, whatever the model size.
Each merge runs through `axolotl_unlearn.merging.merge` in a process of its own; memory is that
process's peak resident set (ru_maxrss), which counts mapped files too. Delta merges are run on
embedding, one layer and head; a whole model is that layer 32 times (estimated, not run).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HIDDEN, MLP, LAYERS, VOCABULARY, RANK = 4096, 11008, 32, 50304, 32
HERE = Path(__file__).parent
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}


def shapes(layers: int, part: int | None = None) -> dict[str, tuple[int, int]]:
    """Tensors of an OLMo (its norms have no weights); ``part``: so many of a layer, small ends."""
    vocabulary = 64 if part else VOCABULARY
    named = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "lm_head.weight": (vocabulary, HIDDEN),
    }
    for layer in range(layers):
        for name, shape in list(LINEARS.items())[:part]:
            named[f"model.layers.{layer}.{name}.weight"] = shape
    return named


def write_sparse_model(folder: Path, layers: int) -> None:
    """A checkpoint of zeros that takes no disk: only its layout is read by a factor merge."""
    folder.mkdir(parents=True)
    shards: list[dict] = [{}]
    for name, shape in shapes(layers).items():
        if sum(4 * rows * columns for rows, columns in shards[-1].values()) > 4_000_000_000:
            shards.append({})
        shards[-1][name] = shape
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        header, position = {}, 0
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for name, shape in shard.items():
            end = position + 4 * shape[0] * shape[1]
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, end]}
            position = end
            weight_map[name] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as handle:
            handle.write(struct.pack("<Q", len(text)) + text)
            handle.truncate(8 + len(text) + position)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_config(folder, layers)


def write_config(folder: Path, layers: int) -> None:
    config = {
        "architectures": ["OlmoForCausalLM"],
        "model_type": "olmo",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    layers: int,
    seed: int,
    near: Path | None = None,
    part: int | None = None,
    dtype: str = "float32",
) -> None:
    """Random weights of std .02, or those of ``near`` moved by std 1e-4 (1e-3 in bfloat16, whose
    steps there are of that size)."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(layers, part).items():
        if near is None:
            tensors[name] = torch.randn(shape, generator=generator).mul_(0.02)
        else:
            with safe_open(near / "model.safetensors", "pt") as handle:
                moved = 1e-4 if dtype == "float32" else 1e-3
                change = torch.randn(shape, generator=generator).mul_(moved)
                tensors[name] = change.add_(handle.get_tensor(name).float())
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, layers)


def write_adapter(folder: Path, base: Path, layers: int, seed: int) -> None:
    """Rank-32 factors on all linear layers; A of both parents from one draw, moved a little."""
    import torch
    from safetensors.torch import save_file

    same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (rows, columns) in LINEARS.items():
            stem = f"base_model.model.model.layers.{layer}.{name}."
            a = torch.rand(RANK, columns, generator=same).sub_(0.5).mul_(0.03)
            a.add_(torch.randn(a.shape, generator=own), alpha=2e-3)
            tensors[stem + "lora_A.weight"] = a
            tensors[stem + "lora_B.weight"] = torch.randn(rows, RANK, generator=own).mul_(2e-3)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "base_model_name_or_path": str(base),
        "target_modules": sorted(name.split(".")[1] for name in LINEARS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


MERGE = """
import json, resource, sys, time
from axolotl_unlearn.merging import merge
start = time.perf_counter()
options = json.loads(sys.argv[1])
merge(**options)
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"seconds": time.perf_counter() - start,
                  "cpu_seconds": used.ru_utime + used.ru_stime,
                  "peak_bytes": used.ru_maxrss * 1024}))
"""
MERGEKIT = MERGE.replace(
    "from axolotl_unlearn.merging import merge", "from mergekit.scripts.run_yaml import main"
).replace("merge(**options)", "main.main(options, standalone_mode=False)")


def measure(code: str, options: dict | list) -> dict:
    """Run one merge in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(options, default=str)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: round(value, 1) for key, value in measured.items()}


def with_mergekit(base: Path, parents: list[Path], out: Path, dtype: str = "float32") -> dict:
    """The same TIES by `mergekit-yaml`; the work is in float32, ``dtype`` is what is written."""
    import yaml

    from axolotl_unlearn.merging import Recipe

    config = (
        Recipe().for_parents(len(parents)).mergekit_config(str(base), [str(p) for p in parents])
    )
    if dtype != "float32":
        config["out_dtype"] = dtype
    path = out.with_suffix(".yml")
    path.write_text(yaml.safe_dump(config))
    options = ["--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
    return measure(MERGEKIT, [str(path), str(out), *options])


def differing(ours: Path, theirs: Path) -> dict:
    """Entries of two merges, and how many of them differ."""
    from axolotl_unlearn.merging import open_base

    one, two = (open_base(folder).tensors for folder in (ours, theirs))
    pairs = [(one[name].to(two[name].dtype), two[name]) for name in one]
    return {"entries": sum(a.numel() for a, _ in pairs),
            "differing": sum(int((a != b).sum()) for a, b in pairs)}  # fmt: skip


def parameters(layers: int) -> int:
    return sum(rows * columns for rows, columns in shapes(layers).values())


def run(scratch: Path) -> list[dict]:
    rows = []
    largest = 4 * VOCABULARY * HIDDEN
    base = scratch / "base"
    write_sparse_model(base, LAYERS)
    parents = [scratch / "over", scratch / "under"]
    for seed, parent in enumerate(parents, 1):
        write_adapter(parent, base, LAYERS, seed)
    options = {"parents": parents, "base": base, "out": scratch / "out", "space": "factors"}
    measured = measure(MERGE, options)
    rows.append(
        {
            "merge": "factor TIES, two rank-32 adapters, 32 layers",
            **measured,
            "target_seconds": 90,
            "target_bytes": 3_000_000_000,
        }
    )
    print(rows[-1], flush=True)

    one = scratch / "one"
    write_model(one, 1, seed=0)
    for seed, parent in enumerate(parents, 1):
        parent = scratch / f"small_{parent.name}"
        write_adapter(parent, one, 1, seed)
    small = [scratch / f"small_{parent.name}" for parent in parents]
    measured = measure(MERGE, {"parents": small, "base": one, "out": scratch / "delta"})
    shutil.rmtree(scratch / "delta")
    rows.append(
        {
            "merge": "delta TIES, two rank-32 adapters, embedding + 1 layer + head",
            **measured,
            "target_bytes": 3 * largest + 2_000_000_000,
        }
    )
    print(rows[-1], flush=True)
    full = []
    for seed in (1, 2):
        full.append(scratch / f"full_{seed}")
        write_model(full[-1], 1, seed=seed, near=one)
    measured = measure(MERGE, {"parents": full, "base": one, "out": scratch / "full"})
    rows.append(
        {
            "merge": "delta TIES, two full models, embedding + 1 layer + head (all tensors move)",
            **measured,
            "cpu_seconds_per_billion": round(measured["cpu_seconds"] / parameters(1) * 1e9, 1),
            "target_bytes": 3 * largest + 2_000_000_000,
        }
    )
    print(rows[-1], flush=True)
    return rows


def beside_mergekit(scratch: Path, part: int = 2, dtype: str = "float32") -> dict:
    """Some matrices of a layer of two full models, by us and by `mergekit-yaml`."""
    base, parents = scratch / "beside", [scratch / f"beside_{seed}" for seed in (1, 2)]
    write_model(base, 1, seed=0, part=part, dtype=dtype)
    for seed, parent in enumerate(parents, 1):
        write_model(parent, 1, seed=seed, near=base, part=part, dtype=dtype)
    ours = measure(MERGE, {"parents": parents, "base": base, "out": scratch / "ours"})
    theirs = with_mergekit(base, parents, scratch / "theirs", dtype)
    print(ours, theirs, flush=True)
    bits = differing(scratch / "ours", scratch / "theirs")
    found = {"facts": machine_facts(), "ours": ours, "mergekit": theirs, **bits}
    print(found, flush=True)
    return found


def report(rows: list[dict], facts: dict, beside: dict) -> str:
    lines = [
        "# Merging at the shapes of OLMo-7B",
        "",
        f"`OMP_NUM_THREADS={facts['threads']} python research/benchmarks/merging.py` on {facts['machine']}, "
        f"{facts['cores']} cores; torch {facts['torch']}, mergekit {facts['mergekit']}; "
        f"{facts['date']}.",
        "",
        "| merge | seconds | CPU seconds | peak memory | target |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        target = f"{row['target_bytes'] / 1e9:.2f} GB"
        if "target_seconds" in row:
            target = f"{row['target_seconds']} s, {target}"
        peak = f"{row['peak_bytes'] / 1e9:.2f} GB"
        times = f"{row['seconds']:.1f} | {row['cpu_seconds']:.1f}"
        lines.append(f"| {row['merge']} | {times} | {peak} | {target} |")
    name = "cpu_seconds_per_billion"
    per_billion = next(row[name] for row in rows if name in row)
    lines += [
        "",
        f"Delta TIES costs {per_billion:.0f} CPU s a billion weights that move, so a full OLMo-7B "
        f"(6.9 billion) would take about {6.9 * per_billion / 60:.0f} minutes: an estimate from "
        "one layer, not a run. Reading, checking and writing are included; generating the random "
        "weights is not. Other work kept the machine busy (load "
        f"{facts['load']:.1f} on {facts['cores']} cores at the end): judge by CPU seconds.",
        "",
        "## Beside mergekit",
        "",
        "Delta TIES of two full models, two matrices of 4096 x 4096, "
        f"{beside['entries'] / 1e6:.0f} million weights, on "
        f"{beside['facts']['date']}, load {beside['facts']['load']:.1f}, "
        f"OMP_NUM_THREADS={beside['facts']['threads']}; CPU seconds and memory include starting "
        "Python:",
        "",
        "| | seconds | CPU seconds | peak memory |",
        "|---|---|---|---|",
    ]
    for name in ("ours", "mergekit"):
        row = beside[name]
        times = f"{row['seconds']:.1f} | {row['cpu_seconds']:.1f}"
        lines.append(f"| {name} | {times} | {row['peak_bytes'] / 1e9:.2f} GB |")
    lines += [
        "",
        f"{beside['differing']:,} of {beside['entries']:,} entries differ.",
        "",
    ]
    return "\n".join(lines)


def report_layer(layer: dict) -> str:
    """The comparison at one layer of a 7B in bfloat16."""
    facts = layer["facts"]
    lines = [
        "## One layer of a 7B in bfloat16 beside mergekit",
        "",
        f"`python research/benchmarks/merging.py --layer`: the same with all seven matrices of a layer, "
        f"{layer['entries'] / 1e6:.0f} million weights in bfloat16, on {facts['date']}, load "
        f"{facts['load']:.1f}, OMP_NUM_THREADS={facts['threads']}:",
        "",
        "| | seconds | CPU seconds | peak memory |",
        "|---|---|---|---|",
    ]
    for name in ("ours", "mergekit"):
        row = layer[name]
        times = f"{row['seconds']:.1f} | {row['cpu_seconds']:.1f}"
        lines.append(f"| {name} | {times} | {row['peak_bytes'] / 1e9:.2f} GB |")
    lines += [
        "",
        f"{layer['differing']:,} of {layer['entries']:,} entries differ.",
        "",
    ]
    return "\n".join(lines)


def machine_facts() -> dict:
    return {
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": version("torch"),
        "mergekit": version("mergekit"),
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch", type=Path, help="folder with 12 GB free (default: temporary)")
    parser.add_argument("--beside", action="store_true", help="only the comparison with mergekit")
    parser.add_argument("--layer", action="store_true", help="only that of a whole layer, bfloat16")
    arguments = parser.parse_args()
    path = HERE / "merging.json"
    part = arguments.beside or arguments.layer
    result = json.loads(path.read_text()) if part else {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        if not part:
            result["rows"] = run(Path(scratch))
            result["facts"] = machine_facts()
        if not arguments.layer:
            result["beside"] = beside_mergekit(Path(scratch))
        if not arguments.beside:
            result["layer"] = beside_mergekit(Path(scratch, "layer"), len(LINEARS), "bfloat16")
    path.write_text(json.dumps(result, indent=2) + "\n")
    text = report(result["rows"], result["facts"], result["beside"])
    (HERE / "merging.md").write_text(text + "\n" + report_layer(result["layer"]))


if __name__ == "__main__":
    main()
