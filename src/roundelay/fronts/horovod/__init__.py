"""Horovod's API: named operations, which run once every rank has submitted them."""
