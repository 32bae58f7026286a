"""Turns scored answers into better weights. Read `step.py` first, then `trainer.py`."""
