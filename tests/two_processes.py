"""Run the group with lm-eval in one of two CPU processes: ``torchrun ... two_processes.py``.

lm-eval's Hugging Face model only spreads over GPUs by itself; here rank and world size are set by
hand, everything else (splitting the documents, gathering the metrics) is lm-eval's.
"""

import json
import sys

import torch
from accelerate import Accelerator
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager


def main(model: str, data: str, include: str, out: str) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    lm = HFLM(pretrained=model, device="cpu", dtype="float32", batch_size=4)
    lm.accelerator = accelerator
    lm._rank, lm._world_size = accelerator.process_index, accelerator.num_processes
    assert lm.world_size == 2
    metadata = {"data_dir": data, "min_members": 1, "pretrained": model}
    results = simple_evaluate(
        lm,
        tasks=["semeval_unlearn"],
        task_manager=TaskManager(include_path=include, metadata=metadata),
        bootstrap_iters=0,
        log_samples=False,
    )
    if lm.rank == 0:
        with open(out, "w") as file:
            json.dump(results["results"], file)


if __name__ == "__main__":
    main(*sys.argv[1:])
