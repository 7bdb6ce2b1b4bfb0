"""How a config becomes a result file: config, plan, engine, units side by side, torchrun, this machine.

Imports `bench.measure`, `bench.files`, cases, and backends by name, when one is asked for.
"""
