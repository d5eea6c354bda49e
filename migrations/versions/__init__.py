"""One module per version, in order."""
