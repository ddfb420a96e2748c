"""Start of a run by a command or by the Python API: the launcher, with the planner's layout, memory and advice."""
