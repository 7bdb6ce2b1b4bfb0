"""From result files to tables, sentences and pages that people read: select, tabulate, render.

Imports `bench.files`, what cases say of themselves, and `bench.check.stale`.
"""
