"""FedID with overlapping rounds (`method.pipeline = 1`): Algorithm 1 with feedback one batch late."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fedstill.common.maths.ensemble import by_size
from fedstill.common.wire import items
from fedstill.common.wire.checks import predictions
from fedstill.strategies.base import Meanwhile, Round, texts_of
from fedstill.strategies.fedid import FedID, Lesson, learn

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


def overlapped(method: FedID, fed: Federation, sites: tuple[str, ...], batches: list[np.ndarray]) -> Round:
    """Algorithm 1 with feedback one batch late: sites predict batch i + 1 while the central model learns batch i.

    A site's step on batch i (line 21) is thus taken with weights that have learned batch i - 1.
    """
    lesson: Lesson | None = None
    each: dict[str, dict[str, float]] = {}
    y_k = yield method.ask_batch(fed, batches[0], sites)
    for i, (x0, following) in enumerate(zip(batches, [*batches[1:], None], strict=True)):
        w, practice = by_size(texts_of(y_k)), method.practice(fed, i / len(batches), (i + 1) / len(batches))
        if i == 0 and method.p.aggregation == "mean":
            fed.event("weights", weighting="size", weights=w)
        central = Meanwhile(partial(method.central_step, fed, i, x0, *method.ensemble(y_k, w), practice))
        if lesson is not None:  # what the central model learned from batch i - 1
            check = None if following is None else predictions(following, fed.central.classes)
            asking = learn.ask(replace(lesson, rows=following), each=each, to=sites, check=check)
            y_k = yield replace(asking, meanwhile=central)
        elif following is not None:
            y_k = yield replace(method.ask_batch(fed, following, sites), meanwhile=central)
        feedback, loss = central.result()
        lesson = replace(feedback, answered=items(x0), practice=practice, late=True)
        each = {site: {"weight": w.get(site, 0.0)} for site in sites}
        fed.progress("interactive", i + 1, len(batches), loss=loss)
    yield learn.ask(lesson, each=each, to=sites)
    return {"loss": loss}
