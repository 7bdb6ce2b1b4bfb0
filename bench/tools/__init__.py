"""Programs around the suite: benchmarks of our own code, studies, preparation of data.

Imports anything; nothing imports it.
"""
