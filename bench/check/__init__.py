"""Whether a result file is what it claims to be: validate, plausible, stale, contribute.

Imports `bench.files`, the plan of `bench.run`, cases, and the names of backends; it runs no kernel.
"""
