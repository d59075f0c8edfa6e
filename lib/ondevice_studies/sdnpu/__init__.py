"""sd.npu's evidence: drafts and passes, schedules on a simulated phone, switching, and its claims."""
