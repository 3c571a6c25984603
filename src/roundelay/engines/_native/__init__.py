"""The native core, as the engines on it share it."""
