"""Starting a run: in this process, or as ranks that are started, watched, restarted and ended together."""
