"""Shared by DIAA's and sd.npu's evidence: requests and their plain answers, reruns, the mixture's weights."""
