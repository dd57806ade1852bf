"""Benchmarks: ``python -m benchmarks.NAME``, each ending with one line of JSON that says which aims hold."""
