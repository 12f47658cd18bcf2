"""A run's seconds and bytes by phase, beside the paper's arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedstill.common.config import RunConfig
from fedstill.common.wire import Facts, Reply
from fedstill.server.central import CentralModel
from fedstill.strategies import Method
from fedstill.strategies.formulas import sizes_of

Bytes = Mapping[str, tuple[int, int]]


class Costs:
    """Seconds by phase (sites, central, exchange) and bytes by site and phase (up, down)."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, float]] = {}
        self.traffic: dict[str, dict[str, list[int]]] = {}
        self.computing: dict[str, float] = {}  # seconds of each site
        self.asks: dict[str, Facts] = {}  # by verb: how often it was asked, and what kind of thing left the sites
        self.setup = 0.0
        self.total = 0.0

    def spend(self, phase: str, **seconds: float) -> None:
        """Add seconds of one or more kinds to a phase."""
        spent = self.phases.setdefault(phase, {"total": 0.0, "sites": 0.0, "central": 0.0, "exchange": 0.0})
        for kind, value in seconds.items():
            spent[kind] += value
            spent["total"] += value

    def asked(self, verb: str, leaves: str) -> None:
        """Count an Ask by its verb."""
        self.asks.setdefault(verb, {"asks": 0, "leaves": leaves})["asks"] += 1

    def exchanged(self, phase: str, wall: float, replies: Iterable[Reply], before: Bytes, after: Bytes) -> None:
        """Account for one Ask: the slowest site's computing is the sites' part of the time, the rest is exchange."""
        seconds = {reply.node: float(reply.metrics.get("seconds", 0.0)) for reply in replies}
        slowest = max(seconds.values(), default=0.0)
        for name, spent in seconds.items():
            self.computing[name] = self.computing.get(name, 0.0) + spent
        self.spend(phase, sites=min(slowest, wall), exchange=max(0.0, wall - slowest))
        for name, (up, down) in after.items():
            counts = self.traffic.setdefault(name, {}).setdefault(phase, [0, 0])
            counts[0] += up - before.get(name, (0, 0))[0]
            counts[1] += down - before.get(name, (0, 0))[1]

    def seconds(self) -> dict[str, float]:
        """Return the run's total seconds: total, compute, exchange, set-up."""
        kinds = {kind: sum(spent[kind] for spent in self.phases.values()) for kind in ("sites", "central", "exchange")}
        seconds = {
            "total": self.total,
            "compute": kinds["sites"] + kinds["central"],
            "exchange": kinds["exchange"],
            "set-up": self.setup,
        }
        return {kind: round(value, 3) for kind, value in seconds.items()}

    def site(self, name: str) -> Facts:
        """Return a site's bytes, in total and by phase."""
        phases = self.traffic.get(name, {})
        return {
            "bytes_up": sum(up for up, _ in phases.values()),
            "bytes_down": sum(down for _, down in phases.values()),
            "seconds": round(self.computing.get(name, 0.0), 3),
            "bytes": {phase: {"up": up, "down": down} for phase, (up, down) in phases.items() if up or down},
        }

    def facts(self) -> Facts:
        """Return everything a checkpoint needs."""
        return {
            "phases": self.phases,
            "traffic": self.traffic,
            "setup": self.setup,
            "total": self.total,
            "computing": self.computing,
        }

    def load(self, facts: Facts) -> None:
        """Restore what `facts` returned."""
        self.phases, self.traffic = facts["phases"], facts["traffic"]
        self.setup, self.total, self.computing = facts["setup"], facts["total"], facts.get("computing", {})
        self.asks = facts.get("asks", {})


def by_formula(method: Method, config: RunConfig, central: CentralModel, site: Facts, happened: Iterable[str]) -> Facts:
    """Return a site's bytes by phase for the whole run by the paper's arithmetic; empty if there is none."""
    settings = method.p.model_dump()
    known = method.formula is not None and central.classes and method.p.participation == 1
    if not known or method.formula is None or settings.get("private"):
        return {}
    sizes = sizes_of(
        settings,
        public=len(central.public),
        classes=central.classes,
        batch=central.learner.batch_size,
        parameters=int(site.get("travelling", 0)),
        predictions=config.exchange.predictions,
    )
    phases, rounds = set(happened), config.rounds
    return {
        phase: {"up": up * rounds, "down": down * rounds}
        for phase, (up, down) in method.formula(sizes).items()
        if phase in phases
    }
