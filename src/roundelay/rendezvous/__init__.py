"""Layer 5: how ranks find each other, on one host and over several."""
