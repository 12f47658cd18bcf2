"""Weights & Biases: offline by default, as files that `wandb sync` uploads where and when somebody decides to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import wandb

from fedstill.common.config import RunConfig


class WandB:
    """One run of W&B; a resumed run goes on under the same id."""

    def __init__(self, config: RunConfig, run: str, folder: Path, parameters: Mapping[str, str]) -> None:
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        self.run = wandb.init(
            project=config.track.project,
            name=run,
            id=run,
            resume="allow",
            dir=str(folder),
            mode=config.track.wandb_mode,
            config=dict(parameters),
            settings=quiet,
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a round; W&B's own steps only grow, so that the round is one of the values."""
        self.run.log({"round_number": step, **values})

    def close(self, status: str, report: Path | None) -> None:
        """End the run."""
        self.run.summary["status"] = status
        self.run.finish(exit_code=0 if status == "finished" else 1)


def open_sink(config: RunConfig, run: str, folder: Path, parameters: Mapping[str, str]) -> WandB:
    """Open W&B's run."""
    return WandB(config, run, folder, parameters)
