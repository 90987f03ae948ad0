"""Paged KV cache: blocks, the pool that holds them, and the manager that gives them to sequences."""
