"""Confident Sinkhorns and its entropy baseline, with the noise that probes a model's bias."""

from fedstill.strategies.sinkhorn.method import Entropy, Sinkhorn

__all__ = ["Entropy", "Sinkhorn"]
