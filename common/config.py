"""Every key of a run's and a site's configuration, as pydantic models; config_files.py reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

S = TypeVar("S", bound=BaseModel)

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"  # of a site, a run or a row: it becomes a folder
LONGEST_NAME = 64  # of a site


class ConfigError(ValueError):
    """A configuration that cannot be used; the text says which key and what to write instead."""


class Section(BaseModel):
    """A table of the TOML file: unknown keys are refused, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskConfig(Section):
    """Which texts and labels: a task by name (`fedstill tasks`), files (`files`, `superglue`), a hub data set (`hub`).

    `mixed`: every site has a task of its own, in its own [task], and nobody else hears which.
    """

    name: str = "film-reviews"
    train: Path | None = None
    test: Path | None = None
    public: Path | None = None
    text: list[str] = ["text"]
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


class LoraConfig(Section):
    """Train low-rank adapters instead of the whole model (peft)."""

    r: int = Field(8, ge=1)
    alpha: int = Field(16, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: list[str] | None = None


class ModelConfig(Section):
    """What `load_model` needs to know of a model."""

    name: str
    max_length: int = Field(64, ge=4)
    keep: Literal["start", "end"] = "start"
    lora: LoraConfig | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"


class TrainConfig(Section):
    """How every learner of the run trains, unless a site or the central model says otherwise."""

    learning_rate: float = Field(2e-5, gt=0)
    batch_size: int = Field(32, ge=1)
    max_length: int = Field(128, ge=4)
    keep: Literal["start", "end"] = "start"  # of a text that is longer: a long review tells its verdict at the end
    weight_decay: float = Field(0.0, ge=0)
    epoch_steps: int | None = Field(None, ge=1)  # what counts as a local epoch: so many steps instead of one pass
    clip: float | None = Field(None, gt=0)  # the norm to which a step's gradient is cut
    warmup: float = Field(0.0, ge=0, lt=1)  # share of a falling schedule in which the rate rises first


class LearnerConfig(Section):
    """One model at work: the central one or a site's. Empty values come from [train]."""

    model: str = "tiny-bert"
    learning_rate: float | None = Field(None, gt=0)
    distill_rate: float | None = Field(None, gt=0)
    batch_size: int | None = Field(None, ge=1)
    max_length: int | None = Field(None, ge=4)
    lora: LoraConfig | None = None
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = Field(None, ge=1)

    def model_settings(self, train: TrainConfig) -> ModelConfig:
        """The part of this section that makes the model."""
        return ModelConfig(
            name=self.model,
            max_length=self.max_length or train.max_length,
            keep=train.keep,
            lora=self.lora,
            precision=self.precision,
            device=self.device,
        )


class SiteData(Section):
    """A site's own files, on the site's own disk; they replace the run's share for it."""

    private: Path
    public: Path | None = None
    text: list[str] = ["text"]
    label: str = "label"

    @field_validator("text", mode="before")
    @classmethod
    def _one_column_is_enough(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


Kind = Literal["classification", "question-answering", "summarisation", "question-generation"]
COLUMNS: dict[str, tuple[list[str], str]] = {  # of each kind: the texts that are read, and what is wanted
    "classification": (["text"], "label"),
    "question-answering": (["question", "context"], "answer"),
    "summarisation": (["text"], "summary"),
    "question-generation": (["answer", "context"], "question"),
}


class SiteTask(Section):
    """A site's own task, where the run's task is `mixed`: its kind, its files, and how answers are written.

    `name` takes a known data set (`fedstill tasks`) in the place of `kind` and `train`.
    """

    kind: Kind
    name: str | None = None
    folder: Path | None = None  # of a known data set: its files; else FEDSTILL_DATA, else the hub
    share: tuple[int, int] | None = None  # (2, 3): the second of three equal slices of the training texts
    train: Path | None = None
    test: Path | None = None  # by default a tenth of `train` is kept back
    text: list[str] = []  # columns; the kind has names for them
    target: str = ""
    labels: list[str] | None = None
    target_length: int = Field(64, ge=4)  # tokens that are learned of a text to write
    query_length: int = Field(64, ge=4)  # tokens of a question
    stride: int = Field(32, ge=1)  # tokens that two windows of a long passage share
    beams: int = Field(5, ge=1)
    length_penalty: float = 2.0
    fewest: int = Field(1, ge=1)  # tokens that are written
    most: int = Field(100, ge=1)
    label_smoothing: float = Field(0.1, ge=0, lt=1)

    @field_validator("text", mode="before")
    @classmethod
    def _one_column_is_enough(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _columns_by_kind(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") is not None:
            from fedstill.common.tasks import site_kind

            values = {**values, "kind": site_kind(values["name"])}
        if isinstance(values, dict) and values.get("kind") in COLUMNS:
            text, target = COLUMNS[values["kind"]]
            return {**values, "text": values.get("text") or text, "target": values.get("target") or target}
        return values

    @model_validator(mode="after")
    def _fits_its_kind(self) -> SiteTask:
        if (self.name is None) == (self.train is None):
            raise ValueError("task needs either `train`, the path of its file, or `name`, a known data set")
        if self.name is None and (self.folder is not None or self.share is not None):
            raise ValueError("task.folder and task.share belong to a known data set: give its `name`, or take them out")
        if self.share is not None and not 1 <= self.share[0] <= self.share[1]:
            raise ValueError(f"task.share = {list(self.share)}: write [2, 3] for the second of three slices")
        if self.labels is not None and self.kind != "classification":
            raise ValueError(f"task.labels belong to classification, and this task is {self.kind}: take them out")
        wanted = (2,) if self.kind == "question-answering" else (1, 2)
        if len(self.text) not in wanted:
            raise ValueError(f"task.text of {self.kind} names {' or '.join(map(str, wanted))} columns, not {self.text}")
        if self.fewest > self.most:
            raise ValueError(f"task.fewest = {self.fewest} is above task.most = {self.most}: lower it")
        return self


Leaving = Literal["predictions", "counts", "features", "weights"]


class LimitsConfig(Section):
    """What a site lets out, whatever a run asks for; counts and losses of a few numbers always may."""

    leave: list[Leaving] = ["predictions", "counts", "features", "weights"]
    verbs: list[str] | None = None  # if given, no other Ask is answered
    mb_per_run: float | None = Field(None, gt=0)
    mb_per_day: float | None = Field(None, gt=0)  # a day of UTC, all runs together
    run_files: bool = False  # whether a run may name files on this site's disk as its texts


class PrivacyConfig(Section):
    """Noise on the predictions that leave a site, and how much they may tell in all its runs (docs/PRIVACY.md)."""

    epsilon: float = Field(gt=0)  # the budget: when it is spent the site refuses to predict
    delta: float = Field(1e-5, gt=0, lt=1)
    clip: float = Field(1.0, gt=0)  # the norm to which each text's logits, less their mean, are cut
    noise_multiplier: float | None = Field(None, gt=0)  # the noise in units of 2 clip ...
    predictions: int | None = Field(None, ge=1)  # ... or for how many predictions the budget is to last

    @model_validator(mode="after")
    def _noise_is_named(self) -> PrivacyConfig:
        if (self.noise_multiplier is None) == (self.predictions is None):
            raise ValueError("write either noise_multiplier, or predictions: how many the budget is to last for")
        return self


class SiteConfig(LearnerConfig):
    """A site: in the run's [[sites]], or in a file of its own (site.toml) that only the site reads."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME, pattern=f"^{NAME}$")
    data: SiteData | None = None
    task: SiteTask | None = None
    privacy: PrivacyConfig | None = None
    state: Path | None = None
    root_certificates: Path | None = None
    stream: str | None = None
    limits: LimitsConfig = LimitsConfig()


class SiteFile(SiteConfig):
    """site.toml: the site, and how `flower-client` reaches the coordinator. Relative paths begin at the file."""

    superlink: str | None = Field(None, pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^:\s]+):\d{1,5}$")
    private_key: Path | None = None
    insecure: bool = False  # no TLS and no key: for a trial on one machine
    port: int | None = Field(None, ge=1, le=65535)  # of the SuperNode's own processes, on loopback; any free one
    health: str | None = None  # address at which the SuperNode says that it lives
    labels: list[str] | None = None  # of the runs that this site takes part in; the check counts texts of each
    public_hash: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")  # SHA-256 of data.public, as agreed

    @model_validator(mode="after")
    def _trust_is_settled(self) -> SiteFile:
        given = [name for name in ("root_certificates", "private_key") if getattr(self, name) is not None]
        if self.insecure and given:
            raise ValueError(f"insecure = true and {given[0]} exclude each other: take one of them out")
        if self.public_hash is not None and (self.data is None or self.data.public is None):
            raise ValueError("public_hash is the hash of data.public, and there is none: name the file in [data]")
        return self


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
    sites: list[SiteConfig] = []
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
