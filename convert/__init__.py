"""Conversion: character-level nanoGPT models in, GPT-2 models of Hugging Face out."""
