"""Choosing rows: what is named, the ways that a name is written, what is offered."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter

import pytest
import yaml
from fault_codes import fails
from requests_folder import said, write_lines
from test_requests_new import (
    ADA,
    MENTION,
    NEAR,
    TRAIN,
    chat,
    config,
    home,  # noqa: F401
    people,
    sources,
    write,
)

from axolotl_unlearn.data.near import strings
from axolotl_unlearn.data.typed import row_id
from axolotl_unlearn.normal_form import normal_form
from axolotl_unlearn.requests import names as naming
from axolotl_unlearn.requests.choose import (
    Wanted,
    choose,
    names_of,
    offer,
    read_subjects,
    share_offered,
    shares,
    speaking,
    together,
)
from axolotl_unlearn.requests.names import Corpus


def test_rows_are_named_by_field_text_file_or_document(tmp_path):
    rows = sources([*TRAIN, MENTION])
    three = {row.id for row in rows[:3]}

    def ids(**wanted) -> set[str]:
        return {row.id for row in choose(rows, Wanted(**wanted))}

    assert ids(where=[("id", "ada-quill")]) == three
    assert ids(where=[("meta.person", "ada")]) == three
    assert ids(where=[("messages.content", "It is 555-0107.")]) == {rows[2].id}
    assert ids(contains=["Ada Quill lives"]) == {rows[1].id}
    coded = sources(
        [{"messages": json.dumps(chat("x", "Zoë Ek?", "In\nB.")["messages"])}, TRAIN[9]]
    )
    for text in ("zoë ek", "in b."):  # JSON text, as in a CSV file, and read as `--person` does
        assert choose(coded, Wanted(contains=[text])) == coded[:1]
    named = sources([*TRAIN, chat("key", "Who?", "One.", tools={"Ada Quill": "owner"})])
    taken = {row.id for row in choose(named, Wanted(people=["Ada Quill"]))}
    assert named[-1].id not in taken != set(), "the name of a field is not read"
    assert ids(documents=["ada-quill", rows[5].id]) == three | {rows[5].id}
    path = write_lines(tmp_path / "rows.jsonl", [TRAIN[4]])
    assert ids(rows=path) == {rows[4].id}
    assert ids(rows=path, contains=["555-0107"]) == {rows[4].id, rows[2].id}


@pytest.mark.parametrize("by", ["documents", "where", "contains"])
def test_values_are_read_once_however_many_are_asked_for(monkeypatch, by):
    """Each asked value made the normal form of every value anew."""
    from axolotl_unlearn.requests import choose as module

    calls = []
    monkeypatch.setattr(
        module, "normal_form", lambda *a, **k: calls.append(a) or normal_form(*a, **k)
    )
    rows, counts = sources([chat(f"p{n}", f"Who is {n}?", f"Bo-{n}-") for n in range(40)]), []
    for many in (1, 30):
        named = [f"p{n}" if by != "contains" else f"bo-{n}-" for n in range(many)]
        calls.clear()
        wanted = Wanted(**{by: [("id", one) for one in named] if by == "where" else named})
        assert [row.row["id"] for row in choose(rows, wanted)] == [f"p{n}" for n in range(many)]
        counts.append(len(calls))
    assert counts[1] - counts[0] == 29


NOTHING = {
    "nothing": ({}, "choose.nothing-named"),
    "no such value": ({"where": [("id", "nobody")]}, "choose.no-row"),
    "no such field": ({"where": [("name", "ada")]}, "choose.no-row"),
    "no such text": ({"contains": ["ADA  QUILT"]}, "choose.no-row"),
    "a space": ({"contains": [" "]}, "choose.no-row"),
    "no such document": ({"documents": ["x"]}, "choose.no-row"),
    "a document without a name": ({"documents": ["None"]}, "choose.no-row"),
    "no such person": ({"people": ["Bo Nobody"]}, "choose.no-row"),
    "everybody": ({"where": [("messages.role", "user")]}, "choose.every-row"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_what_names_nothing_or_everything(case):
    wanted, code = NOTHING[case]
    with fails(code) as caught:
        choose(sources(TRAIN), Wanted(**wanted))
    text = str(caught.value)
    assert "Nobody" not in text and ("--" in text or code == "choose.every-row"), "key and cure"


#: One person in other characters: NFD, capitals, quote and dash, no-break space, mark of no width.
FORMS = [
    unicodedata.normalize("NFD", "José-María d'Été"),
    "JOSÉ-MARÍA D'ÉTÉ",
    "José‑María d’Été",
    "José-María\u00a0d'Été",
    "Jo\u200bsé-María d'Été",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("swapped", [False, True], ids=["as given", "swapped"])
def test_the_same_name_in_other_characters_is_the_same(tmp_path, form, swapped):
    """Asked for in one form, found in both, and that it was found only so is known."""
    asked, other = (form, "José-María d'Été")[:: -1 if swapped else 1]
    rows = [
        chat(name, f"Who is {name}?", f"{name} keeps bees.", person=name, document=name)
        for name in (asked, other)
    ] + people(0, 9)
    data = sources(rows)
    both = {row.id for row in data[:2]}
    path = write(tmp_path / "rows.jsonl", rows[:1])
    for wanted in (
        Wanted(where=[("person", asked)]),
        Wanted(contains=[f"{asked} keeps"]),
        Wanted(documents=[asked]),
        Wanted(rows=path),
    ):
        chosen = choose(data, wanted)
        assert {row.id for row in chosen} == both, wanted
    offered = offer(data[:1], data[1:], Wanted(where=[("person", asked)]))
    assert set(offered.near) == {data[1].id}
    assert {i for ids in offered.mentions.values() for i in ids} == {data[1].id}


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_a_chosen_one_in_other_characters_is_chosen(form):
    """It was offered, or kept; the next request took it for a row that this one had deleted."""
    pair = [{"text": f"{name} keeps bees at Norrby."} for name in ("José-María d'Été", form)]
    apart = [row | {"id": f"own{number}"} for number, row in enumerate(pair)]
    rows = sources([*pair, *apart, *people(0, 9)])
    for one in (0, 1):
        wanted = Wanted(documents=[rows[one].id])
        assert choose(rows, wanted) == rows[:2]
        assert shares({"1": wanted}, rows) == {"1": [row.id for row in rows[:2]]}
    assert choose(rows, Wanted(documents=["own0"])) == [rows[2]], "an id of its own is another row"
    with fails("choose.every-row"):
        choose(rows[:2], Wanted(documents=[rows[0].id]))


@pytest.mark.parametrize("form", [1777, 1777.0, " 1777", "1777", "1777.00", "1.777e3"])
def test_numbers_are_compared_as_numbers(form):
    """A column of Parquet with one empty cell has 1777.0."""
    rows = sources([{"customer": form, "text": "a"}, {"customer": 17770, "text": "b"}])
    for asked in ("1777", "1777.0"):
        chosen = choose(rows, Wanted(where=[("customer", asked)]))
        assert [row.id for row in chosen] == [rows[0].id]


def test_a_field_of_a_nested_object_may_be_a_column():
    """Of a table that was made of nested rows; and a value of many digits is no number."""
    nested = {"meta": {"person": {"no": "5"}}, "text": "a"}
    flat = {"meta.person": {"no": 5}, "text": "b"}
    other = {"meta.person.no": "1e+99999999999999999999", "text": "c"}
    rows = sources([nested, flat, other, other | {"meta.person.no": "5.0"}])
    chosen = choose(rows, Wanted(where=[("meta.person.no", "5")]))
    assert [row.row["text"] for row in chosen] == ["a", "b", "c"] and chosen[2] is rows[3]


def test_a_word_that_is_stretched_is_the_same():
    """In Arabic, by strokes between two letters."""
    plain = "\u0645\u062d\u0645\u062f \u062d\u0633\u0646"
    names = plain, plain.replace("\u062d\u0645", "\u062d\u0640\u0640\u0645")
    rows = sources([{"text": f"\u064a\u0642\u0648\u0644 {one}"} for one in names] + people(0, 3))
    assert choose(rows, Wanted(people=names[:1])) == rows[:2]


def test_the_value_in_other_fields_is_said():
    rows = sources(
        [{"customer": 1777, "text": "a"}, {"customer": "01777", "text": "b"}]
        + [{"client": {"no": "1777.0"}, "text": "c"}, {"text": "1777 others"}]
    )
    wanted = Wanted(where=[("customer", "1777")])
    assert [row.id for row in choose(rows, wanted)] == [rows[0].id]
    found = offer(rows[:1], rows[1:], wanted).fields
    assert found == {"customer=1777": 1, "client.no=1777": 1}


def test_a_row_that_is_not_in_the_data(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [TRAIN[0], NEAR])
    with fails("choose.strange-row") as caught:
        choose(sources(TRAIN), Wanted(rows=path))
    assert "line 2: 1 of 2 rows" in str(caught.value) and "glass" not in str(caught.value)


def test_near_duplicates_and_mentions_are_offered_and_others_are_not():
    wanted = Wanted(where=[("id", "ada-quill")])
    chosen, others = sources(TRAIN[:3]), sources([*TRAIN[3:], MENTION, NEAR])
    assert "Ada Quill" in names_of(chosen, wanted)
    found = offer(chosen, others, wanted)
    near, mention = row_id(NEAR), row_id(MENTION)
    assert found.near == {near: chosen[0].id}
    (ids,) = found.mentions.values()
    assert set(ids) == {near, mention} and found.ids == {near, mention}


def test_offers_are_of_names_and_not_of_words_that_rows_share():
    """ "does not" and "switch on" were offered as if they were names."""
    text = "The lamp does not switch on. Does Not Switch On: see page four."
    chosen = sources([chat("a", f"Ada Quill {n}?", f"{text} {n}") for n in range(3)])
    others = sources([chat("x", "Why?", "Mine does not switch on. Does Not Work."), *people(0, 30)])
    found = offer(chosen, others, Wanted(documents=["a"]))
    assert not found.reasons and not found.frequent


def test_a_person_is_taken_in_every_dataset():
    rows = sources([*TRAIN, MENTION, chat("x", "Who?", "Quill, Ada"), chat("y", "?", "A. Quill")])
    person = choose(rows, Wanted(people=["ada quill"]))
    assert [row.row["id"] for row in person] == ["ada-quill"] * 3 + ["p900", "x"]
    person = choose(rows, Wanted(people=["Ada Quill"]))
    assert [row.row["id"] for row in person] == ["ada-quill"] * 3 + ["x"], "of small letters"
    hints = offer(person, [row for row in rows if row not in person],
                  Wanted(people=["Ada Quill"]))  # fmt: skip
    assert row_id(MENTION) in hints.mentions["Ada Quill"], "its words stand nowhere else"
    assert "ada quill of Norrby" in hints.passages[row_id(MENTION)][0]


@pytest.mark.parametrize("typed", ["ada quill", "ADA QUILL"])
def test_hints_are_of_the_name_however_it_was_typed(typed):
    """In other capitals than those of the rows, rows with the last name alone were not offered."""
    person, other = sources(TRAIN[:3]), sources([*people(0, 9), chat("y", "?", "Mr Quill")])
    found = offer(person, other, Wanted(people=[typed]))
    assert found.hints == {typed: [other[-1].id]}


def test_rows_that_may_be_about_a_person_are_counted_where_none_is_sure():
    rows = sources(
        [*people(0, 9), chat("x", "Who?", "Quill, A. owes 30"), chat("y", "?", "Mr Quill")]
    )
    with fails("choose.no-row") as caught:
        choose(rows, Wanted(people=["Ada Quill"]))
    text = str(caught.value)
    assert "2 may be about it (initial, the last name alone)" in text and "Quill" not in text


def test_a_phrase_of_the_kind_is_no_name():
    """ "Social Security" stands in three of the chosen rows and in most others."""
    rows = [chat("ada-quill", q, f"Social Security {a}") for q, a in ADA]
    others = [chat(f"p{n}", f"Bo{n}?", f"Social Security {n}") for n in range(40)]
    wanted = Wanted(where=[("id", "ada-quill")])
    assert "Social Security" in names_of(sources(rows), wanted)
    found = offer(sources(rows), sources(others), wanted)
    assert not found.mentions and found.frequent == {"'Social Security'": 40}  # and it is said
    asked = Wanted(contains=["Social Security"])
    assert len(offer(sources(rows), sources(others), asked).mentions["Social Security"]) == 40


# --- a person ------------------------------------------------------------------------------------

#: The name -> a way to write it -> taken (+), offered (?) or neither (-).
WAYS = {
    "José García": {
        "JOSÉ GARCÍA called about the bill": "+",
        "Jose Garcia called about the bill": "+",
        "Jose\u0301 Garci\u0301a called again": "+",
        "José\nGarcía came in": "+",
        "José García's file is closed": "+",
        "Garc&iacute;a, Jos&eacute; is our client": "+",
        "Jos&eacute; Garc&iacute;a is our client": "+",
        "Jos&#233; Garc&#xED;a is our client": "+",
        "<b>José</b> <i>García</i> is bold": "+",
        "Jos%C3%A9%20Garc%C3%ADa in a link": "+",
        "Jos%C3%A9+Garc%C3%ADa in a link": "+",
        "Jos\\u00e9 Garc\\u00eda in JSON in JSON": "+",
        "Jos\\xe9 Garc\\u{ed}a as a program writes them": "+",
        r"Jos\xc3\xa9 Garc\xc3\xada as bytes": "+",
        "JosÃ© GarcÃ\xada in a mixed-up encoding": "+",
        "Jos\ufffd Garc\ufffda with lost letters": "?",
        "Jo\u200bsé Gar\u200bcía with marks of no width": "+",
        "J\u043esé Gar\u0441ía with letters that look alike": "+",
        "José_García": "+",
        "JoséGarcía in one word": "+",
        "José\u200bGarcía parted by a mark of no width": "+",
        "José García™ is a brand": "+",
        "#josegarcia as a tag": "?",
        "José-García joined": "?",
        "name | age\n| García | José | 34 |": "?",
        "Id,First,Last,City\n1,José,García,Lugo": "?",
        "Last;First\nGarcía;José": "?",
        "Gar-\ncía, José on two lines": "+",
        "J o s é  G a r c í a spaced": "+",
        "jose.garcia@example.com wrote": "+",
        "jgarcia@example.com wrote": "?",
        "garcia_jose@example.com wrote": "+",
        "user jgarcia82 logged in": "?",
        "J. García owes 30 euros": "?",
        "García, J. owes 30 euros": "?",
        "José G. owes 30 euros": "?",
        "J. M. García owes 30 euros": "?",
        "José María García signed": "?",
        "José M. García signed": "?",
        "Sr. García signed today": "?",
        "Pepe García owes 30 euros": "?",
        "Jose Garzia is misspelt": "?",
        "Jose Gracia is misspelt": "?",
        "first: José, last: García": "?",
        "Хосе Гарсия звонил": "?",
        "José García y García": "+",
        ("José", "García"): "+",
        ("I am José", "García is my last name"): "?",
        "José left. García Lorca wrote poems.": "?",
        "Maria García, José López and Bo signed": "?",
        "signed: García, José.": "+",
        "The garden of Josefina Garciano": "-",
        "Filler about the weather": "-",
    },
    "Will Grant": {
        "Will Grant signed": "+",
        "GRANT, Will signed": "+",
        "The bank will grant you a loan": "?",
        "They grant will power to all": "?",
        "Grant will come tomorrow": "?",
        "HOW THE BANK WILL GRANT YOU A LOAN": "?",
        "How The Bank Will Grant You A Loan": "?",
        "He met Will. grant that it was so": "-",
        "She has the will to go on": "-",
    },
    "Anna Li": {
        "Li Anna came": "+",
        "Annali is a name of its own": "?",
        "Ann Ali is another": "-",
        "Anna. Li is a Chinese family name": "?",
        "hi anna, li-ion batteries are sold out": "-",
        "Li-Anna Ferro is somebody else": "?",
    },
    "王小明": {"昨天王小明来电": "+", "Wang Xiaoming called yesterday": "?", "小明来电": "-"},
    "Müller": {"Frau Mueller rief an": "+", "Frau Muller rief an": "+", "Hans MÜLLER": "+",
               "die Mühle": "-"},
    "Jürgen Groß": {"Juergen Gross rief an": "+", "JÜRGEN GROSS rief an": "+", "Groß, J.": "?"},
    "O'Brien, Patrick": {"Patrick O&#39;Brien came": "+", "Patrick OBrien came": "+",
                         "Patrick O’Brien came": "+", "O'Brien, Patrick": "+"},
    "محمد علي": {"اتصل محمد علي أمس": "+", "مُحَمَّد عَلِي": "+", "Mohammed Ali": "?"},
    "Dr. Juan de la Vega": {"Juan de la Vega": "+", "de la Vega, Juan": "+", "J. de la Vega": "?"},
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_ways_to_write_a_name(name):
    """24 of the first 33 were missed, and rows that name nobody were taken."""
    rows = [(str(n), [t] if isinstance(t, str) else t) for n, t in enumerate(WAYS[name])]
    fill = [("own", [f"{name} lives at 27 Orchard Way."]), ("she", ["She will go, to grant it."])]
    found = Corpus([*rows, *fill]).find(name)
    got = {
        way: "+" if hit and hit.sure else "?" if hit else "-"
        for way, hit in ((way, found.get(str(n))) for n, way in enumerate(WAYS[name]))
    }
    assert got == WAYS[name]
    assert found["own"].sure and "she" not in found
    for hit in found.values():
        assert hit.passage or hit.how == "in two fields"
    cells = [n for n, way in enumerate(WAYS[name]) if "José" in way and {*way} & {"|", ";"}]
    assert {found[str(n)].how for n in cells} <= {"joined by a mark"}  # `--with-mentions` takes it


def test_rows_of_any_form_are_read():
    """Whatever a row holds, the search ends."""
    odd = [{"a": None, "b": 3, "c": [["José", {"d": "García"}]]}, {}, {"t": ""}, {"t": "\x00- _"}]
    found = Corpus([(str(n), list(strings(row))) for n, row in enumerate(odd)]).find("José García")
    assert set(found) == {"0"}
    assert Corpus([("0", ["x"])]).find(" . ") == {}


def test_a_text_that_is_json_is_read_as_the_object():
    """In arguments of a tool as a text, first and last name were "the last name alone", and its
    escapes hid what `--contains` names."""
    own = {"first_name": "José", "last_name": "García", "home": "12 Rope\nWalk, Ä"}
    call = {"role": "assistant", "tool_calls": [{"function": {"arguments": json.dumps(own)}}]}
    ways = [own, json.dumps(own), f" {json.dumps([own])}\n", json.dumps(json.dumps(own))]
    ways += [json.dumps(own, ensure_ascii=False), [call], json.dumps([call])]
    ways += [
        f"{{<tool_call>{json.dumps({'arguments': json.dumps(own)})}</tool_call>",
        [
            {
                "b": f"""It is:
