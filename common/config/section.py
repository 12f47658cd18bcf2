"""A table of a configuration file, and what an unusable one raises."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"  # of a site, a run or a row: it becomes a folder
LONGEST_NAME = 64  # of a site


class ConfigError(ValueError):
    """A configuration that cannot be used; the text says which key and what to write instead."""


class Section(BaseModel):
    """A table of the TOML file: unknown keys are refused, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
