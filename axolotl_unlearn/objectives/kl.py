"""KL divergence to the reference, with its gradient in closed form."""

from __future__ import annotations

from typing import Literal

from axolotl_unlearn.objectives.base import Tensor, objective, torch


def kl_with_gradient(
    prob: Tensor,
    logp: Tensor,
    ref_logp: Tensor,
    labels: Tensor,
    *,
    direction: Literal["forward", "reverse"] = "reverse",
    with_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """KL of each position and its gradient by the policy's logits, in place of ``ref_logp``.

    - reverse, ``sum_v p (log p - log q)``: gradient ``p_v (log p_v - log q_v - KL)``;
    - forward, ``sum_v q (log q - log p)``: gradient ``p_v - q_v``.

    Args:
        prob, logp: ``[position, vocabulary]`` of the policy; kept.
        ref_logp: ``[position, vocabulary]`` of the reference; overwritten.
        labels: unused.

    Returns:
        ``[position]`` and ``[position, vocabulary]``.
    """
    if direction == "reverse":
        gap = ref_logp.neg_().add_(logp)
        value = torch.linalg.vecdot(prob, gap)
        return value, gap.sub_(value[:, None]).mul_(prob) if with_gradient else None
    gap = ref_logp - logp
    ref_prob = ref_logp.exp_()
    value = torch.linalg.vecdot(ref_prob, gap)
    return value, torch.sub(prob, ref_prob, out=gap) if with_gradient else None


@objective(
    "kl",
    sees="distributions",
    reference=True,
    unit="token",
    side="both",
    source="arXiv 2503.21088 eq. 4 (reverse); 2401.06121 KL minimisation (forward)",
    closed_form=kl_with_gradient,
)
def kl(
    logp: Tensor,
    ref_logp: Tensor,
    labels: Tensor,
    *,
    direction: Literal["forward", "reverse"] = "reverse",
) -> Tensor:
    """KL divergence between policy and reference, in nats per position.

    - ``reverse``: ``KL(policy || reference) = sum_v p (log p - log q)``, as the ZJUKLAB paper
      writes it (eq. 4);
    - ``forward``: ``KL(reference || policy) = sum_v q (log q - log p)``, as its released code and
      TOFU compute it.

    Args:
        logp, ref_logp: ``[position, vocabulary]`` log-probs of policy and reference.
        labels: unused.
    """
    if direction == "reverse":
        return (logp.exp() * (logp - ref_logp)).sum(-1)
    return (ref_logp.exp() * (ref_logp - logp)).sum(-1)
