"""Conversations, new items and scores of a model; `loaded` is the `LoadedModel` of sample.py."""
