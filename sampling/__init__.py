"""What sample.py does on request; `loaded` is its LoadedModel: conversations, new items, scores."""
