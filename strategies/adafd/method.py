"""AdaFD. Xiao and Liu, "Adaptive Federated Distillation for Multi-Domain Non-IID Textual Data", 2025."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedstill.common.maths.ensemble import mean_predictions, softmax, uniform
from fedstill.common.maths.losses import squared_error
from fedstill.common.maths.robust import Aggregation, combine
from fedstill.common.maths.weights import Rule, best_beta, enwc, per_class, rnwc
from fedstill.common.models.learner import Practice
from fedstill.common.wire import Ask, Facts, Reply, WireError, predictions
from fedstill.strategies.adafd.llm import LLM, LLMConfig, Talk, ask_for_weights, open_llm
from fedstill.strategies.base import Method, Params, Round

Weights = Mapping[str, float] | Mapping[str, NDArray[np.float64]]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
BETAS = (0.0, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0)  # the paper's, with equal weights and 2
SHOWN = 3  # public texts whose logits a language model sees


class AdaFDParams(Params):
    """Eqs. 6 to 10. `learned` and `per_class` are ours."""

    weighting: Literal["rnwc", "enwc", "llmwc"] = "enwc"
    beta: NotNegative | Literal["learned"] = 5.0  # of enwc, also where llmwc falls back to it
    per_class: bool = False  # weights for each class by the sites' losses on it
    aggregation: Aggregation = "mean"  # a rule beside `mean` counts every site once instead of weighing them
    epsilon: float = Field(0.0, ge=0)  # added to each loss of rnwc
    distance: Literal["norm", "mean"] = "norm"  # eq. 10, or its mean over classes as in the code
    temperature: float = Field(1.0, gt=0)  # of the sites' KL
    distill_epochs: int = Field(3, ge=1)
    epoch_calls: bool = False  # a new AdamW every epoch, whose rate falls by 1 / epochs and starts anew
    reference_epochs: int = Field(10, ge=1)  # of the model that `learned` compares with
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
        if self.weighting == "llmwc" and self.per_class:
            raise ValueError("per_class weights come from losses; set weighting = 'enwc' or 'rnwc' with it")
        return self


class AdaFD(Method):
    """Sites that fit their texts better count more; the central model learns their logits, and teaches them in turn."""

    name = "adafd"
    paper = "Xiao and Liu 2025"
    parameters = AdaFDParams
    presets: ClassVar = {
        "paper": {},
        "authors_code": {"epsilon": 1e-6, "distance": "mean", "optimizer_state": "fresh", "epoch_calls": True},
    }
    p: AdaFDParams

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reference: np.ndarray | None = None
        self._llm: LLM | None = open_llm(self.p.llm) if self.p.llm is not None else None
        if self.p.beta == "learned" and not len(self.student.labelled):
            raise ValueError(
                "method.beta = 'learned' needs labelled texts at the server, and data.labelled is 0; give it some, or "
                "set method.beta to a number"
            )

    def round(self, number: int) -> Round:
        rows, epochs = self.public_rows, self.p.distill_epochs
        trained = yield from self._local()  # step 1
        check = predictions(rows, self.student.classes)
        replies = yield Ask("query.predictions", {"rows": rows}, to=tuple(trained), check=check)
        said = {r.node: r.arrays["logits"] for r in replies}
        zhat = self._torch(self._combine(number, {name: trained[name] for name in said}, said))  # steps 2 and 3
        size = 1.0 if self.p.distance == "mean" else float(self.student.classes)
        for calls, practice in self._calls(epochs):  # step 4, eq. 10
            loss = self.student.fit_public(
                rows, lambda logits, places: size * squared_error(logits, zhat[places]), calls, practice
            )
        tau = self.p.temperature
        targets = softmax(self.student.predict(rows), tau)  # step 5
        sites = tuple(said)
        for calls, practice in self._calls(epochs):  # step 6
            settings = {"loss": "kl", "temperature": tau, "epochs": calls, **self.told(practice)}
            distilled = yield Ask("train.distil", {"rows": rows, "targets": targets}, settings, to=sites)
            sites = tuple(r.node for r in distilled)
        return {"loss": loss}

    def _combine(self, number: int, sites: Mapping[str, Facts], said: Mapping[str, np.ndarray]) -> np.ndarray:
        """zhat = sum_k w_k z_k (eq. 8), or the robust rule that stands for it."""
        if self.p.aggregation != "mean":
            return combine(said, uniform(list(said)), self.p.aggregation)
        weights = self._weights(number, sites, said)
        shown = {name: np.asarray(weight).tolist() for name, weight in weights.items()}
        self.record.event("weights", round=number, weighting=self.p.weighting, weights=shown)
        return mean_predictions(said, weights)

    def _calls(self, epochs: int) -> list[tuple[int, Practice]]:
        """How many epochs each call has, and how it trains."""
        if not self.p.epoch_calls:
            return [(epochs, self.practice())]
        return [(1, Practice(fresh=True, decay=(0.0, 1.0 / epochs)))] * epochs

    def _local(self) -> Generator[Ask, list[Reply], dict[str, Facts]]:
        """E epochs on the private texts; what each site says of itself, with the mean loss of all its epochs."""
        found: dict[str, Facts] = {}
        sites: tuple[str, ...] | None = None
        for calls, practice in self._calls(self.p.local_epochs):
            describe = self.p.weighting == "llmwc" or self.p.per_class
            settings = {"epochs": calls, "describe": describe, **self.told(practice)}
            check = _self_description(self.student.classes, describe)
            replies = yield Ask("train.local", settings=settings, to=sites, check=check)
            earlier = {name: facts["losses"] for name, facts in found.items()}
            found = {r.node: {**r.metrics, "losses": earlier.get(r.node, []) + r.metrics["losses"]} for r in replies}
            sites = tuple(found)
        filled = {name: facts for name, facts in found.items() if facts["texts"]}
        if not filled:
            raise ValueError(f"no site that answered holds a text to train on: {', '.join(found)}")
        return filled  # a model that learned nothing has a loss of 0, and would count most

    # --- step 2 ---

    def _weights(self, number: int, sites: Mapping[str, Facts], said: Mapping[str, np.ndarray]) -> Weights:
        least = {name: min(facts["losses"]) for name, facts in sites.items()}  # l_k
        classes = {name: facts.get("class_losses", []) for name, facts in sites.items()}

        def by(rule: Rule) -> Weights:
            return per_class(classes, least, rule) if self.p.per_class else rule(least)

        if self.p.weighting == "rnwc":
            return by(lambda losses: rnwc(losses, self.p.epsilon))
        if self.p.weighting == "llmwc":
            advised = self._advised(number, sites, said)
            if advised is not None:
                return advised
        beta = self.p.beta
        if beta == "learned":
            tried = {b: mean_predictions(said, by(lambda losses, b=b: enwc(losses, b))) for b in BETAS}  # type: ignore[misc]
            beta = best_beta(tried, softmax(self._referee()))
            self.record.event("beta", round=number, beta=beta)
        return by(lambda losses: enwc(losses, beta))

    def _referee(self) -> np.ndarray:
        """What a model of the labelled texts alone says of the public rows; trained once."""
        if self._reference is None:
            self._reference = self.student.reference(self.p.reference_epochs)
        return self._reference

    def _advised(
        self, number: int, sites: Mapping[str, Facts], said: Mapping[str, np.ndarray]
    ) -> dict[str, float] | None:
        """LLMWC: a language model's weights, or None where it gave none that can be used."""
        assert self._llm is not None
        assert self.p.llm is not None

        def note(**facts: Any) -> None:
            self.record.event("llm", round=number, **facts)

        found = ask_for_weights(self._llm, question(sites, said), len(sites), self.p.llm, note)
        if found is None:
            note(fallback="enwc")
            return None
        return dict(zip(sites, found, strict=True))

    def state(self) -> dict[str, np.ndarray]:
        """The referee's answers: they are from before any round."""
        return {} if self._reference is None else {"reference": self._reference}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up what `state` gave."""
        self._reference = arrays.get("reference")

    def _torch(self, logits: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(logits).to(self.student.learner.model.device)


def question(sites: Mapping[str, Facts], said: Mapping[str, np.ndarray]) -> Talk:
    """What LLMWC asks: four facts of each site, whose names stay here."""
    lines = [
        f"Model {k}: training loss {facts['losses'][-1]:.4f}; weighted F1 on its training texts "
        f"{facts['f1_weighted']:.4f}; mean entropy of its predictions {facts['entropy']:.4f}; logits on the first "
        f"shared texts {np.round(said[name][:SHOWN].astype(np.float64), 3).tolist()}"
        for k, (name, facts) in enumerate(sites.items(), start=1)
    ]
    task = (
        "You weigh models in a federation that distils them into one. Each was trained on texts of its own, and all "
        "predicted the same shared texts; their logits will be averaged with your weights. Models that fit better and "
        "are surer with reason deserve more. Answer with numbers and commas only."
    )
    wanted = f"Give {len(lines)} weights from 0 to 1 that sum to 1, in the order of the models, separated by commas."
    return [{"role": "system", "content": task}, {"role": "user", "content": "\n".join([*lines, wanted])}]


def _self_description(classes: int, described: bool) -> Any:
    def amount(value: object) -> bool:
        return isinstance(value, int | float) and math.isfinite(value) and value >= 0

    def check(reply: Reply) -> None:
        facts = reply.metrics
        losses, texts = facts.get("losses"), facts.get("texts")
        if not isinstance(texts, int) or texts < 0:
            raise WireError(f"{texts!r} is no number of texts")
        if not isinstance(losses, list) or not losses or not all(map(amount, losses)):
            raise WireError(f"{losses!r} are no losses")
        if described and texts:
            rows = facts.get("class_losses")
            if not isinstance(rows, list) or len(rows) != classes or not all(r is None or amount(r) for r in rows):
                raise WireError(f"{rows!r} are no losses of {classes} classes")
            if not amount(facts.get("f1_weighted")) or not amount(facts.get("entropy")):
                raise WireError("the weighted F1 or the mean entropy is missing or no number")

    return check
