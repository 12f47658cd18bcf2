"""The methods: one file each with both halves, its paper named in the first line."""

from __future__ import annotations

import difflib

from fedstill.common.catalogue import Catalogue
from fedstill.common.config import ConfigError, MethodConfig
from fedstill.common.config.files import check
from fedstill.strategies.adafd import AdaFD
from fedstill.strategies.atc import ATC
from fedstill.strategies.base import Method, Params
from fedstill.strategies.bounds import Centralized, Isolated
from fedstill.strategies.cronus import Cronus
from fedstill.strategies.ditto import Ditto
from fedstill.strategies.dsfl import DSFL
from fedstill.strategies.evenhand import Evenhand
from fedstill.strategies.fedaux import FedAUX
from fedstill.strategies.fedavg import FedAvg
from fedstill.strategies.fedavg_st import FedAvgST
from fedstill.strategies.fedbn import FedBN
from fedstill.strategies.feddf import FedDF
from fedstill.strategies.feddrs import FedDRS
from fedstill.strategies.feded import FedED
from fedstill.strategies.fedid import FedID
from fedstill.strategies.fedkd import FedKD
from fedstill.strategies.fedkd_mutual import FedKDMutual
from fedstill.strategies.fedmd import FedMD
from fedstill.strategies.fedprox import FedProx
from fedstill.strategies.flower_rules import Bulyan, FedAdam, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from fedstill.strategies.logit_fedavg import LogitFedAvg
from fedstill.strategies.mhat import MHAT
from fedstill.strategies.percfl import PerCFL
from fedstill.strategies.sinkhorn import Entropy, Sinkhorn
from fedstill.strategies.spfl import SPFL
from fedstill.strategies.verbs import VERBS, Verb, find_verb

__all__ = ["METHODS", "VERBS", "Method", "Params", "all_verbs", "find_method", "find_verb", "make_method"]

METHODS: Catalogue[type[Method]] = Catalogue(
    "fedstill.methods",
    {
        method.name: method
        for method in (
            *(FedID, AdaFD, DSFL, FedAvg, FedDF, FedED, FedKD, MHAT, FedMD, Cronus, LogitFedAvg, Sinkhorn, Entropy),
            *(FedProx, FedAvgST, Ditto, FedBN, PerCFL, SPFL),
            *(FedAdam, FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan),
            *(FedDRS, FedAUX, FedKDMutual, ATC, Evenhand, Isolated, Centralized),
        )
    },
)


def all_verbs() -> dict[str, Verb]:
    """Return every verb that this installation knows, installed methods included."""
    METHODS.load_installed()
    return VERBS


def find_method(config: MethodConfig) -> tuple[type[Method], Params]:
    """Return the configured method with its preset's values and the configuration's changes."""
    method = METHODS.get(config.name)
    if method is None:
        near = difflib.get_close_matches(config.name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"method.name: there is no method {config.name!r}; {hint}known: {', '.join(METHODS)}")
    if config.preset not in method.presets:
        raise ConfigError(
            f"method.preset: {config.name} has no preset {config.preset!r}; known: {', '.join(method.presets)}"
        )
    if "pipeline" in config.parameters() and "pipeline" not in method.parameters.model_fields:
        raise ConfigError(f"method.pipeline: {config.name} {method.no_pipeline}; take it out")
    values = {**method.presets[config.preset], **config.parameters()}
    return method, check(method.parameters, values, f"[method] {config.name}")


def make_method(config: MethodConfig) -> Method:
    """Build the configured method."""
    kind, params = find_method(config)
    return kind(params)
