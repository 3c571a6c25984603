"""Layer 9: doors from other libraries; a folder each, thin, and nothing else needs it."""
