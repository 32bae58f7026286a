"""The rollout engine. Start reading at `core.py`."""
