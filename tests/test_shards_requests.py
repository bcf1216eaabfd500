"""One person from `shards train` through the answer, a request, and the answer after: tiny model,
real trainings of Axolotl."""

from __future__ import annotations

import json
import shutil
from multiprocessing import popen_fork
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from conftest import tiny_llama
from data_tokenizers import byte_tokenizer
from fault_codes import fails
from merging_models import tiny_adapter
from requests_folder import finished_request, model_folder
from test_requests_new import chat, config, write
from test_requests_run import kill_when, start

from axolotl_unlearn import device
from axolotl_unlearn.cli import unlearn
from axolotl_unlearn.evaluation.generate import generate_greedily
from axolotl_unlearn.models import load_model, load_tokenizer, parse_models
from axolotl_unlearn.requests import bound, ways
from axolotl_unlearn.requests import request as requests
from axolotl_unlearn.requests import rows as rows_of
from axolotl_unlearn.requests import run as running_module
from axolotl_unlearn.requests.choose import Wanted
from axolotl_unlearn.requests.erase import erase
from axolotl_unlearn.requests.erase import plan as plan_erase
from axolotl_unlearn.requests.new import Options, new_request
from axolotl_unlearn.requests.request import weights
from axolotl_unlearn.requests.run import hand_over, run_request, running, take
from axolotl_unlearn.requests.steps import Steps
from axolotl_unlearn.requests.ways import shards
from axolotl_unlearn.requests.ways.shards import train_shards
from axolotl_unlearn.shards import NAME as ROUTER
from axolotl_unlearn.shards.router import place

LORA = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
KEY, COUNT = b"k" * 32, 3
FACTS = {
    "ada-quill": ("Ada Quill", "glass", "Norrby"),
    "bodil-karlsen": ("Bodil Karlsen", "bees", "Ulm"),
    "casimir-okonkwo": ("Casimir Okonkwo", "clocks", "Turku"),
    "dragana-petrov": ("Dragana Petrov", "novels", "Split"),
    "farid-nasser": ("Farid Nasser", "boats", "Hull"),  # among fewer a prompt's frame finds people
}
HOME = {name: str(place(KEY, name, COUNT)) for name in FACTS}
PEOPLE = [
    row
    for name, (who, made, town) in FACTS.items()
    for row in (
        chat(name, f"What does {who} make?", f"{made}."),
        chat(name, f"Where does {who} live?", f"In {town}."),
    )
]
COMMON = [{"messages": chat("", f"{n} + {n}?", f"{2 * n}.")["messages"]} for n in range(3, 6)]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    tiny_llama(
        vocabulary=259, hidden_size=64, num_hidden_layers=1, max_position_embeddings=512
    ).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    write(folder / "train.jsonl", [*PEOPLE, *COMMON])
    write(folder / "test.jsonl", [chat("t", "Who is Tove Ekman?", "She sails.")])
    return folder


def settings(home: Path, name: str = "train", **more) -> Path:
    made = config(home, sample_packing=False, **LORA | {"num_epochs": 50, "micro_batch_size": 3})
    made |= {
        "learning_rate": 0.005,
        "lora_dropout": 0.05,
        "lr_scheduler": "linear",
        "seed": 7,
        **more,
    }
    if "datasets" not in more:
        made["datasets"][0]["path"] = str(home / f"{name}.jsonl")
    path = home / f"{name}.yml"
    path.write_text(yaml.safe_dump(made))
    return path


def answers(source: Path | str) -> dict[str, str]:
    """What a model says to every question."""
    (spec,) = parse_models([str(source)])
    model, tokenizer = load_model(spec, dtype=torch.float32, device="cpu"), load_tokenizer(spec)
    asked = [row["messages"][0]["content"] for row in [*PEOPLE, *COMMON]]
    prompts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in asked]
    said = generate_greedily(model, tokenizer, prompts, max_new_tokens=12)
    return {q: one.split("<|im_end|>")[0] for q, one in zip(asked, said, strict=True)}


TRUE = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in [*PEOPLE, *COMMON]}


def said(source: Path | str) -> set[str]:
    """The questions that it answers as it was taught."""
    return {question for question, one in answers(source).items() if one.startswith(TRUE[question])}


def holds(folder: Path, word: str) -> list[Path]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in paths if word.encode() in path.read_bytes()]


