"""Tools for tests of this package and of code built on it: tiny models, injected faults, third-source measurements."""
