"""DRAGON: retrieval-augmented generation split over device and cloud (Liu et al.), as a reproduction."""