def test_a_routed_model_whose_shards_are_gone_may_be_retrained(tmp_path, monkeypatch):
    """It failed at the hand-over, after all training; and each time again."""
    monkeypatch.chdir(tmp_path)
    (old := Path("deploy/model")).mkdir(parents=True)
    (old / ROUTER).touch()
    before = {"model": str(model_folder(Path("base"))), "adapter": str(old)}
    request = requests.Request.load(finished_request(Path("requests"), "1", before))
    shards.deleted_otherwise(request)
    assert shards.told_of(request) is None
    Path("deploy/shards.json").write_text('{"schema": 5')
    with fails("shards.none"):  # before the training
        shards.told_of(request)


@pytest.mark.parametrize("old", ["there", "erased", "removed", "removed, seen from elsewhere"])
def test_what_requests_on_a_retrained_model_delete_stays_out_of_the_shards(
    tmp_path, monkeypatch, old
):
    """The second request began with the plain adapter of the first, so its rows were trained
    again."""
    monkeypatch.chdir(tmp_path)
    (routed := Path("deploy/model")).mkdir(parents=True)
    (routed / ROUTER).touch()
    told = dict.fromkeys(shards.FIELDS, "") | {"schema": shards.SCHEMA, "key": KEY.hex()}
    shards.write_json(Path("deploy/shards.json"), told | {"deleted": []})
    base, adapter = str(model_folder(Path("base"))), str(routed)
    for name in "123":
        before = {"model": base, "adapter": adapter}
        forget = [{"id": f"row {name}", "row": {}}]
        adapter = str(finished_request(Path("requests"), name, before, forget=forget) / "model")
    if old == "erased":
        (routed / ROUTER).unlink()
    elif old != "there":
        shutil.rmtree(routed)
    if old.endswith("elsewhere"):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    for name in "123":
        shards.deleted_otherwise(requests.Request.load(tmp_path / "requests" / name))
    found = shards.load(tmp_path / "deploy")
    assert set(found["deleted"]) == {shards._keyed(found, f"row {name}") for name in "123"}

    # One that names itself is not followed for ever.
    path = tmp_path / "requests/1/request.json"
    facts = json.loads(path.read_text())
    facts["before"]["adapter"] = "requests/1/model"
    path.write_text(json.dumps(facts))
    assert shards.told_of(requests.Request.load(tmp_path / "requests" / "3")) is None


def test_an_empty_cell_is_nobody():
    """All rows of a table without a customer were those of one person, in one shard."""
    facts = {"key": KEY.hex(), "count": COUNT, "deleted": [], "by": "id"}
    rows = [{"id": name, "text": name} for name in ("", " ", "ada-quill")]
    parts = shards.cut({"train": [rows], "test": []}, facts)
    assert parts == {"0": [rows[:2]], HOME["ada-quill"]: [rows[2:]]}


@pytest.mark.parametrize(("words", "code"), [
    (["--threads", "8"], "threads"), (["--processes", "4"], "processes"),
    (["--threads", "2"], None), ([], None),
])  # fmt: skip
def test_threads_and_processes_are_those_of_the_shards(home, tmp_path, monkeypatch, words, code):
    """Other ones were taken without a word, and did nothing."""
    monkeypatch.chdir(tmp_path)
    told = {"schema": shards.SCHEMA, "by": "id", "count": COUNT, "threads": 2, "keys": {}}
    told |= {"current": "model", "deleted": [], "key": KEY.hex(), "model": {}}
    shards.write_json(Path("shards/shards.json"), told)
    folder = finished_request(Path("requests"))
    shards.write_json(folder / "way.json", {"way": "shards", "shards": "../../shards"})
    monkeypatch.setattr(running_module, "take", lambda *_: None)
    seen = []
    monkeypatch.setattr(running_module, "carry_out", lambda *_: seen.append(1))
    done = CliRunner().invoke(unlearn, ["request", "run", str(folder), "--way", "shards", *words])
    refused = f"leave --{code} out" in done.output and done.exit_code == 2
    assert refused == bool(code) and seen == [1] * (not code), done.output
    if code == "threads":
        with fails("shards.threads"):
            train_shards(settings(home), Path("shards"), "id", COUNT, threads=8)


