"""The gateway for OpenAI clients that races a device against a server within a budget (DiSCo)."""
