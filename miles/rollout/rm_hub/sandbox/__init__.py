"""Runs programs of the model where they can do no harm."""
