"""Objectives that match held-out rows: features with gradient, what the engine finds for them,
and the distribution of held-out rows by hand arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from torch.testing import assert_close

from axolotl_unlearn.columns import KINDS
from axolotl_unlearn.config import LevelArgs, parse_unlearn
from axolotl_unlearn.engine import packing
from axolotl_unlearn.engine.needs import ForwardSpec, label_positions
from axolotl_unlearn.engine.observe import observe
from axolotl_unlearn.engine.step import step_loss
from axolotl_unlearn.engine.views import make_entries
from axolotl_unlearn.metrics.learned import FEATURES, text_features, token_features
from axolotl_unlearn.metrics.memorisation import TokenFacts
from axolotl_unlearn.objectives import OBJECTIVES
from axolotl_unlearn.reference import heldout
from axolotl_unlearn.reference.base import row_keys
from axolotl_unlearn.reference.heldout import RIDGE, HeldoutDistribution
from axolotl_unlearn.reference.level import Level
from axolotl_unlearn.training import level
from axolotl_unlearn.training.level import LevelCallback, ScoredRows, profiles


def batch_of(rows: int = 3, time: int = 12) -> dict[str, torch.Tensor]:
    """Rows of unequal length, the last a question of task 2; the first two labels are a prompt."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 23, (rows, time), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    kind = torch.zeros(rows, dtype=torch.long)
    kind[-1] = 1
    return {
        "input_ids": ids, "attention_mask": mask, "labels": labels,
        "role": torch.zeros(rows, dtype=torch.long), "kind": kind, "task": kind + 1,
    }  # fmt: skip


