"""Tests of several ranks, as processes on this machine. A package, lest an installed `distributed` be taken for it."""
