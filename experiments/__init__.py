"""Run configurations, one TOML a run."""