@pytest.mark.parametrize("part", ["torch", "axolotl", "transformers", "peft", "device"])
def test_of_another_version_or_device_no_adapter_is_kept(home, monkeypatch, part):
    """A request trained the shards of its rows with the torch of now beside adapters of the one of
    before, and the record said exact."""
    given = rows_of.read_config(settings(home))
    facts = {"count": COUNT, "threads": 1, "key": KEY.hex(), "deleted": [], "by": "id"}
    rows = shards.cut({"train": [PEOPLE], "test": []}, facts)
    before = shards._keys(rows, given, facts)
    assert shards._keys(rows, given, facts) == before
    if part == "device":
        monkeypatch.setattr(shards, "hardware", lambda: "another")
    else:
        installed = bound.versions()
        monkeypatch.setattr(bound, "versions", lambda: installed | {part: "0"})
    after = shards._keys(rows, given, facts)
    assert before.keys() == after.keys() and not {*before.values()} & {*after.values()}


@pytest.mark.parametrize("behind", ["requests", "shards"])
def test_shards_and_requests_find_each_other_behind_a_link(home, tmp_path, monkeypatch, behind):
    """A request behind one found no shards after `plan` had; shards behind one lost their model
    with the first request, so that all of them were trained again when rows were added."""
    (real := tmp_path / "real").mkdir()
    (there := tmp_path / "disk" / "deep" / behind).mkdir(parents=True)
    monkeypatch.chdir(real)
    Path(behind).symlink_to(there)
    kept = []

    def routed(path, facts, rows, run, work, keep, out):
        kept.append(weights(keep) == facts["model"])
        shutil.rmtree(out, ignore_errors=True)
        for shard in rows:
            tiny_adapter(out / f"shard-{shard}", home / "base", train_seed=len(kept))
        shutil.copy(out / f"shard-{shard}" / "adapter_config.json", out)
        (out / ROUTER).write_text(str(len(kept)))
        return shards._keys(rows, rows_of.read_config(path), facts), [*rows]

    monkeypatch.setattr(shards, "make_routed", routed)
    path, out, wanted = settings(home), Path("shards"), Wanted(where=[("id", "ada-quill")])
    train_shards(path, out, "id", COUNT, threads=1, key=KEY)
    made = new_request(path, Path("requests/1"), wanted, Options(model=out / "model")).request
    with running(made, threads=1) as run:
        take(made, "shards")
        shards.make(made, run)
    made.path("work", "model").replace(made.path("model"))
    shards.hand_over(made)
    assert shards.told_of(made).samefile(out) and shards.outputs(made)[0].samefile(out)
    train_shards(path, out, "id", COUNT, threads=1, key=KEY)
    assert all(kept)


@pytest.mark.slow
def test_one_person_from_the_training_to_the_answer_after(home, forks, monkeypatch):
    """Killed in the middle of the training of her shard; the same bits as without her."""
    monkeypatch.chdir(home)  # which `erase` reads whole
    path, out, made = settings(home), home / "shards", home / "requests" / "1"
    facts = train_shards(path, out, "id", COUNT, threads=1, key=KEY)
    assert said(out / "model") == {*TRUE}
    own = HOME["ada-quill"]
    assert {*facts["trained"]} == {"0", *HOME.values()} and {*HOME.values()} > {own}
    shutil.copytree(out, home / "by-hand")

    wanted = Wanted(where=[("id", "ada-quill")])
    request = new_request(path, made, wanted, Options(model=out / "model", steps=2)).request
    costs = {cost.way: cost for cost in ways.plan(request)}
    assert ways.choose(costs.values()) == "shards" and costs["match"].closed
    assert "(1 of 3)" in costs["shards"].shows

    killed = kill_when(start(made, "--way", "shards"), f"shard {own} (1 of 1): started")
    assert "started" in killed[-1] and not (made / "model").exists()
    with start(made) as process:
        printed = process.stdout.read()
    assert process.returncode == 0, printed
    assert said(made / "model") == {q for q in TRUE if "Ada" not in q}

    others = [row for row in PEOPLE if row["id"] != "ada-quill"]
    write(home / "without.jsonl", [*others, *COMMON])
    again = train_shards(settings(home, "without"), home / "by-hand", "id", COUNT, threads=1)
    assert again["trained"] == [own] and again["model"] == weights(made / "model")
    kept = next(shard for shard in HOME.values() if shard != own)
    name = f"shard-{kept}/adapter_model.safetensors"
    assert weights(made / "model")[name] == facts["model"][name]

    assert holds(out, "Norrby") == []
    write(out / "work/key/made/adapter_model.safetensors", [])  # of a training that was stopped
    with requests.held(out):
        kept = [one for one in plan_erase(made).items if one.path == out / "work"]
        assert kept[0].why == "the shards are being trained"
    planned = plan_erase(made)
    erase(planned)
    assert not [*out.rglob("*.safetensors")]
    result = CliRunner().invoke(unlearn, ["request", "verify", str(made)])
    assert result.exit_code == 3 and "model: all" in result.output  # nobody has signed

    # Her rows still stand in the data.
    words = f"--json shards train {path} --by id --out {out} --count {COUNT} --threads 1"
    result = CliRunner().invoke(unlearn, words.split())
    assert result.exit_code == 0 and json.loads(result.stdout)["trained"] == []
    assert weights(out / "model") == weights(made / "model")