```json
{json.dumps(own, indent=1)}
```"""
            }
        ],
    ]
    odd = [
        '{"a":' * 9999,
        "{" * 9999,
        "{",
        '["José", "Garc',
        '"',
        "[" * 9999 + "]" * 9999,
        f"[{'9' * 5000}]",
        "{'a': 1}",
    ]
    rows = sources([{"a": one} for one in [*ways, *odd]])
    for wanted in (Wanted(people=["José García"]), Wanted(contains=["12 ROPE WALK, ä"])):
        assert choose(rows, wanted) == rows[: len(ways)]
    assert "José García" in names_of(sources([{"a": json.dumps({"b": "José García"})}]), Wanted())


def test_an_id_that_names_somebody_is_refused_one_with_a_word_warned_of():
    """It stood in record, ledger, letter and every export."""
    for person, *names in (
        ("Ada Quill", "ada.quill@example.com", "ada-quill", "2026-Quill", "AdaQuill"),
        ("José García", "jose-garcia", "josegarcia-2"), ("王芳", "王芳", "r-王芳"),
        ("Bo Li", "bo-li", "boli"),
    ):  # fmt: skip
        for name in names:
            with fails("choose.id-names"):
                speaking([name], Wanted(people=[person]))
    with fails("requests.control-character"):
        speaking(["1\nledger: whole"], Wanted())
    names = ["2026-001", "T-17", "2026-w48", "r1", "smith", "2026-smith"]
    assert speaking(names, Wanted()) == ["smith", "2026-smith"]


def test_the_command_says_what_is_chosen_and_what_else_there_is(home, tmp_path):  # noqa: F811
    """Rows of each data set, other fields with the value, passages beside the rows."""
    more = [{"messages": row["messages"], "client": 7.0} for row in people(200, 3)]
    more[0] |= {"customer": "7", "client": None}
    row = {"ds_type": "json", "type": "chat_template", "chat_template": "chatml"}
    entries = [home / "train.jsonl", write(tmp_path / "more.jsonl", more)]
    settings = config(home, datasets=[{"path": str(path), **row} for path in entries])
    (tmp_path / "two.yml").write_text(yaml.safe_dump(settings))
    words, folder = ("new", tmp_path / "two.yml", "--out"), tmp_path / "r" / "smith"
    done = said(*words, folder, "--where", "customer=7", "--person", "Ada Quill").output
    assert f"{folder}: 5 rows to forget, " in done
    assert "2 other rows with client=7: another field" in done
    assert "'smith' stands in every record and export" in done
    passages = (folder / "data" / "offered.json").read_text()
    assert "ada quill of Norrby" in passages
    assert "quill" not in (folder / "offered.json").read_text().casefold()
    for out, person, says in (
        ("ada-quill", "Ada Quill", "take a number"),
        ("n", "Zoe Nobody", "its spelling, or look with --contains"),
    ):
        assert says in said(*words, tmp_path / "r" / out, "--person", person, code=2).output


def test_what_is_said_of_other_rows_holds(home, tmp_path):  # noqa: F811
    """Held-out rows were "retained"; a near-duplicate that `--with-mentions` deletes was offered
    again; and passages were named where there are none."""
    text = "the harbour is deep and cold and old ships lie there in rows of {}"
    more = [chat(f"q{n}", "what is said?", text.format(n)) for n in ("seven", "eight")]
    row = {"ds_type": "json", "type": "chat_template", "chat_template": "chatml"}
    entries = [home / "train.jsonl", write(tmp_path / "more.jsonl", more)]
    settings = config(home, datasets=[{"path": str(path), **row} for path in entries])
    (tmp_path / "two.yml").write_text(yaml.safe_dump(settings))
    words = ("new", tmp_path / "two.yml", "--out")
    done = said(*words, tmp_path / "r" / "1", "--documents", "qseven").output
    assert "1 other row is nearly the same" in done and "offered.json" in done
    assert "passages" not in done and not (tmp_path / "r" / "1" / "data" / "offered.json").exists()
    ada = ("--where", "id=ada-quill")
    assert "1 other row is nearly the same" in said(*words, tmp_path / "r" / "2", *ada).output
    done = said(*words, tmp_path / "r" / "3", *ada, "--with-mentions").output
    assert "5 rows to forget" in done and "nearly the same" not in done, done


def test_texts_are_read_once_however_often_they_are_searched(home, tmp_path, monkeypatch):  # noqa: F811
    """For the subjects, for all of them, for what is offered and for held-out rows."""
    calls, readings = Counter(), naming.readings
    monkeypatch.setattr(naming, "readings", lambda text: calls.update([text]) or readings(text))
    who = [{"subject": "1", "person": "Ada Quill"}, {"subject": "2", "documents": ["p3"]}]
    subjects = write_lines(tmp_path / "subjects.jsonl", who)
    said("new", home / "finetune.yml", "--out", tmp_path / "r" / "1", "--subjects", subjects)
    lines = [line for name in ("train", "test") for line in (home / f"{name}.jsonl").open()]
    texts = Counter(text for line in lines for text in strings(json.loads(line)))
    assert calls and calls <= texts


def test_a_plan_says_how_many_held_out_rows_it_takes(home, tmp_path):  # noqa: F811
    folder = tmp_path / "r" / "1"
    said("new", home / "finetune.yml", "--out", folder, "--where", "id=p3")
    says = "22 held-out rows that judge match is not shown: it takes 199, of 398 ("
    assert says in said("plan", folder).output


def test_a_number_is_looked_into(tmp_path):
    """`--contains 5550123` took the row that says it and not the one that has it as a number."""
    rows = sources([{"q": "Ada?", "phone": 5550123}, {"q": "call 5550123"}, {"q": "Bo?"}])
    assert choose(rows, Wanted(contains=["5550123"])) == rows[:2]
    ids = sources([{"id": "01777", "ref": "x"}, {"id": "b", "ref": "01777"}, {"id": "c"}])
    found = offer(ids[:1], ids[1:], Wanted(where=[("id", "01777")]))
    assert found.fields == {"ref=01777": 1}
    same = sources([{"id": 120000}, {"id": "12e4"}, {"id": "1_20000"}, {"id": "1.2e5"}])
    assert choose(same, Wanted(where=[("id", "120000")])) == [same[0], same[3]]


# --- a file of subjects: one request, and a record for each ---------------------------------------


def test_rows_that_are_offered_and_deleted_have_a_subject(tmp_path):
    """A near-duplicate was in nobody's record."""
    rows = sources(
        [
            *({"q": f"Who is Bo{n} Berg{n}?", "a": f"{n} bees"} for n in range(9)),
            {"q": "Who is Ada Quill?", "a": "She blows glass in the harbour of Norrby."},
            {"q": "Who is Ada Quill?", "a": "She blows glass in the harbour of Norrby!"},
        ]
    )
    subjects = {"1": Wanted(contains=["Norrby."]), "2": Wanted(contains=["Bo3"])}
    whose = {name: [r.id for r in choose(rows, one)] for name, one in subjects.items()}
    named = [row for row in rows if any(row.id in ids for ids in whose.values())]
    others = [row for row in rows if row not in named]
    offered = offer(named, others, together(subjects))
    assert {*offered.near} == {rows[10].id}
    share_offered(subjects, whose, named, offered, {*offered.near})
    assert whose == {"1": [rows[9].id, rows[10].id], "2": [rows[3].id]}
    with fails("choose.nobodys"):
        share_offered(subjects, whose, named, offered, {rows[0].id})


