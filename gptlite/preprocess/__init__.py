"""Corpora to prepared folders: read, tokenized by many processes, written in shards that outlive a kill."""
