"""One file per question, each prints a table of ratios; NumPy takes one thread, as in sample.py."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