def plain(model, batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the labels, mean and spread of log p(v), ``[R, T]`` by autograd in float64."""
    logp = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    prob = logp.exp()
    mean = (prob * logp).sum(-1)
    sd = ((prob * logp**2).sum(-1) - mean**2).sqrt()
    label = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return logp.gather(-1, label.clamp(min=0)[..., None])[..., 0], mean, sd


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("beside", [True, False])
def test_moments_are_those_of_the_distribution(frozen, beside):
    """Value and gradient against float64 autograd, with a frozen and a trained head, with and
    without label log-probs and a KL at the same positions."""
    model, double = tiny_llama(seed=3).float(), tiny_llama(seed=3).double()
    if frozen:
        for one in (model, double):
            one.get_output_embeddings().weight.requires_grad_(False)
    batch = batch_of()
    asked = label_positions(batch)
    where = torch.from_numpy(asked)
    rng = torch.Generator().manual_seed(1)
    upstream = torch.randn(*where.shape, 3, generator=rng, dtype=torch.float64) * where[..., None]
    upstream[..., 0] *= beside

    found = observe(model, batch, ForwardSpec(labels=asked if beside else None, moments=asked))
    ours = torch.cat([found.logp[..., None], found.moments], -1)
    theirs = torch.stack(plain(double, batch), -1)
    mask = where[..., None].expand_as(theirs)
    first = 0 if beside else 1
    assert_close(ours[mask].view(-1, 3)[:, first:].double(),
                 theirs[mask].view(-1, 3)[:, first:], atol=2e-5, rtol=1e-5)  # fmt: skip
    assert not ours[~mask].any()
    (ours * upstream).sum().backward()
    (theirs * upstream).sum().backward()
    for name, weight in model.named_parameters():
        want = dict(double.named_parameters())[name].grad
        assert (weight.grad is None) == (want is None), name
        if want is not None:
            assert_close(weight.grad.double(), want, atol=3e-5, rtol=2e-4, msg=name)


def test_an_evaluation_shows_the_distribution_nothing():
    """Rows of `test_datasets` counted as forget rows from the first evaluation on."""
    known, group = HeldoutDistribution(correlated=False), (0, 1)
    known.look({group: {b"own": torch.tensor([1.0, 2.0])}}, {group: torch.randn(4, 2)})
    pull = known.look_up(None, None, batch_of(), None).pull
    before, features = known.direction(group).double(), torch.tensor([[8.0, -8.0]])
    with torch.no_grad():
        pull(np.array([0]), features)
    assert_close(known.direction(group).double(), before)
    pull(np.array([0]), features)  # of training
    assert not torch.equal(known.direction(group), before)


def test_a_certain_model_and_impossible_tokens_give_finite_numbers():
    """One token has all the mass, or a logit of -inf: no NaN in value or gradient."""
    from axolotl_unlearn.engine.head_losses import Group, linearised_statistics

    logits = torch.tensor([[200.0, 0.0, 0.0], [1.0, -torch.inf, 2.0]])
    states = torch.eye(2, requires_grad=True)
    group = Group(torch.arange(2), torch.zeros(2), torch.tensor([0, 2]), True, moments=True)
    graded, _, slopes = linearised_statistics(
        states, group, lambda h: torch.where(logits.isinf(), logits, h @ logits.nan_to_num()),
        with_gradient=True,
    )  # fmt: skip
    p = 1 / (1 + np.e)
    mean = p * np.log(p) + (1 - p) * np.log(1 - p)
    sd = np.sqrt(p * (np.log(p) - mean) ** 2 + (1 - p) * (np.log(1 - p) - mean) ** 2)
    assert graded[1].tolist() == pytest.approx([np.log(1 - p), mean, sd], abs=1e-5)
    assert graded[0].tolist() == pytest.approx([0, 0, 0], abs=1e-5)
    assert torch.isfinite(graded).all() and torch.isfinite(slopes).all()


def facts(rng, n: int) -> TokenFacts:
    logp = -rng.exponential(1.0, n)
    return TokenFacts(logp, logp > -0.5, -rng.exponential(1.5, n), rng.uniform(0.1, 2.0, n))


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_features_equal_those_by_numpy(n):
    """Quantiles, lowest shares and windows of four values, written out."""
    one = facts(np.random.default_rng(n), n)
    want = []
    for values in (one.logp, (one.logp - one.mean) / one.sd, one.mean, one.logp - one.mean):
        values = np.clip(values, -50, 50)
        windows = np.convolve(values, np.ones(min(8, n)) / min(8, n), "valid")
        want.append([
            values.mean(), values.std(),
            *np.quantile(values, (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)),
            *(np.sort(values)[: max(1, int(k * n))].mean() for k in (0.1, 0.2, 0.4)),
            windows.min(), windows.max(),
        ])  # fmt: skip
    found = token_features(*(torch.as_tensor(c) for c in (one.logp, one.mean, one.sd)))
    assert found.shape == (FEATURES,)
    assert_close(found, torch.tensor(np.concatenate(want)), atol=1e-12, rtol=0)
    assert text_features(one)[2:] == pytest.approx(found.tolist(), abs=1e-12)


def rows(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_where_features_outnumber_rows_each_counts_by_itself():
    """Spreads 1 and 2, one feature that never varies: d = (3, 4), so 3 / 1 / 3 and 4 / 4 / 3."""
    group, distribution = (0, 1), HeldoutDistribution(correlated=False)
    heldout = torch.tensor([[0.0, 0.0, 7.0], [2.0, 4.0, 7.0]]).double()
    distribution.look({group: {b"a": torch.tensor([4.0, 6.0, 9.0]).double()}}, {group: heldout})
    assert distribution.direction(group).tolist() == pytest.approx([1.0, 1 / 3, 0.0])


def test_a_row_in_a_batch_renews_what_is_known_of_it():
    """The first row comes back as 1, where held-out rows are: d falls from 3 to 2. A row of another
    group is drawn nowhere, and what was given at the look is not changed."""
    batch = batch_of(3)
    group = (0, 1)
    distribution = HeldoutDistribution()
    given = {group: dict(zip(row_keys(batch)[:2], rows([3.0, 5.0]), strict=True))}
    distribution.look(given, {group: rows([0.0, 2.0])})
    pull = distribution.look_up(None, None, batch, None).pull
    features = torch.tensor([[1.0], [9.0]], requires_grad=True)
    centre, direction = pull(torch.tensor([0, 2]), features)
    assert centre.tolist() == [[1.0], [0.0]] and not direction.requires_grad
    assert direction.flatten().tolist() == pytest.approx([2 / (1 + RIDGE), 0.0])
    assert distribution.seen[group][row_keys(batch)[0]].item() == 1
    assert given[group][row_keys(batch)[0]].item() == 3
    values = OBJECTIVES["feature_matching"].function(features, centre, direction).values
    assert values.tolist() == pytest.approx([0.0, 0.0])
    values.sum().backward()
    assert features.grad.flatten().tolist() == pytest.approx([2 / (1 + RIDGE), 0.0])


def test_the_mean_over_all_rows_is_the_squared_distance():
    """Three features, correlated: against numpy's inverse of the pooled covariance and ridge."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((3, 3))
    heldout, forget = (
        rng.standard_normal((50, 3)) @ mixing,
        1 + rng.standard_normal((20, 3)) @ mixing,
    )
    distribution, group = HeldoutDistribution(), (0, 1)
    own = {bytes([i]): row for i, row in enumerate(torch.tensor(forget))}
    distribution.look({group: own}, {group: torch.tensor(heldout)})
    scale = heldout.std(0)
    pooled = np.concatenate([heldout - heldout.mean(0), forget - forget.mean(0)]) / scale
    metric = np.linalg.inv(np.cov(pooled.T, bias=True) + RIDGE * np.eye(3))
    d = (forget.mean(0) - heldout.mean(0)) / scale
    direction = distribution.direction(group).expand(20, 3)
    centre = distribution.centres[group].expand(20, 3)
    found = OBJECTIVES["feature_matching"].function(torch.tensor(forget), centre, direction).values
    assert found.mean().item() == pytest.approx(d @ metric @ d)


def plain_states(model, batch) -> torch.Tensor:
    """Mean and spread of each row's states where a label is predicted, by the model itself."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    layers = model(**given, output_hidden_states=True).hidden_states[1:]
    where = label_positions(batch)
    chosen = [[layer[row, where[row]] for layer in layers] for row in range(len(where))]
    two = [[(x.mean(0), x.std(0, correction=0)) for x in row] for row in chosen]
    return torch.stack([torch.cat([x for both in row for x in both]) for row in two])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("beside", [True, False])
def test_profiles_are_those_of_the_model(packed, beside, monkeypatch):
    """Of all layers, the last after the final norm, as the model gives them; laid end to end or
    padded, with a layer asked for beside them or nothing; 0 for a row that nothing is asked of."""
    model, double = tiny_llama(seed=3).float(), tiny_llama(seed=3).double()
    batch = batch_of()
    monkeypatch.setattr(packing, "is_worthwhile", lambda *_: packed)
    where = label_positions(batch)
    where[1] = False
    needs = ForwardSpec(profiles=where, states={0: where} if beside else {})
    found = observe(model, batch, needs)
    want = plain_states(double, batch)
    assert_close(found.profiles[[0, 2]].double(), want[[0, 2]], atol=1e-5, rtol=1e-5)
    assert not found.profiles[1].any() and not found.logp.any()
    if beside:
        ours = found.states[0].values[: int(where[0].sum())].mean(0)
        assert_close(ours, found.profiles[0, : len(ours)])
    rows = [{k: v[i, v_mask].tolist() for k, v in batch.items() if v.dim() == 2}
            for i, v_mask in enumerate(batch["attention_mask"].bool())]  # fmt: skip
    found = torch.stack(profiles(model, rows))
    assert_close(found, want.detach(), atol=1e-5, rtol=1e-5)


def test_a_look_asks_inside_the_model_about_judged_rows_alone(monkeypatch):
    """Questions are judged by nothing; their states were computed, and that is half of a look."""
    model, batch, asked, shown = tiny_llama(seed=3).float(), batch_of(), [], []
    rows = [{k: v[i, mask].tolist() for k, v in batch.items() if v.dim() == 2}
            for i, mask in enumerate(batch["attention_mask"].bool())]  # fmt: skip
    kinds = (KINDS["completion"], KINDS["question"], KINDS["completion"])
    rows = [row | {"kind": kind, "task": 0} for row, kind in zip(rows, kinds, strict=True)]
    watched = ScoredRows(rows, SimpleNamespace(decode=lambda *_, **__: ""))
    distribution = SimpleNamespace(look=lambda *sides: shown.append(sides))
    callback = LevelCallback(
        LevelArgs(heldout="-"),
        Level(),
        *[watched] * 3,
        distributions={"profiles": distribution},
    )
    monkeypatch.setattr(
        level, "profiles", lambda *given: asked.append(len(given[1])) or profiles(*given)
    )
    callback.gather(model)
    assert asked == [2, 2]
    ((seen, unseen),) = shown
    group, want = (KINDS["completion"], 0), plain_states(tiny_llama(seed=3).double(), batch)[[0, 2]]
    assert seen.keys() == unseen.keys() == {group}
    assert list(seen[group]) == [watched.keys[0], watched.keys[2]]
    for found in (torch.stack(list(seen[group].values())), unseen[group]):
        assert_close(found, want.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("objective", ["feature_matching", "hidden_matching"])
def test_a_step_draws_forget_rows_to_heldout_rows(objective):
    """Loss and gradient of a step equal those of plain autograd."""
    model, double = tiny_llama(seed=3).float(), tiny_llama(seed=3).double()
    batch = batch_of()

    def features(of) -> torch.Tensor:
        if objective == "hidden_matching":
            return plain_states(of, batch)[:2]
        where = label_positions(batch)
        three = plain(of, batch)
        return torch.stack([
            token_features(*(column[row, where[row]] for column in three)) for row in (0, 1)
        ])  # fmt: skip

    distribution, group = HeldoutDistribution(correlated=objective != "hidden_matching"), (0, 1)
    start = features(double).detach()
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(30, start.shape[1], generator=rng).double()
    heldout = start.mean(0) + 0.3 + 0.2 * noise
    keys = row_keys(batch)[:2]
    distribution.look({group: dict(zip(keys, start, strict=True))}, {group: heldout})
    entries = make_entries(parse({"forget": {"objective": objective, "kinds": "completion"}}))
    result = step_loss(model, batch, entries, reference=distribution)
    want = (
        ((features(double) - distribution.centres[group]) * distribution.direction(group))
        .sum(-1)
        .mean()
    )
    assert result.total.item() == pytest.approx(want.item(), rel=1e-4)
    result.total.backward()
    want.backward()
    for weight, other in zip(model.parameters(), double.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None)  # the head has no part in its input
        if other.grad is not None:
            assert_close(weight.grad.double(), other.grad, atol=2e-4, rtol=2e-3)


def parse(block: dict):
    return parse_unlearn(block).entries()


def test_what_goes_to_a_device_has_a_dtype_of_its_own_before(monkeypatch):
    """Apple's takes no float64: the first step after a look ended there."""
    sent: list[np.dtype] = []
    monkeypatch.setattr(heldout, "exact_dtype", lambda device: torch.float32)
    monkeypatch.setattr(
        heldout, "to_device", lambda x, device: sent.append(x.dtype) or torch.from_numpy(x)
    )
    distribution, group = HeldoutDistribution(), (0, 1)
    rows = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    distribution.look({group: {b"a": rows[0], b"b": rows[1]}}, {group: rows[2:]})
    distribution._be_on(torch.device("meta"))
    assert sent == [np.float32] * 4
