"""Objectives against arithmetic by hand."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from axolotl_unlearn.objectives import OBJECTIVES, LabelScores
from axolotl_unlearn.objectives.distributions import (
    bootstrapped_targets,
    masc,
    nckd,
    undial,
)
from axolotl_unlearn.objectives.likelihood import (
    gradient_ascent,
    nll,
    npo,
)
from axolotl_unlearn.objectives.matching import log_odds, match
from axolotl_unlearn.objectives.preference import _DIVERGENCES, dpo, flat


def scores(logp, ref=None, mask=None) -> LabelScores:
    logp = tensor(logp, dtype=torch.float64)
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else tensor(mask)
    ref = None if ref is None else tensor(ref, dtype=torch.float64)
    return LabelScores(logp=logp, mask=mask, ref_logp=ref)


def test_npo_sum_by_hand():
    """beta .5; log-ratios D = [0, 2 ln 3] (each from two tokens), so beta D = [0, ln 3].
    2/beta ln(1 + e^(beta D)) = 4 [ln 2, ln 4]. Weights 2 sigmoid = [1, 2 * 3/4 = 1.5]."""
    seen = scores([[-1.0, -2.0], [-1.0, -1.0]], [[-1.5, -1.5], [-1 - 2 * log(3), -1.0]])
    terms = npo(seen, beta=0.5)
    assert_close(terms.values, tensor([4 * log(2), 4 * log(4)], dtype=torch.float64))
    assert_close(terms.logs["npo_weight"], tensor([1.0, 1.5], dtype=torch.float64))
    assert_close(terms.logs["log_ratio"], tensor([0.0, 2 * log(3)], dtype=torch.float64))


def test_npo_reductions_by_hand():
    """Ratios row 0: (-1, -3); row 1: (-2, masked). Sum: -4, -2; row mean: -2, -2;
    batch-token mean: (-1 - 3 - 2) / 3 = -2. beta 1: 2 ln(1 + e^D)."""
    seen = scores(
        [[-1.0, -3.0], [-2.0, 0.0]],
        [[0.0, 0.0], [0.0, 0.0]],
        [[True, True], [True, False]],
    )
    at = {d: 2 * log(1 + exp(d)) for d in (-4, -2)}
    expected = {"sum": [at[-4], at[-2]], "mean": [at[-2], at[-2]], "batch_token_mean": at[-2]}
    for reduction, values in expected.items():
        got = npo(seen, beta=1.0, reduction=reduction).values
        assert_close(got, tensor(values, dtype=torch.float64))


def test_npo_stops_once_the_answer_is_gone():
    """D = -200, beta .1: weight 2 sigmoid(-20) < 1e-8, saturated, and the loss is finite."""
    logp = tensor([[-200.0]], requires_grad=True)
    terms = npo(LabelScores(logp, tensor([[True]]), tensor([[0.0]])), beta=0.1)
    (gradient,) = torch.autograd.grad(terms.values.sum(), logp)
    assert gradient.item() < 1e-8 and terms.logs["saturated"].item() == 1.0
    assert torch.isfinite(terms.values).all()


def test_nll_and_ascent_by_hand():
    """Row 0: 1 and 3 nats, row 1: 2 nats and a masked token. Sequence means: 2 and 2."""
    seen = scores([[-1.0, -3.0], [-2.0, -9.0]], mask=[[True, True], [True, False]])
    assert_close(nll(seen).values, tensor([[1.0, 3.0], [2.0, 0.0]], dtype=torch.float64))
    assert_close(nll(seen, reduction="sequence").values, tensor([2.0, 2.0], dtype=torch.float64))
    assert_close(gradient_ascent(seen).values, -nll(seen).values)


def test_dpo_by_hand():
    """beta 1. Row 0: D = -ln 3 (two tokens), D' = 0: 2 ln(1 + 1/3) = 2 ln(4/3). Row 1: D = D' = 1:
    2 ln 2. The answers may have other lengths; the padding of either does not count."""
    worse = scores([[-1.0, -log(3)], [0.0, -1.0]], [[-1.0, 0.0], [-1.0, -1.0]])
    better = scores([[-2.0, 7.0], [-1.0, -1.0]], [[-2.0, 0.0], [-1.5, -1.5]], [[1, 0], [1, 1]])
    better = LabelScores(better.logp, better.mask.bool(), better.ref_logp)
    terms = dpo(worse, better, beta=1.0)
    assert_close(terms.values, tensor([2 * log(4 / 3), 2 * log(2)], dtype=torch.float64))
    assert terms.logs["preferred"].tolist() == [1.0, 0.0]
    far = scores([[-400.0]], [[0.0]]), scores([[0.0]], [[-400.0]])
    assert torch.isfinite(dpo(*far).values).all() and torch.isfinite(dpo(*far[::-1]).values).all()


@pytest.mark.parametrize("divergence", sorted(_DIVERGENCES))
def test_flat_lowers_the_forget_answer_and_raises_the_other(divergence):
    """In the right direction at any probability (three of the released code are not)."""
    for p, other in ((1e-3, 1e-3), (0.5, 0.5), (1.0, 1e-6), (1e-6, 1.0)):
        logp = tensor([[log(p)], [log(other)]], dtype=torch.float64, requires_grad=True)
        sides = [LabelScores(x[None], tensor([[True]])) for x in logp]
        values = flat(*sides, divergence=divergence).values
        (gradient,) = torch.autograd.grad(values.sum(), logp)
        assert gradient[0] > 0 > gradient[1] and torch.isfinite(values).all()


def test_undial_by_hand():
    """Reference (1/2, 1/2), label 0, beta ln 3: target (1/4, 3/4); policy (1/2, 1/2): ln 2."""
    half = tensor([[0.5, 0.5]], dtype=torch.float64).log()
    policy = tensor([[0.2, 0.8]], dtype=torch.float64).log()
    got = undial(policy, half, tensor([0]), beta=log(3))
    assert_close(got, tensor([-(0.25 * log(0.2) + 0.75 * log(0.8))]).double())
    # a position without label keeps the reference's distribution as target
    got = undial(policy, half, tensor([-100]), beta=log(3))
    assert_close(got, tensor([-(0.5 * log(0.2) + 0.5 * log(0.8))]).double())


def test_nckd_by_hand():
    """p = (1/2, 3/8, 1/8) and q = (.9, .08, .02), label 0: without it (3/4, 1/4) and (4/5, 1/5);
    times 1 - p_0 = 1/2. At temperature 1/2 the reference's rest is (16/17, 1/17). What the label
    has in the reference does not count, and of the policy's own only the factor does."""
    p = tensor([[1 / 2, 3 / 8, 1 / 8]], dtype=torch.float64).log()
    q = tensor([[0.9, 0.08, 0.02]], dtype=torch.float64).log()

    def kl(a, b):
        return sum(x * log(x / y) for x, y in zip(a, b, strict=True))

    got = nckd(p, q, tensor([0]))
    assert_close(got, tensor([kl((4 / 5, 1 / 5), (3 / 4, 1 / 4)) / 2]).double())
    got = nckd(p, q, tensor([0]), temperature=0.5)
    assert_close(got, tensor([kl((16 / 17, 1 / 17), (3 / 4, 1 / 4)) / 2]).double())
    p = tensor([[0.2, 0.4, 0.2, 0.1, 0.1]], dtype=torch.float64).log()
    q = tensor([[0.5, 0.1, 0.25, 0.1, 0.05]], dtype=torch.float64).log()
    got = nckd(p, q, tensor([0]), k=1)  # token 2 against all of 1, 3, 4
    assert_close(got, tensor([kl((1 / 2, 1 / 2), (1 / 4, 3 / 4)) * 0.8]).double())
    z = p.clone().requires_grad_()
    nckd(z.log_softmax(-1), q, tensor([0])).sum().backward()
    assert_close(z.grad[0, 0], tensor(0.0).double())  # the label's own logit is left alone
    half, mixed = (tensor([[a, 1 - a]], dtype=torch.float64).log() for a in (1 / 2, 1 / 4))
    # a position without a label compares everything, the first token too
    got = nckd(half, mixed, tensor([-100]))
    assert_close(got, tensor([kl((1 / 4, 3 / 4), (1 / 2, 1 / 2))]).double())
    sure = tensor([[0.0, -200.0, -201.0]])
    assert torch.isfinite(nckd(sure, sure.flip(1), tensor([0]))).all()


