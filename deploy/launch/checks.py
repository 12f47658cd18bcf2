"""Checks of a run before anything is started or written."""

from __future__ import annotations

from fedstill.common.config import ConfigError, RunConfig
from fedstill.deploy.launch import HERE
from fedstill.deploy.launch.simulation import check_actors
from fedstill.strategies import find_method


def check_run(config: RunConfig, on: str) -> None:
    """Refuse a run with errors that show before anything is started or written."""
    find_method(config.method)
    if not config.sites and on in HERE:
        raise ConfigError("sites: the run names no sites; write a [[sites]] table with a name and a model for each")
    if on == "simulation":
        check_actors(config)
