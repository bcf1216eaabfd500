"""A routed folder as a model: every row is answered by the adapter of its shard, to the last digit
that a merged adapter says the same."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from conftest import tiny_llama, with_lora
from data_tokenizers import byte_tokenizer
from fault_codes import fails
from merging_models import edit_json
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from requests_folder import write_lines
from test_shards_router import PEOPLE

from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.engine.token_scoring import Query, score_queries
from axolotl_unlearn.evaluation.generate import generate_greedily
from axolotl_unlearn.models import (
    ModelSpec,
    load_model,
    load_tokenizer,
    parse_models,
    weights_digest,
)
from axolotl_unlearn.requests.request import weights
from axolotl_unlearn.shards import NAME as ROUTER
from axolotl_unlearn.shards.model import mixed
from axolotl_unlearn.shards.router import Router

HOME = {name: 1 + number % 2 for number, name in enumerate(PEOPLE)}
PROMPTS = {f"Tell me about {name}, please: ": HOME[name] for name in PEOPLE}
PROMPTS["12 times 7 is "] = 0


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """A base, and a folder of three adapters."""
    folder = tmp_path_factory.mktemp("routed")
    tiny_llama(vocabulary=259).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    for shard in range(3):
        lora = with_lora(tiny_llama(vocabulary=259), seed=shard)
        lora.peft_config["default"].base_model_name_or_path = str(folder / "base")
        lora.save_pretrained(folder / "model" / f"shard-{shard}")
    byte_tokenizer().save_pretrained(folder / "model")
    shutil.copy(folder / "model" / "shard-1" / "adapter_config.json", folder / "model")
    Router.of((HOME[name], PEOPLE[name]) for name in PEOPLE).save(folder / "model")
    return folder


def load(source: str):
    (spec,) = parse_models([source])
    return load_model(spec, dtype=torch.float64, device="cpu"), load_tokenizer(spec)


def alone(folder, shard: int):
    return load(f"{folder / 'base'}+{folder / 'model' / f'shard-{shard}'}")


@pytest.mark.parametrize("batch_size", [1, 7])
def test_generated_rows_are_those_of_the_adapter_alone(routed, batch_size):
    """Rows of a batch leave it one by one: the others keep their adapter."""
    model, tokenizer = load(str(routed / "model"))
    model.generation_config.eos_token_id = [2, *range(40, 200, 3)]
    made = generate_greedily(
        model, tokenizer, list(PROMPTS), max_new_tokens=12, batch_size=batch_size
    )
    assert len({len(one) for one in made}) > 1
    for shard in range(3):
        own, _ = alone(routed, shard)
        own.generation_config.eos_token_id = model.generation_config.eos_token_id
        prompts = [prompt for prompt, home in PROMPTS.items() if home == shard]
        said = [one for one, home in zip(made, PROMPTS.values(), strict=True) if home == shard]
        expected = generate_greedily(own, tokenizer, prompts, max_new_tokens=12)
        assert said == expected


def test_an_adapter_that_was_changed_answers_as_it_is_now(routed):
    """What a batch keeps of its adapters from token to token ends with it."""
    model, tokenizer = load(str(routed / "model"))

    def said():
        return generate_greedily(model, tokenizer, list(PROMPTS), max_new_tokens=8)

    before = said()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B.shard-1" in name:
                weight.mul_(-9)
    changed = {home for home, *pair in zip(PROMPTS.values(), before, said(), strict=True)
               if pair[0] != pair[1]}  # fmt: skip
    assert changed == {1}


def test_without_rows_of_nobody_the_base_answers(routed, tmp_path):
    shutil.copytree(routed / "model", tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "shard-0")
    prompt = ["12 times 7 is "]
    said, base = (
        generate_greedily(*load(str(source)), prompt, max_new_tokens=8)[0]
        for source in (tmp_path / "model", routed / "base")
    )
    assert said == base


@pytest.mark.parametrize("beams", [1, 3])
def test_the_models_own_generate(routed, beams):
    model, tokenizer = load(str(routed / "model"))
    prompt = "Tell me about Ada Quill, please: "
    given = tokenizer(prompt, return_tensors="pt")
    how = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False}
    own, _ = alone(routed, HOME["Ada Quill"])
    assert torch.equal(model.generate(**given, **how), own.generate(**given, **how))


def test_scores_are_routed_by_the_prompt_and_not_by_the_answer(routed):
    """The answer names somebody of the other shard; a text without a prompt is routed by itself."""
    model, tokenizer = load(str(routed / "model"))
    other = next(name for name in PEOPLE if HOME[name] != HOME["Ada Quill"])
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    said = tokenizer(f"{other} " * 4)["input_ids"]
    queries = [Query.of([*row, *said], len(row)) for row in ids] + [Query.of(said)]
    homes = [*PROMPTS.values(), HOME[other]]
    facts = score_queries(model, queries)
    for shard in range(3):
        expected = score_queries(alone(routed, shard)[0], queries)
        for one, known, home in zip(facts, expected, homes, strict=True):
            same = torch.allclose(
                torch.tensor(one.logp), torch.tensor(known.logp), rtol=0, atol=1e-5
            )
            assert same == (home == shard)


def test_its_digest_is_that_of_every_adapter_and_the_router(routed, tmp_path):
    shutil.copytree(routed / "model", tmp_path / "model")
    spec = ModelSpec("", str(tmp_path / "model"))
    found = weights(tmp_path / "model")
    assert set(found) == {"adapter_router.safetensors"} | {
        f"shard-{shard}/adapter_model.safetensors" for shard in range(3)
    }
    digests = {weights_digest(spec)}
    for path in sorted((tmp_path / "model").glob("*/adapter_*")):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        digests.add(weights_digest(spec))
    Router.of([(1, ["someone else"])]).save(tmp_path / "model")
    digests.add(weights_digest(spec))
    assert len(digests) == 8 and weights(tmp_path / "model") != found


#: Code of the fault -> what was done to the folder.
BROKEN = {
    "shards.no-adapter": lambda folder: shutil.rmtree(folder / "shard-2"),
    "models.base-missing": lambda folder: edit_json(
        folder / "adapter_config.json", base_model_name_or_path=str(folder / "gone")
    ),
    "shards.no-tokens": lambda folder: None,  # it is asked by embeddings
    "shards.no-router": lambda folder: (folder / ROUTER).write_bytes(b""),
}


@pytest.mark.parametrize("code", BROKEN)
def test_what_is_no_whole_folder(routed, tmp_path, code):
    folder = shutil.copytree(routed / "model", tmp_path / "model")
    BROKEN[code](folder)
    with fails(code):
        model, _ = load(str(folder))
        model(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64))


def test_lm_eval_answers_each_row_by_its_adapter(routed):
    """`lm_eval --model routed`: likelihoods and generated texts of rows of several people."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    import axolotl_unlearn.evaluation.lm  # noqa: F401 (registers it)

    def asked(model, prompts: list[str]) -> list:
        rows = {"loglikelihood": " a baker", "generate_until": {"until": [], "max_gen_toks": 8}}
        return [
            getattr(model, kind)(
                [Instance(kind, {}, (prompt, given), 0) for prompt in prompts], disable_tqdm=True
            )
            for kind, given in rows.items()
        ]

    how = {"pretrained": str(routed / "base"), "device": "cpu", "dtype": "float32", "batch_size": 4}
    found = asked(get_model("routed")(peft=str(routed / "model"), **how), list(PROMPTS))
    for shard in range(3):
        own = get_model("hf-unlearn")(peft=str(routed / "model" / f"shard-{shard}"), **how)
        at = [n for n, home in enumerate(PROMPTS.values()) if home == shard]
        (known, said) = asked(own, [[*PROMPTS][n] for n in at])
        assert [found[1][n] for n in at] == said
        assert [found[0][n][0] for n in at] == pytest.approx([a for a, _ in known], abs=1e-4)


