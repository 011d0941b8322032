"""One HTML file that runs a trained model in a browser, offline, and shows why it writes what."""
