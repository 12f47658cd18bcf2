"""ATC: assign, then contrast; with the corrupted texts that ASSIGN learns from."""

from fedstill.strategies.atc.method import ATC, ATCParams

__all__ = ["ATC", "ATCParams"]
