"""All settings, each declared once, and the parsers of config files and command lines."""
