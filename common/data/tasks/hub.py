"""The data set hub: whether it answers, and what it has."""

from __future__ import annotations

import os
from typing import Any

from fedstill.common.data.tasks.task import TaskError


def hub_parts(name: str, config: str | None = None, revision: str | None = None) -> Any:
    """Return the splits of a hub data set, or of the library's cache where HF_HUB_OFFLINE is set."""
    import datasets

    cure = 'download the files and use task.name = "files", or set HF_HUB_OFFLINE=1 if the dataset is in the cache'
    if not os.environ.get("HF_HUB_OFFLINE") and not hub_reachable():
        raise TaskError(f"dataset {name}: the hub cannot be reached from this machine; {cure}")
    try:
        return datasets.load_dataset(name, config, revision=revision)
    except Exception as error:  # the library raises a dozen exception types, several of them private
        raise TaskError(f"dataset {name} ({config or 'default'}): {error}; {cure}") from error


def hub_reachable(seconds: float = 4.0) -> bool:
    """Return whether the hub answers; fails fast, where the libraries would retry for minutes."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=seconds)
    except httpx.HTTPError:
        return False
    return True
