"""Start of a run, in this process or as several ranks, which are monitored, restarted and ended together."""
