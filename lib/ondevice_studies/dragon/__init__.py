"""DRAGON's evidence: the live pair, its replays and simulator, language modelling, an attack, and its claims."""
