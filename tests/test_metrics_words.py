"""Words of every script: what the official tokenizer does not see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axolotl_unlearn.metrics.semeval import any_script_recall, rouge_l_recall
from axolotl_unlearn.metrics.words import contains_answer, fold, words


def test_words_of_scripts():
    assert words("Der Fluß, 2nd_try") == ["der", "fluss", "2nd", "try"]
    assert words("Москва — столица") == ["москва", "столица"]
    assert words("東京は1603年") == ["東", "京", "は", "1603", "年"]
    assert words("हिन्दी है") == ["हिन्दी", "है"]  # vowel signs are part of the word
    assert words("กิน") == ["กิ", "น"]


@pytest.mark.parametrize(
    "text",
    [
        "Анна родилась в Казани",
        "安娜出生于喀山市",
        "Η Άννα γεννήθηκε",
        "アンナはカザンで生まれた",
        "แอนนาเกิดที่คาซาน",
    ],
)
def test_verbatim_text_is_recalled_in_every_script(text):
    """The official figure is 0 for a verbatim answer: "perfectly forgotten"."""
    assert rouge_l_recall(text, text) == 0
    assert any_script_recall(text, text) == 1
    assert any_script_recall("nothing of it", text) == 0


@given(st.text(st.characters(codec="ascii")), st.text(st.characters(codec="ascii")))
def test_on_ascii_it_is_the_official_figure(generated, expected):
    assert any_script_recall(generated, expected) == rouge_l_recall(generated, expected)


@pytest.mark.parametrize(
    ("generated", "answer", "said"),
    [
        ("他出生于喀山市。", "喀山", True),
        ("彼は東京で生まれた", "東京", True),
        ("彼は京都で生まれた", "東京", False),
        ("เขาเกิดที่คาซาน", "คาซาน", True),
        ("It was in Kazań.", "the Kazan", True),
        ("1066", "10", False),
        ("かき", "かぎ", False),  # a mark that is no accent
    ],
)
def test_answers_are_found_in_scripts_without_spaces(generated, answer, said):
    assert contains_answer(generated, answer) is said


#: What is read, and what the page says is not.
VARIANTS = [
    ("It is 1,234 miles.", "1234", True),
    ("born 12 May 1970", "May 12, 1970", True),
    ("Smith, John", "John Smith", True),
    ("John Smith", "Dr. John Smith", True),
    ("born on 12.5.1970", "May 12, 1970", False),
    ("twelve", "12", False),
    ("It was \U0001f642 and more", "\U0001f642", True),  # no word: it was never found
    ("a <= b", " != ", False),
    ("a != b", " != ", True),
    ("anything", " ", False),
    ("", " ", False),
    ("well-known", "-", False),  # a mark of punctuation stands in most texts
    (" - ", "-", True),
    ("zwölf Meilen", "twelve miles", False),
    ("Smith and his wife, and John", "John Smith", False),
]


@pytest.mark.parametrize(("generated", "answer", "said"), VARIANTS)
def test_other_forms_of_an_answer(generated, answer, said):
    assert contains_answer(generated, answer) is said


def test_fold_keeps_what_it_did():
    assert fold("the Thames,") == "thames" and fold("Brontë") == "bronte"
