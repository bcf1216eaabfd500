"""Of rows that name a person in some way, how many does `request new --person` take or offer?

Names are Faker's, of 14 languages; each is written in each of the forms below, in a sentence of
Faker's in the same language, among rows about others: people with the same first or last name,
people with neither, sentences without a name. Nothing of the search is tuned on these names.

    python -m research.benchmarks.people          # writes people.json beside it, about a minute
"""

from __future__ import annotations

import html
import json
import random
import unicodedata
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from axolotl_unlearn.data.near import strings
from axolotl_unlearn.requests.names import WEAK, Corpus

LOCALES = (
    "en_US es_ES de_DE fr_FR it_IT pt_PT pl_PL sv_SE tr_TR cs_CZ hu_HU ru_RU el_GR zh_CN".split()
)
#: People of each language, and rows about others for each of them.
PEOPLE, SAME, OTHERS = 20, 3, 10
SEED = 11


def _plain(text: str) -> str:
    marks = unicodedata.normalize("NFD", text)
    return "".join(c for c in marks if unicodedata.category(c) != "Mn")


def _mixed_up(text: str) -> str | None:
    try:
        return text.encode().decode("cp1252")
    except UnicodeError:
        return None


def _lost(text: str) -> str:
    return "".join(c if c.isascii() else "\ufffd" for c in text)


def _partly(text: str) -> str | None:
    """Where letters are lost and letters stay."""
    stays = [c.isascii() for c in text if c.isalpha()]
    return _lost(text) if any(stays) and not all(stays) else None


def _alike(text: str) -> str:
    return text.translate(str.maketrans("aeocp", "аеоср"))  # Latin, then Cyrillic


#: The form -> how a first and a last name are written in it; None where it does not exist.
FORMS: dict[str, Callable[[str, str], object]] = {
    "first last": lambda f, z: f"{f} {z}",
    "last, first": lambda f, z: f"{z}, {f}",
    "capitals": lambda f, z: f"{f} {z}".upper(),
    "small letters": lambda f, z: f"{f} {z}".lower(),
    "without accents": lambda f, z: _plain(f"{f} {z}"),
    "accents as marks of their own": lambda f, z: unicodedata.normalize("NFD", f"{f} {z}"),
    "HTML": lambda f, z: "".join(
        html.escape(c) if c.isascii() else f"&#{ord(c)};" for c in f"{f} {z}"
    ),
    "in a link": lambda f, z: urllib.parse.quote_plus(f"{f} {z}"),
    "JSON in JSON": lambda f, z: json.dumps({"customer": f"{f} {z}"}),
    "mixed-up encoding": lambda f, z: _mixed_up(f"{f} {z}"),
    "lost letters": lambda f, z: _partly(f"{f} {z}"),
    "marks of no width": lambda f, z: f"{f[:2]}\u200b{f[2:]} {z[:1]}\u00ad{z[1:]}",
    "letters of another script": lambda f, z: _alike(f"{f} {z}"),
    "joined by _": lambda f, z: f"{f}_{z}",
    "in one word": lambda f, z: f"{f}{z}" if f[0] != f[0].lower() else None,
    "joined by -": lambda f, z: f"{f}-{z}",
    "over a line end": lambda f, z: f"{f}\n{z[:3]}-\n{z[3:]}" if len(z) > 5 else f"{f}\n{z}",
    "spaced": lambda f, z: f"{' '.join(f)}  {' '.join(z)}",
    "two fields": lambda f, z: {"first": f, "last": z},
    "a list": lambda f, z: {"name": [f, z]},
    "two turns": lambda f, z: {"turns": [f"{f}.", f"{z}!"]},
    "labelled": lambda f, z: f"first: {f}, last: {z}",
    "e-mail": lambda f, z: f"{_plain(f)}.{_plain(z)}@example.com".lower().replace(" ", ""),
    "e-mail, initial": lambda f, z: f"{_plain(f)[0]}{_plain(z)}@example.com".lower().replace(
        " ", ""
    ),
    "user name": lambda f, z: f"{_plain(f)[0]}{_plain(z)}84".lower().replace(" ", ""),
    "initial": lambda f, z: f"{f[0]}. {z}",
    "last, initial": lambda f, z: f"{z}, {f[0]}.",
    "initial of the last name": lambda f, z: f"{f} {z[0]}.",
    "middle name": lambda f, z: f"{f} Maria {z}",
    "middle initial": lambda f, z: f"{f} M. {z}",
    "title": lambda f, z: f"Dr. {z}",
    "misspelt": lambda f, z: f"{f} {z[:-2]}{z[-1]}" if len(z) > 5 else None,
}
#: Forms that need letters with capitals or an alphabet.
LATIN = {"in one word", "e-mail", "e-mail, initial", "user name", "initial", "last, initial",
         "initial of the last name", "middle name", "middle initial", "title", "misspelt",
         "letters of another script", "spaced", "over a line end", "joined by -", "joined by _",
         "capitals", "small letters", "last, first", "labelled"}  # fmt: skip


