"""All five systems in one assistant for documentation: compositions, without mechanisms of its own."""
