"""Recipe of the corpus shakespeare: Shakespeare's plays."""
