"""What a result file holds, and how it is read and written without loss.

Imports `bench.measure` and `bench.errors`.
"""
