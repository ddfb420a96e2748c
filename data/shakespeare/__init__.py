"""Shakespeare's plays."""
