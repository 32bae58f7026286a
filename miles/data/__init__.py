"""Prompt files and the order in which their rows are used."""
