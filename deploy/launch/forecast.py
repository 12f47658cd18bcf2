"""What a run will cost, before it starts: exchanges, bytes, steps, and time from a measured step of each model."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedstill.client.node import Node
from fedstill.common.config import RunConfig
from fedstill.common.models.learner import Batches, Learner, Rows
from fedstill.common.practice import Practice
from fedstill.common.wire import Facts
from fedstill.server.central import CentralModel
from fedstill.server.costs import by_formula
from fedstill.server.federation import Federation
from fedstill.strategies import Method
from fedstill.strategies.formulas import Phases, sizes_of

STARTING = {"local": (10.0, 7.0), "simulation": (20.0, 4.0)}  # seconds: SuperLink and server, then sites by cores
ENVELOPE = (160, 230)  # bytes up and down that an exchange takes beside what the formulas count, as measured
TRIED = Practice(fresh=True)


@dataclass(frozen=True)
class Trial:
    """A model as it loads and steps on this machine."""

    model: str
    parameters: int
    trained: int  # of the parameters
    bytes: int  # of the weights
    batch: int  # texts in a step
    rates: Mapping[str, float]
    warmup: float  # share of a falling schedule
    fall: float  # its last part, in which the rate falls
    step: float  # seconds of one training step
    prediction: float  # seconds of predicting as many texts


@dataclass(frozen=True)
class SiteCost:
    """What the run costs one site; bytes are None where the method has no formula."""

    texts: int
    steps: int
    up: int | None
    down: int | None
    seconds: float  # of computing


@dataclass(frozen=True)
class Forecast:
    """What the run will cost."""

    rounds: int
    exchanges: int | None  # with every site, in the whole run; None where the method has no formula
    seconds: float
    parts: Mapping[str, float]  # of the seconds
    sites: Mapping[str, SiteCost] = field(default_factory=dict)

    def facts(self) -> Facts:
        """Return it for JSON."""
        return {
            "rounds": self.rounds,
            "exchanges": self.exchanges,
            "seconds": round(self.seconds, 1),
            "parts": {name: round(value, 1) for name, value in self.parts.items()},
            "sites": {name: {**vars(cost), "seconds": round(cost.seconds, 1)} for name, cost in self.sites.items()},
        }


def try_site(node: Node) -> Trial:
    """Take one measured step with a site's model on its own texts."""
    return _tried(node.site.model, node.learner, node.lessons, node.private_loss)


def try_central(name: str, central: CentralModel) -> Trial:
    """Take one measured step with the central model, on public texts."""
    return _tried(name, central.learner, central.public, lambda out, at: out.square().mean())


def _tried(name: str, learner: Learner, texts: Batches, loss: Callable[[Tensor, Rows], Tensor]) -> Trial:
    rows = np.arange(min(len(texts), learner.batch_size))
    step = prediction = 0.0
    if len(rows):
        for _ in range(2):  # the first one also pays for what is set up only once
            began = time.perf_counter()
            learner.fit(texts, rows, loss, 1, "local", TRIED, shuffle=False)
            step = (time.perf_counter() - began) * learner.batch_size / len(rows)
        learner.model.eval()
        began = time.perf_counter()
        with torch.inference_mode():
            learner.model(texts.batch(rows))
        prediction = (time.perf_counter() - began) * learner.batch_size / len(rows)
    values = list(learner.model.parameters())
    return Trial(
        name,
        parameters=sum(value.numel() for value in values),
        trained=sum(value.numel() for value in learner.parameters),
        bytes=sum(value.numel() * value.element_size() for value in values),
        batch=learner.batch_size,
        rates={str(purpose): rate for purpose, rate in learner.rates.items()},
        warmup=learner.warmup,
        fall=learner.fall,
        step=step,
        prediction=prediction,
    )


