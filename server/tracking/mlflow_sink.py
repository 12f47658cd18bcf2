"""MLflow: a run in the experiment `track.project`, in a file of the run's folder or on a tracking server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient

from fedstill.common.config import RunConfig

STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
LONGEST = 500  # characters of a parameter


class MLflow:
    """One run of MLflow for one run of ours; a resumed run goes on in it."""

    def __init__(self, uri: str, project: str, run: str, parameters: Mapping[str, str], artifacts: Path) -> None:
        self.client = MlflowClient(tracking_uri=uri)
        known = self.client.get_experiment_by_name(project)
        where = known.experiment_id if known else self.client.create_experiment(project, artifacts.resolve().as_uri())
        found = self.client.search_runs([where], f"tags.`mlflow.runName` = '{run}'", max_results=1)
        if found:
            self.id = found[0].info.run_id
            self.client.update_run(self.id, "RUNNING")
            return
        self.id = self.client.create_run(where, run_name=run).info.run_id
        for key, value in parameters.items():
            self.client.log_param(self.id, key, value[:LONGEST])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a round."""
        for name, value in values.items():
            self.client.log_metric(self.id, name, value, step=step)

    def close(self, status: str, report: Path | None) -> None:
        """End the run; its report becomes an artifact."""
        if report is not None:
            self.client.log_artifact(self.id, str(report))
        self.client.set_terminated(self.id, STATES[status])


def open_sink(config: RunConfig, run: str, folder: Path, parameters: Mapping[str, str]) -> MLflow:
    """Open MLflow's run."""
    uri = config.track.mlflow_uri or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    return MLflow(uri, config.track.project, run, parameters, folder / "mlflow")
