"""Method: a federated method as a coroutine. Only at `replies = yield ...ask(...)` does it meet the network."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from pydantic import Field

from fedstill.common.config import Section
from fedstill.common.practice import Practice
from fedstill.common.wire import Ask, Facts, Reply
from fedstill.strategies.copies import Copies
from fedstill.strategies.formulas import Formula
from fedstill.strategies.generic import Train, train_locally

if TYPE_CHECKING:
    from fedstill.common.checkpoint import Nested
    from fedstill.server.federation import Federation

Round = Generator[Ask, list[Reply], Facts]

_NOT_BY_HOOKS = (
    "a Method asks as often as its paper does, and Flower's hooks allow one exchange a round: "
    "call start(grid, federation=...)"
)


# How both authors' programs of FedID and AdaFD train: a new AdamW and a rate that falls to zero in every call.
FRESH = {"optimizer_state": "fresh", "schedule": "call"}
FRESH_EACH_CALL = {**FRESH, "distill_dropout": True}
# AdaFD's, where every epoch is a call.
RESTARTING = {"optimizer_state": "fresh", "epoch_calls": True, "distill_dropout": True}


class QuorumLost(RuntimeError):
    """Too few sites answered for the step to count; the run stops with its last checkpoint."""


class Params(Section):
    """Parameters of every method. A method's own Params add to these; unknown keys are refused."""

    local_epochs: int = Field(3, ge=1)
    participation: float = Field(1.0, gt=0, le=1)
    optimizer_state: Literal["persistent", "fresh"] = "persistent"
    # over what the rate falls to zero; at a constant rate a model ends where its last few batches pushed it
    schedule: Literal["constant", "call", "phase", "run"] = "run"
    distill_dropout: bool = False  # dropout while sites learn from others' predictions; the authors' programs have it


class RestartingParams(Params):
    """AdaFD's program, which calls itself anew for every epoch."""

    epoch_calls: bool = False  # a new AdamW every epoch, whose rate falls by 1 / epochs and starts anew


class BalancedParams(Params):
    """FedDRS's local training, which the other rows of its tables have too."""

    optimizer: Literal["adamw", "adafactor", "adafactor_unscaled"] = "adamw"
    samples: int = Field(0, ge=0)  # texts that a site draws for a round; 0: all it has
    balance: bool = False  # no site trains on more texts than the smallest one that takes part


# FedDRS, section 5.1.
BALANCED = {"optimizer": "adafactor", "optimizer_state": "fresh", "samples": 250, "balance": True,
            "local_epochs": 5, "participation": 0.8}  # fmt: skip

Made = TypeVar("Made")


class Meanwhile(Generic[Made]):
    """Work of the central model that an Ask takes along: done once, while the sites work or when it is needed."""

    def __init__(self, work: Callable[[], Made]) -> None:
        self._work, self._done = work, list[Made]()

    def __call__(self) -> None:
        self._done.append(self._work())

    def result(self) -> Made:
        """Return what came out."""
        if not self._done:
            self()
        return self._done[0]


