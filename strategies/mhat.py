"""MHAT. Hu et al., "MHAT: An Efficient Model-Heterogenous Aggregation Training Scheme", Information Sciences 2021."""

from __future__ import annotations

from typing import ClassVar, Literal

from fedstill.common.maths.ensemble import mean_predictions, softmax
from fedstill.strategies.base import Round
from fedstill.strategies.predictions import PredictingMethod, PredictingParams, names


class MHATParams(PredictingParams):
    """`kl` (AdaFD's variant) keeps the predictions soft on both ways; `hard` takes each one's argmax."""

    loss: Literal["hard", "kl"] = "hard"


class MHAT(PredictingMethod):
    """The central model learns from every site's predictions, and its own predictions teach the sites."""

    name = "mhat"
    paper = "Hu et al. 2021"
    parameters = MHATParams
    presets: ClassVar = {"paper": {}, "authors_code": {"optimizer_state": "fresh", "schedule": "call"}}
    p: MHATParams

    def round(self, number: int) -> Round:
        rows, kl = self.public_rows, self.p.loss == "kl"
        trained = yield self.local_training()
        replies = yield self.ask_predictions(rows, names(trained))
        if kl:  # sum_k w_k KL(y_k || p) and KL(sum_k w_k y_k || p) have the same gradient
            said = {r.node: softmax(r.arrays["logits"]) for r in replies}
            loss = self.distil_at_server(rows, mean_predictions(said, self.site_weights(replies)), "kl")
        else:
            loss = self.distil_at_server(rows, self.votes(replies), "soft")
        own = self.student.predict(rows)
        yield self.distil_at_sites(rows, softmax(own) if kl else own, self.p.loss, names(replies))
        return {"loss": loss}
