"""The table of an attack."""

from __future__ import annotations

from axolotl_unlearn.attacks.results import sentence


def figure(value: float, half: float = 0.05) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


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
