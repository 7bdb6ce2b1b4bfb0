"""Two things side by side: two result files, or two captures of one attention call.

Imports `bench.measure`, `bench.files` and what cases say of themselves; kernels by name, when asked.
"""