def test_match_by_hand():
    """width 1, floor 0. Token 1: p 3/4 against q 1/2: odds ln 3 - 0 = 1.0986 > 1, so huber
    ln 3 - 1/2; weight |ln(3/4) - ln(1/2)| = ln 1.5. Token 2: p 1/2, q 1/(1 + e^.5): odds error
    .5, huber .125, weight ln(1/2) + ln(1 + e^.5). Token 3 is masked. offset ln 3 meets token 1."""
    seen = scores(
        [[log(3 / 4), log(1 / 2), 0.0]],
        [[log(1 / 2), -log(1 + exp(0.5)), 0.0]],
        [[True, True, False]],
    )
    second = 0.125 * (log(1 / 2) + log(1 + exp(0.5)))
    expected = [[log(1.5) * (log(3) - 0.5), second, 0.0]]
    terms = match(seen, width=1.0, floor=0.0)
    assert_close(terms.values, tensor(expected, dtype=torch.float64))
    assert_close(terms.logs["gap"][0, 0], tensor(log(1.5), dtype=torch.float64))
    assert match(seen, width=1.0, offset=log(3)).values[0, 0].item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("odds, sign", [(6.0, 1), (0.1, 1), (0.0, 0), (-0.1, -1), (-6.0, -1)])
def test_match_is_two_sided_and_moves_memorised_tokens(odds, sign):
    """The gradient to the label's logit z is w * clip(error / width, -1, 1): that of log-odds to
    z is 1 wherever p is, so a token of p = .998 is moved as fast as one of p = .5."""
    target = -1.5
    z = tensor([[target + odds, 0.0]], dtype=torch.float64, requires_grad=True)
    logp = z.log_softmax(-1)[:, :1]
    ref = tensor([[target, 0.0]], dtype=torch.float64).log_softmax(-1)[:, :1]
    terms = match(LabelScores(logp, tensor([[True]]), ref), width=0.5, floor=0.02)
    (gradient,) = torch.autograd.grad(terms.values.sum(), z)
    weight = min(1.0, abs(float((logp - ref).detach()))) + 0.02
    clipped = max(-1.0, min(1.0, odds / 0.5))
    assert gradient[0, 0].item() == pytest.approx(weight * clipped, rel=1e-6, abs=1e-12)
    assert (clipped > 0) - (clipped < 0) == sign