def forecast(
    federation: Federation, on: str, texts: Mapping[str, int], trials: Mapping[str, Trial], central: Trial | None
) -> Forecast:
    """Work out a run's cost from the number of private texts and the trial of every site."""
    config, method = federation.config, federation.method
    phases = _phases(method, federation.central, config)
    exchanges = exchanges_of(method, federation, phases)
    rounds, settings = config.rounds, method.p.model_dump()
    public = 0 if config.mixed else len(federation.central.public)
    public = min(public, settings.get("subset") or public)
    passes = settings.get("distill_epochs", 0) if public else 0
    sites_distil = passes and (phases is None or any(phases.get(p, (0, 0))[1] for p in ("interactive", "distillation")))
    tests = 0 if config.mixed else len(federation.central.test_texts)
    tested = rounds + 1 if config.report.evaluate == "rounds" else 2
    costs, local, distilling, testing = {}, [], [], []
    for name, trial in trials.items():
        epoch = config.train.epoch_steps or math.ceil(texts[name] / trial.batch)
        own, towards = method.p.local_epochs * epoch, passes * math.ceil(public / trial.batch) if sites_distil else 0
        local.append(own * trial.step)
        distilling.append(towards * trial.step + math.ceil(public / trial.batch) * trial.prediction)
        testing.append(math.ceil(tests / trial.batch) * trial.prediction)
        steps = round(rounds * method.p.participation * (own + towards))
        seconds = rounds * method.p.participation * (local[-1] + distilling[-1]) + tested * testing[-1]
        up, down = _bytes(federation, trial, phases, exchanges)
        costs[name] = SiteCost(texts[name], steps, up, down, seconds)
    parts = {"starting": _starting(on, len(trials)), "local training": rounds * _wall(local, on, method)}
    parts["distillation"] = rounds * _wall(distilling, on, method)
    parts["tests"] = tested * _wall(testing, on, method)
    if config.report.alone:
        parts["yardstick: sites alone"] = rounds * _wall(local, on, method) + _wall(testing, on, method)
    if central is not None:
        batches = math.ceil(public / central.batch)
        interactive = phases is not None and "interactive" in phases
        step = central.step + (2 * central.prediction if interactive else 0.0)  # FedID validates before and after
        parts["distillation"] += rounds * passes * batches * step
        parts["tests"] += tested * math.ceil(tests / central.batch) * central.prediction
        if config.report.centralized:
            epochs = config.report.centralized_epochs or method.p.local_epochs * rounds
            parts["yardstick: all texts"] = epochs * math.ceil(sum(texts.values()) / central.batch) * central.step
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    return Forecast(rounds, exchanges, sum(parts.values()), parts, costs)


def exchanges_of(method: Method, federation: Federation, phases: Phases | None) -> int | None:
    """Return how often a site is asked in the whole run, tests and checkpoints included; None without a formula."""
    if phases is None:
        return None
    config, rounds = federation.config, federation.config.rounds
    central = federation.central
    settings = method.p.model_dump()
    sizes = sizes_of(
        settings, public=len(central.public), classes=central.classes, batch=central.learner.batch_size, parameters=0
    )
    a_round = 0 if "local training" in phases else 1
    for phase in phases:
        a_round += sizes.passes * sizes.batches + 1 if phase == "interactive" else 1
    tests = rounds + 1 if config.report.evaluate == "rounds" else 2
    return rounds * (a_round + 1) + 1 + tests + int(config.report.alone)


def _phases(method: Method, central: CentralModel, config: RunConfig) -> Phases | None:
    if method.formula is None or config.mixed or method.p.participation != 1:
        return None
    sizes = sizes_of(
        method.p.model_dump(),
        public=len(central.public),
        classes=central.classes,
        batch=central.learner.batch_size,
        parameters=1,
        predictions=config.exchange.predictions,
    )
    return method.formula(sizes)


def _bytes(
    federation: Federation, trial: Trial, phases: Phases | None, exchanges: int | None
) -> tuple[int | None, int | None]:
    method, config = federation.method, federation.config
    known = by_formula(method, config, federation.central, {"travelling": trial.trained}, list(phases or {}))
    if exchanges is None or not known:
        return None, None
    up, down = (sum(part[way] for part in known.values()) for way in ("up", "down"))
    return up + exchanges * ENVELOPE[0], down + exchanges * ENVELOPE[1]


def _wall(seconds: Sequence[float], on: str, method: Method) -> float:
    """Return how long sites take together: one after the other in a process, over the cores of this machine, or apart.

    Only a share of the sites takes part in a round where the method samples them.
    """
    if not seconds:
        return 0.0
    total = sum(seconds) * method.p.participation
    if on == "process":
        return total
    return max(max(seconds), total / _cores()) if on in STARTING else max(seconds)


def _starting(on: str, sites: int) -> float:
    begin, more = STARTING.get(on, (2.0, 0.0))
    return begin + more * math.ceil(sites / _cores())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
