"""Every key of a site: in a run's [[sites]], or in the site's own site.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedstill.common.config.model import LearnerConfig
from fedstill.common.config.section import LONGEST_NAME, NAME, Section


class SiteData(Section):
    """A site's own files, on the site's own disk; they replace the run's share for it."""

    private: Path  # csv, tsv or jsonl with texts and labels
    public: Path | None = None  # the agreed public texts
    text: list[str] = Field(["text"])  # the column, or two columns of a pair
    label: str = "label"  # the column of the label

    @field_validator("text", mode="before")
    @classmethod
    def _one_column_is_enough(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


Kind = Literal["classification", "question-answering", "summarisation", "question-generation"]
COLUMNS: dict[str, tuple[list[str], str]] = {  # for each kind: the input columns, and the target column
    "classification": (["text"], "label"),
    "question-answering": (["question", "context"], "answer"),
    "summarisation": (["text"], "summary"),
    "question-generation": (["answer", "context"], "question"),
}


class SiteTask(Section):
    """A site's own task, where the run's task is `mixed`: its kind, its files, and how answers are written.

    `name` takes a known data set (`fedstill tasks`) in the place of `kind` and `train`.
    """

    kind: Kind  # the kind of task; a known data set has its own
    name: str | None = None  # a known data set, instead of `train`
    folder: Path | None = None  # of a known data set: its files; else FEDSTILL_DATA, else the hub
    share: tuple[int, int] | None = None  # (2, 3): the second of three equal slices of the training texts
    train: Path | None = None  # csv, tsv or jsonl
    test: Path | None = None  # by default a tenth of `train` is held out
    text: list[str] = Field([])  # columns; by default the kind's names
    target: str = ""  # the target column; by default the kind's name
    labels: list[str] | None = None  # of classification; by default those in the texts
    target_length: int = Field(64, ge=4)  # tokens of a target text in training
    query_length: int = Field(64, ge=4)  # tokens of a question
    stride: int = Field(32, ge=1)  # tokens shared by two windows of a long passage
    beams: int = Field(5, ge=1)  # of beam search
    length_penalty: float = 2.0  # of beam search
    fewest: int = Field(1, ge=1)  # fewest tokens generated
    most: int = Field(100, ge=1)  # most tokens generated
    label_smoothing: float = Field(0.1, ge=0, lt=1)  # of texts to write

    @field_validator("text", mode="before")
    @classmethod
    def _one_column_is_enough(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _columns_by_kind(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") is not None:
            from fedstill.common.data.tasks import site_kind

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
    """What a site releases, whatever a run asks for; counts and losses of a few numbers may always leave."""

    # the kinds of answers that may leave
    leave: list[Leaving] = Field(["predictions", "counts", "features", "weights"])
    verbs: list[str] | None = None  # if given, no other Ask is answered
    mb_per_run: float | None = Field(None, gt=0)  # megabytes that may leave in one run
    mb_per_day: float | None = Field(None, gt=0)  # a day of UTC, all runs together
    sums_only: bool = False  # predictions and weights leave only in secure sums (exchange.secure in the run)
    fewest: int = Field(3, ge=3)  # sites of a secure sum ...
    least_weight: float = Field(0.1, ge=0, le=1)  # ... that weigh at least this share of what this site weighs in it
    run_files: bool = False  # whether a run may name files on this site's disk as its texts


class PrivacyConfig(Section):
    """Noise on what leaves a site, or on its training, and how much all its runs may tell (docs/PRIVACY.md)."""

    epsilon: float = Field(gt=0)  # the budget: once it is spent the site refuses to predict, or to train
    delta: float = Field(1e-5, gt=0, lt=1)  # of (epsilon, delta)-differential privacy
    train: Literal["dp-sgd"] | None = None  # noise in training instead of noise on every prediction
    clip: float = Field(1.0, gt=0)  # the norm to which each text's centred logits, or its gradient, is clipped
    noise_multiplier: float | None = Field(None, gt=0)  # the noise in units of 2 clip, or of clip in training ...
    predictions: int | None = Field(None, ge=1)  # ... or for how many predictions the budget is to last
    epochs: int | None = Field(None, ge=1)  # ... or, in training, for how many epochs
    cadence: float | None = Field(None, gt=0)  # seconds: an answer leaves only whole multiples of it after its Ask

    @model_validator(mode="after")
    def _noise_is_named(self) -> PrivacyConfig:
        lasting, other = ("epochs", "predictions") if self.train else ("predictions", "epochs")
        if getattr(self, other) is not None:
            raise ValueError(f"{other} is for the other way to hide: write noise_multiplier or {lasting}")
        if (self.noise_multiplier is None) == (getattr(self, lasting) is None):
            raise ValueError(f"write either noise_multiplier, or {lasting}: how many the budget is to last for")
        return self


class ApprovalConfig(Section):
    """Runs need this site's yes: by these rules, or by `flower-client approve RUN`."""

    methods: list[str] = Field([])  # approved without asking, if the other rules hold; none: every run is asked for
    most_rounds: int | None = Field(None, ge=1)  # of a run that is approved by rules
    most_mb: float | None = Field(None, gt=0)  # limits.mb_per_run must be set, and not above
    least_epsilon: float | None = Field(None, gt=0)  # of the budget, that must be left after the run
    wait: float = Field(600.0, ge=0)  # seconds for which a run waits for its owner's answer


class SiteConfig(LearnerConfig):
    """A site: in the run's [[sites]], or in a file of its own (site.toml) that only the site reads."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME, pattern=f"^{NAME}$")  # unique in the run
    data: SiteData | None = None  # the site's own files
    task: SiteTask | None = None  # the site's own task, where the run's is mixed
    privacy: PrivacyConfig | None = None  # noise on predictions
    state: Path | None = None  # folder of checkpoints, ledger and budget; else $FEDSTILL_STATE, else ~/.local/state
    root_certificates: Path | None = None  # ca.crt of the coordinator
    stream: str | None = None  # address of the stream, if the advertised one cannot be reached
    limits: LimitsConfig = LimitsConfig()  # what may leave
    approval: ApprovalConfig | None = None  # whether runs need this site's yes

    @model_validator(mode="after")
    def _gradients_by_text(self) -> Self:
        if self.compile and self.privacy is not None and self.privacy.train:
            raise ValueError("DP-SGD takes each text's own gradient, which compiled models hide: take compile out")
        return self


class SiteFile(SiteConfig):
    """site.toml: the site, and how `flower-client` reaches the coordinator. Relative paths begin at the file."""

    # HOST:PORT of the coordinator's SuperLink
    superlink: str | None = Field(None, pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^:\s]+):\d{1,5}$")
    private_key: Path | None = None  # the site's key (`fedstill keys new`)
    certificate: Path | None = None  # of that key, for the stream (`fedstill certs site`), if the coordinator wants one
    peers: Path | None = None  # folder of the other sites' public keys, NAME.pub, for secure sums with them alone
    insecure: bool = False  # no TLS and no key: for a trial on one machine
    port: int | None = Field(None, ge=1, le=65535)  # of the SuperNode's own processes, on loopback; any free one
    health: str | None = None  # address of the SuperNode's health service
    metrics: str | None = None  # loopback address of the site's numbers for Prometheus, such as 127.0.0.1:9465
    labels: list[str] | None = None  # of the runs that this site takes part in; the check counts texts of each
    public_hash: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")  # SHA-256 of data.public, as agreed

    @model_validator(mode="after")
    def _trust_is_settled(self) -> SiteFile:
        given = [name for name in ("root_certificates", "private_key") if getattr(self, name) is not None]
        if self.insecure and given:
            raise ValueError(f"insecure = true and {given[0]} exclude each other: take one of them out")
        if self.certificate is not None and self.private_key is None:
            raise ValueError("certificate belongs to private_key, and there is none: name both")
        if self.peers is not None and self.private_key is None:
            raise ValueError("peers check each other's signatures, and this site has no private_key to sign: name both")
        if self.public_hash is not None and (self.data is None or self.data.public is None):
            raise ValueError("public_hash is the hash of data.public, and there is none: name the file in [data]")
        return self