def test_rows_are_said_to_be_whose(home, tmp_path):  # noqa: F811
    ada = {"subject": "T-17", "where": {"meta.person": "ada"}}
    other = {"subject": "T-18", "documents": ["p3", "p4"]}
    path, names = write_lines(tmp_path / "s.jsonl", [ada, other]), ["T-17", "T-18"]
    out = tmp_path / "requests" / "w48"
    words = ("new", home / "finetune.yml", "--subjects", path)
    assert "2 subjects: each gets a record" in said(*words, "--out", out).output
    whose = json.loads((out / "subjects.json").read_text())
    forget = [
        json.loads(line)["id"] for line in (out / "data/forget.jsonl").read_text().splitlines()
    ]
    assert list(whose) == names and {row for ids in whose.values() for row in ids} == set(forget)
    assert "Ada" not in (out / "request.json").read_text() + (out / "subjects.json").read_text()
    both = said(*words, "--person", "x", "--out", tmp_path / "r", code=2)
    assert "leave the other options out" in both.output
    people = [{"subject": "T-1", "person": "Ada Quill"}, {"subject": "T-2", "person": "No Body"}]
    path = write_lines(tmp_path / "s.jsonl", people)
    nobody = said(*words[:3], path, "--out", tmp_path / "r", code=2)
    assert "subject T-2: --person" in nobody.output
    assert not (tmp_path / "r").exists()


SHE = {"subject": "a", "person": "Ada"}


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"subject": "a"}], "choose.subject-names-nothing"),
        ([SHE | {"persons": "Ada"}], "choose.subject-names-nothing"),
        ([{"person": "Ada"}], "choose.subject-name"),
        ([SHE | {"subject": "../a"}], "choose.subject-name"),
        ([SHE | {"subject": ".."}], "choose.subject-name"),
        ([SHE | {"subject": "7" * 256}], "choose.subject-name"),  # of no folder, after the training
        ([{"subject": 1, "where": "id=7"}], "choose.subject-where"),
        ([SHE | {"subject": "a\nb"}], "choose.subject-name"),
        ([SHE, SHE], "choose.subject-name"),
    ],
)
def test_what_is_no_subject_and_subjects_ask_together(tmp_path, rows, code):
    with fails(code):
        read_subjects(write_lines(tmp_path / "s.jsonl", rows))
    rows = [SHE | {"person": ["Ada", "A."]}, {"subject": 0, "where": {"id": 7}}]
    wanted = together(read_subjects(write_lines(tmp_path / "s.jsonl", rows)))
    assert wanted.people == ["Ada", "A."] and wanted.where == [("id", "7")]
