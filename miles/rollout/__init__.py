"""From prompts to scored answers that the trainer can use."""
