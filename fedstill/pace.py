"""How long a run and its current phase will still take: as forecast before the start, then at the pace so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

Facts = Mapping[str, Any]
FORECAST = {  # where a phase's seconds are in the forecast, and whether they are of all rounds together
    "joining": ("starting", False),
    "alone": ("yardstick: sites alone", False),
    "centralized": ("yardstick: all texts", False),
    "local training": ("local training", True),
    "interactive": ("distillation", True),
    "distillation": ("distillation", True),
    "evaluation": ("tests", True),
}


class Pace:
    """Follows the events of a run."""

    def __init__(self, forecast: Facts | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.forecast, self.clock = forecast, clock
        self.began = self.round_began = clock()
        self.phase, self.phase_began = "starting", self.began
        self.took: dict[str, float] = {}  # seconds of a phase, the last time
        self.rounds: list[float] = []  # seconds of each
        self.left_rounds = 0

    def enter(self, phase: str) -> None:
        """Begin a phase; the one before has taken its time."""
        if phase != self.phase:
            self.took[self.phase] = self.clock() - self.phase_began
            self.phase, self.phase_began = phase, self.clock()

    def begin_round(self, number: int, rounds: int) -> None:
        """Begin a round."""
        self.round_began, self.left_rounds = self.clock(), rounds - number + 1

    def end_round(self, number: int, rounds: int) -> None:
        """End a round."""
        self.rounds.append(self.clock() - self.round_began)
        self.round_began, self.left_rounds = self.clock(), rounds - number

    def in_all(self) -> float | None:
        """Seconds until the run ends; None if there is nothing to judge by."""
        if self.rounds:
            mean = sum(self.rounds) / len(self.rounds)
            return max(0.0, self.left_rounds * mean - (self.clock() - self.round_began))
        if self.forecast is None:
            return None
        return max(0.0, float(self.forecast["seconds"]) - (self.clock() - self.began))

    def expected(self) -> float | None:
        """Seconds that the current phase takes as a whole, by its last time or by the forecast."""
        if self.phase in self.took:
            return self.took[self.phase]
        name, every_round = FORECAST.get(self.phase, ("", False))
        if self.forecast is None or name not in self.forecast["parts"]:
            return None
        seconds = float(self.forecast["parts"][name])
        return seconds / max(1, self.forecast["rounds"]) if every_round else seconds

    def spent(self) -> float:
        """Seconds in the current phase."""
        return self.clock() - self.phase_began

    def left(self, done: int | None = None, total: int | None = None) -> float | None:
        """Seconds until the current phase ends: by its steps if it counts them, else as expected."""
        if done and total:
            return self.spent() / done * (total - done)
        expected = self.expected()
        return None if expected is None else max(0.0, expected - self.spent())
