"""Bytes -> characters (text) -> ids (tokenizer, corpus; items of lists) -> windows (batches)."""
