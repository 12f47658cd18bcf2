"""What a column of a table shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

WHOSE = {
    "central": "central model",
    "centralized": "all texts in one place",
    "sites": "mean of sites, after",
    "alone": "mean of sites, alone",
    # of mixed tasks: own.NAME.SCORE, the mean of the sites NAME or NAME-1, NAME-2 ...; own.NAME+OTHER.mean, the mean
    # over data sets of the mean of their scores
    "own": "by the site's own task",
}
LAST = re.compile(r"@last([1-9][0-9]*)$")  # central.accuracy@last5: the mean of the last five rounds
COSTS = {"bytes_up": "sent, a site", "bytes_down": "received, a site", "seconds": "seconds, wall clock"}


@dataclass(frozen=True)
class Column:
    """What a column shows of a run: a score of the central model, of the sites (or of one), or a cost."""

    key: str

    @property
    def is_known(self) -> bool:
        """Whether a run can have this column at all."""
        whose, _, rest = LAST.sub("", self.key).partition(".")
        if "@" in rest or (self.rounds > 1 and whose not in ("central", "sites")):
            return False
        if self.key in COSTS or whose not in WHOSE or not rest:
            return self.key in COSTS
        of_one_site = "." in rest
        return of_one_site if whose == "own" else not of_one_site or whose in ("sites", "alone")

    @property
    def is_score(self) -> bool:
        """Whether rows compete in this column."""
        return self.key not in COSTS

    @property
    def whose(self) -> str:
        """Whose score it is: the central model's or the sites'."""
        return self.key.partition(".")[0]

    @property
    def site(self) -> str | None:
        """The single site whose score it is, if any."""
        return self.key.partition(".")[2].rpartition(".")[0] or None

    @property
    def data_sets(self) -> list[str]:
        """Of `own`: the data sets over which it is a mean."""
        return (self.site or "").split("+")

    @property
    def score(self) -> str:
        """The score's name, as the task gives it."""
        return LAST.sub("", self.key).rpartition(".")[2]

    @property
    def rounds(self) -> int:
        """Over how many last rounds the score is a mean."""
        found = LAST.search(self.key)
        return int(found[1]) if found else 1

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values are better: distances and costs."""
        return not self.is_score or self.score.startswith("semantic_distance")  # of all domains, or of one

    @property
    def title(self) -> str:
        """The column's heading."""
        if not self.is_score:
            return COSTS[self.key]
        if len(self.data_sets) > 1:
            return f"{self.score} of {', '.join(self.data_sets)}"
        who = f"{self.site}{', alone' if self.whose == 'alone' else ''}" if self.site else WHOSE[self.whose]
        when = f", mean of the last {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{self.score.replace('_', ' ')}, {who}{when}"
