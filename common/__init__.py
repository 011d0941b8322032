"""The parts that every package may import: they need neither settings nor torch."""
