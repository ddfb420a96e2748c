"""The GPT of the papers: module, initial weights, FLOPs, generation, Hugging Face names."""
