"""Shared memory inside every host, another library between them."""
