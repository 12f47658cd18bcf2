"""Run configurations, one TOML a run; and tables of them (`fedstill compare`): reading, running, reporting."""