class Method(Strategy):
    """A method's parameters, presets, round and state; `Federation` drives it."""

    name: ClassVar[str]
    paper: ClassVar[str]
    parameters: ClassVar[type[Params]] = Params
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}}
    needs_same_models: ClassVar[bool] = False
    own_tasks: ClassVar[Literal["refused", "possible", "needed"]] = "refused"  # sites with different tasks
    teaches_central: ClassVar[bool] = True  # else nothing is said of a central model that has not learned
    formula: ClassVar[Formula | None] = None  # bytes of a round by the paper's arithmetic
    no_pipeline: ClassVar[str] = "gets no predictions row by row, which the central model could begin with"

    def __init__(self, params: Params | None = None) -> None:
        self.p = self.parameters(**self.presets["paper"]) if params is None else params
        self.copies = Copies()  # of what the method sends its sites

    # --- what a method writes ---

    def prepare(self, fed: Federation) -> None:
        """Before any site joins: refuse a run that cannot work, and set up what the rounds need."""

    def round(self, fed: Federation) -> Round:
        """One communication round, as in the paper."""
        raise NotImplementedError

    def state(self) -> Nested:
        """Return what the method itself must keep between rounds, beside the central model."""
        return {}

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""

    def check_sites(self, fed: Federation) -> Round:
        """Refuse models that cannot work together, once when all sites have joined."""
        families = {name: str(facts.get("model")) for name, facts in fed.sites.items()}
        central = Path(fed.config.central.model).name
        if self.needs_same_models:
            reason = (
                f"{self.name} exchanges weights, so the central model and every site must be the same model; "
                f"central: {fed.config.central.model}, sites: {families}. Exchange predictions to mix models"
            )
            fed.without({name: reason for name, model in families.items() if model != central}, "join")
        yield from ()
        return {}

    def why_no_sums(self) -> str | None:
        """Return why the method needs the sites' single answers; None if their weighted sum suffices."""
        return "looks at every site's own answer"

    def averages_predictions(self) -> bool:
        """Whether the ensemble is the mean of what sites say of public texts, by their sizes or plain."""
        return False

    def site_began_anew(self, site: str) -> None:
        """Note that a site has restarted: it holds at most what its own last checkpoint has."""
        self.copies.lose(site)

    # --- what a method uses ---

    def practice(self, fed: Federation, start: float = 0.0, end: float = 1.0) -> Practice:
        """Return how a call between the shares `start` and `end` of this round trains, by the schedule."""
        done, rounds = fed.number - 1, fed.config.rounds
        decay = {
            "constant": None,
            "call": (0.0, 1.0),
            "phase": (start, end),
            "run": ((done + start) / rounds, (done + end) / rounds),
        }[self.p.schedule]
        return Practice(fresh=self.p.optimizer_state == "fresh", decay=decay)

    def train_locally(self, fed: Federation, to: tuple[str, ...] | None = None, epochs: int | None = None) -> Ask:
        """Return the Ask that opens most rounds: E epochs on the private texts."""
        return train_locally.ask(Train(epochs or self.p.local_epochs, self.practice(fed)), to=to)

    # --- Flower's Strategy ---

    def start(  # type: ignore[override]
        self, grid: Grid, *, federation: Federation, resume: bool = False
    ) -> Result:
        """Run every round over Flower's grid; Flower's own loop does not allow enough in a round."""
        return federation.over(grid, self, resume)

    def summary(self) -> None:
        """Flower's hook for a log line; the run's `method` event says it."""

    def configure_train(self, *_: Any, **__: Any) -> Iterable[Message]:
        """Not how a Method works: see `start`."""
        raise NotImplementedError(_NOT_BY_HOOKS)

    def aggregate_train(self, *_: Any, **__: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Not how a Method works: see `start`."""
        raise NotImplementedError(_NOT_BY_HOOKS)

    def configure_evaluate(self, *_: Any, **__: Any) -> Iterable[Message]:
        """Not how a Method works: see `start`."""
        raise NotImplementedError(_NOT_BY_HOOKS)

    def aggregate_evaluate(self, *_: Any, **__: Any) -> MetricRecord | None:
        """Not how a Method works: see `start`."""
        raise NotImplementedError(_NOT_BY_HOOKS)


class RestartingMethod(Method):
    """A method whose calls may be epochs."""

    p: RestartingParams

    def calls(self, fed: Federation, epochs: int) -> list[tuple[int, Practice]]:
        """Return how many epochs each call has, and how it trains."""
        if not self.p.epoch_calls:
            return [(epochs, self.practice(fed))]
        return [(1, Practice(fresh=True, decay=(0.0, 1.0 / epochs)))] * epochs


class BalancedMethod(Method):
    """A method whose sites may train on as many texts, with another optimizer."""

    p: BalancedParams

    def practice(self, fed: Federation, start: float = 0.0, end: float = 1.0) -> Practice:
        """With the optimizer of the parameters."""
        return replace(super().practice(fed, start, end), optimizer=self.p.optimizer)

    def most_texts(self, fed: Federation) -> int | None:
        """Return on how many texts a site may train in this round; None: on all that it has."""
        sizes = [int(fed.sites[name]["texts"]) for name in fed.participants]
        smallest = min((size for size in sizes if size), default=0) if self.p.balance else 0
        return min((limit for limit in (self.p.samples, smallest) if limit), default=None)


def names(replies: list[Reply]) -> tuple[str, ...]:
    """Return the sites that answered."""
    return tuple(reply.node for reply in replies)


def texts_of(replies: list[Reply]) -> dict[str, int]:
    """Return n_k: the number of private texts of each site that answered."""
    return {reply.node: int(reply.metrics["texts"]) for reply in replies}


def mean_loss(replies: list[Reply], shares: Mapping[str, float] | None = None, name: str = "loss") -> float | None:
    """Return the mean of the losses that sites report, weighted by shares or plain."""
    losses = {reply.node: float(reply.metrics[name]) for reply in replies if reply.metrics.get(name) is not None}
    if shares is not None:
        return sum(shares[site] * loss for site, loss in losses.items())
    return float(np.mean(list(losses.values()))) if losses else None
