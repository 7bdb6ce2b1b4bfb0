"""Measurements that answer one question once; not part of a run."""
