"""Helpers without settings and without torch, which every other package may import."""
