"""Every key of a run's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedstill.common.config.model import LearnerConfig, TrainConfig
from fedstill.common.config.section import NAME, Section
from fedstill.common.config.site import SiteConfig
from fedstill.common.config.track import TrackConfig


class TaskConfig(Section):
    """Which texts and labels: a task by name (`fedstill tasks`), files (`files`, `superglue`), a hub data set (`hub`).

    `mixed`: every site has a task of its own, in its own [task], and nobody else hears which.
    """

    name: str = "film-reviews"  # see `fedstill tasks`; or files, hub, superglue, mixed
    train: Path | None = None  # for files: csv, tsv or jsonl
    test: Path | None = None  # for files; by default a part of `train` is held out
    public: Path | None = None  # a file whose texts are the public ones; column `text`
    text: list[str] = Field(["text"])  # the column, or two columns of a pair
    label: str = "label"  # the column of the label
    domain: str | None = None  # the column of the domain, if there is one
    labels: list[str] | None = None  # every label in order; by default those in the texts
    label_words: list[str] | None = None  # what a text-to-text model writes for each label; by default the labels
    # what a decoder-only model reads before the label word, with {text} and {second}; by default "{text}\nAnswer:"
    prompt: str | None = None
    coordinates: list[list[float]] | None = None  # a point for each label, where some labels are nearer than others
    metric: str | None = None  # by default the task's own, or accuracy
    hub: str | None = None  # for hub: name of the data set
    hub_config: str | None = None  # for hub: its configuration
    folder: Path | None = (
        None  # for a task by name: its files, or a folder that has them; else FEDSTILL_DATA, else the hub
    )
    parts: list[str] | None = None  # for superglue, nli, emotions: which of its tasks; all by default
    turns: int = Field(8, ge=0)  # for dialogues: past turns read with each turn
    public_task: str | None = None  # a task whose texts are the public ones, instead of a part of this one's
    # a task with the same labels on whose test texts the central model is tested too, such as mnli-mm beside mnli
    second_test: str | None = None
    own_words: bool = True  # for superglue: a task's texts are scored among that task's own words
    train_split: str = "train"  # for hub
    test_split: str = "test"  # for hub

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

    private: int | float = Field(2000, ge=0)  # dealt to the sites; 0: each site has its own texts
    public: int | float = Field(600, ge=0)  # held by everybody, without labels
    labelled: int | float = Field(100, ge=0)  # held by the server, with labels
    test: int | float = Field(400, ge=0)  # everybody is tested on these
    # Dirichlet parameter for another mix of labels in the test texts; drawn once, whatever the run's seed
    test_alpha: float | None = Field(None, gt=0)
    # of the test texts; by default the run's seed, or 0 with test_alpha. A number tests all seeds of a table alike
    test_seed: int | None = Field(None, ge=0)
    # put the server's labelled texts among the public ones, where sites predict them without knowing which they are
    blind: bool = False
    pool: int | None = Field(None, ge=1)  # use only so many training texts, the same ones whatever the seed
    domain_pool: int | None = Field(None, ge=1)  # likewise so many of each domain, in its mix of labels
    # how private texts are dealt to the sites: docs/TASKS.md
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
    minimum: int | float = Field(8, gt=0)  # the fewest texts per site, or a share below 1 of an equal part
    domains: list[str] | None = None  # use only texts of these domains
    public_domains: list[str] | None = None  # the public texts come from these, and no site has them
    labelled_domains: list[str] | None = None  # likewise the server's labelled texts
    # for trials of bad sites: by a site's name, the share of its private labels that are another class instead
    label_noise: dict[str, Annotated[float, Field(ge=0, le=1)]] | None = None


class ExchangeConfig(Section):
    """How Asks and Replies travel, and how long anybody waits (seconds)."""

    # stream: gRPC, about a millisecond an Ask; messages: plain Flower messages, one port less
    link: Literal["stream", "messages"] = "stream"
    listen: str = "127.0.0.1:0"  # where the server's stream listens; port 0: any free one
    advertise: str | None = None  # the address that sites connect to, if different
    certificate: Path | None = None  # of the stream, PEM; by default the coordinator's (`fedstill superlink`)
    key: Path | None = None  # its private key, PEM
    authority: Path | None = None  # ca.crt: only sites with a certificate of it may open a stream
    sites: int | None = Field(None, ge=1)  # how many must join; by default as many as [[sites]] has
    most_texts: int = Field(1_000_000, ge=1)  # private texts that a site may claim: they decide how much it counts
    texts: dict[str, int] = Field({})  # of single sites, by name: that many may it claim; a name is bound to its key
    quorum: float = Field(1.0, gt=0)  # how many sites must answer: a share up to 1, or a number above
    join_deadline: float = Field(180.0, gt=0)  # until all sites have joined
    train_deadline: float = Field(3600.0, gt=0)  # for any other Ask, such as local training
    step_deadline: float = Field(300.0, gt=0)  # for a quick Ask: one batch, a checkpoint
    reconnect: float = Field(60.0, ge=0)  # how long a broken stream may take to reconnect
    write_deadline: float = Field(60.0, gt=0)  # for a site to take one megabyte
    keep_alive: float = Field(20.0, gt=0)  # between two pings on an idle stream
    predictions: Literal["float32", "float16", "int8"] = "float32"  # encoding of predictions on the wire
    secure: bool = False  # secure sums: the server learns the sites' weighted sum, and no site's own answer
    max_frame_mb: int = Field(2048, ge=1)  # the largest message accepted
    metrics: str | None = None  # loopback address of the coordinator's numbers for Prometheus, such as 127.0.0.1:9464
    session_hours: float = Field(72.0, gt=0)  # how long a join message, and so a session, may last

    @model_validator(mode="after")
    def _sums_need_a_stream(self) -> ExchangeConfig:
        if self.secure and (self.link != "stream" or self.predictions != "float32"):
            raise ValueError('secure = true needs link = "stream" and predictions = "float32": take the others out')
        return self


class SimulationConfig(Section):
    """Resources of one simulated client; `cpus` and `gpus` are what Ray may hand out in total.

    Ray's CPUs are shares, not cores: more of them than the machine has lets more clients live at the same time.
    Flower takes whole CPUs per client, and any share of a GPU.
    """

    client_cpus: int = Field(1, ge=1)  # per client
    client_gpus: float = Field(0.0, ge=0)  # per client; 0.25 lets four share a GPU
    cpus: int | None = Field(None, ge=1)  # in total; by default the machine's
    gpus: int | None = Field(None, ge=0)  # in total; by default the machine's
    resident: int | None = Field(None, ge=1)  # sites in memory with --on process; others wait on disk. Default: all


class ReportConfig(Section):
    """Which yardsticks are trained beside the federation, and how often everybody is tested."""

    alone: bool = True  # train a copy of each site's model on its own texts only
    centralized: bool = True  # train the central model on all private texts in one place
    centralized_epochs: int | None = Field(None, ge=1)  # by default as many as a site trains: rounds x local epochs
    evaluate: Literal["rounds", "end"] = "rounds"  # test after every round, or only before the first and after the last


class MethodConfig(BaseModel):
    """The method's name and preset; every other key of [method] is a parameter of that method."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "fedid"  # see `fedstill methods`
    preset: str = "paper"  # which values parameters start from: `paper`, `authors_code`

    def parameters(self) -> dict[str, Any]:
        """The keys beside name and preset, as written."""
        return dict(self.model_extra or {})


