"""Tokenizers, from files of SentencePiece, tiktoken and Hugging Face."""
