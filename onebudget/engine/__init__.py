"""The engine: build order, step loop, scheduler, model runner and sampler."""
