"""How the central model learns the sites' predictions on all public rows; `method.pipeline = 1`: from the first on.

With it the first of E_d epochs goes over the public rows part by part, in the order in which they are asked for and
shuffled within a part, while sites predict the next part; the other epochs go over all rows as ever. Nothing depends on
who is how fast.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import model_validator

from fedstill.common.practice import Practice
from fedstill.common.wire import Ask, Reply, items
from fedstill.strategies.base import Meanwhile, Params, names

if TYPE_CHECKING:
    from fedstill.common.models.learner import Course, Loss
    from fedstill.server.federation import Federation

PARTS = 8  # at most, of the public rows: an exchange each
BY_WHOLE_SITES = ("krum", "spectral")  # rules that judge a site by all of its rows
NO_SUMS = "with pipeline = 1 overlaps its Asks, and a secure sum takes several"


class EarlyParams(Params):
    """Of methods whose central model can learn a row as soon as all sites have sent it."""

    pipeline: Literal[0, 1] = 0  # 1: the central model learns the first public rows while sites predict the next

    @model_validator(mode="after")
    def _rule_looks_at_rows(self) -> Self:
        rule = getattr(self, "aggregation", "mean")
        if self.pipeline and rule in BY_WHOLE_SITES:
            raise ValueError(
                f"aggregation = {rule!r} judges a site by all of its rows, so that nothing can be learned before the "
                "last one; set pipeline = 0, or aggregation = 'mean', 'median', 'trimmed' or 'cronus'"
            )
        return self


class Distillation:
    """The central model's E_d epochs on public rows that sites predict: after the last row, or from the first on."""

    def __init__(self, fed: Federation, rows: np.ndarray, epochs: int, practice: Practice, pipeline: int) -> None:
        self.central, self.rows, self.epochs, self.practice = fed.central, rows, epochs, practice
        self.course: Course | None = None
        if pipeline:
            self.course = self.central.learner.course(len(rows), epochs, "distil", practice)
        self._first = 0.0  # the mean loss of the epoch that went part by part

    def predictions(
        self,
        asking: Callable[[np.ndarray, tuple[str, ...] | None], Ask],
        sites: tuple[str, ...] | None,
        learn: Callable[[list[Reply], np.ndarray], Loss],
    ) -> Generator[Ask, list[Reply], list[Reply]]:
        """Ask for all rows at once, or part by part and learn each part by `learn` while sites predict the next.

        A site that misses a part is asked no more; what was learned from its earlier rows stays.
        """
        if self.course is None:
            return (yield asking(self.rows, sites))
        said: list[list[Reply]] = []
        learned: Meanwhile[None] | None = None
        for part in whole_batches(self.rows, self.central.learner.batch_size):
            said.append((yield replace(asking(part, sites), meanwhile=learned)))
            if learned is not None:
                learned.result()  # an Ask without time for it leaves it to do
            sites = names(said[-1])
            learned = Meanwhile(partial(self._learn, part, partial(learn, said[-1], part)))
        if learned is not None:
            learned.result()
        return [_joined(self.rows, [_of(site, part) for part in said]) for site in sites or ()]

    def _learn(self, part: np.ndarray, loss: Callable[[], Loss]) -> None:
        mean = self.central.fit_public(part, loss(), 1, self.practice, self.course)
        self._first += mean * len(part) / len(self.rows)

    def finish(self, loss: Loss) -> float:
        """Take the epochs that are left; return the last one's mean loss."""
        if self.course is None:
            return self.central.fit_public(self.rows, loss, self.epochs, self.practice)
        if self.epochs == 1:
            return self._first
        return self.central.fit_public(self.rows, loss, self.epochs - 1, self.practice, self.course)

    def beside(self, ask: Ask, loss: Loss) -> tuple[Ask, Meanwhile[float]]:
        """For an Ask that needs nothing of the central model: with `pipeline` it finishes while sites work on it."""
        rest = Meanwhile(partial(self.finish, loss))
        return ask if self.course is None else replace(ask, meanwhile=rest), rest


def whole_batches(rows: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Cut rows into at most PARTS parts of whole batches: as many steps as one pass over them takes."""
    batches = -(-len(rows) // batch_size)
    size = batch_size * max(1, -(-batches // PARTS))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _of(site: str, replies: list[Reply]) -> Reply:
    return next(reply for reply in replies if reply.node == site)


def _joined(rows: np.ndarray, parts: list[Reply]) -> Reply:
    """Return one site's answers to all parts as its answer to all rows."""
    logits = np.concatenate([part.arrays["logits"] for part in parts])
    return Reply(parts[-1].node, {"items": items(rows), "logits": logits}, parts[-1].metrics)
