"""The terminal's table and the verdict sentences."""

import io

from report_fixture import make_results
from rich.console import Console
from verdict_fixture import results as results_of
from verdict_fixture import three

from axolotl_unlearn.metrics.verdict import judge
from axolotl_unlearn.report import answer_of, table


def by_name(results, name):
    return next(model for model in results["models"] if model["name"] == name)


def verdict(model, original, retrained=None):
    return judge(model, original, retrained).sentence


def printed(results, width=120, color=False):
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="truecolor" if color else None,
    )
    console.print(table(results))
    return console.file.getvalue()


def test_every_number_of_the_results_is_in_the_table():
    results = make_results()
    lines = printed(results).splitlines()
    for model in results["models"]:
        line = next(line for line in lines if line.startswith(f" {model['name']} "))
        for metric in ("aggregate", "task_aggregate", "mia_auc", "mia_score", "utility"):
            assert f" {model[metric]:.2f} " in line
    text = " ".join(printed(results).split())
    assert "80 members against 80 non-members" in text
    assert "140 forget rows, 300 retain rows" in text


def test_nothing_is_cut_at_80_columns():
    """Every score, every interval and every reading, even with all intervals and a long name: with
    ends of four characters readings were cut to "over-fo"."""
    results = make_results()
    results["models"][1]["name"] = "npo-over-beta-0.03"
    for model in results["models"]:
        for metric in ("task_aggregate", "mia_score", "utility"):
            model["intervals"][metric] = [0.125, 1.0]
    text = printed(results, width=80)
    assert "\u2026" not in text and text.count("0.12-1.00") == 18
    assert all(f"{model['utility']:.2f}" in text for model in results["models"])
    for words in ("original ", "retrained ", "over-forgets ", "under-forgets ", "unlearning "):
        assert words in text, words


def test_flags_are_red_and_the_best_row_is_bold():
    text = printed(make_results(), color=True)
    row = next(line for line in text.splitlines() if "ascent" in line)
    assert "COLLAPSED, BELOW GATE" in row and "\x1b[31mascent" in row
    assert "\x1b[1mmerged" in next(line for line in text.splitlines() if "mmerged" in line)
    assert text.count(", best") == 1 and "the best of 4" in " ".join(text.split())


def test_over_and_under_forgetting_are_named():
    lines = printed(make_results()).splitlines()
    for name, word in (("over", "over-forgets"), ("under", "under-forgets"), ("merged", "good")):
        assert word in next(line for line in lines if line.startswith(f" {name} "))


def test_what_speaks_against_each_candidate_stands_below_the_table():
    lines = answer_of(make_results()).reasons
    assert [line.partition(" is not good: ")[0] for line in lines] == ["over", "under", "ascent"]
    assert all(line.endswith(".") and len(line) > 40 for line in lines)
    assert not answer_of({"schema": 2, "models": [{"name": "bare"}]}).reasons  # the title says it


def test_narrow_terminals_and_missing_scores():
    """A model with nothing but a name prints n/a, not 0 and not an error."""
    text = printed({"schema": 2, "models": [{"name": "bare"}]}, width=70)
    assert (
        text.startswith("bare is not good: ")
        and text.split("Model")[1].count("n/a") == 5
        and "n not recorded" in " ".join(text.split())
    )


def test_texts_of_few_authors_promise_no_more_than_their_number():
    """200 texts of ten authors: the table expected a MIA score, and the page drew a band, as of 200
    texts, in which no model of these would fall."""
    results = results_of(*three())
    assert "get a MIA score of only 0.95" in " ".join(printed(results).split())
    for model in results["models"]:
        for side in ("member", "nonmember"):
            model["likelihood"][f"{side}_cluster"] = [f"{side} {i % 10}" for i in range(200)]
    said = " ".join(printed(results).split())
    assert "200 members against 200 non-members" in said
    assert "get a MIA score of only 0.79" in said
