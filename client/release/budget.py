"""What all runs of a site have spent of its privacy budget: on disk before anything that it paid for leaves."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from fedstill.common.checkpoint import OWNER, write_atomically
from fedstill.common.lock import taking_turns
from fedstill.common.maths.privacy import Use, epsilon_of


class BudgetSpent(RuntimeError):
    """The site's privacy budget is spent."""


class BudgetError(RuntimeError):
    """The budget cannot be read or written, so nothing may leave; the text names the file."""


class Budget:
    """`privacy.json`: how often each kind of noise was used. Processes of one site take turns at it."""

    def __init__(self, folder: Path, epsilon: float, delta: float) -> None:
        self.path, self.epsilon, self.delta = folder / "privacy.json", epsilon, delta

    def uses(self) -> dict[Use, int]:
        """Return how often each kind of noise was used, over all runs."""
        if not self.path.exists():
            return {}
        try:
            uses = json.loads(self.path.read_text())["uses"]
            return {_use(name): int(count) for name, count in uses.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BudgetError(
                f"{self.path}: cannot be read ({type(error).__name__}), and nothing leaves this site uncounted; put "
                "back a copy of it that is not older than the last run"
            ) from None

    def charge(self, use: Use, count: int, what: str) -> tuple[float, dict[Use, int]]:
        """Charge uses of a kind of noise and sync them to disk, or refuse; return the epsilon spent, and all uses."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with taking_turns(self.path.with_name("privacy.lock")):
                uses = self.uses()
                uses[use] = uses.get(use, 0) + count
                spent = self.spent(uses)
                if spent > self.epsilon:
                    raise BudgetSpent(
                        f"this site's privacy budget is spent: {what} would make epsilon {spent:.3f} of "
                        f"{self.epsilon:g} at delta = {self.delta:g}"
                    )
                write_atomically(
                    self.path, json.dumps({"uses": {_name(use): count for use, count in uses.items()}}), OWNER
                )
        except OSError as error:
            raise BudgetError(
                f"{self.path}: cannot be written ({error.strerror}), and nothing leaves this site uncounted; free some "
                "space or check the folder's permissions"
            ) from None
        return spent, uses

    def spent(self, uses: dict[Use, int] | None = None) -> float:
        """Return the epsilon of these uses, or of all so far."""
        with warnings.catch_warnings():  # that the best order is the first or last: the bound holds all the same
            warnings.simplefilter("ignore")
            return epsilon_of(self.uses() if uses is None else uses, self.delta)


def _name(use: Use) -> str:
    return repr(use.multiplier) if use.rate == 1.0 else f"{use.multiplier!r}@{use.rate!r}"


def _use(name: str) -> Use:
    multiplier, _, rate = name.partition("@")
    return Use(float(multiplier), float(rate or 1.0))