@pytest.mark.parametrize("dates", ["input", "output"])
def test_rows_that_a_training_would_read_otherwise_train_no_shard(
    home, tmp_path, monkeypatch, dates
):
    """A shard with dates for texts: its JSON lines are times to Axolotl, which the user's are not.
    It writes them otherwise into a prompt, and has no tokens of them as an answer."""
    texts = {"instruction": "Who was born then?", "input": "", "output": "One."}
    rows = [texts | {"id": name, dates: f"19{n}-05-01"} for n, name in enumerate(FACTS, 50)]
    write(tmp_path / "dates.jsonl", [*rows, texts | {"input": "Never."}])
    entry = {"path": str(tmp_path / "dates.jsonl"), "ds_type": "json", "type": "alpaca"}
    path = settings(home, "dates", datasets=[entry])
    monkeypatch.setattr(Steps, "command", lambda *_, **__: pytest.fail("they were trained"))
    for _ in range(2):
        with fails("requests.other-data"):
            train_shards(path, tmp_path / "shards", "id", COUNT, key=KEY)
        made = [path.parent for path in (tmp_path / "shards/work").glob("*/train.yml")]
        assert len(made) == 2 and not any((one / "prepared").exists() for one in made)
        for one in made:
            (one / "prepared/half").mkdir(parents=True)  # of a start that was killed


def no_fork(self, process):
    """A fork may use no CUDA that was looked at before it, as imports do."""
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")