#: 33 ways to write José García, of which version 0.2 missed 24.
GARCIA: list[object] = [
    "JOSÉ GARCÍA called about the bill",
    "Jose Garcia called about the bill",
    "Jose\u0301 Garci\u0301a called again",
    "José\nGarcía came in",
    "José García's file is closed",
    "Garc&iacute;a, Jos&eacute; is our client",
    "Jos&eacute; Garc&iacute;a is our client",
    "Jos%C3%A9%20Garc%C3%ADa in a link",
    "Jos%C3%A9+Garc%C3%ADa in a link",
    "jose.garcia@example.com wrote",
    "jgarcia@example.com wrote",
    "J. García owes 30 euros",
    "José G. owes 30 euros",
    "Pepe García owes 30 euros",
    "José María García signed",
    "José Luis García López signed",
    "Sr. García signed today",
    "Jo\u200bsé Gar\u200bcía hidden",
    "J\u043es\u00e9 Garc\u00eda homoglyph",
    "Хосе Гарсия звонил",
    "J o s é  G a r c í a spaced",
    "Jos\\u00e9 Garc\\u00eda json in json",
    "José_García",
    "JoséGarcía camel",
    "José-García joined",
    "Gar-\ncía, José broken",
    "José García y García",
    "Jos\ufffd Garc\ufffda mojibake",
    "JosÃ© GarcÃ\xada mojibake2",
    "first: José, last: García",
    {"first_name": "José", "last_name": "García", "note": "asked for a refund"},
    {"messages": [{"content": "I am José"}, {"content": "García is my last name"}]},
    {"customer": ["José", "García"], "x": "y"},
]


def garcia() -> dict:
    rows = [(str(n), list(strings({"row": one}))) for n, one in enumerate(GARCIA)]
    hits = Corpus(rows).find("José García")
    how = Counter("taken" if hit.sure else "offered" for hit in hits.values())
    return {"rows": len(rows), **how, "missed": len(rows) - len(hits)}


def measure() -> dict:
    from faker import Faker

    by_form: dict[str, Counter] = defaultdict(Counter)
    by_locale: dict[str, Counter] = defaultdict(Counter)
    found = {name: Counter() for name in ("taken", "likely", "weak")}
    for locale in LOCALES:
        fake, draw = Faker(locale), random.Random(f"{SEED}/{locale}")
        fake.seed_instance(SEED)
        spaced = locale not in ("zh_CN", "ja_JP")

        def row(value: object, fake=fake) -> list[str]:
            said = fake.sentence(8)
            if isinstance(value, str):
                value = f"{said} {value} {fake.sentence(5)}" if spaced else f"{said}{value}，{said}"  # noqa: B023
            return list(strings(value)) + ([said] if isinstance(value, dict) else [])

        for number in range(PEOPLE):
            first, last = fake.first_name(), fake.last_name()
            name = f"{first} {last}" if spaced else f"{last}{first}"
            rows, form_of = [], {}
            for form, write in FORMS.items():
                if not spaced and form in LATIN:
                    continue
                value = write(first, last) if spaced else write(name, "")
                if isinstance(value, str) and not spaced:
                    value = value.strip(" ,-_.")
                if value is not None:
                    key = f"{number}/{form}"
                    rows.append((key, row(value)))
                    form_of[key] = form
            others = [f"{first} {fake.last_name()}" for _ in range(SAME)]
            others += [f"{fake.first_name()} {last}" for _ in range(SAME)]
            others += [f"{fake.first_name()} {fake.last_name()}" for _ in range(OTHERS)]
            others += [fake.sentence(6) for _ in range(OTHERS)]
            draw.shuffle(others)
            rows += [(f"other {n}", row(text)) for n, text in enumerate(others)
                     if _plain(name) != _plain(text)]  # fmt: skip
            # In small letters alone: beside other forms it would show that the parts are words.
            small = [one for one in rows if one[0].endswith("/small letters")]
            hits = Corpus([one for one in rows if one not in small]).find(name)
            hits |= Corpus([*small, *rows[-OTHERS:]]).find(name) if small else {}
            for key, form in form_of.items():
                hit = hits.get(key)
                how = "missed" if hit is None else "taken" if hit.sure else "offered"
                by_form[form][how] += 1
                by_locale[locale][how] += 1
            for key, hit in hits.items():
                kind = "taken" if hit.sure else "weak" if hit.how in WEAK else "likely"
                found[kind]["right" if key in form_of else "of others"] += 1

    def shares(counts: Counter) -> dict:
        n = sum(counts.values())
        each = {k: round(counts[k] / n, 3) for k in ("taken", "offered", "missed")}
        return {"rows": n, **each}

    every = sum(by_form.values(), Counter())
    return {
        "command": "python -m research.benchmarks.people",
        "people": PEOPLE * len(LOCALES),
        "languages": list(LOCALES),
        "33 ways to write José García": garcia(),
        "recall": {"all": shares(every)}
        | {"by form": {form: shares(by_form[form]) for form in FORMS}}
        | {"by language": {one: shares(by_locale[one]) for one in LOCALES}},
        "precision": {
            kind: {"rows": sum(c.values()), "right": round(c["right"] / sum(c.values()), 3)}
            for kind, c in found.items()
        },
    }


def main() -> None:
    out = Path(__file__).with_suffix(".json")
    out.write_text(json.dumps(measure(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(out.read_text("utf-8"))


if __name__ == "__main__":
    main()
