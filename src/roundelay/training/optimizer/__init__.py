"""The user's optimizers once they are prepared: what they step on, keep and show."""
