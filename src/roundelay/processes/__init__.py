"""Layer 5: processes that are ranks: started, heard, and how they end."""
