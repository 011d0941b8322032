"""The GPT: token ids in, logits out, and text from the logits."""
