"""From result files to tables that people read: collect, tabulate, render."""
