"""ATC. Dong et al., "Collaborating Heterogeneous Natural Language Processing Tasks via Federated Learning", 2022."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstill.common.config import RunConfig
from fedstill.common.maths.affinity import cluster, cosines, mixed_features, ranking, step_towards
from fedstill.common.maths.ensemble import by_size, mean_arrays
from fedstill.common.models.bert2bert import GROUPS, group_of, moved_by
from fedstill.common.models.learner import Practice
from fedstill.common.randomness import derive
from fedstill.common.wire import Arrays, Ask, Facts, Reply, same_shapes, shaped
from fedstill.server.central import Student
from fedstill.server.holder import Holder
from fedstill.server.record import Record
from fedstill.strategies.base import Method, Params, Round


class ATCParams(Params):
    """`local_epochs` are those of the own task, in CONTRAST."""

    assign_rounds: int | None = Field(None, ge=0)  # two thirds of the rounds; 0: no ASSIGN
    assign_steps: int = Field(50, ge=1)
    corruption: Literal["both", "mlm", "denoising"] = "both"
    clustering: bool = True
    clusters: int = Field(5, ge=1)
    contrast: bool = True  # false: FedAvg of the encoder in its place
    contrast_loss: bool = True
    neighbours: int = Field(8, ge=1)  # K
    temperature: float = Field(1.0, gt=0)
    items: int = Field(1024, ge=1)
    positions: int = Field(128, ge=1)
    clip: float = Field(0.0, ge=0)  # norm of each vector that a site shows; 0: as it is
    noise: float = Field(0.0, ge=0)  # standard deviation, in units of `clip`
    horizon: float = Field(1.0, ge=1)  # of CONTRAST's schedule, in lengths of CONTRAST


class ATC(Method):
    """Sites mend corrupted texts, clustered by their updates; then each learns its task beside its neighbours."""

    name = "atc"
    paper = "Dong et al. 2022"
    parameters = ATCParams
    presets: ClassVar = {
        "paper": {"local_epochs": 1, "schedule": "run"},
        "authors_code": {"local_epochs": 1, "schedule": "run", "horizon": 3.125, "items": 20000, "positions": 384},
    }
    needs_same_models = True
    any_task = True
    p: ATCParams

    def __init__(self, params: ATCParams, config: RunConfig, student: Student, record: Record) -> None:
        super().__init__(params, config, student, record)
        if not isinstance(student, Holder):
            raise ValueError('atc is for sites with tasks of their own: set task.name = "mixed", and [sites.task]')
        if params.noise and not params.clip:
            raise ValueError("method.noise is in units of method.clip, the norm of what is shown: set clip above 0 too")
        self.assign_rounds = config.rounds * 2 // 3 if params.assign_rounds is None else params.assign_rounds
        if self.assign_rounds > config.rounds:
            raise ValueError(f"method.assign_rounds = {self.assign_rounds} is above rounds = {config.rounds}: lower it")
        self.holder = student
        self.models: dict[str, Arrays] = {}  # w_n
        self.stale: dict[str, frozenset[str]] = {}  # groups of w_n that the site does not hold as they are here
        self.nearest: dict[str, list[str]] = {}  # everybody else, nearest first, by the last updates
        self.synthetic: Arrays = {}
        self.supplied: set[str] = set()  # sites that hold the synthetic set

    def round(self, number: int) -> Round:
        for site in self.link.sites:
            self.models.setdefault(site, self.holder.shared())
            self.stale.setdefault(site, frozenset(GROUPS))
        steps = self._assign(number) if number <= self.assign_rounds else self._contrast(number)
        facts = yield from steps
        back = self._owed(self.link.sites)
        for reply in (yield Ask("train.shared", each=back, to=tuple(back))):  # what sites test is what they share
            self.stale[reply.node] = frozenset()
        sizes = by_size({site: facts["texts"] for site, facts in self.link.sites.items()})
        self.holder.load_shared(mean_arrays(self.models, sizes))
        return facts

    # --- ASSIGN ---

    def _assign(self, number: int) -> Round:
        objective = self._objective(number)
        settings = {"objective": objective, "steps": self.p.assign_steps, **self.told(self.practice())}
        replies = yield self._ask("train.corrupted", settings, moved_by(objective))
        updates = self._received(replies, moved_by(objective))
        labels = cluster(similarity := cosines(updates), self.p.clusters if self.p.clustering else 1)
        found = dict(zip(updates, labels, strict=True))
        self._move(
            replies, {site: [other for other in found if found[other] == found[site]] for site in found}
        )  # eq. 2
        self.record.event("clusters", round=number, objective=objective, clusters=found, cosines=similarity.tolist())
        return {"loss": _mean_loss(replies), "objective": objective, "clusters": len(set(labels))}

    def _objective(self, number: int) -> str:
        """MLM first, then either with equal chance."""
        if self.p.corruption != "both":
            return self.p.corruption
        return "mlm" if number == 1 or derive(self.config.seed, "objective", number) % 2 else "denoising"

    # --- CONTRAST ---

    def _contrast(self, number: int) -> Round:
        told: dict[str, Arrays] = {}
        if self.p.contrast and self.p.contrast_loss:
            if not self.synthetic:
                yield from self._synthesise()
            elif self.nearest:
                told = self._positives_and_negatives((yield self._ask_representations()))
        settings = {"epochs": self.p.local_epochs, "temperature": self.p.temperature, **self.told(self.practice())}
        replies = yield self._ask("train.contrast", settings, ("encoder",), told)
        updates = self._received(replies, ("encoder",))
        names, similarity = list(updates), cosines(updates)
        self.nearest = {site: [names[i] for i in ranking(similarity, n)] for n, site in enumerate(names)}
        members = {site: [site, *self.nearest[site][: self.p.neighbours - 1]] for site in names}
        self._move(replies, members if self.p.contrast else dict.fromkeys(names, names))  # eq. 4
        self.record.event("neighbours", round=number, nearest=self.nearest, cosines=similarity.tolist())
        return {"loss": _mean_loss(replies), "contrasted": len(told)}

    def _synthesise(self) -> Round:
        """Once: features of every site mixed, half of one and equal parts of the rest; tokens by the mean MLM head."""
        shape = (self.p.items, self.p.positions, self.holder.model.mlm.dense.in_features)
        settings = {"items": self.p.items, "positions": self.p.positions, **self._hiding()}
        replies = yield self._ask("query.features", settings, (), shape={"features": shape})
        self._received(replies, ())
        rng = np.random.default_rng(derive(self.config.seed, "primary"))
        primary = rng.integers(len(replies), size=self.p.items)
        mixed = mixed_features([r.arrays["features"] for r in replies], primary)
        self.synthetic = {"features": mixed.astype(np.float16), "tokens": self.holder.read_tokens(mixed)}
        return {}

    def _ask_representations(self) -> Ask:
        each = {site: self.synthetic for site in self.participants if site not in self.supplied}
        shape = {"h": (self.p.items, self.holder.model.mlm.dense.in_features)}
        return Ask("query.representations", {}, self._hiding(), each, check=shaped(shape))

    def _positives_and_negatives(self, replies: list[Reply]) -> dict[str, Arrays]:
        """For each site the mean h of its K nearest, and the h of every other."""
        self.supplied |= {reply.node for reply in replies}
        h = {reply.node: np.asarray(reply.arrays["h"], np.float32) for reply in replies}
        told = {}
        for site in h:
            others = [other for other in self.nearest.get(site, []) if other in h]
            near, far = others[: self.p.neighbours], others[self.p.neighbours :]
            if near and far:  # with nobody to stand off from, eq. 3 is 0
                positive = np.mean([h[other] for other in near], axis=0)
                told[site] = {"positive": positive.astype(np.float16), "negatives": _stack([h[o] for o in far])}
        return told

    def _hiding(self) -> Facts:
        return {"clip": self.p.clip, "noise": self.p.noise}

    # --- what both stages share ---

    def practice(self, start: float = 0.0, end: float = 1.0) -> Practice:
        """Each stage has a schedule of its own."""
        if self.p.schedule != "run":
            return super().practice(start, end)
        done, rounds = self._number - 1, float(self.assign_rounds)
        if self._number > self.assign_rounds:
            done, rounds = done - self.assign_rounds, (self.config.rounds - self.assign_rounds) * self.p.horizon
        return Practice(fresh=self.p.optimizer_state == "fresh", decay=(done / rounds, (done + 1) / rounds))

    def _ask(
        self,
        verb: str,
        settings: Facts,
        groups: tuple[str, ...],
        told: dict[str, Arrays] | None = None,
        shape: dict[str, tuple[int, ...]] | None = None,
    ) -> Ask:
        """An Ask that brings each site what it lacks of w_n; the update of `groups` is wanted."""
        owed = self._owed(self.participants)
        each = {site: {**owed.get(site, {}), **(told or {}).get(site, {})} for site in self.participants}
        like = _of(self.holder.shared(), groups)
        return Ask(verb, {}, settings, each, check=shaped(shape) if shape else same_shapes(like))

    def _owed(self, sites: Iterable[str]) -> dict[str, Arrays]:
        """What each of the sites lacks of its w_n, where it lacks any."""
        return {site: _of(self.models[site], self.stale[site]) for site in sites if self.stale[site]}

    def _received(self, replies: list[Reply], groups: tuple[str, ...]) -> dict[str, Mapping[str, np.ndarray]]:
        """The updates; a site that answered lacks what it trained itself, one that did not may lack everything."""
        shared = frozenset(GROUPS if self._number <= self.assign_rounds else ("encoder",))
        answered = {reply.node for reply in replies}
        for site in self.participants:
            self.stale[site] = frozenset(groups) if site in answered else self.stale[site] | shared
        return {reply.node: reply.arrays for reply in replies}

    def _move(self, replies: list[Reply], members: dict[str, list[str]]) -> None:
        """w_n + the mean update, by size, of those it is put together with."""
        updates, sizes = {r.node: r.arrays for r in replies}, {r.node: r.metrics["texts"] for r in replies}
        for site, those in members.items():
            near = {other: updates[other] for other in those}
            self.models[site] = step_towards(self.models[site], near, {other: sizes[other] for other in those})

    # --- checkpoints ---

    def began_anew(self, site: str) -> None:
        """It is sent everything that is shared."""
        self.stale[site] = frozenset(GROUPS)

    def state(self) -> dict[str, np.ndarray]:
        """Every w_n, what each site holds of it, the neighbours and the synthetic set."""
        names = list(self.link.sites)
        found = {f"synthetic/{name}": value for name, value in self.synthetic.items()}
        for site, model in self.models.items():
            found.update({f"model/{site}/{name}": value for name, value in model.items()})
            found[f"holds/{site}"] = np.array([group in self.stale[site] for group in GROUPS] + [site in self.supplied])
        for site, others in self.nearest.items():
            found[f"nearest/{site}"] = np.array([names.index(other) for other in others], np.int64)
        return found

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""
        names = list(self.link.sites)
        for key, value in arrays.items():
            kind, _, rest = key.partition("/")
            site, _, name = rest.partition("/")
            if kind == "model":
                self.models.setdefault(site, {})[name] = value
            elif kind == "holds":
                self.stale[site] = frozenset(g for g, lacks in zip(GROUPS, value[:-1], strict=True) if lacks)
                self.supplied |= {site} if value[-1] else set()
            elif kind == "nearest":
                self.nearest[site] = [names[i] for i in value.tolist()]
            else:
                self.synthetic[rest] = value

    def _take_up(self) -> int | None:
        number = super()._take_up()
        for site, facts in self.link.sites.items():
            if number is not None and number not in facts.get("rounds", []):  # it begins anew, and holds nothing
                self.stale[site] = frozenset(GROUPS)
                self.supplied.discard(site)
        return number


def _of(state: Arrays, groups: tuple[str, ...] | frozenset[str]) -> Arrays:
    return {name: value for name, value in state.items() if group_of(name) in groups}


def _stack(parts: list[np.ndarray]) -> np.ndarray:
    return np.stack(parts).astype(np.float16)


def _mean_loss(replies: list[Reply]) -> float:
    weights = by_size({r.node: r.metrics["texts"] for r in replies})
    return float(sum(weights[r.node] * r.metrics["loss"] for r in replies))
