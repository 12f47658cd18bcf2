"""Texts: tasks, the splits of a run, and each site's share."""
