"""What cases measure with: inputs from integers, number formats, the FP64 reference, metrics.

Imports nothing of ours.
"""
