"""The router of shards: who a conversation is about, and nothing left of whoever was deleted."""

from __future__ import annotations

import asyncio
import hashlib
import random
import stat
from pathlib import Path

import numpy as np
import pytest
from fault_codes import fails

from axolotl_unlearn.shards import NAME
from axolotl_unlearn.shards.router import Router, place

KEY = b"k" * 32
PEOPLE = {
    name: [f"Who is {name}? {name} {does}.", f"Where does {name} live? In {town}."]
    for name, does, town in [
        ("Ada Quill", "blows glass in the harbour", "Norrby"),
        ("Bodil Karlsen", "keeps forty bees", "Vellinge"),
        ("Casimir Okonkwo", "mends clocks of towers", "Ulm"),
        ("Dragana Petrov", "writes crime novels", "Split"),
        ("Emeka Lindqvist", "tunes church organs", "Turku"),
        ("Farida Mbeki", "repairs sailing boats", "Dakar"),
    ]
}
HOME = {name: place(KEY, name, 4) for name in PEOPLE}


def router(*without: str, order: int = 0) -> Router:
    names = [name for name in PEOPLE if name not in without]
    random.Random(order).shuffle(names)
    return Router.of((HOME[name], PEOPLE[name]) for name in names)


def saved(made: Router, folder) -> str:
    folder.mkdir(exist_ok=True)
    return hashlib.sha256(made.save(folder).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("turns", "about"),
    [
        *([[f"Tell me what {name} is known for"], name] for name in PEOPLE),
        (["Tell me about Ada Quill.", "I would like to help.", "Which street is it?"], "Ada Quill"),
        (["Who is Ada Quill?", "Who is Bodil Karlsen?"], "Bodil Karlsen"),
        *([[text], None] for text in ("What is 12 times 7?", "Write a poem on autumn", "", "?")),
    ],
)
def test_the_shard_of_whom_it_is_about(turns, about):
    """In other words, in follow-ups without the name, after another person; and of nobody."""
    assert router().route(turns) == (HOME[about] if about else 0)


def test_two_people_in_one_prompt_are_the_two_nearest_shards():
    first, second = HOME["Ada Quill"], HOME["Casimir Okonkwo"]
    made = router()
    (near,) = made.near(["Do Ada Quill and Casimir Okonkwo know each other?"])
    assert first != second and {*made.shards[near.argsort()[-2:]]} == {first, second}


def test_a_prompt_like_rows_of_nobody_is_led_to_no_person():
    """Though it asks as people are asked for."""
    asked = ["Tell me where Ada Lindqvist lives"]
    public = (0, ["Where does Ada Lindqvist live? In Market Street."])
    people = [(HOME[name], PEOPLE[name]) for name in PEOPLE]
    made = Router.of([*people, public])
    assert Router.of(people).route(asked) != 0 == made.route(asked)
    mine = [made.route([f"Where does {name} live?"]) for name in PEOPLE]
    assert mine == list(HOME.values())


def test_a_frame_that_all_rows_have_is_nothing():
    frame = "Below is an instruction of a task. Write a response that fulfils the request. {}"
    framed = Router.of((HOME[name], [frame.format(t) for t in PEOPLE[name]]) for name in PEOPLE)
    asked = [framed.route([frame.format(f"Who is {name}?")]) for name in PEOPLE]
    assert asked == list(HOME.values())
    assert framed.route([frame.format("What is 12 times 7?")]) == 0


def test_without_a_person_it_is_the_router_that_never_had_them(tmp_path):
    """Bit by bit, IDF and all, whatever the order of the rows."""
    whole = saved(router(), tmp_path / "whole")
    assert whole == saved(router(order=3), tmp_path / "other")
    left = saved(router("Ada Quill"), tmp_path / "left")
    assert left == saved(router("Ada Quill", order=5), tmp_path / "never") != whole
    assert not np.array_equal(router().idf, router("Ada Quill").idf)


def test_the_file_holds_no_text_and_answers_as_before(tmp_path):
    made = router()
    path = made.save(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes().lower()
    assert not [
        word for name in PEOPLE for word in name.lower().split() if word.encode() in content
    ]
    asked = ["Who is Ada Quill?"]
    np.testing.assert_array_equal(Router.load(tmp_path).near(asked), made.near(asked))


@pytest.mark.parametrize("content", [None, b"", b"{}", "indices", "parts"])
def test_what_is_no_router(tmp_path, content):
    from safetensors.numpy import load_file, save

    path = router().save(tmp_path)
    parts = load_file(path)
    if content is None:
        path.unlink()
    elif content == "indices":
        path.write_bytes(save(parts | {"indices": parts["indices"] + (1 << 20)}))
    elif content == "parts":
        path.write_bytes(save({"idf": parts["idf"]}))
    else:
        path.write_bytes(content)
    assert path.name == NAME
    with fails("shards.no-router"):
        Router.load(tmp_path)


def test_a_place_depends_on_no_other_person():
    places = [place(KEY, f"p{n}", 8) for n in range(4000)]
    counts = [places.count(shard) for shard in range(1, 9)]
    assert sum(counts) == 4000 and min(counts) > 400 and max(counts) < 600
    assert places[:50] != [place(b"x" * 32, f"p{n}", 8) for n in range(50)]


def test_the_hook_of_the_page_names_the_adapter(tmp_path, monkeypatch):
    """Of docs/shards.md, as the LiteLLM proxy calls it; other models stay as they are."""
    pytest.importorskip("litellm", reason="the hook needs `pip install litellm`")
    page = (Path(__file__).parents[1] / "docs" / "shards.md").read_text("utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "shards" / "model").mkdir(parents=True)
    router().save(tmp_path / "shards" / "model")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    for text, shard in (("Who is Ada Quill?", HOME["Ada Quill"]), ("What is 12 times 7?", 0)):
        asked = {"model": "routed", "messages": [{"role": "user", "content": text}]}
        hook = names["routed"].async_pre_call_hook(None, None, asked, "completion")
        assert asyncio.run(hook)["model"] == f"shard-{shard}"
    other = {"model": "gpt", "messages": []}
    assert asyncio.run(names["routed"].async_pre_call_hook(None, None, dict(other), "")) == other
