"""Layer 7: the other dimensions of a model cut between ranks; a file or folder for each axis."""
