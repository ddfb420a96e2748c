"""The mesh of devices, and all that talks across it. Knows nothing of GPT."""
