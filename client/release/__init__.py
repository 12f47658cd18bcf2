"""What may leave a site: limits, the ledger of what left, and noise with a budget."""
