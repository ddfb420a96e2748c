"""Steps, and what happens between them."""