def test_match_is_finite_for_certain_tokens():
    """float32 log-probs of 0 and of -200."""
    logp = tensor([[0.0, -200.0]], requires_grad=True)
    terms = match(LabelScores(logp, tensor([[True, True]]), tensor([[-2.0, 0.0]])))
    (gradient,) = torch.autograd.grad(terms.values.sum(), logp)
    assert torch.isfinite(terms.values).all() and torch.isfinite(gradient).all()
    assert_close(log_odds(tensor([log(0.5)])), tensor([0.0]), atol=1e-6, rtol=0)


def test_match_forgets_what_is_known_by_heart():
    """p = 1 - 2e-6 lies above the cut of the log-odds (1 - 1e-5), whose slope 1e5 by log p goes on
    there: the gradient to the logit is w (1 - p) 1e5 with w = 1.02."""
    z = tensor([[log(5e5), 0.0]], dtype=torch.float64, requires_grad=True)
    terms = match(LabelScores(z.log_softmax(-1)[:, :1], tensor([[True]]), tensor([[-2.0]])))
    (gradient,) = torch.autograd.grad(terms.values.sum(), z)
    assert gradient[0, 0].item() == pytest.approx(1.02 * 2e-6 * 1e5, rel=1e-3)


def test_bounded_objectives_by_hand():
    """p = (1/2, 1/4, 1/4), label 0. MASC: margin ln(1/2) - ln(1/2) = 0, with rho 1/2 the threshold
    is -eta = -.5, so .5 / .5 = 1; BS-T with mix .5 and one belief (the label): -ln 2."""
    p = tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    for function, given, expected in (
        (masc, {"rho": 0.5, "eta": 0.5, "k": 2}, 1.0),
        (bootstrapped_targets, {"mix": 0.5, "top_k": 1}, -log(2)),
    ):
        assert_close(function(p, None, tensor([0]), **given), tensor([expected]).double())
        assert_close(function(p, None, tensor([-100])), tensor([0.0]).double())


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_says_what_it_is(name):
    known = OBJECTIVES[name]
    assert "arXiv" in known.source and known.summary.endswith(".")
    assert all(p.default is not p.empty for p in known.parameters.values())


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("name", sorted(n for n, o in OBJECTIVES.items() if o.slope))
def test_a_declared_slope_is_the_derivative(name, reduction):
    """The engine takes ``slope * log p`` for the value, where the objective declares one."""
    known = OBJECTIVES[name]
    slope = known.slope({"reduction": reduction})
    assert (slope is None) == (reduction == "sequence")
    logp = tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    mask = tensor([[True, True], [True, False]])
    values = known.function(LabelScores(logp=logp, mask=mask), reduction=reduction).values
    if slope is not None:
        (found,) = torch.autograd.grad(values.sum(), logp)
        assert_close(found, slope * mask)
        assert_close(values, slope * logp * mask)
