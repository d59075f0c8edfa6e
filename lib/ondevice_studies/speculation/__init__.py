"""Shared by DIAA's and sd.npu's evidence: requests, plain answers, drafters on Spec-Bench, the mixture's weights."""
