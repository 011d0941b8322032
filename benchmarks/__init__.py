"""Benchmarks, one file per question; each prints its own figures."""
