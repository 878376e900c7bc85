"""Where examples come from: a local folder, the official download, or a package mirror; and their fingerprints."""
