"""DiSCo's evidence: traces, simulated requests, a device's measured times, and its claims."""
