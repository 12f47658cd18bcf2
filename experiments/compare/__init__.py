"""`fedstill compare`: tables of runs, from their TOML file to the report."""
