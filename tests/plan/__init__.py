"""Tests of the planner, and the truth that it is held to. A package, so that ranks can import it."""
