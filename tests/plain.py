"""The plain, obvious implementation of every loss, in float64 on full logits: the oracle.

Written from the published formulas, independently of axolotl_unlearn: full ``[row, time,
vocabulary]`` logits, loops over rows and tokens, no chunks, no shared code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def full_logp(model, batch: dict[str, Tensor], row: int) -> Tensor:
    """[time, vocabulary] log-softmax of one row, run alone and unpadded."""
    length = int(batch["attention_mask"][row].sum())
    logits = model(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0]
    return logits.double().log_softmax(-1)


def label_positions(batch: dict[str, Tensor], row: int) -> list[tuple[int, int]]:
    """(position, label) pairs: the distribution at position t is asked for label t + 1."""
    labels = batch["labels"][row].tolist()
    return [(t - 1, labels[t]) for t in range(1, len(labels)) if labels[t] != -100]


def row_logps(model, batch, row: int) -> Tensor:
    logp = full_logp(model, batch, row)
    return torch.stack([logp[t, y] for t, y in label_positions(batch, row)])


def npo(model, reference, batch, rows, beta, reduction) -> Tensor:
    ratios = [row_logps(model, batch, r) - row_logps(reference, batch, r).detach() for r in rows]
    if reduction == "sum":
        d = torch.stack([ratio.sum() for ratio in ratios])
    elif reduction == "mean":
        d = torch.stack([ratio.mean() for ratio in ratios])
    else:
        d = torch.cat(ratios).mean()[None]
    return (2 / beta * torch.log(1 + torch.exp(beta * d))).mean()


def recipe(model, reference, batch, forget=(0, 1, 2), retain=(3, 4)) -> Tensor:
    """The paper's three objectives (`conftest.CONFIGS`)."""
    return (
        0.4 * npo(model, reference, batch, forget, 0.1, "sum")
        + 0.4 * nll(model, batch, retain)
        + 0.2 * kl(model, reference, batch, retain, "reverse", "answer")
    )


def dpo(model, reference, batch, rows, alternatives, beta) -> Tensor:
    values = []
    for worse, better in zip(rows, alternatives, strict=True):
        d, other = (
            (row_logps(model, batch, r) - row_logps(reference, batch, r).detach()).sum()
            for r in (worse, better)
        )
        values.append(-2 / beta * torch.log(1 / (1 + torch.exp(-beta * (other - d)))))
    return torch.stack(values).mean()


def f_divergence(name: str) -> tuple:
    """Activation g and conjugate f* of f-GAN's tables 2 and 6 (arXiv 1606.00709), as printed."""
    return {
        "total_variation": (lambda v: 0.5 * torch.tanh(v), lambda t: t),
        "jensen_shannon": (
            lambda v: math.log(2) - torch.log(1 + torch.exp(-v)),
            lambda t: -torch.log(2 - torch.exp(t)),
        ),
        "pearson": (lambda v: v, lambda t: t**2 / 4 + t),
        "kl": (lambda v: v, lambda t: torch.exp(t - 1)),
        "reverse_kl": (lambda v: -torch.exp(-v), lambda t: -1 - torch.log(-t)),
        "hellinger": (lambda v: 1 - torch.exp(-v), lambda t: t / (1 - t)),
        "neyman": (lambda v: 1 - torch.exp(-v), lambda t: 2 - 2 * torch.sqrt(1 - t)),
        "jeffrey": (lambda v: v, lambda t: t + t**2 / 4 + t**3 / 16),
    }[name]


def flat(model, batch, rows, alternatives, divergence) -> Tensor:
    g, conjugate = f_divergence(divergence)
    values = []
    for worse, better in zip(rows, alternatives, strict=True):
        p, other = (row_logps(model, batch, r).exp().mean() for r in (worse, better))
        values.append(conjugate(g(p)) - g(other))
    return torch.stack(values).mean()


def nll(model, batch, rows) -> Tensor:
    return -torch.cat([row_logps(model, batch, r) for r in rows]).mean()


def kl(model, reference, batch, rows, direction, positions) -> Tensor:
    values = []
    for row in rows:
        p, q = full_logp(model, batch, row), full_logp(reference, batch, row).detach()
        if positions == "answer":
            where = [t for t, _ in label_positions(batch, row)]
        else:
            where = list(range(int(batch["attention_mask"][row].sum())))
        for t in where:
            first, second = (p[t], q[t]) if direction == "reverse" else (q[t], p[t])
            values.append((first.exp() * (first - second)).sum())
    return torch.stack(values).mean()


def simnpo(model, batch, rows, beta, gamma) -> Tensor:
    means = torch.stack([row_logps(model, batch, r).mean() for r in rows])
    return (-2 / beta * torch.log(torch.sigmoid(-beta * means - gamma))).mean()


