"""Every key of a run's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedstill.common.config.model import LearnerConfig, TrainConfig
from fedstill.common.config.section import NAME, Section
from fedstill.common.config.site import SiteConfig


class TaskConfig(Section):
    """Which texts and labels: a task by name (`fedstill tasks`), files (`files`, `superglue`), a hub data set (`hub`).

    `mixed`: every site has a task of its own, in its own [task], and nobody else hears which.
    """

    name: str = "film-reviews"
    train: Path | None = None
    test: Path | None = None
    public: Path | None = None
    text: list[str] = Field(["text"])
    label: str = "label"
    domain: str | None = None
    labels: list[str] | None = None
    label_words: list[str] | None = None
    coordinates: list[list[float]] | None = None  # a point for each label, where labels are near or far
    metric: str | None = None  # by default the task's own, or accuracy
    hub: str | None = None
    hub_config: str | None = None
    folder: Path | None = (
        None  # of a task by name: its files, or a folder with theirs in it; else FEDSTILL_DATA, else the hub
    )
    parts: list[str] | None = None  # of superglue, nli, emotions: which of its tasks; all if none is named
    turns: int = Field(8, ge=0)  # of dialogues: past turns that are read with each
    public_task: str | None = None  # a task whose texts are the public ones, instead of a part of this one's
    own_words: bool = True  # of superglue: a task's texts are scored among that task's own words
    train_split: str = "train"
    test_split: str = "test"

    @field_validator("text", mode="before")
    @classmethod
    def _one_column_is_enough(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _source_is_named(self) -> TaskConfig:
        if self.name == "files" and self.train is None:
            raise ValueError('task "files" needs `train`, the path of a csv, tsv or jsonl file')
        if self.name == "hub" and self.hub is None:
            raise ValueError('task "hub" needs `hub`, the name of a data set')
        return self


class DataConfig(Section):
    """Sizes of the four splits (a count, or a share below 1) and how the private one is dealt to the sites."""

    private: int | float = Field(2000, ge=0)
    public: int | float = Field(600, ge=0)
    labelled: int | float = Field(100, ge=0)
    test: int | float = Field(400, ge=0)
    test_alpha: float | None = Field(None, gt=0)  # test texts with another mix of labels than their pool has
    partition: Literal[
        "iid",
        "dirichlet",
        "dirichlet-clients",
        "domain",
        "domain-dirichlet",
        "tasks-dirichlet",
        "quantity",
        "power-law",
    ] = "dirichlet"
    alpha: float = Field(1.0, ge=0)  # 0, the limit, is for dirichlet and tasks-dirichlet
    minimum: int | float = Field(8, gt=0)  # the fewest texts of a site, or a share below 1 of an equal part
    domains: list[str] | None = None
    public_domains: list[str] | None = None  # the public texts come from these, and no site has them
    labelled_domains: list[str] | None = None  # likewise the server's labelled texts


class ExchangeConfig(Section):
    """How Asks and Replies travel, and how long anybody waits (seconds)."""

    link: Literal["stream", "messages"] = "stream"
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    sites: int | None = Field(None, ge=1)
    quorum: float = Field(1.0, gt=0)
    join_deadline: float = Field(180.0, gt=0)
    train_deadline: float = Field(3600.0, gt=0)
    step_deadline: float = Field(300.0, gt=0)
    reconnect: float = Field(60.0, ge=0)
    keep_alive: float = Field(20.0, gt=0)
    predictions: Literal["float32", "float16", "int8"] = "float32"  # in how many bytes they travel
    max_frame_mb: int = Field(2048, ge=1)
    session_hours: float = Field(72.0, gt=0)


class SimulationConfig(Section):
    """What one simulated client takes; `cpus` and `gpus` are what Ray may deal out in all.

    Ray's CPUs are shares, not cores: more of them than the machine has lets more clients live at the same time.
    Flower takes whole CPUs a client, and any share of a GPU.
    """

    client_cpus: int = Field(1, ge=1)
    client_gpus: float = Field(0.0, ge=0)
    cpus: int | None = Field(None, ge=1)
    gpus: int | None = Field(None, ge=0)


class ReportConfig(Section):
    """Which yardsticks are trained beside the federation, and how often everybody is tested."""

    alone: bool = True
    centralized: bool = True
    centralized_epochs: int | None = Field(None, ge=1)  # by default as many as a site trains: rounds x local epochs
    evaluate: Literal["rounds", "end"] = "rounds"


class MethodConfig(BaseModel):
    """The method's name and preset; every other key of [method] is a parameter of that method."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "fedid"
    preset: str = "paper"

    def parameters(self) -> dict[str, Any]:
        """The keys beside name and preset, as written."""
        return dict(self.model_extra or {})


class RunConfig(Section):
    """Everything a run is told. `fedstill run CONFIG.toml` reads it, the run folder keeps it."""

    name: str = Field("run", pattern=f"^{NAME}$")
    seed: int = Field(1, ge=0)
    rounds: int = Field(10, ge=1)
    task: TaskConfig = TaskConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    method: MethodConfig = MethodConfig()
    central: LearnerConfig = LearnerConfig()
    sites: list[SiteConfig] = Field([])
    exchange: ExchangeConfig = ExchangeConfig()
    simulation: SimulationConfig = SimulationConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _sites_have_names_of_their_own(self) -> RunConfig:
        names = [site.name for site in self.sites]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sites are called {twice[0]!r}: give each site a name of its own")
        for site in self.sites:
            if site.task is not None and not self.mixed:
                raise ValueError(
                    f"site {site.name} has a task of its own, and the run's is {self.task.name!r}: "
                    'set task.name = "mixed", or take [sites.task] out'
                )
        return self

    @property
    def mixed(self) -> bool:
        """Whether every site has a task of its own that the server does not know."""
        return self.task.name == "mixed"

    @property
    def expected_sites(self) -> int:
        """How many sites must join before the first round."""
        return self.exchange.sites or len(self.sites)

    def to_json(self) -> str:
        """One line of JSON, as it travels to the sites."""
        return self.model_dump_json(exclude_none=True)

    def to_toml(self) -> str:
        """The resolved configuration as a person reads it."""
        return tomli_w.dumps(json.loads(self.to_json()))
