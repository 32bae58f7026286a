"""Dynamic filters: which groups are worth training on."""
