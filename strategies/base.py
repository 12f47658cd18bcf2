"""Method: a federated method as a coroutine. Only at `replies = yield Ask(...)` does it meet the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from pydantic import Field

from fedstill.common import checkpoint
from fedstill.common.config import RunConfig, Section
from fedstill.common.models.learner import Practice
from fedstill.common.randomness import derive
from fedstill.common.wire import Ask, Facts, Failure, Reply, check_metrics, check_reply, to_records
from fedstill.common.wire.compression import pack, unpack
from fedstill.server.central import Student
from fedstill.server.costs import PHASES, Spending
from fedstill.server.formulas import arithmetic
from fedstill.server.link import Link
from fedstill.server.record import Record
from fedstill.server.results import Results, scores_in, short_name

Round = Generator[Ask, list[Reply], Facts]

_NOT_BY_HOOKS = (
    "a Method asks as often as its paper does, and Flower's hooks allow one exchange a round: "
    "call start(), or run() with a link"
)


class QuorumLost(RuntimeError):
    """Too few sites answered for the step to count; the run stops with its last checkpoint."""


class Params(Section):
    """What every method can be told. A method's own Params add to these; unknown keys are refused."""

    local_epochs: int = Field(3, ge=1)
    participation: float = Field(1.0, gt=0, le=1)
    optimizer_state: Literal["persistent", "fresh"] = "persistent"
    schedule: Literal["constant", "call", "phase", "run"] = "constant"  # where the rate falls to zero


