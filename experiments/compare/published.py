"""Scores of finished runs, kept beside a table's file: a table begun on one machine goes on on another.

`fedstill compare --publish` writes them to published/TABLE.json, and with `--published` they count as finished runs.
Only then: they are found by a run's configuration, and a program that has changed since might score otherwise.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import ConfigError, RunConfig
from fedstill.common.wire import Facts
from fedstill.experiments.compare.columns import COSTS, Column
from fedstill.experiments.compare.tables import Table

if TYPE_CHECKING:
    from fedstill.experiments.compare.results import Results

VALUES = "values"  # where a published summary has its columns' values


def published_file(table: Table) -> Path:
    """Return where the scores of a table are kept."""
    return table.file.parent / "published" / f"{table.name}.json"


def key_of(config: RunConfig) -> str:
    """Return what tells a run's configuration from all others, whatever its name."""
    return hashlib.sha256(config.model_copy(update={"name": ""}).to_toml().encode()).hexdigest()[:16]


def read_published(table: Table) -> dict[str, Facts]:
    """Return kept scores as summaries, by the configuration's key: those that have all of the table's columns."""
    return {
        key: {VALUES: one["values"], "done": {"on": "published", "cpu_seconds": one["cpu_seconds"]}}
        for key, one in _kept(published_file(table)).items()
        if set(table.settings.columns) <= set(one["values"])
    }


def publish(results: Results) -> Path:
    """Keep the scores of all finished runs, beside those that were kept before."""
    table = results.table
    path = published_file(table)
    kept = _kept(path)
    for row, result in results.rows.items():
        for seed, summary in result.summaries.items():
            found = {key: results.value(row, seed, Column(key)) for key in [*table.settings.columns, *COSTS]}
            one = kept.setdefault(key_of(table.config(row, seed)), {"run": f"{row}, seed {seed}", "values": {}})
            one["values"] |= {key: value for key, value in found.items() if key in table.settings.columns or value}
            one["cpu_seconds"] = summary["done"].get("cpu_seconds", 0.0)
    lines = (f"{json.dumps(key)}: {json.dumps(one)}" for key, one in sorted(kept.items()))
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); copy the table's file to a folder of yours"
        ) from None
    return path


def _kept(path: Path) -> dict[str, Facts]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): {"run": str(one["run"]), "values": dict(one["values"]), "cpu_seconds": one["cpu_seconds"]}
                for key, one in kept.items()}  # fmt: skip
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read as published scores ({error}); restore or delete it") from None
