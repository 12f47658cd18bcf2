"""FedAvg-ST, a baseline of ATC. Dong et al., "Collaborating Heterogeneous Natural Language Processing Tasks via
Federated Learning", 2022."""

from __future__ import annotations

from pydantic import Field

from fedstill.strategies.base import Round
from fedstill.strategies.parameters import ParameterParams
from fedstill.strategies.personal import PersonalMethod


class FedAvgSTParams(ParameterParams):
    """Which sites share a model: `groups = { reviews = ["north", "east"], news = ["south"] }`."""

    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # to be given: a site in no group is refused


class FedAvgST(PersonalMethod):
    """A FedAvg of its own for every group of sites."""

    name = "fedavg-st"
    paper = "Dong et al. 2022"
    parameters = FedAvgSTParams
    p: FedAvgSTParams

    def key_of(self, site: str) -> str:
        """The number of the site's group."""
        return next(str(number) for number, sites in enumerate(self.p.groups.values()) if site in sites)

    def round(self, number: int) -> Round:
        replies = yield self.training()
        self.average(replies)
        self.show_mean(replies)
        self.held((yield self.giving_back(replies)))
        return self.loss(replies)

    def _check_models(self) -> None:
        listed = [site for sites in self.p.groups.values() for site in sites]
        joined = list(self.link.sites)
        wrong = [f"{site} is in no group" for site in joined if site not in listed]
        wrong += [f"{site} is no site of this run" for site in dict.fromkeys(listed) if site not in joined]
        wrong += [f"{site} is in two groups" for site in joined if listed.count(site) > 1]
        if wrong:
            raise ValueError(f"method.groups: {'; '.join(wrong)}. Put every site into exactly one group")
        super()._check_models()
