"""Recipe of the corpus kjv: The King James Bible."""
