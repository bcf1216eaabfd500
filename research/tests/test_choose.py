"""`python -m research choose`: the bound by hand, its error rate, and what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from research.__main__ import research
from research.analysis.choose import above_p, chosen, risks


def test_a_bound_by_hand():
    """No loss in n: (1 - bound) ** n by Hoeffding; a mean at the bound shows nothing."""
    assert above_p([0.0] * 50, 0.1) == pytest.approx(0.9**50)
    assert above_p([0.1] * 50, 0.1) == 1.0


def test_a_model_at_the_bound_is_rarely_called_valid():
    rng = np.random.default_rng(0)
    wrong = np.mean([above_p(rng.random(60) < 0.1, 0.1) <= 0.05 for _ in range(1000)])
    assert wrong <= 0.05 + 3 * (0.05 * 0.95 / 1000) ** 0.5


def evaluation(folder, strengths, retrained=0.2):
    rows = [
        {"model": name, "extraction_strength": s, "retrained": {"extraction_strength": retrained}}
        for name, some in strengths.items()
        for s in some
    ]
    (folder / "audit.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = [{"name": name, "utility": 0.9 - 0.1 * i} for i, name in enumerate(strengths)]
    (folder / "results.json").write_text(json.dumps({"models": models}))


def test_the_command_says_what_it_controls(tmp_path):
    """100 documents without risk: p = 0.95 ** 100 = 0.0059, times 3 models; half of the risk is the
    retrained model's own."""
    strengths = {"leaks": [0.2] * 50 + [0.6] * 50, "good": [0.1] * 100, "worse": [0.2] * 100}
    evaluation(tmp_path, strengths)
    assert sum(risks(tmp_path)["leaks"]) == pytest.approx(20)
    told = chosen(risks(tmp_path), {"leaks": 0.9, "good": 0.8, "worse": 0.7}, 0.05)
    assert list(told) == ["good", "worse", "leaks"]  # of the valid ones the more useful first
    assert [row["valid"] for row in told.values()] == [True, True, False]
    assert told["good"]["p"] == pytest.approx(3 * 0.95**100)
    said = CliRunner().invoke(research, ["choose", str(tmp_path)]).output
    assert "good: valid" in said and "leaks: not shown" in said
    said = CliRunner().invoke(research, ["choose", str(tmp_path), "--risk", "0.01"]).output
    assert "None is shown to keep a risk of 0.01" in said and "nothing of a single document" in said


@pytest.mark.parametrize(
    ("retrained", "says"), [(None, "beside a retrained model's"), (0.2, "has no audit.jsonl")]
)
def test_what_was_not_measured_is_refused(tmp_path, retrained, says):
    evaluation(tmp_path, {"a": [0.1]}, retrained)
    if retrained:
        (tmp_path / "audit.jsonl").unlink()
    done = CliRunner().invoke(research, ["choose", str(tmp_path)])
    assert done.exit_code == 2 and says in done.output