class RunConfig(Section):
    """A run's whole configuration. `fedstill run CONFIG.toml` reads it, the run folder keeps it."""

    name: str = Field("run", pattern=f"^{NAME}$")  # the run's folder is NAME-DATE
    seed: int = Field(1, ge=0)  # every draw follows from it
    rounds: int = Field(10, ge=1)  # communication rounds
    task: TaskConfig = TaskConfig()  # [task]: texts and labels
    data: DataConfig = DataConfig()  # [data]: splits and partition
    train: TrainConfig = TrainConfig()  # [train]: how models train
    method: MethodConfig = MethodConfig()  # [method]: name, preset, parameters
    central: LearnerConfig = LearnerConfig()  # [central]: the central model
    sites: list[SiteConfig] = Field([])  # [[sites]]: one table a site
    exchange: ExchangeConfig = ExchangeConfig()  # [exchange]: transport and deadlines
    simulation: SimulationConfig = SimulationConfig()  # [simulation]: resources of Flower's simulation
    report: ReportConfig = ReportConfig()  # [report]: yardsticks and tests
    track: TrackConfig = TrackConfig()  # [track]: scores to TensorBoard, MLflow or W&B

    @model_validator(mode="after")
    def _sites_have_names_of_their_own(self) -> RunConfig:
        names = [site.name for site in self.sites]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sites are called {twice[0]!r}: give each site a name of its own")
        strange = sorted(set(self.exchange.texts) - set(names)) if names else []
        if strange:
            raise ValueError(f"exchange.texts names {strange[0]!r}, which is no site of this run: {', '.join(names)}")
        for name in self.data.label_noise or {}:
            if reason := self._why_no_noise(name):
                raise ValueError(f"data.label_noise names {name!r}: {reason}; take it out")
        for site in self.sites:
            if site.task is not None and not self.mixed:
                raise ValueError(
                    f"site {site.name} has a task of its own, and the run's is {self.task.name!r}: "
                    'set task.name = "mixed", or take [sites.task] out'
                )
        return self

    def _why_no_noise(self, name: str) -> str | None:
        if self.mixed:
            return "sites with tasks of their own hold labels that the run does not deal"
        site = next((site for site in self.sites if site.name == name), None)
        if site is None:
            return f"no site of this run is called so: {', '.join(site.name for site in self.sites) or 'it lists none'}"
        return None if site.data is None else "a site's own files are never changed"

    @property
    def mixed(self) -> bool:
        """Whether every site has a task of its own that the server does not know."""
        return self.task.name == "mixed"

    @property
    def expected_sites(self) -> int:
        """The number of sites that must join before the first round."""
        return self.exchange.sites or len(self.sites)

    def to_json(self) -> str:
        """Return one line of JSON, as sent to the sites."""
        return self.model_dump_json(exclude_none=True)

    def to_toml(self) -> str:
        """Return the resolved configuration as TOML."""
        return tomli_w.dumps(json.loads(self.to_json()))
