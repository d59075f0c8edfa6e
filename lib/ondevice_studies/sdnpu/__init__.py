"""sd.npu's evidence: drafts and passes, random schedules, switching on static graphs, and its claims."""
