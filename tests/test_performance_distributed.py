"""Several processes, real ones on the CPU (gloo): the same update as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from test_train_axolotl import config, stage  # noqa: F401

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.slow
def test_full_fine_tuning_in_parts_gives_the_loss_and_gradient_of_one_process(tmp_path, forks):
    """Every objective under FSDP2, the starting model asked in its parts; also as a resumed run has
    it, which reads what was said. And LoRA, whose reference runs in training."""
    out = tmp_path / "result.json"
    command = [*TORCHRUN, str(ROOT / "tests/two_ranks_sharded.py"), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=800, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-9000:]
    found = json.loads(out.read_text())
    seen = {one["sees"] for one in found.values()}
    assert seen == {"labels", "pairs", "distributions", "hidden", None}
    for name, one in found.items():
        assert one["largest"] > 0.1, name
        assert max(one["loss"], one["gradient"]) < 1e-6, (name, one)


#: Under torchrun Axolotl asks a torch that is built for CUDA about peers: an error without a GPU.
needs_other_torch = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="Axolotl's two processes want a GPU, or a build of torch for the CPU",
)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="they run on a GPU")
@pytest.mark.parametrize(
    ("key", "given"),
    [("deepspeed", {"deepspeed": "zero3.json"}),
     ("activation_offloading", {"activation_offloading": True}),
     ("profiler_steps", {"profiler_steps": 1}),
     ("peft.loftq_config", {"peft": {"loftq_config": {"loftq_bits": 4}}})],
)  # fmt: skip
def test_what_needs_a_gpu_is_refused(stage, key, given, capsys):  # noqa: F811
    """Accelerate would train on without DeepSpeed, and LoftQ ended in a traceback. A config may
    still be made and checked there."""
    from axolotl.utils.dict import DictDefault

    from axolotl_unlearn.plugin import UnlearnPlugin

    name = str(stage / "base")
    cfg = config(stage, "zero", tokenizer_config=name, **given)
    cfg = DictDefault(
        cfg | {"batch_size": 4, "world_size": 1, "num_epochs": 1, "val_set_size": 0.0}
    )
    with pytest.raises(SystemExit) as ended:
        UnlearnPlugin().load_datasets(cfg)
    assert ended.value.code == 2
    assert f"`{key}` needs a GPU" in capsys.readouterr().err
    assert UnlearnPlugin().load_datasets(cfg, preprocess=True) is None


def test_the_first_process_records_the_base_when_the_group_is_gone(stage, tmp_path, monkeypatch):  # noqa: F811
    """Axolotl leaves it before this hook; under DeepSpeed, to ask it for a rank fails."""
    from axolotl.utils.dict import DictDefault

    from axolotl_unlearn.plugin import UnlearnPlugin

    cfg = DictDefault(config(stage, "recorded") | {"output_dir": str(tmp_path)})
    for rank, there in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        UnlearnPlugin().post_train(cfg, None)
        assert (tmp_path / "unlearn_base.json").is_file() == there


@needs_other_torch
@pytest.mark.slow
def test_one_process_that_fails_ends_the_others_with_its_sentence(stage, forks):  # noqa: F811
    """The other one waits for it in the next step's reduction; torchrun ends it."""
    changes = {"max_steps": 4, "micro_batch_size": 2}
    changes["plugins"] = ["axolotl_unlearn.UnlearnPlugin", "failing_rank.FailingPlugin"]
    path = stage / "failing.yml"
    path.write_text(yaml.safe_dump(config(stage, "failing", **changes)))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*TORCHRUN, "-m", "axolotl.cli.train", str(path)],
        capture_output=True, text=True, cwd=ROOT, timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Error: process 1 has met a bad row." in done.stderr, done.stderr[-3000:]
    assert not (stage / "failing" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3"])
def test_example_configs_have_no_fault(name):
    """Apart from data, models and DeepSpeed, which a newcomer does not have yet."""
    from axolotl_unlearn.checks.config import faults

    cfg = yaml.safe_load((ROOT / f"examples/distributed/{name}.yml").read_text())
    missing = ("does not exist", "data/semeval", "needs the package deepspeed")
    found = [f for f in faults(cfg) if not any(words in f for words in missing)]
    assert not found
