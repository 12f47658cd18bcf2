"""A site's privacy guard: what its verb does not declare safe stays here; what leaves has noise and is paid for."""

from __future__ import annotations

import warnings
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.client.release.budget import Budget
from fedstill.client.release.noise import standard_normal
from fedstill.common.config import PrivacyConfig
from fedstill.common.maths.privacy import Use, hide, multiplier_for
from fedstill.common.wire import Facts, WireError
from fedstill.common.wire.typed import Message
from fedstill.strategies.verbs import Verb


@dataclass(frozen=True)
class Plan:
    """How a call trains: how many steps, and the chance of each text to be in one."""

    steps: int
    rate: float

    @classmethod
    def of(cls, texts: int, batch: int, epochs: int, steps: int | None = None) -> Plan:
        """As many steps as plain training would take, on batches that are as large on average."""
        each = -(-texts // batch) if texts else 0
        return cls(epochs * each if steps is None else steps, min(1.0, batch / texts) if texts else 1.0)


class Guard:
    """Stands between a site's model and its Replies; the budget of all runs is in the site's state folder."""

    def __init__(self, settings: PrivacyConfig, folder: Path) -> None:
        self.settings, self.trains = settings, settings.train == "dp-sgd"
        self.multiplier = settings.noise_multiplier or (0.0 if self.trains else _found(settings))
        self.budget = Budget(folder, settings.epsilon, settings.delta)
        self._charged: Facts | None = None  # by the answer in work

    def settle(self, texts: int, batch: int) -> None:
        """Find the noise of training that makes the budget last, for so many texts and this batch size."""
        if not self.multiplier and self.settings.epochs is not None:
            lasting = Plan.of(max(1, texts), batch, self.settings.epochs)
            self.multiplier = _quietly(lasting.steps, self.settings, lasting.rate)

    def admit(self, verb: Verb) -> None:
        """Refuse a verb whose answer is not declared safe, before any work."""
        self._charged = None
        shield = verb.shield
        safe = shield is not None and (self.trains or not shield.after_training)
        if shield is None or not safe or any(name not in self._kept(verb) for name in shield.needed):
            raise WireError(
                f"this site has [privacy], and {verb.name} is not declared safe under it: choose a method that "
                "exchanges predictions, or take [privacy] out of the site's file"
            )

    def cover(self, verb: Verb, answer: Message) -> tuple[Message, Facts | None]:
        """Return what may leave of an answer, with noise, and the budget after it, charged before anything leaves."""
        assert verb.shield is not None
        changes: dict[str, Any] = {
            field.name: _default(field) for field in fields(answer) if field.name not in self._kept(verb)
        }
        for name in () if self.trains else verb.shield.noised:
            logits = getattr(answer, name)
            if logits is not None:
                changes[name] = self._hidden(logits)
        if any(getattr(answer, name) is not None for name in verb.shield.charged) and self._charged is None:
            raise WireError(f"{verb.name} hides its answer itself and has not paid for it")
        return replace(answer, **changes), self._charged

    def charge(self, count: int, what: str) -> float:
        """Charge uses of the Gaussian mechanism; return the noise multiplier that each must have."""
        spent, uses = self.budget.charge(Use(self.multiplier), count, what)
        self._charged = self._facts(uses, spent)
        return self.multiplier

    def charge_training(self, texts: int, batch: int, epochs: int, steps: int | None) -> tuple[Plan, float]:
        """Charge a call of DP-SGD before it begins; return its plan and the noise multiplier."""
        plan = Plan.of(texts, batch, epochs, steps)
        if plan.steps:
            use = Use(self.multiplier, plan.rate)
            spent, uses = self.budget.charge(use, plan.steps, f"{plan.steps} more steps of training")
            self._charged = self._facts(uses, spent)
        return plan, self.multiplier

    def _kept(self, verb: Verb) -> tuple[str, ...]:
        shield = verb.shield
        if shield is None:
            return ()
        return (*shield.plain, *shield.noised, *shield.charged, *(shield.learned if self.trains else ()))

    def _hidden(self, logits: np.ndarray) -> np.ndarray:
        multiplier = self.charge(len(logits), f"{len(logits)} more predictions")
        return hide(logits, self.settings.clip, multiplier, standard_normal)

    def _facts(self, uses: dict[Use, int], spent: float) -> Facts:
        settings = {"noise_multiplier": self.multiplier, "clip": self.settings.clip, "delta": self.settings.delta}
        rest = {"epsilon": round(spent, 6), "left": round(self.settings.epsilon - spent, 6)}
        return {**rest, **settings, "steps" if self.trains else "predictions": sum(uses.values())}


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _found(settings: PrivacyConfig) -> float:
    assert settings.predictions is not None
    return _quietly(settings.predictions, settings)


def _quietly(count: int, settings: PrivacyConfig, rate: float = 1.0) -> float:
    with warnings.catch_warnings():  # that the best order is the first or last: the bound holds all the same
        warnings.simplefilter("ignore")
        return multiplier_for(count, settings.epsilon, settings.delta, rate)
