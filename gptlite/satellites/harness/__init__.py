"""Evaluation with lm-eval's tasks (EleutherAI's lm-evaluation-harness) on one rank or many."""
