"""DIAA's evidence: methods and their records, times by machine, and its claims."""
