"""FedAvg-ST, a baseline of ATC. Dong et al., "Collaborating Heterogeneous Natural Language Processing Tasks via
Federated Learning", 2022."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from fedstill.strategies.base import Round, names
from fedstill.strategies.parameters import ParameterParams
from fedstill.strategies.personal import PersonalMethod

if TYPE_CHECKING:
    from fedstill.server.federation import Federation


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

    def round(self, fed: Federation) -> Round:
        replies = yield self.training(fed)
        self.average(replies)
        self.show_mean(replies)
        self.copies.only(names((yield self.giving_back(fed, replies))))
        return self.loss(replies)

    def check_sites(self, fed: Federation) -> Round:
        listed = [site for sites in self.p.groups.values() for site in sites]
        joined = list(fed.sites)
        wrong = [f"{site} is in no group" for site in joined if site not in listed]
        wrong += [f"{site} is no site of this run" for site in dict.fromkeys(listed) if site not in joined]
        wrong += [f"{site} is in two groups" for site in joined if listed.count(site) > 1]
        if wrong:
            raise ValueError(f"method.groups: {'; '.join(wrong)}. Put every site into exactly one group")
        return (yield from super().check_sites(fed))
