"""What every package may import: it needs neither settings nor torch."""
