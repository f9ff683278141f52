"""Loaders that are known to fail inside spawned processes, and what runs them here."""