class Method(Strategy):
    """Drives `round()`; owns sampling, quorum, deadlines, events and checkpoints."""

    name: ClassVar[str]
    paper: ClassVar[str]
    parameters: ClassVar[type[Params]] = Params
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}}
    needs_same_models: ClassVar[bool] = False
    _holders: frozenset[str] = frozenset()  # sites that hold what the method would send them
    any_task: ClassVar[bool] = False  # whether sites may have different tasks (task.name = "mixed")

    def __init__(self, params: Params, config: RunConfig, student: Student, record: Record) -> None:
        if config.mixed and not self.any_task:
            raise ValueError(
                f'{self.name} needs texts and labels that all sites share, and with task.name = "mixed" they have '
                "tasks of their own: choose a method that exchanges parameters, such as atc or fedavg"
            )
        self.p, self.config, self.student, self.record = params, config, student, record
        self.participants: tuple[str, ...] = ()
        self.results, self.spending = Results(), Spending()
        self._number = self._step = 0
        self._left: dict[str, str] = {}  # sites that were late or lost in this round, and why
        self._away: dict[str, str] = {}  # those that have not been heard of since
        self._phase = "start"
        self._link: Link | None = None

    # --- what a method writes ---

    def round(self, number: int) -> Round:
        """One communication round, as in the paper."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """What the method itself must remember between rounds, beside the central model."""
        return {}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""

    def began_anew(self, site: str) -> None:
        """A site's process is another than before: it holds at most what its own last checkpoint has."""
        self._holders = self._holders - {site}

    # --- what a method uses ---

    @property
    def link(self) -> Link:
        """How the sites are reached."""
        assert self._link is not None, "the method has not been started"
        return self._link

    @property
    def public_rows(self) -> np.ndarray:
        """All rows of the public set, in their agreed order."""
        return np.arange(len(self.student.public))

    def practice(self, start: float = 0.0, end: float = 1.0) -> Practice:
        """How a call between the shares `start` and `end` of this round trains, by the schedule."""
        done, rounds = self._number - 1, self.config.rounds
        decay = {
            "constant": None,
            "call": (0.0, 1.0),
            "phase": (start, end),
            "run": ((done + start) / rounds, (done + end) / rounds),
        }[self.p.schedule]
        return Practice(fresh=self.p.optimizer_state == "fresh", decay=decay)

    @staticmethod
    def told(practice: Practice) -> Facts:
        """A practice as settings of an Ask."""
        said = {"optimizer": practice.optimizer, "fresh": practice.fresh, "decay": practice.decay}
        usual = {"optimizer": "adamw", "fresh": False, "decay": None}
        return {name: value for name, value in said.items() if value != usual[name]}

    def local_training(self) -> Ask:
        """The Ask that opens most rounds: E epochs on the private texts."""
        return Ask("train.local", settings={"epochs": self.p.local_epochs, **self.told(self.practice())})

    # --- the run ---

    def run(self, link: Link, resume: bool = False, began: float | None = None) -> Facts:
        """All rounds over a link that the sites have joined; returns the summary."""
        began = time.perf_counter() if began is None else began
        self._link = link
        self._check_models()
        self.spending.setup += time.perf_counter() - began
        self.record.event("joined", sites=link.sites)
        done = self._take_up() if resume else None
        if done is None:
            self._yardsticks()
            self._evaluate(0)
            self._checkpoint(0)
        for number in range((done or 0) + 1, self.config.rounds + 1):
            self._begin(number)
            self.record.event("round_started", round=number, rounds=self.config.rounds, sites=list(self.participants))
            metrics = self._drive(self.round(number))
            self._evaluate(number)
            self.record.event("round_finished", round=number, rounds=self.config.rounds, metrics=metrics,
                              central=self.results.central(), sites=self.results.sites())  # fmt: skip
            if self.results.privacy:
                self.record.event("privacy", round=number, sites=self.results.privacy)
            self._account(began)
            began = time.perf_counter()
            self._checkpoint(number)
        self._account(began)
        return self._finish()

    def _begin(self, number: int) -> None:
        self._number, self._step = number, 0
        self._left.clear()
        self._let_in()
        self.student.begin_round(number)
        names = list(self.link.sites)
        count = max(1, round(self.p.participation * len(names))) if number else len(names)
        rng = np.random.default_rng(derive(self.config.seed, "participants", number))
        chosen = set(rng.permutation(len(names))[:count].tolist())
        self.participants = tuple(name for place, name in enumerate(names) if place in chosen)

    def _let_in(self) -> None:
        """Sites whose process began anew take up their own last checkpoint; without one they start with a new model."""
        for name, facts in self.link.returned().items():
            held = [number for number in facts.get("rounds", []) if number < self._number]
            self._away.setdefault(name, "it began anew")
            self._take_up_alone(name, held, self._number)

    def _take_up_alone(self, name: str, held: list[int], number: int) -> None:
        """A site that missed rounds goes on with what it last had; one that has nothing starts with a new model."""
        self.began_anew(name)
        if held:
            self.ask(Ask("query.restore", settings={"number": max(held)}, to=(name,)), quorum=False)
        else:
            self.record.event("site_reset", site=name, round=number, reason="it holds no checkpoint")

    def _drive(self, steps: Round) -> Facts:
        try:
            ask = next(steps)
            while True:
                replies = self.ask(ask)
                del ask  # a state that was sent need not live while the next one is made
                ask = steps.send(replies)
                del replies
        except StopIteration as end:
            return dict(end.value or {})

    def ask(self, ask: Ask, quorum: bool = True) -> list[Reply]:
        """Put an Ask to its sites; the usable Replies in the run's order. Too few of them end the run."""
        names = self.participants if ask.to is None else ask.to
        asked = [name for name in names if name not in self._left]
        self._spend_central()
        self._phase = PHASES.get(ask.verb, self._phase)
        before, began = self.link.traffic(), time.perf_counter()
        place = {"round": self._number, "step": self._step}
        self._step += 1
        coded = replace(ask, arrays=pack(ask.arrays, self.config.exchange.predictions))
        parts = {name: coded.part_for(name) for name in asked}
        parts = {name: Ask(part.verb, part.arrays, {**part.settings, **place}) for name, part in parts.items()}
        replies = dict(self._usable(ask, self.link.deliver(parts, self._deadline(ask.verb))))
        wall = time.perf_counter() - began
        self.spending.exchanged(self._phase, wall, replies.values(), before, self.link.traffic())
        needed = self._quorum(len(names))
        if quorum and len(replies) < needed:
            raise QuorumLost(
                f"round {self._number}, {ask.verb}: {len(replies)} of {len(names)} sites gave a usable answer and "
                f"{needed} are needed; {self.record.folder / 'events.jsonl'} says why. The run can be resumed"
            )
        return [replies[name] for name in names if name in replies]

    def _usable(self, ask: Ask, outcomes: Iterable[Reply | Failure]) -> Iterable[tuple[str, Reply]]:
        for outcome in outcomes:
            reason = outcome.reason if isinstance(outcome, Failure) else None
            if isinstance(outcome, Failure) and outcome.gone:
                self._left[outcome.node] = self._away[outcome.node] = outcome.reason
            if isinstance(outcome, Reply):
                try:
                    reply = replace(outcome, arrays=unpack(outcome.arrays))
                    check_metrics(ask.verb, reply, self.link.sites[reply.node])
                    check_reply(ask, reply)
                except (ValueError, OverflowError) as error:
                    reason = str(error)
                else:
                    self._heard(reply)
                    yield outcome.node, reply
            if reason is not None:
                self.record.event("left_out", site=outcome.node, round=self._number, verb=ask.verb, reason=reason)

    def _heard(self, reply: Reply) -> None:
        """Say that a site is back, and keep what it says of its privacy budget."""
        if reply.node in self._away:
            missed = self._away.pop(reply.node)
            self.record.event("readmitted", site=reply.node, round=self._number, missed=missed)
        if "privacy" in reply.metrics:
            self.results.privacy[reply.node] = reply.metrics["privacy"]

    def _quorum(self, asked: int) -> int:
        quorum = self.config.exchange.quorum
        return min(asked, max(1, int(np.ceil(quorum * asked)) if quorum <= 1 else int(quorum)))

    def _deadline(self, verb: str) -> float:
        quick = ("query.logits", "train.feedback", "query.save", "query.restore")
        exchange = self.config.exchange
        return exchange.step_deadline if verb in quick else exchange.train_deadline

    def _check_models(self) -> None:
        families = {name: str(facts.get("model")) for name, facts in self.link.sites.items()}
        if self.needs_same_models and len({*families.values(), short_name(self.config.central.model)}) > 1:
            raise ValueError(
                f"{self.name} exchanges weights, so the central model and every site must be the same model; "
                f"central: {self.config.central.model}, sites: {families}. Exchange predictions to mix models"
            )

    # --- yardsticks, evaluation, summary ---

    def _yardsticks(self) -> None:
        """What each site reaches alone, and what all private texts in one place would have reached."""
        self._begin(0)
        epochs = self.p.local_epochs * self.config.rounds
        practice = Practice(fresh=True, decay=None if self.p.schedule == "constant" else (0.0, 1.0))
        if self.config.report.alone:
            self.record.event("phase", phase="alone", epochs=epochs)
            for reply in self.ask(
                Ask("evaluate.alone", settings={"epochs": epochs, **self.told(practice)}), quorum=False
            ):
                self.results.alone[reply.node] = scores_in(reply.metrics)
            self.record.event("alone", sites=self.results.alone)
        if self.config.report.centralized and len(self.student.texts.private):
            self._spend_central()
            self._phase = "centralized"
            epochs = self.config.report.centralized_epochs or epochs
            self.record.event("phase", phase="centralized", epochs=epochs)
            began = time.perf_counter()
            self.results.centralized = self.student.centralized(epochs, practice)
            self.spending.spend("centralized", central=time.perf_counter() - began)
            self.record.event("centralized", metrics=self.results.centralized)

    def _evaluate(self, number: int) -> None:
        if number not in (0, self.config.rounds) and self.config.report.evaluate == "end":
            return
        self._number = number
        self.results.tested(number, "central", self.student.test())
        everyone = tuple(self.link.sites)
        for reply in self.ask(Ask("evaluate.test", to=everyone), quorum=False):
            self.results.tested(number, reply.node, reply.metrics)
        self.record.metrics(self.results.history)

    def summary(self) -> None:
        """Log what will be run (Flower's hook)."""
        self.record.event("method", name=self.name, paper=self.paper, parameters=self.p.model_dump())

    def _finish(self) -> Facts:
        about = {"method": self.name, "preset": self.config.method.preset, "parameters": self.p.model_dump()}
        sites = self.link.sites
        formulas = {name: self._formula(facts) for name, facts in sites.items()}
        facts = self.results.summary(about, self.config, self.student, self.spending, sites, formulas)
        self.record.save_central(self.student.learner.model, facts)
        self.record.summary(facts)
        self.record.event("run_finished", central=facts["central"], seconds=facts["seconds"])
        return facts

    def _formula(self, site: Facts) -> Facts:
        """The bytes that the paper's arithmetic gives this site for the whole run, by phase; empty if it has none."""
        if self.p.participation < 1 or self.config.mixed:
            return {}
        found = arithmetic(
            self.name,
            self.p.model_dump(),
            public=len(self.student.public),
            classes=self.student.classes,
            batch=self.student.learner.batch_size,
            parameters=int(site.get("travelling", 0)),
            predictions=self.config.exchange.predictions,
        )
        rounds, happened = self.config.rounds, self.spending.phases
        return {
            phase: {"up": up * rounds, "down": down * rounds}
            for phase, (up, down) in found.items()
            if phase in happened
        }

    def _spend_central(self) -> None:
        """What the central model computed since the last Ask belongs to that Ask's phase."""
        spent, self.student.learner.compute_seconds = self.student.learner.compute_seconds, 0.0
        if spent:
            self.spending.spend(self._phase, central=spent)

    def _account(self, began: float) -> None:
        self._spend_central()
        self.spending.total += time.perf_counter() - began

    # --- checkpoints ---

    def _checkpoint(self, number: int) -> None:
        """Sites first, so that whatever the server holds, they hold too; whoever was late may be there by now."""
        self._left.clear()
        self.ask(Ask("query.save", settings={"number": number}, to=tuple(self.link.sites)))
        arrays = {f"central/{name}": value for name, value in self.student.learner.state(copy=False).items()}
        arrays.update({f"method/{name}": value for name, value in self.state().items()})
        facts = {"round": number, **self.results.facts(), "spending": self.spending.facts()}
        self.record.save_round(number, arrays, facts)

    def _take_up(self) -> int | None:
        """The last round that is done and that a quorum of the sites holds; None where the run begins anew.

        Where so many sites lost their checkpoints that there is none, the server's last one will do: what is done is
        not done again because a site was away.
        """
        held = {name: set(facts.get("rounds", [])) for name, facts in self.link.sites.items()}
        everywhere = set().union(*held.values())
        needed = self._quorum(len(held))
        enough = {number for number in everywhere if sum(number in rounds for rounds in held.values()) >= needed}
        found = checkpoint.newest(self.record.checkpoints, enough) or checkpoint.newest(self.record.checkpoints)
        if found is None:
            self.record.event("resumed", round=None, reason="there is no checkpoint that can be read")
            return None
        number, arrays, facts, problems = found
        for problem in problems:
            self.record.event("damaged", problem=problem)
        self.student.learner.load_state(_under(arrays, "central/"))
        self.load_state(_under(arrays, "method/"))
        self.results.load(facts)
        self.spending.load(facts["spending"])
        holders = tuple(name for name in held if number in held[name])
        if holders:
            self.ask(Ask("query.restore", settings={"number": number}, to=holders))
        for name in held:
            if name not in holders:
                self._take_up_alone(name, [other for other in held[name] if other < number], number)
        self.record.event("resumed", round=number)
        return number

    # --- Flower's Strategy ---

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        *,
        link: Callable[[Grid], Link],
        resume: bool = False,
    ) -> Result:
        """Open the link over Flower's grid and run every round; what Flower's own loop allows a round is not enough."""
        began = time.perf_counter()
        self.summary()
        opened = link(grid)
        try:
            self.run(opened, resume, began)
        except BaseException as error:
            opened.close({"status": "failed", "reason": f"{type(error).__name__}: {error}"})
            raise
        opened.close({"status": "finished"})
        result = Result()
        result.arrays = ArrayRecord(
            dict(to_records(self.student.learner.weights(copy=False), {}).array_records["arrays"])
        )
        for number, scores in self.results.central_by_round().items():
            result.evaluate_metrics_serverapp[number] = MetricRecord(scores)
        return result

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


def _under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name[len(prefix) :]: value for name, value in arrays.items() if name.startswith(prefix)}
