"""Helpers that every package may import, because they need neither settings nor torch."""
