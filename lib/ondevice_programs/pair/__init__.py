"""The two programs that answer together, a cloud and a device, and what they are made of (DRAGON)."""
