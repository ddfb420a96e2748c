"""GPT as in the papers: module, initial weights, FLOPs, generation, Hugging Face names."""
