"""The training recipe: everything that a researcher would change."""
