"""Benchmarks, one file per question; each prints its own figures."""

import os

# Single-token products are too small to multithread, as in sample.py; read when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
