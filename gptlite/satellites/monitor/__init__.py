"""Observation of a run: stalled ranks, communication time, replicas and memory. Imported only when it observes."""
