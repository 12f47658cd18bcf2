"""One run: drives the method's rounds over a link, with sampling, quorum, deadlines, tests and events."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedstill.common.config import RunConfig
from fedstill.common.practice import Practice
from fedstill.common.prometheus import MetricsServer
from fedstill.common.randomness import derive
from fedstill.common.readable import plain, reason_of
from fedstill.common.wire import Ask, Facts, Failure, Reply, WireError
from fedstill.common.wire.checks import check_every_reply, check_reply
from fedstill.common.wire.compression import pack, unpack
from fedstill.common.wire.flower_records import to_records
from fedstill.server import recovery
from fedstill.server.admission import Admission
from fedstill.server.central import make_central
from fedstill.server.costs import Costs, by_formula
from fedstill.server.diagnosis import ENOUGH, Finding, diagnosis_of
from fedstill.server.link import Link, open_link
from fedstill.server.observed import coordinator
from fedstill.server.pseudo_labels import PseudoLabels
from fedstill.server.pulse import Pulse
from fedstill.server.record import Record, RunStopped
from fedstill.server.results import Results, judged, scores_in
from fedstill.strategies import VERBS, Method, find_verb, make_method
from fedstill.strategies.base import QuorumLost, Round
from fedstill.strategies.generic import Train, evaluate, evaluate_alone, save
from fedstill.strategies.secure_sum import PROTOCOL
from fedstill.strategies.secure_sum.server import ask_for_sum
from fedstill.strategies.verbs import Nothing, Verb

UNCHANGED = {save.name, evaluate.name, evaluate_alone.name}  # verbs that leave a site as it was


class Federation:
    """One run: its method, its central model, its record, and the sites behind a link."""

    def __init__(self, config: RunConfig, record: Record | Path | str, method: Method | None = None) -> None:
        self.config = config
        self.record = record if isinstance(record, Record) else Record(Path(record), config)
        self.method = make_method(config.method) if method is None else method
        self.central = make_central(config)
        self.central.check_method(self.method)
        if config.exchange.secure and (reason := self.method.why_no_sums()) is not None:
            raise ValueError(f"exchange.secure: {self.method.name} {reason}; choose another method, or secure = false")
        self.results, self.costs = Results(), Costs()
        self.diagnosis = diagnosis_of(config, self.method, self.central)
        known = dict(zip(self.central.blind.tolist(), self.central.labels.tolist(), strict=False))
        public, truth = len(self.central.public), self.central.texts.public_truth
        self.pseudo = PseudoLabels(self.central.classes, public, truth, known)
        self.pulse = Pulse(self.record, self.costs)
        self.number = 0  # of the round
        self.participants: tuple[str, ...] = ()
        self.late: dict[str, str] = {}  # sites that were late or lost in this round, and why
        self.away: dict[str, str] = {}  # those that have not answered since
        self.left_out: Counter[str] = Counter()  # how often, by site
        self.saved: dict[str, int] = {}  # the round of each site's last checkpoint
        self.touched: set[str] = set()  # sites that may have changed since
        self.heard_at: dict[str, float] = {}  # when each site's last usable answer came
        self._missed: dict[str, str] = {}  # why a site's last answer was of no use
        self.local_losses: dict[str, list[float]] = {}  # of this round's local epochs, by site
        self._step, self._phase = 0, "start"
        self.link: Link  # how the sites are reached; set by `run`
        self.sites: dict[str, Facts] = {}  # the greeting of each site, in the run's order
        for key in ("warmup", "fall"):
            if getattr(config.train, key) and self.method.p.schedule == "constant":
                raise ValueError(
                    f"train.{key} is a share of a falling schedule, and method.schedule is constant; "
                    f"set method.schedule to run, phase or call, or take train.{key} out"
                )
        self.method.prepare(self)

    # --- what a method uses ---

    @property
    def public_rows(self) -> np.ndarray:
        """All rows of the public set, in the agreed order."""
        return np.arange(len(self.central.public))

    def event(self, kind: str, **facts: object) -> None:
        """Record an event of this round."""
        self.record.event(kind, round=self.number, **facts)

    def progress(self, phase: str, done: int, total: int, **facts: object) -> None:
        """Report the progress of a phase of this round."""
        self.record.progress(phase, done, total, round=self.number, **facts)

    def without(self, unfit: Mapping[str, str], verb: str) -> None:
        """Go on without sites that cannot take part, if the quorum allows; their answers will not fit. Else stop."""
        if unfit and len(self.sites) - len(unfit) < self.quorum(len(self.sites)):
            raise ValueError(next(iter(unfit.values())))
        for name, reason in unfit.items():
            self.event("left_out", site=name, verb=verb, reason=plain(reason))

    # --- the run ---

    def admission(self) -> Admission:
        """What a site must have in common with the others to be admitted."""
        return Admission(self.config, self.central)

    def over(self, grid: Grid, method: Method | None = None, resume: bool = False) -> Result:
        """Open the configured link over Flower's grid, run every round, and tell the sites how it ended."""
        began = time.perf_counter()
        if method is not None and method is not self.method:
            self.method = method
            self.central.check_method(method)
            method.prepare(self)
        self.announce()
        link = open_link(grid, self.config, self.record, self.admission())
        address = self.config.exchange.metrics
        try:
            numbers = None if address is None else MetricsServer(address, lambda: coordinator(self, link))
            self.run(link, resume, began)
            if numbers is not None:
                numbers.close()
        except RunStopped as stopped:
            link.close({"status": "stopped", "reason": str(stopped)})
            raise
        except BaseException as error:
            link.close({"status": "failed", "reason": reason_of(error)})
            raise
        link.close({"status": "finished"})
        result = Result()
        weights = to_records(self.central.learner.weights(copy=False), {}).array_records["arrays"]
        result.arrays = ArrayRecord(dict(weights))
        for number, scores in self.results.central_by_round().items():
            result.evaluate_metrics_serverapp[number] = MetricRecord(scores)
        return result

    def announce(self) -> None:
        """Record which method will run, with which parameters."""
        method = self.method
        self.record.event("method", name=method.name, paper=method.paper, parameters=method.p.model_dump())

    def run(self, link: Link, resume: bool = False, began: float | None = None) -> Facts:
        """Run all rounds over a link that the sites have joined; return the summary."""
        began = time.perf_counter() if began is None else began
        self.link, self.sites, self.saved, self.touched = link, link.sites, {}, set()
        self._drive(self.method.check_sites(self))
        self.costs.setup += time.perf_counter() - began
        self.record.event("joined", sites=link.sites)
        central = self.central.learner
        rates = {name: greeting.get("rates") or {} for name, greeting in link.sites.items()}
        own = {str(purpose): rate for purpose, rate in central.rates.items()}
        self.record.note_rates({"central": {**own, "warmup": central.warmup, "fall": central.fall}, **rates})
        done = recovery.resume(self) if resume else None
        if done is None:
            self._yardsticks()
            self._evaluate(0)
            self.event("tested", central=self.results.central(), sites=self.results.sites())
            recovery.save_round(self, 0)
        for number in range((done or 0) + 1, self.config.rounds + 1):
            self._begin(number)
            self.event("round_started", rounds=self.config.rounds, sites=list(self.participants))
            metrics = self._drive(self.method.round(self))
            self._evaluate(number)
            self.event("round_finished", rounds=self.config.rounds, metrics=metrics,
                       central=self.results.central(), sites=self.results.sites())  # fmt: skip
            findings = self._findings(metrics)
            if self.diagnosis.agreement:
                self.event("agreement", **self.diagnosis.agreement)
            if self.local_losses:
                self.event("local_losses", sites=self.local_losses)
                self.local_losses = {}
            for facts, right in self.pseudo.after_round():
                self.event("pseudo_labels", **facts)
                if right is not None:
                    self.event("pseudo_label_accuracy", **right)
            for finding in findings:
                self.event("warning", **finding.facts())
            if self.results.privacy:
                self.event("privacy", sites=self.results.privacy)
            self._account(began)
            began = time.perf_counter()
            recovery.save_round(self, number)
            if number < self.config.rounds and self.record.stop_wanted():
                raise RunStopped(number, self.record.folder.name)
        self.pulse.last(self.number)
        self._account(began)
        return self._finish()

    def _begin(self, number: int) -> None:
        self.number, self._step = number, 0
        self.late.clear()
        recovery.let_in(self)
        self.central.begin_round(number)
        names = list(self.sites)
        count = max(1, round(self.method.p.participation * len(names))) if number else len(names)
        rng = np.random.default_rng(derive(self.config.seed, "participants", number))
        chosen = set(rng.permutation(len(names))[:count].tolist())
        self.participants = tuple(name for place, name in enumerate(names) if place in chosen)

    def _drive(self, steps: Round) -> Facts:
        try:
            ask = next(steps)
            while True:
                replies = self.ask(ask)
                del ask  # free the sent state before the next one is made
                ask = steps.send(replies)
                del replies
        except StopIteration as end:
            return dict(end.value or {})

    # --- one Ask ---

    def ask(self, ask: Ask) -> list[Reply]:
        """Put an Ask to its sites; return the usable Replies in the run's order. The run ends if there are too few."""
        if self.config.exchange.secure and ask.sum is not None:
            return ask_for_sum(self, ask)
        verb = VERBS.get(ask.verb) or find_verb(ask.verb)
        names = self.participants if ask.to is None else ask.to
        self._spend_central()
        self._phase = verb.phase or self._phase
        self.touched.update(() if ask.verb in UNCHANGED else names)
        before, began = self.link.traffic(), time.perf_counter()
        place = {"round": self.number, "step": self._step}
        self._step += ask.verb not in PROTOCOL
        room = verb.room(ask, self.central.classes)
        coded = replace(ask, arrays=pack(ask.arrays, self.config.exchange.predictions), room=room)
        parts = coded.parts_for([name for name in names if name not in self.late], place)
        exchange = self.config.exchange
        deadline = exchange.step_deadline if verb.quick else exchange.train_deadline
        self.costs.asked(ask.verb, ", ".join(verb.leaves) or "a few numbers")
        self.pulse.asked(self.number, self._phase, ask.verb, parts, verb.quick)
        outcomes, besides = self.link.deliver(parts, deadline), 0.0
        if ask.meanwhile is not None:
            sent = time.perf_counter()
            ask.meanwhile()
            besides = time.perf_counter() - sent
        replies = dict(self._usable(verb, ask, outcomes))
        wall = time.perf_counter() - began - besides
        self.costs.exchanged(self._phase, wall, replies.values(), before, self.link.traffic())
        self.pulse.done(self.number)
        # of the round's sites, not of those who are left of them: an ensemble of one is no ensemble
        needed = min(len(names), self.quorum(max(len(names), len(self.participants))))
        if not ask.optional:
            self.require(needed, names, replies, ask.verb)
        return [replies[name] for name in names if name in replies]

    def require(self, needed: int, names: Sequence[str], fine: Container[str], verb: str) -> None:
        """End the run, with every site's reason, if fewer than `needed` of these sites are fine."""
        missing = [name for name in names if name not in fine]
        if len(names) - len(missing) < needed:
            why = "; ".join(f"site {name}: {self._missed.get(name, 'no answer')}" for name in missing)
            raise QuorumLost(
                f"{why} (round {self.number}, {verb}: {len(names) - len(missing)} of {len(names)} sites gave a usable "
                f"answer and {needed} are needed; the run can be resumed)"
            )

    def _usable(self, verb: Verb, ask: Ask, outcomes: Iterable[Reply | Failure]) -> Iterable[tuple[str, Reply]]:
        for outcome in outcomes:
            reason = outcome.reason if isinstance(outcome, Failure) else None
            if isinstance(outcome, Failure) and outcome.gone:
                self.late[outcome.node] = self.away[outcome.node] = plain(outcome.reason)
            if isinstance(outcome, Reply):
                try:
                    reply = self._checked(verb, ask, outcome)
                except Exception as error:  # whatever one site sends, the others go on
                    reason = f"{error}" if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
                else:
                    self._heard(reply)
                    yield outcome.node, reply
            if reason is not None:
                self.left_out[outcome.node] += 1
                self._missed[outcome.node] = plain(reason)
                self.event("left_out", site=outcome.node, verb=ask.verb, reason=plain(reason))
                for finding in self.diagnosis.broke_down(outcome.node, reason):
                    self.event("warning", **finding.facts())

    def _checked(self, verb: Verb, ask: Ask, outcome: Reply) -> Reply:
        """Return a Reply that fits its verb's declaration and what was asked; an exception says why it does not."""
        reply, greeting = replace(outcome, arrays=unpack(outcome.arrays)), self.sites[outcome.node]
        check_every_reply(reply, greeting)
        verb.check(reply)
        check_reply(ask, reply)
        if not self.config.exchange.secure:
            self.diagnosis.observe([reply])
            if "rows" in ask.arrays and "logits" in reply.arrays:
                self.pseudo.observe(reply.node, ask.arrays["rows"], reply.arrays["logits"])
        return replace(reply, metrics={**reply.metrics, "texts": greeting["texts"]}) if verb.counts_texts else reply

    def _heard(self, reply: Reply) -> None:
        """Record that a site answered or is back, and keep its reported privacy budget."""
        self.heard_at[reply.node] = time.monotonic()
        self.pulse.heard(self.number, reply.node)
        if reply.node in self.away:
            self.event("readmitted", site=reply.node, missed=self.away.pop(reply.node))
        losses = reply.metrics.get("losses")
        if isinstance(losses, list) and losses and all(isinstance(loss, int | float) for loss in losses):
            self.local_losses[reply.node] = [*self.local_losses.get(reply.node, []), *map(float, losses)]
        if "privacy" in reply.metrics:
            self.results.privacy[reply.node] = reply.metrics["privacy"]

    def quorum(self, asked: int) -> int:
        """Return how many of the sites asked must answer."""
        quorum = self.config.exchange.quorum
        return min(asked, max(1, math.ceil(quorum * asked) if quorum <= 1 else int(quorum)))

    # --- yardsticks, tests, summary ---

    def _yardsticks(self) -> None:
        """Measure what each site reaches alone, and what all private texts in one place would reach."""
        self._begin(0)
        report, p = self.config.report, self.method.p
        epochs = p.local_epochs * self.config.rounds
        practice = Practice(fresh=True, decay=None if p.schedule == "constant" else (0.0, 1.0))
        if report.alone:
            self.record.event("phase", phase="alone", epochs=epochs)
            open_sites = tuple(name for name in self.participants if "privacy" not in self.sites[name])
            for reply in self.ask(evaluate_alone.ask(Train(epochs, practice), to=open_sites, optional=True)):
                self.results.alone[reply.node] = scores_in(reply.metrics)
            self.record.event("alone", sites=self.results.alone)
        if report.centralized and len(self.central.texts.private):
            self._spend_central()
            self._phase = "centralized"
            epochs = report.centralized_epochs or epochs
            self.record.event("phase", phase="centralized", epochs=epochs)
            began = time.perf_counter()
            self.results.centralized = self.central.centralized(epochs, practice)
            self.costs.spend("centralized", central=time.perf_counter() - began)
            self.record.event("centralized", metrics=self.results.centralized)

    def _evaluate(self, number: int) -> None:
        if not self._is_tested(number):
            return
        self.number = number
        self.results.tested(number, "central", self.central.test())
        if number and self.method.teaches_central and not (self.config.mixed or self.central.task.choices):
            self.diagnosis.tested = self.central.tested
        open_sites = tuple(name for name, facts in self.sites.items() if facts.get("privacy") != "noise")
        for reply in self.ask(evaluate.ask(Nothing(), to=open_sites, check=self._scores, optional=True)):
            self.results.tested(number, reply.node, reply.metrics)
        self.record.metrics(self.results.history)

    def _is_tested(self, number: int) -> bool:
        return number in (0, self.config.rounds) or self.config.report.evaluate != "end"

    def _findings(self, metrics: Facts) -> list[Finding]:
        """What the round gives reason to say, from everything that the server has seen of it."""
        sizes = {name: int(facts.get("texts", 0)) for name, facts in self.sites.items()}
        tested = self._is_tested(self.number)  # else the last scores are those from before the first round
        return self.diagnosis.after_round(
            metrics,
            self.results.central() if tested and self.method.teaches_central else {},
            self.results.sites() if tested else {},
            self.number,
            self.number == self.config.rounds,
            {site: losses for site, losses in self.local_losses.items() if sizes.get(site, 0) >= ENOUGH},
            self.pseudo.compared(sizes) if self.method.averages_predictions() else None,
        )

    def _scores(self, reply: Reply) -> None:
        """Refuse a test without the scores that the report shows: the central model's main ones, or a mean."""
        names = list(self.results.central())
        main = next((name for name in names if not name.startswith(("accuracy", "semantic_distance"))), "accuracy")
        missing = ({"accuracy", main} & set(names) if names else {"score"}) - set(reply.metrics)
        if missing:
            raise WireError(f"its test has no {min(missing)}")

    def _finish(self) -> Facts:
        method, sites = self.method, self.sites
        about = {"method": method.name, "preset": self.config.method.preset, "parameters": method.p.model_dump()}
        formulas: Mapping[str, Any] = {
            name: by_formula(method, self.config, self.central, facts, self.costs.phases)
            for name, facts in sites.items()
        }
        summary = self.results.summary(about, self.config, self.central, self.costs, sites, formulas)
        summary["central_test"] = self._tested_closely()
        self.record.save_central(self.central.learner.model, self.central.card(summary))
        self.record.summary(summary)
        self.record.event("run_finished", central=summary["central"], seconds=summary["seconds"])
        return summary

    def _tested_closely(self) -> Facts | None:
        """Return the central model's confusions and how sure it is, for the report; None where it has no such test."""
        central = self.central
        if self.config.mixed or central.task.choices or not len(central.test_texts):
            return None
        logits = central.learner.predict(central.test_texts, np.arange(len(central.test_texts)))
        return judged(central.task.labels, np.asarray(central.texts.test.labels), logits)

    def _spend_central(self) -> None:
        """Charge what the central model computed since the last Ask to that Ask's phase."""
        learner = self.central.learner
        spent, learner.compute_seconds = learner.compute_seconds, 0.0
        if spent:
            self.costs.spend(self._phase, central=spent)

    def _account(self, began: float) -> None:
        self._spend_central()
        self.costs.total += time.perf_counter() - began