def test_the_commands_take_the_folder(routed, tmp_path):
    """`eval`, `attack membership` and `audit`: the routed folder is measured as a model."""

    prompts = list(PROMPTS)
    asked = [{"id": f"p{n}qa0", "input": one, "output": "a baker", "task": "Task1"}
             for n, one in enumerate(prompts)]  # fmt: skip
    write_lines(tmp_path / "forget.jsonl", asked[:2])
    write_lines(tmp_path / "retain.jsonl", asked[2:])
    for side in ("member", "nonmember"):
        texts = [{"id": f"{side}-{n}sc1", "document": f"{prompts[n % len(prompts)]}{side} {n}"}
                 for n in range(20)]  # fmt: skip
        write_lines(tmp_path / f"{side}.jsonl", texts)
    model, data = str(routed / "model"), ["--data", str(tmp_path)]
    for words in (
        ["eval", f"routed={model}", *data, "--min-members", "2", "--max-gen-toks", "4"],
        ["attack", "membership", f"routed={model}", *data],
        ["audit", str(tmp_path / "member.jsonl"), "--model", model, "--max-new-tokens", "4"],
        ["attack", "quantise", model, *data, "--schemes", "int8,int4", "--max-new-tokens", "4"],
        ["attack", "relearn", model, *data, "--steps", "1", "--rows", "2", "--max-new-tokens", "4"],
        ["tasks", "run", "--model", "routed", "--model_args", f"pretrained={model}", "--device",
         "cpu", "--tasks", "semeval_unlearn_tasks", "--gen_kwargs", "max_gen_toks=4", "--metadata",
         json.dumps({"data_dir": str(tmp_path)})],
    ):  # fmt: skip
        out = [] if words[0] == "tasks" else ["--out", str(tmp_path / f"{words[0]}.out")]
        done = CliRunner().invoke(unlearn, ["--json", *words, *out])
        assert done.exit_code == 0, (words, done.output, done.exception)


