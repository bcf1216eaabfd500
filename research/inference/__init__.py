"""Forgetting at inference: interventions on hidden states that stand beside unchanged weights."""
