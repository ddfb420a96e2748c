"""Recipe of Shakespeare's plays."""
