"""Models: facts from a config, loading through transformers, our attention inside them, and the demo model."""
