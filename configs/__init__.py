"""Every setting once: its type, default and range; YAML files and command lines read into them."""
