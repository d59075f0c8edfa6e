"""DIAA: drafts from two look-up tables keyed by the last token, as a tree grown by its candidates' probabilities."""
