"""JAX stays out of pytest's own process, which is forked: its laws are a program."""

collect_ignore = ["laws.py"]
