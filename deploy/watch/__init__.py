"""`fedstill watch`: a run's live page, from the events in its folder."""
