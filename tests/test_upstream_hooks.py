"""The hooks of Axolotl, transformers and lm-eval that we override take what they did when we wrote
ours. An upstream change shows here as one sentence, instead of somewhere in a training run."""

from __future__ import annotations

import importlib
import inspect

import pytest

from axolotl_unlearn import versions

#: Upstream class -> hook -> its parameters without ``self``. Axolotl 0.19, transformers 5.
HOOKS = {
    "axolotl.integrations.base.BasePlugin": {
        "register": "cfg",
        "get_input_args": "",
        "get_training_args": "cfg",
        "pre_model_load": "cfg",
        "pre_lora_load": "cfg model",
        "post_trainer_create": "cfg trainer",
        "post_train": "cfg model",
        "post_lora_merge": "cfg adapter_path output_path",
        "load_datasets": "cfg preprocess",
        "get_collator_cls_and_kwargs": "cfg is_eval",
        "get_trainer_cls": "cfg",
    },
    "axolotl.core.trainers.base.AxolotlTrainer": {
        "_save_checkpoint": "model trial **kwargs",
        "compute_loss": "model inputs return_outputs num_items_in_batch",
        "create_scheduler": "num_training_steps optimizer",
        "evaluate": "*args **kwargs",
        "log": "logs start_time",
        "training_step": "*args **kwargs",
    },
    "axolotl.prompt_tokenizers.DatasetWrappingStrategy": {
        "wrap_dataset": "dataset process_count keep_in_memory **kwargs",
    },
    "transformers.Trainer": {
        "_get_grad_norm": "model grad_norm",
        "_prepare_inputs": "inputs",
        "_save_checkpoint": "model trial",
        "compute_loss": "model inputs return_outputs num_items_in_batch",
        "create_scheduler": "num_training_steps optimizer",
        "create_model_card": (
            "language license tags model_name finetuned_from tasks dataset_tags dataset "
            "dataset_args"
        ),
        "evaluate": "eval_dataset ignore_keys metric_key_prefix",
        "evaluation_loop": (
            "dataloader description prediction_loss_only ignore_keys metric_key_prefix"
        ),
        "get_batch_samples": "epoch_iterator num_batches device",
        "get_eval_dataloader": "eval_dataset",
        "get_train_dataloader": "",
        "log": "logs start_time",
        "train": "resume_from_checkpoint trial ignore_keys_for_eval",
        "training_step": "model inputs num_items_in_batch",
    },
    "transformers.TrainerCallback": {
        "on_log": "args state control **kwargs",
        "on_step_end": "args state control **kwargs",
        "on_train_begin": "args state control **kwargs",
        "on_train_end": "args state control **kwargs",
    },
    "transformers.trainer_callback.ExportableState": {"state": ""},
    "lm_eval.models.huggingface.HFLM": {
        "_create_model": "pretrained revision dtype trust_remote_code parallelize gpus "
        "max_memory_per_gpu max_cpu_memory offload_folder peft delta autogptq gptqmodel gguf_file "
        "quantization_config subfolder **kwargs",
        "_encode_pair": "context continuation",
        "_loglikelihood_tokens": "requests disable_tqdm override_bs",
        "tok_batch_encode": "strings padding_side left_truncate_len truncation",
    },
    "lm_eval.api.task.ConfigurableTask": {
        "build_all_requests": (
            "limit samples rank world_size cache_requests rewrite_requests_cache "
            "system_instruction apply_chat_template fewshot_as_multiturn chat_template "
            "tokenizer_name"
        ),
        "construct_requests": "doc ctx **kwargs",
        "fewshot_context": "doc num_fewshot system_instruction apply_chat_template "
        "fewshot_as_multiturn chat_template gen_prefix",
        "process_results": "doc results",
        "aggregation": "",
        "higher_is_better": "",
    },
}

#: Hook -> the first Axolotl that has it.
SINCE = {"post_lora_merge": "0.21"}

#: Our classes that override them.
OURS = (
    "axolotl_unlearn.plugin.UnlearnPlugin",
    "axolotl_unlearn.training.trainer.UnlearnTrainer",
    "axolotl_unlearn.training.level.LevelCallback",
    "axolotl_unlearn.data.strategy.RoleStrategy",
    "axolotl_unlearn.evaluation.lm.UnlearnLM",
    "axolotl_unlearn.evaluation.lm_tasks.UnlearnTask",
    "eval_tasks.tofu.utils.Tofu",
)
UPSTREAM = ("axolotl.", "transformers.", "lm_eval.")


def named(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def parameters(function) -> str:
    """Names in their order; ``*`` and ``**`` as they are written."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    given = list(inspect.signature(inspect.unwrap(function)).parameters.values())[1:]
    return " ".join(stars.get(one.kind, "") + one.name for one in given)


def change(owner: type, hook: str, expected: str) -> str | None:
    """One sentence if the hook is not as we expect."""
    function = getattr(owner, hook, None)
    name = f"{owner.__module__}.{owner.__qualname__}.{hook}"
    if function is None:
        return f"{name} is gone, so ours is never called; see who calls what instead."
    found = parameters(function)
    if found == expected:
        return None
    return f"{name} takes ({found}) instead of ({expected}); adapt our override and this table."


@pytest.mark.parametrize("owner", HOOKS)
def test_hooks_take_what_we_expect(owner):
    upstream = named(owner)
    changes = [
        change(upstream, hook, expected)
        for hook, expected in HOOKS[owner].items()
        if hook not in SINCE or versions.within(since=SINCE[hook])
    ]
    assert not any(changes), " ".join(filter(None, changes))


@pytest.mark.parametrize("path", OURS)
def test_every_override_is_in_the_table_and_can_be_called_as_upstream_does(path):
    ours = named(path)
    found = 0
    for hook, function in vars(ours).items():
        if hook.startswith("__") or not inspect.isfunction(function):
            continue
        bases = [b for b in ours.__mro__ if b.__module__.startswith(UPSTREAM) and hook in vars(b)]
        if not bases:
            continue
        found += 1
        known = [t for t in HOOKS if issubclass(ours, named(t)) and hook in HOOKS[t]]
        assert known, f"{path} overrides {bases[0].__module__}'s {hook}: add it to HOOKS"
        for table in known:
            expected = HOOKS[table][hook].split()
            names = [name for name in expected if not name.startswith("*")]
            signature = inspect.signature(function)
            optional = inspect.signature(inspect.unwrap(getattr(named(table), hook))).parameters
            needed = [n for n in names if optional[n].default is inspect.Parameter.empty]
            if "*args" not in expected:
                signature.bind(None, *needed)
            if not any(name.startswith("*") for name in expected):
                signature.bind(None, *names)
    assert found, f"{path} overrides nothing"


def test_the_options_that_axolotl_reads_are_found_in_its_source():
    """`check` names keys that nobody reads, without the seconds that an import takes."""
    from axolotl.utils.schemas.config import AxolotlInputConfig

    from axolotl_unlearn.checks.axolotl_options import known

    fields = AxolotlInputConfig.model_fields
    assert set(fields) | {f.alias for f in fields.values()} - {None} <= known()
    others = known() - set(fields)
    assert all(name.startswith(("model_", "expert_parallel", "context_")) for name in others)
