"""What a site can be asked: one file a family of verbs. A new family is imported here."""

from fedstill.client.verbs import (
    evaluating,
    interactive,
    keeping,
    mixed,
    mutual,
    parameters,
    predicting,
    scoring,
    textfree,
    training,
)
from fedstill.client.verbs.registry import VERBS

__all__ = [
    "VERBS",
    "evaluating",
    "interactive",
    "keeping",
    "mixed",
    "mutual",
    "parameters",
    "predicting",
    "scoring",
    "textfree",
    "training",
]
