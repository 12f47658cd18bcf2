"""MHAT. Hu et al., "MHAT: An Efficient Model-Heterogenous Aggregation Training Scheme", Information Sciences 2021."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fedstill.common.maths.ensemble import mean_predictions, softmax
from fedstill.common.wire import Ask, Reply
from fedstill.strategies.base import FRESH_EACH_CALL, Round, names
from fedstill.strategies.early import NO_SUMS, EarlyParams
from fedstill.strategies.formulas import both_ways
from fedstill.strategies.predictions import TaughtMethod, TaughtParams, ask_predictions, logits_of
from fedstill.strategies.secure_sum import summed

if TYPE_CHECKING:
    from fedstill.common.models.learner import Loss
    from fedstill.server.federation import Federation


class MHATParams(TaughtParams, EarlyParams):
    """`kl` (AdaFD's variant) keeps the predictions soft on both ways; `hard` takes each one's argmax."""

    loss: Literal["hard", "kl"] = "hard"


class MHAT(TaughtMethod):
    """The central model learns from every site's predictions, and its own predictions teach the sites."""

    name = "mhat"
    paper = "Hu et al. 2021"
    parameters = MHATParams
    presets: ClassVar = {"paper": {}, "authors_code": FRESH_EACH_CALL}
    formula = staticmethod(both_ways)
    p: MHATParams

    def why_no_sums(self) -> str | None:
        if self.p.pipeline:
            return NO_SUMS
        return None if self.p.loss == "kl" else "takes each site's hard vote; loss = 'kl' needs none"

    def averages_predictions(self) -> bool:
        return self.p.loss == "kl"  # else it sums hard votes

    def round(self, fed: Federation) -> Round:
        rows, kl = fed.public_rows, self.p.loss == "kl"
        trained = yield self.train_locally(fed)
        distillation = self.distillation(fed, rows, self.p.pipeline)

        def asking(rows: np.ndarray, sites: tuple[str, ...] | None) -> Ask:
            return summed(ask_predictions(fed, rows, sites), "probabilities", self.p.weights)

        def learn(replies: list[Reply], rows: np.ndarray) -> Loss:
            if not kl:
                return fed.central.towards(self.votes(replies), "soft")
            # sum_k w_k KL(y_k || p) and KL(sum_k w_k y_k || p) have the same gradient
            probabilities = {site: softmax(logits) for site, logits in logits_of(replies).items()}
            return fed.central.towards(mean_predictions(probabilities, self.site_weights(replies)), "kl")

        replies = yield from distillation.predictions(asking, names(trained), learn)
        loss = distillation.finish(learn(replies, rows))
        self.learn_labelled(fed)
        central = fed.central.predict(rows)
        yield self.distil_at_sites(fed, rows, softmax(central) if kl else central, self.p.loss, names(replies))
        return {"loss": loss}
