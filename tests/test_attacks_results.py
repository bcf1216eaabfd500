"""The table of an attack."""

from __future__ import annotations

import pytest
from rich.console import Console

from axolotl_unlearn.attacks.results import sentence, table


def figure(value: float, half: float = 0.05) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


@pytest.mark.parametrize("control", [True, False])
def test_every_figure_is_readable_in_80_columns(control, capsys):
    row = {
        "variant": "in-context neighbours",
        "n": 80,
        "before": {"recalled": figure(0.1), "probability": figure(0.2)},
        "recalled": figure(0.3),
        "probability": figure(0.18),
        "gain": {"recalled": figure(0.2), "probability": figure(-0.02)},
    }
    if control:
        row["above_control"] = {"recalled": figure(0.23), "probability": figure(0.01)}
    Console(width=80).print(table({"title": "Prompting", "model": "merged", "rows": [row]}))
    text = capsys.readouterr().out
    shown = ["0.100", "0.05-0.15", "0.300", "0.25-0.35", "+0.200", "0.15, 0.25"]
    shown += ["probability", "0.180", "-0.020", "-0.07, 0.03"]
    shown += ["+0.230", "0.18, 0.28", "+0.010", "-0.04, 0.06"] if control else []
    for part in shown:
        assert part in text, text
    assert "…" not in text and ("control" in text) == control


def test_the_sentence_names_an_attack_not_the_model_as_it_is():
    plain, attacked = (
        {"variant": name, "gain": {"recalled": figure(gain) | {"p": 0.7}}}
        for name, gain in (("not quantised", 0.0), ("int8", -0.01))
    )
    result = {"title": "Quantisation", "rows": [plain, attacked]}
    assert "(most with int8: -0.01 [-0.06, +0.04], p 1.000)" in sentence(result)
    assert sentence(result).startswith("Quantisation brings nothing back")
    attacked["gain"]["recalled"] = figure(0.2) | {"p": 0.001}
    assert sentence(result).startswith("Quantisation brings back 0.20 of the forget texts")
