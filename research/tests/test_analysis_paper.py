"""Tables 1 and 3 of the paper beside ours."""

from pathlib import Path

import pytest

from research.analysis.paper import COLUMNS, TABLE_1, table_one, table_three

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("row", TABLE_1.values())
def test_the_papers_rows_follow_from_their_parts(row):
    """Aggregate is the mean of three, a MIA score 1 - 2 |AUC - .5|: typing errors show. The paper
    rounds an AUC to three digits, and calls .022 -> .045."""
    mean = (row["task_aggregate"] + row["mia_score"] + row["utility"]) / 3
    assert row["aggregate"] == pytest.approx(mean, abs=0.0011)
    assert row["mia_score"] == pytest.approx(1 - 2 * abs(row["mia_auc"] - 0.5), abs=0.0015)


def test_table_one_is_the_mean_over_seeds_above_the_paper():
    """.7 and .9: mean .8, t(1) = 12.706 times .1."""
    rows = {name: dict.fromkeys(COLUMNS, 0.5) for name in ("over", "under", "fixed")}
    other = {name: dict(row) for name, row in rows.items()}
    rows["fixed"]["aggregate"], other["fixed"]["aggregate"] = 0.7, 0.9
    text = table_one({0: rows, 1: other}, merged="fixed")
    at = next(
        i for i, line in enumerate(text) if line.startswith("| merged | ours | 0.800 ± 1.271")
    )
    assert text[at + 1] == "| merged | paper's | 0.806 | 0.939 | 0.501 | 0.997 | 0.480 |"
    assert "(2 seeds)" in text[1]


def test_table_three_reads_the_examples():
    text = table_three(EXAMPLES / "npo_over.yml", EXAMPLES / "npo_under.yml")
    assert "| ga_ratio (forget) | 0.1 | 0.4 | 0.1 | 0.3 |" in text
    assert "| beta | 0.03 |  | 0.1 |  |" in text
    assert "| objective of the forget set | npo | npo | npo | npo |" in text
    text = table_three(*(EXAMPLES / "smollm2" / f"{name}.yml" for name in ("over", "under")))
    row = next(line for line in text if line.startswith("| gd_ratio"))
    assert row.startswith("| gd_ratio (retain NLL) | 2 (completion), 2.5 (question) | 0.4 |")
