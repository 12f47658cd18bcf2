"""TensorBoard: one event file a start of the run; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from fedstill.common.config import RunConfig


class TensorBoard:
    """Scalars by round, and the settings as a text."""

    def __init__(self, folder: Path, parameters: Mapping[str, str]) -> None:
        self.writer = SummaryWriter(str(folder))
        rows = "\n".join(f"| {key} | {value.replace('|', '/')} |" for key, value in parameters.items())
        self.writer.add_text("settings", f"| key | value |\n|---|---|\n{rows}")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a round."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, status: str, report: Path | None) -> None:
        """Close the file."""
        self.writer.add_text("status", status)
        self.writer.close()


def open_sink(config: RunConfig, run: str, folder: Path, parameters: Mapping[str, str]) -> TensorBoard:
    """Open TensorBoard's files."""
    return TensorBoard(folder / "tensorboard", parameters)
