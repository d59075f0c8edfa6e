"""DIAA's evidence: drafters on Spec-Bench and their records, times by machine, and its claims."""
