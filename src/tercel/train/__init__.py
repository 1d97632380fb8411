"""Training-time test: from conversations and a frozen target to a head."""
