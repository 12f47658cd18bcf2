"""ATC. Dong et al., "Collaborating Heterogeneous Natural Language Processing Tasks via Federated Learning", 2022."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np

from fedstill.common.maths.affinity import (
    cluster,
    mixed_features,
    positives_and_negatives,
    ranking,
    step_towards,
    update_cosines,
)
from fedstill.common.maths.ensemble import by_size, mean_arrays
from fedstill.common.models.bert2bert import GROUPS, group_of, moved_by
from fedstill.common.practice import Practice
from fedstill.common.randomness import derive
from fedstill.common.wire import Arrays, Ask, Reply
from fedstill.common.wire.checks import same_shapes, shaped
from fedstill.strategies.atc.params import ATCParams
from fedstill.strategies.atc.site import (
    Contrast,
    Encode,
    Mend,
    Represent,
    contrast,
    encode,
    mend,
    represent,
    take_shared,
)
from fedstill.strategies.base import Method, Round, mean_loss, names, texts_of
from fedstill.strategies.copies import Copies

if TYPE_CHECKING:
    from fedstill.common.checkpoint import Nested
    from fedstill.server.central import SharedModel
    from fedstill.server.federation import Federation


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
    own_tasks = "needed"
    p: ATCParams

    def prepare(self, fed: Federation) -> None:
        rounds = fed.config.rounds
        if self.p.noise and not self.p.clip:
            raise ValueError("method.noise is in units of method.clip, the norm of what is shown: set clip above 0 too")
        self.assign_rounds = rounds * 2 // 3 if self.p.assign_rounds is None else self.p.assign_rounds
        if self.assign_rounds > rounds:
            raise ValueError(f"method.assign_rounds = {self.assign_rounds} is above rounds = {rounds}: lower it")
        known = {part for site in fed.config.sites for part in (site.name, site.name.rpartition("-")[0])}
        if unknown := sorted(set(self.p.neighbours_of) - known) if fed.config.sites else []:
            raise ValueError(f"method.neighbours_of names {unknown[0]}, and no site is called so: correct it")
        self.fed, self.central = fed, cast("SharedModel", fed.central)
        self.models: dict[str, Arrays] = {}  # w_n
        self.copies = Copies((*GROUPS, "synthetic"))  # of w_n, and of the synthetic set
        self.nearest: dict[str, list[str]] = {}  # everybody else, nearest first, by the last updates
        self.synthetic: Arrays = {}

    def round(self, fed: Federation) -> Round:
        for site in fed.sites:
            self.models.setdefault(site, self.central.shared())
        facts = yield from self.assign() if fed.number <= self.assign_rounds else self.contrast()
        owed = self._owed(fed.sites)
        for site in names((yield take_shared.ask(each=owed, to=tuple(owed)))):  # what sites test is what they share
            self._holds(site)
        sizes = by_size({site: facts["texts"] for site, facts in fed.sites.items()})
        self.central.load_shared(mean_arrays(self.models, sizes))
        return facts

    # --- stage 1: ASSIGN ---

    def assign(self) -> Round:
        """Mend corrupted texts; average within clusters of alike updates."""
        objective = self._objective()
        moved = moved_by(objective)
        task = Mend(objective, self.p.assign_steps, self.practice(self.fed))
        check = same_shapes(_of(self.central.shared(), moved))
        replies = yield mend.ask(task, each=self._with_what_lacks(), check=check)
        updates = self._received(replies, moved)
        similarity = update_cosines(updates)
        labels = cluster(similarity, self.p.clusters if self.p.clustering else 1)
        of = dict(zip(updates, labels, strict=True))
        self._move(replies, {site: [other for other in of if of[other] == of[site]] for site in of})  # eq. 2
        self.fed.event("clusters", objective=objective, clusters=of, cosines=similarity.tolist())
        loss = mean_loss(replies, by_size(texts_of(replies)))
        return {"loss": loss, "objective": objective, "clusters": len(set(labels))}

    def _objective(self) -> Literal["mlm", "denoising"]:
        """MLM first, then either with equal chance."""
        if self.p.corruption != "both":
            return self.p.corruption
        number = self.fed.number
        return "mlm" if number == 1 or derive(self.fed.config.seed, "objective", number) % 2 else "denoising"

    # --- stage 2: CONTRAST ---

    def contrast(self) -> Round:
        """Each site's own task beside the contrast with its neighbours; the encoder moves with the K nearest."""
        neighbours: dict[str, Arrays] = {}
        if self.p.contrast and self.p.contrast_loss:
            if not self.synthetic:
                yield from self._synthesise()
            elif self.nearest:
                neighbours = self._positives_and_negatives((yield self._ask_representations()))
        task = Contrast(self.p.local_epochs, self.p.temperature, self.practice(self.fed), self.p.contrast_through)
        check = same_shapes(_of(self.central.shared(), ("encoder",)))
        replies = yield contrast.ask(task, each=self._with_what_lacks(neighbours), check=check)
        updates = self._received(replies, ("encoder",))
        sites, similarity = list(updates), update_cosines(updates)
        self.nearest = {site: [sites[i] for i in ranking(similarity, n)] for n, site in enumerate(sites)}
        members = {site: [site, *self.nearest[site][: self.others(site)]] for site in sites}
        self._move(replies, members if self.p.contrast else dict.fromkeys(sites, sites))  # eq. 4
        self.fed.event("neighbours", nearest=self.nearest, cosines=similarity.tolist())
        return {"loss": mean_loss(replies, by_size(texts_of(replies))), "contrasted": len(neighbours)}

    def _synthesise(self) -> Round:
        """Once: features of every site mixed, half of one and equal parts of the rest; tokens by the mean MLM head."""
        central, p = self.central, self.p
        check = shaped({"features": (p.items, p.positions, central.width)})
        message = Encode(p.items, p.positions, p.clip, p.noise)
        replies = yield encode.ask(message, each=self._with_what_lacks(), check=check)
        self._received(replies, ())
        rng = np.random.default_rng(derive(self.fed.config.seed, "primary"))
        primary = rng.integers(len(replies), size=p.items)
        mixed = mixed_features([r.arrays["features"] for r in replies], primary)
        self.synthetic = {"features": mixed.astype(np.float16), "tokens": central.read_tokens(mixed)}
        return {}

    def _ask_representations(self) -> Ask:
        each = {site: self.synthetic for site in self.fed.participants if "synthetic" in self.copies.lacks(site)}
        check = shaped({"h": (self.p.items, self.central.width)})
        message = Represent(clip=self.p.clip, noise=self.p.noise, through=self.p.contrast_through)
        return represent.ask(message, each=each, check=check)

    def _positives_and_negatives(self, replies: list[Reply]) -> dict[str, Arrays]:
        """For each site the mean h of C+, its K nearest but itself as in eq. 4, and the h of every other."""
        for site in names(replies):
            self.copies.hold(site, self.copies.lacks(site) - {"synthetic"})
        h = {reply.node: np.asarray(reply.arrays["h"], np.float32) for reply in replies}
        return positives_and_negatives(h, self.nearest, {site: self.others(site) for site in h})

    def others(self, site: str) -> int:
        """K - 1: how many others count as a site's neighbours."""
        of = self.p.neighbours_of
        return of.get(site, of.get(site.rpartition("-")[0], self.p.neighbours)) - 1

    # --- what both stages share ---

    def practice(self, fed: Federation, start: float = 0.0, end: float = 1.0) -> Practice:
        """Each stage has a schedule of its own."""
        if self.p.schedule != "run":
            return super().practice(fed, start, end)
        done, rounds = fed.number - 1, float(self.assign_rounds)
        if fed.number > self.assign_rounds:
            done, rounds = done - self.assign_rounds, (fed.config.rounds - self.assign_rounds) * self.p.horizon
        return Practice(fresh=self.p.optimizer_state == "fresh", decay=(done / rounds, (done + 1) / rounds))

    def _with_what_lacks(self, more: Mapping[str, Arrays] | None = None) -> dict[str, dict[str, object]]:
        """Each participant's own part of an Ask: what it lacks of w_n, and more."""
        owed = self._owed(self.fed.participants)
        return {site: {**owed.get(site, {}), **(more or {}).get(site, {})} for site in self.fed.participants}

    def _owed(self, sites: Iterable[str]) -> dict[str, dict[str, object]]:
        """What each of the sites lacks of its w_n, where it lacks any."""
        lacking = {site: self.copies.lacks(site) - {"synthetic"} for site in sites}
        return {site: {"weights": _of(self.models[site], groups)} for site, groups in lacking.items() if groups}

    def _holds(self, site: str, but: Iterable[str] = ()) -> None:
        """The site has its w_n but for some groups; whether it has the synthetic set does not change."""
        self.copies.hold(site, {*but, *(self.copies.lacks(site) & {"synthetic"})})

    def _received(self, replies: list[Reply], groups: tuple[str, ...]) -> dict[str, Mapping[str, np.ndarray]]:
        """The updates; a site that answered lacks what it trained itself, one that did not may lack everything."""
        shared = GROUPS if self.fed.number <= self.assign_rounds else ("encoder",)
        answered = names(replies)
        for site in self.fed.participants:
            if site in answered:
                self._holds(site, groups)
            else:
                self.copies.lose(site, shared)
        return {reply.node: reply.arrays for reply in replies}

    def _move(self, replies: list[Reply], members: dict[str, list[str]]) -> None:
        """w_n + the mean update, by size, of its cluster."""
        updates, sizes = {r.node: r.arrays for r in replies}, texts_of(replies)
        for site, near_sites in members.items():
            near = {other: updates[other] for other in near_sites}
            self.models[site] = step_towards(self.models[site], near, {other: sizes[other] for other in near_sites})

    # --- checkpoints ---

    def state(self) -> Nested:
        """Every w_n, what each site holds of it, the neighbours and the synthetic set."""
        sites = list(self.fed.sites)
        parts = (*GROUPS, "synthetic")
        return {
            "synthetic": self.synthetic,
            "model": self.models,
            "lacks": {site: np.array([part in self.copies.lacks(site) for part in parts]) for site in self.models},
            "nearest": {
                site: np.array([sites.index(other) for other in others], np.int64)
                for site, others in self.nearest.items()
            },
        }

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        sites, parts = list(self.fed.sites), (*GROUPS, "synthetic")
        self.synthetic, self.models = dict(state.get("synthetic", {})), dict(state.get("model", {}))
        for site, lacks in state.get("lacks", {}).items():
            self.copies.hold(site, [part for part, missing in zip(parts, lacks, strict=True) if missing])
        self.nearest = {site: [sites[i] for i in near.tolist()] for site, near in state.get("nearest", {}).items()}


def _of(state: Arrays, groups: Iterable[str]) -> Arrays:
    wanted = frozenset(groups)
    return {name: value for name, value in state.items() if group_of(name) in wanted}