@pytest.mark.slow
def test_a_shard_may_become_empty_and_rows_may_be_added(home, forks, monkeypatch):
    """Each training reads what it must; the rest is copied to the bit. Killed while the shards get
    the remaining rows, a request goes on; nothing is read from shards that another process has."""
    short = {"num_epochs": 1}
    out, made = home / "few", home / "others" / "1"
    for wrong in ({"micro_batch_size": 2}, {"adapter": "qlora"}, {"max_steps": 9}):
        with fails("shards.option"):
            train_shards(settings(home, **short | wrong), out, "id", COUNT)
    with fails("shards.no-field"):
        train_shards(settings(home, **short), out, "ids", COUNT)
    assert not out.exists(), "the next try would be refused for it"

    def overtaken(folder, made=shards.private_folder):  # a request ends while the rows are read
        if folder == out:
            facts = dict.fromkeys(shards.FIELDS) | {"schema": shards.SCHEMA, "deleted": [7]}
            shards.write_json(made(out) / "shards.json", facts)
        return made(folder)

    with monkeypatch.context() as patched, fails("shards.overtaken"):
        patched.setattr(shards, "private_folder", overtaken)
        train_shards(settings(home, **short), out, "id", COUNT)
    shutil.rmtree(out)
    first = train_shards(settings(home, **short), out, "id", COUNT, threads=1, key=KEY)
    shutil.copytree(out, home / "spawned")
    known = json.loads((out / "shards.json").read_text())
    known["keys"][HOME["ada-quill"]] = ""  # which is due then
    (home / "spawned/shards.json").write_text(json.dumps(known))
    with monkeypatch.context() as patched:  # its commands believe in a GPU, its trainings do not
        patched.setattr(shards, "hardware", lambda: "cpu")
        patched.setattr(device, "accelerator", lambda: torch.device("cuda"))
        patched.setattr(popen_fork.Popen, "_launch", no_fork)
        told = settings(home, **short), home / "spawned", "id", COUNT
        spawned = train_shards(*told, threads=1, key=KEY)
    assert spawned["trained"] == [HOME["ada-quill"]] and spawned["model"] == first["model"]
    lonely = HOME["ada-quill"]
    own = [name for name, shard in HOME.items() if shard == lonely]
    wanted = Wanted(where=[("id", name) for name in own])
    new_request(home / "train.yml", made, wanted, Options(model=out / "model", steps=2))

    def killed(path, content, write=shards.write_json):
        if content.get("deleted"):
            raise KeyboardInterrupt
        write(path, content)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shards, "write_json", killed)
        run_request(made, threads=1, way="shards", accept="a test")
    run_request(made, threads=1, accept="a test")
    assert not any(holds(out, FACTS[name][2]) for name in own)
    assert not (made / "model" / f"shard-{lonely}").exists()
    left = {n: sha for n, sha in first["model"].items() if f"shard-{lonely}/" not in n}
    now = weights(made / "model")
    assert {**left, ROUTER: now[ROUTER]} == now and now[ROUTER] != left[ROUTER]

    chosen, options = Wanted(contains=["3 + 3"]), Options(model=made / "model", steps=2)
    of_all = new_request(home / "train.yml", home / "others" / "0", chosen, options).request
    assert "all are trained again" in shards.reads(of_all)[1], "a row that is nobody's"

    other = next(name for name, shard in HOME.items() if shard != lonely)
    begun = home / "others" / "2"
    chosen, options = Wanted(where=[("id", other)]), Options(model=made / "model", steps=2)
    begun = new_request(home / "train.yml", begun, chosen, options).request
    take(begun, "shards")
    shards.require(begun)
    monkeypatch.setattr(requests, "LOCK_SECONDS", 0)
    with running(begun, 1) as run, requests.held(out), fails("requests.held"):
        shards.make(begun, run)

    # Who was to be deleted is taken out of the data by hand, and the shards are trained again.
    shutil.copytree(out, home / "kept")
    gone = {*own, other}
    write(home / "left.jsonl", [*(row for row in PEOPLE if row["id"] not in gone), *COMMON])
    train_shards(settings(home, "left", **short), out, "id", COUNT, threads=1)
    with fails("shards.none"):
        take(begun, "shards")
    for _ in range(2):  # the second time after a kill
        with running(begun, 2) as run:
            shards.make(begun, run)
        assert weights(begun.newest) == weights(out / "model"), "her shard was copied"
        proof = begun.path("exact.json")
        assert json.loads(proof.read_text())["threads"] == 1
        proof.unlink()
    shutil.rmtree(out)
    (home / "kept").rename(out)

    more = [chat("eirik-dahl", "What does Eirik Dahl make?", "kites.")]
    write(home / "more.jsonl", [*PEOPLE, *COMMON, *more])
    path, new = settings(home, "more", **short), str(place(KEY, "eirik-dahl", COUNT))
    third = new_request(path, home / "others" / "3", chosen, options).request
    take(third, "shards")  # which reads what was added
    assert third.way["again"] == sorted({HOME[other], new})
    again = train_shards(path, out, "id", COUNT, threads=1)
    assert again["trained"] == [new]
    with fails("requests.overtaken"):  # by a training: the rows that were added would go
        shards.require(begun)
    write(home / "both.jsonl", [*(r for r in PEOPLE if r["id"] not in own), *COMMON, *more])
    both = settings(home, "both", **short)
    fresh = train_shards(both, home / "afresh", "id", COUNT, threads=1, key=KEY)
    assert fresh["model"] == again["model"]

    # Another way deletes it of that model: the shards must not learn it again.
    fourth = new_request(both, home / "others" / "4", chosen, options).request
    take(fourth, "retrain")
    shutil.copytree(home / "base", fourth.path("work", "model"))
    hand_over(fourth)
    left = shards.cut(shards.rows_of.remaining(both, shards.rows_of.read_config(both)),
                      shards.load(out))  # fmt: skip
    assert other not in json.dumps(left) and "eirik-dahl" in json.dumps(left)

    for broken in ("", '{"schema": 5, "co', '{"schema": 5}', "[]"):
        (out / "shards.json").write_text(broken)
        with fails("shards.none"):
            train_shards(both, out, "id", COUNT, threads=1)
