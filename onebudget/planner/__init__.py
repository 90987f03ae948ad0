"""Sizing without a GPU: facts of cards and models, plans for this and other engines, and replays of request traces."""
