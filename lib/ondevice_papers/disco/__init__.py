"""DiSCo: a device and a server race for the first token within a budget, and answers migrate (Sun et al.)."""
