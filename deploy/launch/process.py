"""A federation in this process: no Flower and no network, the same method, sites and Asks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedstill.client.node import Node
from fedstill.client.own_task import make_node
from fedstill.client.residents import Residents, Swapped
from fedstill.common.config import RunConfig, SiteConfig
from fedstill.common.models.text_model import TextModel
from fedstill.common.wire import Facts
from fedstill.deploy.launch import Watch
from fedstill.server.federation import Federation
from fedstill.server.link import Link, LocalLink
from fedstill.server.record import Record, recorded


@dataclass(eq=False)
class InProcess:
    """A federation and its sites."""

    federation: Federation
    nodes: list[Node]  # none where sites are swapped
    swapped: tuple[Swapped, ...] = ()
    residents: Residents | None = None

    def link(self) -> Link:
        """Return a link of plain calls; every site is admitted as over a network."""
        if self.residents is not None:
            return LocalLink(self.swapped, self.federation.admission(), self.residents.here_first)
        return LocalLink(self.nodes, self.federation.admission())

    def run(self, resume: bool = False) -> Facts:
        """Run all rounds; return the run's summary."""
        self.federation.announce()
        return self.federation.run(self.link(), resume)


def assemble(config: RunConfig, record: Record | Path, sites: Path | None = None, run: str | None = None) -> InProcess:
    """Assemble a run in a folder; its sites keep their states under `sites`, by default inside it."""
    federation = Federation(config, record)
    folder = federation.record.folder
    states = folder / "sites" if sites is None else sites
    make = {site.name: partial(_site, config, site, run or folder.name, states / site.name) for site in config.sites}
    most = config.simulation.resident
    if most is None or most >= len(make):
        return InProcess(federation, [one(None) for one in make.values()])
    residents = Residents(most, dict(make))
    return InProcess(federation, [], tuple(Swapped(name, residents) for name in make), residents)


def _site(config: RunConfig, site: SiteConfig, run: str, state_root: Path, model: TextModel | None) -> Node:
    """Build a site whose answers stay in this process: its ledger needs no sync, which would cost more than a step."""
    node = make_node(config, site, run, state_root, model)
    node.ledger.synced = False
    return node


def run_in_process(config: RunConfig, folder: Path, resume: bool = False, watch: Watch = lambda event: None) -> Facts:
    """Run server and sites in this process, recorded as any run; return the run's summary."""
    with recorded(config, folder, resume, watch) as record:
        return assemble(config, record).run(resume)
