"""Every key of where a run's scores and costs are sent while it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from fedstill.common.config.section import Section

Tracker = Literal["tensorboard", "mlflow", "wandb"]


class TrackConfig(Section):
    """Scores and costs of every round to a tracking tool, beside events.jsonl; the tool's package is an extra."""

    to: list[Tracker] = Field([])  # pip install 'fedstill[tensorboard]', 'fedstill[mlflow]', 'fedstill[wandb]'
    folder: Path | None = None  # of the tools' files, at the coordinator; by default `track` in the run's folder
    project: str = "fedstill"  # MLflow's experiment, W&B's project
    mlflow_uri: str | None = None  # MLflow's tracking server; by default a file in `folder`
    wandb_mode: Literal["offline", "online"] = "offline"  # offline: files that `wandb sync` uploads later
