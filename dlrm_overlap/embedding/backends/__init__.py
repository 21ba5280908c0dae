"""The ways to run an exchange, a class each."""
