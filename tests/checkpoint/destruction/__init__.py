"""Ways to harm a run and its checkpoints, for the campaigns in test_{kill,damage,disk_full,hostile,stop_signals}.py."""