@pytest.mark.parametrize("more", [{}, {"lora_bias": True}, {"use_rslora": True}, {"r": 4}])
def test_a_mixed_layer_is_that_of_peft(more):
    """Two products in place of two an adapter left out a bias, which PEFT adds, and failed on
    adapters of two ranks."""
    torch.manual_seed(0)
    how = {"r": 2, "target_modules": ["0"], "init_lora_weights": False}
    others = {key: value for key, value in more.items() if key != "r"}
    linear = torch.nn.Sequential(torch.nn.Linear(6, 5))
    model = get_peft_model(linear, LoraConfig(**how | others), "a")
    model.add_adapter("b", LoraConfig(**how | more))
    layer = model.eval().base_model.model[0]
    for name in ("a", "b"):
        if layer.lora_bias[name]:
            torch.nn.init.normal_(layer.lora_B[name].bias)
    x, names = torch.randn(3, 4, 6), ["a", "b", "a"]
    expected = type(layer)._mixed_batch_forward(layer, x, adapter_names=names)
    torch.testing.assert_close(mixed(layer, x, adapter_names=names), expected)


def test_rows_of_several_adapters_take_two_products(routed, monkeypatch):
    """PEFT hands its layers arguments that are None, for which its own loop ran each time."""
    model, tokenizer = load(str(routed / "model"))
    rows = torch.tensor([tokenizer(f"{name[:12]:12}")["input_ids"] for name in PEOPLE])
    looped = []

    def own(layer, x, *args, adapter_names, **given):
        looped.append({*adapter_names})
        return layer.base_layer(x)

    monkeypatch.setattr(Linear, "_mixed_batch_forward", own)
    model(input_ids=rows)
    assert len(model.routes.now) > 1 and not looped
