"""Graphs: batch sizes that are captured once and replayed, and the memory that capture makes permanent."""
