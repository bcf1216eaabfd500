"""Several processes, real ones on the CPU (gloo): the same update as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch
import yaml
from test_train_axolotl import adapter, assert_same, config, stage, train  # noqa: F401

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def launch(command: list[str], **environment: str) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-9000:]


@pytest.mark.slow
def test_ddp_and_fsdp2_give_the_gradient_of_one_process(tmp_path, forks_on_cpu):
    """Also where only one process needs a reference forward: neither hangs nor differs."""
    out = tmp_path / "result.json"
    launch([*TORCHRUN, str(ROOT / "tests/two_ranks.py"), str(out)])
    result = json.loads(out.read_text())
    assert result["largest"] > 1e-2
    assert result["ddp"] < 1e-5 and result["fsdp2"] < 1e-5 and result["pcgrad"] < 1e-5
    assert result["fsdp2 full"] < 1e-5
    assert result["rmu"] < 1e-5 and result["rmu and kl"] < 1e-5
    if util.find_spec("deepspeed"):  # not among the pinned packages
        assert max(result[f"zero {level}"] for level in (1, 2, 3)) < 1e-5


@pytest.mark.slow
def test_full_fine_tuning_in_parts_gives_the_loss_and_gradient_of_one_process(
    tmp_path, forks_on_cpu
):
    """Every objective under FSDP2, the starting model asked in its parts; also as a resumed run has
    it, which reads what was said."""
    out = tmp_path / "result.json"
    launch([*TORCHRUN, str(ROOT / "tests/two_ranks_sharded.py"), str(out)])
    found = json.loads(out.read_text())
    assert {one["sees"] for one in found.values()} == {"labels", "pairs", "distributions", "hidden"}
    for name, one in found.items():
        assert one["largest"] > 0.1, name
        assert max(one["loss"], one["gradient"]) < 1e-6, (name, one)


#: Under torchrun Axolotl asks a torch that is built for CUDA about peers: an error without a GPU.
needs_other_torch = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="Axolotl's two processes want a GPU, or a build of torch for the CPU",
)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="DeepSpeed runs on a GPU")
def test_deepspeed_without_a_gpu_is_refused(stage, tmp_path, capsys):  # noqa: F811
    """Accelerate would train on without it. A config may still be made and checked there."""
    from axolotl.utils.dict import DictDefault

    from axolotl_unlearn.plugin import UnlearnPlugin

    name = str(stage / "base")
    cfg = config(stage, "zero", deepspeed=str(tmp_path / "zero3.json"), tokenizer_config=name)
    cfg = DictDefault(
        cfg | {"batch_size": 4, "world_size": 1, "num_epochs": 1, "val_set_size": 0.0}
    )
    with pytest.raises(SystemExit) as ended:
        UnlearnPlugin().load_datasets(cfg)
    assert ended.value.code == 2
    assert "`deepspeed` needs a GPU" in capsys.readouterr().err
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
def test_one_process_that_fails_ends_the_others_with_its_sentence(stage, forks_on_cpu):  # noqa: F811
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


def test_four_bit_base_gives_its_own_reference():
    """QLoRA: bitsandbytes NF4 on the CPU; at the start, NPO is 2 ln 2 / beta and KL is 0."""
    bnb = pytest.importorskip("bitsandbytes")
    from conftest import random_batch, tiny_llama, with_lora

    from axolotl_unlearn.config import ObjectiveArgs
    from axolotl_unlearn.engine.head_losses import ChunkPlan
    from axolotl_unlearn.engine.step import step_loss
    from axolotl_unlearn.engine.views import make_entries
    from axolotl_unlearn.reference.start import make_reference

    base = tiny_llama(seed=1, hidden_size=64, intermediate_size=64)
    try:
        for layer in base.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                old = getattr(layer.mlp, name)
                new = bnb.nn.Linear4bit(
                    old.in_features, old.out_features, bias=False, quant_type="nf4",
                    compute_dtype=torch.float32,
                )  # fmt: skip
                new.weight = bnb.nn.Params4bit(
                    old.weight.data, requires_grad=False, quant_type="nf4"
                )
                setattr(layer.mlp, name, new.to("cpu"))
        base(input_ids=torch.tensor([[3, 4, 5]]))
    except Exception as error:  # depends on the build of bitsandbytes
        pytest.skip(f"bitsandbytes has no 4-bit kernel here: {type(error).__name__}: {error}")
    model = with_lora(base, trained=False).train()  # in eval, its CPU kernel has no backward
    entries = make_entries(
        [
            ("forget", ObjectiveArgs(objective="npo", beta=0.1)),
            ("retain", ObjectiveArgs(objective="kl")),
        ]
    )
    reference = make_reference("auto", model, starting_adapter=False, plan=ChunkPlan())
    result = step_loss(model, random_batch(seed=3), entries, reference=reference)
    total, count = result.parts["forget/npo"]
    assert float(total / count) == pytest.approx(20 * 0.6931472, rel=1e-4)
    total, count = result.parts["retain/kl"]
    assert float(total / count) == pytest.approx(0, abs=1e-5)
    result.total.backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    assert any(g.abs().max() > 1e-6 for g in grads)
