"""ATC: assign, then contrast; with the corrupted texts that ASSIGN learns from."""

from fedstill.strategies.atc.method import ATC
from fedstill.strategies.atc.params import ATCParams

__all__ = ["ATC", "ATCParams"]
