"""A table of a configuration file, and the error that an unusable one raises."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"  # of a site, a run or a row: it becomes a folder
LONGEST_NAME = 64  # of a site


class ConfigError(ValueError):
    """A configuration cannot be used; the text names the key and what to write instead."""


class Section(BaseModel):
    """A table of the TOML file: unknown keys are refused, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
