"""The derivation of the KV budget: pure values in, a ledger out. Nothing here imports torch or a device."""
