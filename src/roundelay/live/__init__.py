"""Layer 5: what a running job shows in its shared memory: for errors, and for those who look on."""
