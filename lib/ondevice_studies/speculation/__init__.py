"""Shared by DIAA's and sd.npu's evidence: requests, replayed answers, the cost of a pass, the mixture's weights."""
