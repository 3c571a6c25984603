"""Layer 9: other people's doors to Roundelay: a thin folder for each, each an optional extra."""
