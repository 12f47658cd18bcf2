"""Trimmed vote: sites vote on each public text; texts on which they are split are left out.

Both halves in one file: the server's round on top, the function that runs at the site below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from fedstill import Message, Method, Params, Round, site_verb

if TYPE_CHECKING:
    from fedstill import Federation
    from fedstill.client.node import Node


class TrimmedVoteParams(Params):
    """`least` is the share of the sites that must agree on a text."""

    least: float = Field(0.6, gt=0, le=1)
    distill_epochs: int = Field(1, ge=1)


@dataclass(frozen=True)
class Ballot(Message):
    """The public rows to vote on."""

    rows: np.ndarray


@dataclass(frozen=True)
class Votes(Message):
    """The class that the site's model puts first, for each row."""

    votes: np.ndarray
    texts: int


class TrimmedVote(Method):
    """Sites train and vote; the central model learns the majority where there is one."""

    name = "trimmed-vote"
    paper = "an example"
    parameters = TrimmedVoteParams
    p: TrimmedVoteParams

    def round(self, fed: Federation) -> Round:
        yield self.train_locally(fed)
        rows, classes = fed.public_rows, fed.central.classes
        replies = yield vote.ask(Ballot(rows))
        votes = np.stack([np.eye(classes, dtype=np.float32)[reply.arrays["votes"]] for reply in replies]).mean(axis=0)
        agreed = votes.max(axis=-1) >= self.p.least
        fed.event("votes", agreed=int(agreed.sum()), texts=len(rows))
        if not agreed.any():
            return {"loss": None, "agreed": 0}
        practice = self.practice(fed)
        loss = fed.central.distil(rows[agreed], votes[agreed], "hard", self.p.distill_epochs, practice)
        return {"loss": loss, "agreed": int(agreed.sum())}


@site_verb("query.votes", leaves="predictions", phase="voting")
def vote(site: Node, ballot: Ballot) -> Votes:
    """One class number a text leaves the site, and no probability."""
    logits = site.learner.predict(site.public, site.public_rows(ballot.rows))
    return Votes(logits.argmax(axis=-1), len(site.private))
