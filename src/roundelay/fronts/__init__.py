"""Layer 9: other people's doors to Roundelay; a folder each, none needed by the others."""
