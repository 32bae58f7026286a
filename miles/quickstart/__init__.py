"""The embedded default of `miles quickstart`: a tiny warmed-up model and a small task with exact answers."""
