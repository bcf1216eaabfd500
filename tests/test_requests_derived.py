"""Models made of the one before a request: real adapters and merges."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import yaml
from merging_models import merged_copy, run_mergekit, tiny_adapter, tiny_model
from requests_folder import adapter_folder, answered, finished_request, model_folder, said

from axolotl_unlearn.merging import record_base
from axolotl_unlearn.requests.derived import derived
from axolotl_unlearn.requests.record import write
from axolotl_unlearn.requests.request import weights
from axolotl_unlearn.shards import NAME as ROUTER


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A model that was fine-tuned whole, its request, what others made of it and of the base."""
    home = tmp_path_factory.mktemp("full")
    models = home / "models"
    base, old = home / "base", home / "old"
    tiny_model(base, kind="llama")
    tiny_model(old, kind="llama", seed=1)
    folder = finished_request(home / "requests", "1", {"model": str(old), "adapter": None})
    facts = json.loads((folder / "request.json").read_text()) | {"base": str(base)}
    (folder / "request.json").write_text(json.dumps(facts))
    tiny_model(folder / "model", kind="llama", seed=2)
    write(folder)

    shutil.copytree(old, models / "copy")
    tiny_adapter(models / "tuned-further", old)
    tiny_adapter(models / "of-the-base", base)
    recipe = {"merge_method": "linear", "dtype": "float32", "models": []}
    for part in (old, base):
        recipe["models"].append({"model": str(part), "parameters": {"weight": 0.5}})
    (home / "recipe.yml").write_text(yaml.safe_dump(recipe))
    run_mergekit("mergekit-yaml", home / "recipe.yml", models / "merge")
    tiny_adapter(models / "tuned-on-the-merge", models / "merge")
    (models / "eight-bits.gguf").write_bytes(b"GGUF")
    shutil.copytree(folder / "model", models / "deployed")
    shutil.copytree(base, models / "base")
    return home


WITHDRAWN = {
    "copy": "its weights are those of one",
    "eight-bits.gguf": "look yourself: GGUF files are not read",
    "merge": "mergekit_config.yml names one",
    "tuned-further": "adapter_config.json names one",
    "tuned-on-the-merge": "adapter_config.json names one",
}


def test_what_was_made_of_the_old_model_is_listed_and_nothing_else(full):
    found = {one.path.name: one.why for one in derived(full / "requests/1", [full / "models"])}
    assert set(found) == set(WITHDRAWN)
    for name, why in WITHDRAWN.items():
        assert why in found[name], (name, found[name])


def test_the_command(full):
    words = ("derived", full / "requests/1")
    assert len(answered(*words, full / "models", code=3)["withdraw"]) == len(WITHDRAWN)
    assert "to withdraw: 0" in said(*words, full / "models" / "deployed").output
    said(*words, full / "nowhere", code=2)


def test_of_an_adapter(tmp_path):
    """What stands on the base alone stays; checkpoints, copies and merges do not."""
    base, old = tmp_path / "base", tmp_path / "models" / "old"
    tiny_model(base, kind="llama")
    tiny_adapter(old, base)
    tiny_adapter(old / "checkpoint-5", base, train_seed=5)
    tiny_adapter(tmp_path / "models" / "another", base, train_seed=7)
    files = [one["sha256"] for one in weights(old).values()]  # which `request new` writes down
    before = {"model": str(base), "adapter": str(old), "files": files}
    folder = finished_request(tmp_path / "requests", "1", before)
    shutil.rmtree(folder / "model")
    tiny_adapter(folder / "model", base, train_seed=9)
    write(folder)
    merged_copy(old, base, old / "merged")
    tiny_model(old / "quantized", kind="llama", seed=4)  # as `axolotl quantize` writes one
    merged_copy(old, base, tmp_path / "models" / "merged-elsewhere")
    record_base(tmp_path / "models" / "merged-elsewhere", base, old)
    copy = shutil.copytree(old, tmp_path / "models" / "copy")
    (copy / "adapter_config.json").write_text(
        (copy / "adapter_config.json").read_text().replace('"r": 4', '"r": 4, "note": 1')
    )
    found = {one.path.name: one.why for one in derived(folder, [tmp_path / "models"])}
    assert set(found) == {"checkpoint-5", "merged", "quantized", "merged-elsewhere", "copy"}
    (old / "adapter_model.safetensors").unlink()  # after `erase` nobody knew the copy
    found = {one.path.name: one.why for one in derived(folder, [tmp_path / "models"])}
    assert found["copy"] == "its weights are those of one"
    request = folder / "request.json"
    request.write_text(request.read_text().replace('"files"', '"of-older-versions"'))
    found = {one.path: one.why for one in derived(folder, [tmp_path / "models"])}
    assert old not in found, "it is there, in another form"
    shutil.rmtree(old)
    found = {one.path: one.why for one in derived(folder, [tmp_path / "models"])}
    assert "not known, look yourself: it is gone" in found[old]


