"""A site's privacy guard: noise on every prediction that leaves, and a budget that no run can exceed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np

from fedstill.client.release.secret_noise import draws, secret_of
from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import PrivacyConfig
from fedstill.common.maths.privacy import epsilon_of, hide, multiplier_for
from fedstill.common.states import State
from fedstill.common.wire import Ask, Facts, WireError

COVERED = {"items", "logits"}
PLAIN = {"texts"}  # a site already sends this when it joins


class BudgetSpent(RuntimeError):
    """The site's privacy budget is spent."""


class Guard:
    """Stands between a site's model and its Replies; keeps what all runs have spent in the site's state folder."""

    def __init__(self, settings: PrivacyConfig, folder: Path, run: str) -> None:
        self.settings, self.folder, self.run = settings, folder, run
        self.multiplier = settings.noise_multiplier or _found(settings)
        self.path = folder / "privacy.json"

    def spent(self) -> dict[float, int]:
        """Return how many predictions left under each noise multiplier, over all runs."""
        if not self.path.exists():
            return {}
        return {float(name): int(count) for name, count in json.loads(self.path.read_text())["uses"].items()}

    def cover(self, ask: Ask, arrays: State, metrics: Facts) -> tuple[State, Facts]:
        """Add noise to the arrays and the spent budget to the metrics; the budget is charged before anything leaves."""
        if not ask.verb.startswith("evaluate."):
            metrics = {name: value for name, value in metrics.items() if name not in ("loss", "losses")}
            telling = sorted(set(metrics) - PLAIN)
            if telling:
                raise WireError(f"this site's [privacy] does not let {telling[0]!r} of its private texts out")
        others = sorted(set(arrays) - COVERED)
        if others:
            raise WireError(
                f"this site's [privacy] lets predictions out and nothing else; {ask.verb} would send {others[0]!r}: "
                "choose a method that exchanges predictions, or take [privacy] out of the site's file"
            )
        if "logits" not in arrays:
            return arrays, metrics
        logits, uses = np.asarray(arrays["logits"], np.float32), self.spent()
        uses[self.multiplier] = uses.get(self.multiplier, 0) + len(logits)
        spends, budget = self._epsilon(uses), self.settings.epsilon
        if spends > budget:
            raise BudgetSpent(
                f"this site's privacy budget is spent: {len(logits)} more predictions would make epsilon "
                f"{spends:.3f} of {budget:g} at delta = {self.settings.delta:g}"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps({"uses": {repr(name): count for name, count in uses.items()}}))
        place = (self.run, ask.verb, ask.settings.get("round"), ask.settings.get("step"))
        rng = draws(secret_of(self.folder), logits, *place)
        hidden = hide(logits, self.settings.clip, self.multiplier, rng)
        return {**arrays, "logits": hidden}, {**metrics, "privacy": self._facts(uses, spends)}

    def _epsilon(self, uses: dict[float, int]) -> float:
        return _quietly(uses, self.settings.delta)

    def _facts(self, uses: dict[float, int], spent: float) -> Facts:
        settings = {"noise_multiplier": self.multiplier, "clip": self.settings.clip, "delta": self.settings.delta}
        rest = {"epsilon": round(spent, 6), "left": round(self.settings.epsilon - spent, 6)}
        return {**rest, **settings, "predictions": sum(uses.values())}


def _quietly(uses: dict[float, int], delta: float) -> float:
    with warnings.catch_warnings():  # that the best order is the first or last: the bound holds all the same
        warnings.simplefilter("ignore")
        return epsilon_of(uses, delta)


def _found(settings: PrivacyConfig) -> float:
    assert settings.predictions is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return multiplier_for(settings.predictions, settings.epsilon, settings.delta)
