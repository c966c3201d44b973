"""Other libraries' models."""