def weighted(model, reference, batch, rows, weight) -> Tensor:
    """Mean over rows of the token mean of ``weight(p, p_ref).detach() * log p``."""
    out = []
    for row in rows:
        logp = row_logps(model, batch, row)
        ref = row_logps(reference, batch, row) if reference is not None else logp
        out.append((weight(logp.exp(), ref.exp()).detach() * logp).mean())
    return torch.stack(out).mean()


def match(model, reference, batch, rows, width, floor, offset) -> Tensor:
    """Mean over all label tokens of ``w huber(logit p - logit q - offset)``, token by token."""
    values = []
    for row in rows:
        pairs = zip(row_logps(model, batch, row), row_logps(reference, batch, row), strict=True)
        for logp, ref in pairs:
            p, q = logp.exp(), ref.detach().exp()
            error = torch.log(p / (1 - p)) - torch.log(q / (1 - q)) - offset
            square, linear = error**2 / (2 * width), error.abs() - width / 2
            weight = min(1.0, abs(float((logp - ref).detach()))) + floor
            values.append(weight * (square if error.abs() < width else linear))
    return torch.stack(values).mean()


def undial(model, reference, batch, rows, beta) -> Tensor:
    values = []
    for row in rows:
        logits = full_logp(reference, batch, row)
        logp = full_logp(model, batch, row)
        for t, y in label_positions(batch, row):
            target = logits[t].detach().clone()
            target[y] -= beta
            values.append(-(target.softmax(-1) * logp[t]).sum())
    return torch.stack(values).mean()


def ceu(model, batch, rows) -> Tensor:
    values = []
    for row in rows:
        logp = full_logp(model, batch, row)
        for t, y in label_positions(batch, row):
            target = logp[t].detach().clone()
            target[y] = -math.inf
            values.append(-(target.softmax(-1) * logp[t]).sum())
    return torch.stack(values).mean()


def nckd(model, reference, batch, rows, temperature, k) -> Tensor:
    values = []
    for row in rows:
        logits = full_logp(reference, batch, row)
        logp = full_logp(model, batch, row)
        for t, y in label_positions(batch, row):
            rest = [v for v in range(logp.shape[-1]) if v != y]
            ours = logp[t][rest] - logp[t][rest].logsumexp(0)
            theirs = (logits[t][rest].detach() / temperature).log_softmax(0)
            order = theirs.argsort(descending=True)
            ours, theirs = (
                torch.cat([x.exp()[order[:k]], x.exp()[order[k:]].sum()[None]]).log()
                for x in (ours, theirs)
            )
            kl = (theirs.exp() * (theirs - ours)).sum()
            values.append((1 - logp[t][y].exp().detach()) * kl)
    return torch.stack(values).mean()


def over_labels(model, batch, rows, value) -> Tensor:
    """Mean over all label positions of ``value(log-probs [vocabulary], label)``."""
    values = []
    for row in rows:
        logp = full_logp(model, batch, row)
        values += [value(logp[t], y) for t, y in label_positions(batch, row)]
    return torch.stack(values).mean()


def others(logp: Tensor, label: int) -> Tensor:
    return torch.cat([logp[:label], logp[label + 1 :]])


def masc(logp, label, rho, eta, k, b):
    rivals = sorted(others(logp, label).tolist(), reverse=True)[:k]
    chosen = torch.stack([v for v in others(logp, label) if v.item() in rivals])
    margin = b * logp[label] - torch.log(torch.exp(b * chosen).sum())
    return torch.relu(margin - (math.log(rho / (1 - rho)) - eta)) / eta


def bst(logp, label, mix, top_k):
    p = logp.detach().exp()
    keep = p.sort(descending=True).indices[:top_k]
    target = torch.zeros_like(p)
    target[keep] = p[keep] / p[keep].sum() * mix
    target[label] += 1 - mix
    return (target * logp).sum()


def hidden(model, batch, row: int, layer: int) -> Tensor:
    """[time, hidden] output of a decoder layer (transformers counts the embeddings first)."""
    length = int(batch["attention_mask"][row].sum())
    ids = batch["input_ids"][row : row + 1, :length]
    grabbed: list[Tensor] = []
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    handle = (
        base.get_decoder().layers[layer].register_forward_hook(lambda *a: grabbed.append(a[-1]))
    )
    model(input_ids=ids)
    handle.remove()
    return grabbed[0][0]


def representation(model, reference, batch, rows, layer, aim, positions="answer") -> Tensor:
    """Mean over positions and hidden size of ``(h - aim(h_ref))^2``."""
    values = []
    for row in rows:
        h, h_ref = hidden(model, batch, row, layer), hidden(reference, batch, row, layer).detach()
        where = range(len(h)) if positions == "all" else [t for t, _ in label_positions(batch, row)]
        values += [((h[t] - aim(h_ref[t])) ** 2).mean() for t in where]
    return torch.stack(values).mean()


def control_vector(size: int, seed: int) -> Tensor:
    """Uniform draws, normalised."""
    draw = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw / math.sqrt(float((draw**2).sum()))
