"""Miles: reinforcement learning for language models that a person can trust."""

__version__ = "0.1.0"
