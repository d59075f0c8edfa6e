"""GRATING: top-K selection with cross-encoders in little memory (Zhou et al.), as a reproduction."""
