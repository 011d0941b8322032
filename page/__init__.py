"""One HTML file that runs a trained model offline, with its probabilities and attention."""
