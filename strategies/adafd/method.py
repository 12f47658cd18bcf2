"""AdaFD. Xiao and Liu, "Adaptive Federated Distillation for Multi-Domain Non-IID Textual Data", 2025."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedstill.common.maths.ensemble import mean_predictions, softmax, uniform
from fedstill.common.maths.losses import squared_error
from fedstill.common.maths.robust import Aggregation, combine
from fedstill.common.maths.weights import Rule, best_beta, enwc, per_class, rnwc
from fedstill.common.wire import Ask, Facts, Reply
from fedstill.strategies.adafd.llm import LLM, LLMConfig, ask_for_weights, open_llm
from fedstill.strategies.adafd.site import losses_told, question, train_described
from fedstill.strategies.base import RESTARTING, Params, RestartingMethod, RestartingParams, Round, names
from fedstill.strategies.early import NO_SUMS, Distillation, EarlyParams
from fedstill.strategies.formulas import both_ways
from fedstill.strategies.generic import Train, train_locally
from fedstill.strategies.predictions import Distil, ask_predictions, distil, logits_of
from fedstill.strategies.secure_sum import summed

if TYPE_CHECKING:
    from fedstill.common.models.learner import Loss
    from fedstill.server.federation import Federation

Weights = Mapping[str, float] | Mapping[str, NDArray[np.float64]]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
BETAS = (0.0, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0)  # the paper's, with equal weights and 2


class AdaFDParams(RestartingParams, EarlyParams):
    """Eqs. 6 to 10. `learned` and `per_class` are ours."""

    weighting: Literal["rnwc", "enwc", "llmwc"] = "enwc"
    beta: NotNegative | Literal["learned"] = 5.0  # of enwc, also where llmwc falls back to it
    per_class: bool = False  # weights for each class by the sites' losses on it
    aggregation: Aggregation = "mean"  # a rule beside `mean` counts every site once instead of weighing them
    epsilon: float = Field(0.0, ge=0)  # added to each loss of rnwc
    distance: Literal["norm", "mean"] = "norm"  # eq. 10, or its mean over classes as in the code
    temperature: float = Field(1.0, gt=0)  # of the sites' KL
    distill_epochs: int = Field(3, ge=1)
    llm: LLMConfig | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> AdaFDParams:
        if self.weighting == "llmwc" and self.llm is None:
            raise ValueError("weighting = 'llmwc' asks a language model: say which in [method.llm], by url or local")
        if self.aggregation != "mean" and (self.weighting == "llmwc" or self.per_class or self.beta == "learned"):
            raise ValueError(
                f"aggregation = {self.aggregation!r} counts every site once, so weights that are asked for or learned "
                "have no place; set aggregation = 'mean', or leave weighting, beta and per_class alone"
            )
        if self.pipeline and (self.weighting == "llmwc" or self.beta == "learned"):
            by = "weighting = 'llmwc'" if self.weighting == "llmwc" else "beta = 'learned'"
            raise ValueError(
                f"{by} weighs sites by what they say of all public texts, so that nothing can be learned before the "
                "last one; set pipeline = 0, or weighting = 'enwc' with beta as a number"
            )
        if self.weighting == "llmwc" and self.per_class:
            raise ValueError("per_class weights come from losses; set weighting = 'enwc' or 'rnwc' with it")
        return self


class AdaFD(RestartingMethod):
    """Sites that fit their texts better count more; the central model learns their logits, and teaches them in turn."""

    name = "adafd"
    paper = "Xiao and Liu 2025"
    parameters = AdaFDParams
    presets: ClassVar = {
        "paper": {},
        "authors_code": {"epsilon": 1e-6, "distance": "mean", **RESTARTING},
    }
    formula = staticmethod(both_ways)
    p: AdaFDParams

    def __init__(self, params: Params | None = None) -> None:
        super().__init__(params)
        self._llm: LLM | None = open_llm(self.p.llm) if self.p.llm is not None else None

    def prepare(self, fed: Federation) -> None:
        if self.p.beta == "learned" and not len(fed.central.blind):
            raise ValueError(
                "method.beta = 'learned' looks at what sites say of the server's labelled texts: set data.blind = true "
                "and data.labelled above 0, or method.beta to a number"
            )

    def round(self, fed: Federation) -> Round:
        rows, epochs, central = fed.public_rows, self.p.distill_epochs, fed.central
        trained = yield from self._local(fed)  # step 1
        (calls, practice), *later = self.calls(fed, epochs)
        distillation = Distillation(fed, rows, calls, practice, self.p.pipeline)

        def asking(rows: np.ndarray, sites: tuple[str, ...] | None) -> Ask:
            ask = ask_predictions(fed, rows, sites)
            return ask if self.why_no_sums() else summed(ask, "values", self._told(trained))

        def learn(replies: list[Reply], rows: np.ndarray) -> Loss:
            said = logits_of(replies)
            return self._distance(fed, self._combine(said, self._weigh(fed, trained, said)))

        logits = logits_of((yield from distillation.predictions(asking, tuple(trained), learn)))
        weights = self._weigh(fed, trained, logits)  # step 2
        if weights is not None:
            shown = {name: np.asarray(weight).tolist() for name, weight in weights.items()}
            fed.event("weights", weighting=self.p.weighting, weights=shown)
        distance = self._distance(fed, self._combine(logits, weights))  # step 3
        loss = distillation.finish(distance)  # step 4, eq. 10
        for calls, practice in later:
            loss = central.fit_public(rows, distance, calls, practice)
        tau = self.p.temperature
        targets, sites = softmax(central.predict(rows), tau), tuple(logits)  # step 5
        for calls, practice in self.calls(fed, epochs):  # step 6
            practice = replace(practice, dropout=self.p.distill_dropout)
            lesson = Distil(rows, targets, "kl", calls, practice, temperature=tau)
            sites = names((yield distil.ask(lesson, to=sites)))
        return {"loss": loss}

    def why_no_sums(self) -> str | None:
        if self.p.pipeline:
            return NO_SUMS
        told = self.p.weighting == "rnwc" or (self.p.weighting == "enwc" and self.p.beta != "learned")
        if self.p.aggregation != "mean" or self.p.per_class or not told:
            return (
                "weighs sites by class, by their answers or by a robust rule; enwc with a fixed beta needs a sum only"
            )
        return None

    def _told(self, sites: Mapping[str, Facts]) -> dict[str, float]:
        """w_k where it follows from what sites tell of their training alone."""
        least = {name: min(facts["losses"]) for name, facts in sites.items()}
        found = rnwc(least, self.p.epsilon) if self.p.weighting == "rnwc" else enwc(least, float(self.p.beta))
        return {name: float(weight) for name, weight in found.items()}

    def _weigh(self, fed: Federation, trained: Mapping[str, Facts], logits: Mapping[str, np.ndarray]) -> Weights | None:
        """w_k of the sites that answered; None under a robust rule."""
        if self.p.aggregation != "mean":
            return None
        return self._weights(fed, {name: trained[name] for name in logits}, logits)

    def _combine(self, logits: Mapping[str, np.ndarray], weights: Weights | None) -> np.ndarray:
        """zhat = sum_k w_k z_k (eq. 8), or the robust rule that stands for it."""
        if weights is None:
            return combine(logits, uniform(list(logits)), self.p.aggregation)
        return mean_predictions(logits, weights)

    def _distance(self, fed: Federation, combined: np.ndarray) -> Loss:
        """Eq. 10."""
        zhat = torch.from_numpy(combined).to(fed.central.learner.model.device)
        size = 1.0 if self.p.distance == "mean" else float(fed.central.classes)
        return lambda z, places: size * squared_error(z, zhat[places])

    def _local(self, fed: Federation) -> Generator[Ask, list[Reply], dict[str, Facts]]:
        """E epochs on the private texts; what each site says of itself, with the mean loss of all its epochs."""
        described: dict[str, Facts] = {}
        sites: tuple[str, ...] | None = None
        verb = train_described if self.p.weighting == "llmwc" or self.p.per_class else train_locally
        for calls, practice in self.calls(fed, self.p.local_epochs):
            check = losses_told(fed.central.classes, verb is train_described)
            replies = yield verb.ask(Train(calls, practice), to=sites, check=check)
            earlier = {name: facts["losses"] for name, facts in described.items()}
            described = {
                r.node: {**r.metrics, "losses": earlier.get(r.node, []) + r.metrics["losses"]} for r in replies
            }
            sites = tuple(described)
        filled = {name: facts for name, facts in described.items() if facts["texts"]}
        if not filled:
            raise ValueError(f"no site that answered holds a text to train on: {', '.join(described)}")
        return filled  # a model that learned nothing has a loss of 0, and would count most

    # --- step 2 ---

    def _weights(self, fed: Federation, sites: Mapping[str, Facts], logits: Mapping[str, np.ndarray]) -> Weights:
        least = {name: min(facts["losses"]) for name, facts in sites.items()}  # l_k
        classes = {name: facts.get("class_losses", []) for name, facts in sites.items()}

        def by(rule: Rule) -> Weights:
            return per_class(classes, least, rule) if self.p.per_class else rule(least)

        if self.p.weighting == "rnwc":
            return by(lambda losses: rnwc(losses, self.p.epsilon))
        if self.p.weighting == "llmwc":
            advised = self._advised(fed, sites, logits)
            if advised is not None:
                return advised
        beta = self.p.beta
        if beta == "learned":
            blind = {name: z[fed.central.blind] for name, z in logits.items()}
            tried = {b: mean_predictions(blind, by(lambda losses, b=b: enwc(losses, b))) for b in BETAS}  # type: ignore[misc]
            beta = best_beta(tried, fed.central.labels.numpy())
            fed.event("beta", beta=beta)
        return by(lambda losses: enwc(losses, beta))

    def _advised(
        self, fed: Federation, sites: Mapping[str, Facts], logits: Mapping[str, np.ndarray]
    ) -> dict[str, float] | None:
        """LLMWC: a language model's weights, or None where it gave none that can be used."""
        assert self._llm is not None
        assert self.p.llm is not None

        def note(**facts: Any) -> None:
            fed.event("llm", **facts)

        weights = ask_for_weights(self._llm, question(sites, logits), len(sites), self.p.llm, note)
        if weights is None:
            note(fallback="enwc")
            return None
        return dict(zip(sites, weights, strict=True))