@pytest.mark.parametrize("here", [".", "proj", "proj/requests"])
def test_from_wherever_it_is_asked(tmp_path, monkeypatch, here):
    """Outside of where the request was made "to withdraw" named the models before as gone, and no
    adapter that names one by its path."""
    (proj := tmp_path / "proj").mkdir()
    monkeypatch.chdir(proj)
    old = model_folder(proj / "out" / "old")
    write(folder := finished_request(proj / "requests", "1", {"model": "out/old", "adapter": None}))
    (proj / "c.yml").write_text("{}")
    facts = json.loads((folder / "request.json").read_text())
    facts |= {"root": "../..", "config": {"path": "c.yml"}}
    (folder / "request.json").write_text(json.dumps(facts))
    adapter_folder(proj / "models" / "one", "out/old", b"one")
    adapter_folder(proj / "models" / "two", old, b"two")
    monkeypatch.chdir(tmp_path / here)
    asked = Path(os.path.relpath(folder)), [Path(os.path.relpath(proj / "models"))]
    found = {one.path.name: one.why for one in derived(*asked)}
    assert found == dict.fromkeys(("one", "two"), "adapter_config.json names one")


def test_a_path_may_hold_a_plus(tmp_path):
    """A model that names the old one by such a path was in no list."""
    old = model_folder(tmp_path / "c++" / "old")
    before = {"model": str(old), "adapter": None}
    write(folder := finished_request(tmp_path / "requests", "1", before))
    for name, of in {"one": old, "pair": f"{old}+{tmp_path / 'x'}", "other": "org/base+x"}.items():
        adapter_folder(tmp_path / "models" / name, of, name.encode())
    found = {one.path.name for one in derived(folder, [tmp_path / "models"])}
    assert found == {"one", "pair"}


def bomb(folder, kind: str) -> None:
    """A model that never ends, or ends all, when it is read."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    levels = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    levels += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    card = {"aliases": "\n".join(levels), "itself": "a: &a [*a]"}
    if kind in card:
        (folder / "README.md").write_text(f"---\n{card[kind]}\n---\n")
    elif kind == "brackets":
        (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    elif kind == "large":
        (folder / "config.json").write_text(f'["{"x" * 2**24}"]')
    elif kind == "header":
        (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    else:
        pipe = folder / {"pipe": "", "pipe below": "shard-0"}[kind] / "adapter_model.safetensors"
        pipe.parent.mkdir(exist_ok=True)
        os.mkfifo(pipe)


BOMBS = ("aliases", "itself", "brackets", "large", "header", "pipe", "pipe below")
#: A text or tensor is not parsed, so its depth costs nothing: it names no model.
HARMLESS = {"aliases", "itself", "brackets", "header"}


def test_a_hostile_model_is_listed_as_not_known_and_the_others_follow(full, tmp_path, monkeypatch):
    """A card of a kilobyte never ended; a config of brackets stopped the whole list; of a folder
    that nobody may read "to withdraw: 0" was said."""
    for kind in BOMBS:
        bomb(tmp_path / kind, kind)
    shutil.copytree(full / "old", tmp_path / "z-copy")
    (tmp_path / "weights-alone").mkdir()
    shutil.copy(full / "old" / "model.safetensors", tmp_path / "weights-alone" / "x.safetensors")
    (tmp_path / "closed").mkdir()

    def entered(folder, read=Path.iterdir):
        if folder.name == "closed":
            raise PermissionError
        return read(folder)

    monkeypatch.setattr(Path, "iterdir", entered)
    began = time.monotonic()
    found = {one.path.name: one.why for one in derived(full / "requests/1", [tmp_path])}
    assert time.monotonic() - began < 30
    assert found.pop("z-copy") == found.pop("weights-alone") == "its weights are those of one"
    assert set(found) == {"closed", *BOMBS} - HARMLESS
    assert all("look yourself" in why for why in found.values())


def test_shards_that_stayed_are_no_reason_when_the_model_of_the_request_is_gone(tmp_path):
    """Removed by `erase` of the next request: shards of the current model were to be withdrawn."""
    base, made = model_folder(tmp_path / "base"), tmp_path / "requests"

    def routed(folder: Path, *parts: bytes) -> Path:
        for number, content in enumerate(parts, 1):
            adapter_folder(folder / f"shard-{number}", base, content)
        (folder / ROUTER).write_bytes(b"".join(parts))
        return adapter_folder(folder, base)

    before = routed(tmp_path / "shards" / "model", b"ada and bo", b"cy", b"di")
    for name, parts in (("1", [b"bo", b"cy", b"di"]), ("2", [b"bo", b"", b"di"])):
        files = [one["sha256"] for one in weights(before).values()]
        told = {"model": str(base), "adapter": str(before), "files": files}
        folder = finished_request(made, name, told)
        shutil.rmtree(folder / "model")
        before = routed(folder / "model", *parts)
        write(folder)
    shutil.copytree(before, tmp_path / "deployed")
    shutil.rmtree(made / "1" / "model")
    places = [tmp_path / "deployed", tmp_path / "shards"]
    found = [one.path.relative_to(tmp_path) for one in derived(made / "1", places)]
    assert found == [Path("shards/model/shard-1")]
