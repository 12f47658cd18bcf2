"""Flower's simulation: its number of clients, and whether every site gets an actor."""

from __future__ import annotations

import os
from typing import Any

from fedstill.common.config import ConfigError, RunConfig


def check_actors(config: RunConfig) -> None:
    """Refuse a run with too few actors: a site's session holds its actor, so the run would wait for ever."""
    if config.exchange.link != "stream":
        return
    simulation, sites = config.simulation, config.expected_sites
    actors = (simulation.cpus or os.cpu_count() or 1) // simulation.client_cpus
    cure = f"simulation.cpus = {sites * simulation.client_cpus}"
    if simulation.client_gpus > 0:
        import torch

        gpus = torch.cuda.device_count() if simulation.gpus is None else simulation.gpus
        if (by_gpus := int(gpus / simulation.client_gpus + 1e-9)) < min(actors, sites):
            actors, cure = by_gpus, f"simulation.client_gpus = {int(100 * gpus / sites) / 100}"
    if actors < sites:
        raise ConfigError(
            f"{sites} sites need {sites} actors, one each for the whole run, and this machine gives {actors}: "
            f'set {cure}, or exchange.link = "messages"'
        )


def simulation_settings(config: RunConfig) -> dict[str, Any]:
    """Return the number of clients and the resources of each, under Flower's names."""
    simulation = config.simulation
    settings = {
        "num_supernodes": config.expected_sites,
        "client_resources_num_cpus": simulation.client_cpus,
        "client_resources_num_gpus": simulation.client_gpus,
        "init_args_num_cpus": simulation.cpus,
        "init_args_num_gpus": simulation.gpus,
    }
    return {name: value for name, value in settings.items() if value is not None}
