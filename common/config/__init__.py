"""Every key of a run's and a site's configuration, as pydantic models; files.py reads them from TOML."""

from fedstill.common.config.model import LearnerConfig, LoraConfig, ModelConfig, TrainConfig
from fedstill.common.config.run import (
    DataConfig,
    ExchangeConfig,
    MethodConfig,
    ReportConfig,
    RunConfig,
    SimulationConfig,
    TaskConfig,
)
from fedstill.common.config.section import LONGEST_NAME, NAME, ConfigError, Section
from fedstill.common.config.site import (
    COLUMNS,
    ApprovalConfig,
    Kind,
    Leaving,
    LimitsConfig,
    PrivacyConfig,
    SiteConfig,
    SiteData,
    SiteFile,
    SiteTask,
)
from fedstill.common.config.track import TrackConfig

__all__ = [
    "COLUMNS",
    "LONGEST_NAME",
    "NAME",
    "ApprovalConfig",
    "ConfigError",
    "DataConfig",
    "ExchangeConfig",
    "Kind",
    "LearnerConfig",
    "Leaving",
    "LimitsConfig",
    "LoraConfig",
    "MethodConfig",
    "ModelConfig",
    "PrivacyConfig",
    "ReportConfig",
    "RunConfig",
    "Section",
    "SimulationConfig",
    "SiteConfig",
    "SiteData",
    "SiteFile",
    "SiteTask",
    "TaskConfig",
    "TrackConfig",
    "TrainConfig",
]
