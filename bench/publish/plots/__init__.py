"""Every figure that records allow, a file a kind."""
