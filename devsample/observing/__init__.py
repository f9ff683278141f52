"""Observables where chains run: they read other data, call functions, and fill the record of a draw."""
