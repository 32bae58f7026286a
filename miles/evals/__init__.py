"""Evaluation on named sets."""
