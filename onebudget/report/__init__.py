"""A ledger for people: tables and a bar for terminals, one HTML page, one figure."""
